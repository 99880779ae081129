"""The registry over planted distributions: names, conflicts, versions, isolation, and what the messages say."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.config.engine import PluginsSection
from infer.errors import (
    ConfigError,
    ModelError,
    PluginConflictError,
    PluginContractError,
    PluginLoadError,
    UnknownPluginError,
)
from infer.plugins import builtins as plugin_builtins
from infer.plugins.contracts import CONTRACTS
from infer.plugins.manager import build_registry
from infer.plugins.registry import KINDS, Kind, KindScan, Origin, Registry, Spec

Plant = Callable[..., None]
PARSER = """
    from infer.plugins import ParserSpec, hookimpl

    def make(tools):
        return ("made", tools)

    def explode(tools):
        raise ZeroDivisionError("inside")

    @hookimpl
    def infer_parsers():
        return [ParserSpec(name="{name}", api={api}, factory="{factory}", fingerprints=("<x>",), example={{}})]
"""
MODEL = """
    from infer.plugins import ModelSpec, hookimpl

    @hookimpl
    def infer_models():
        return [
            ModelSpec(name={name!r}, api=1, factory="m:f", architectures={architectures!r}, config_view="m:v", example={{}})
        ]
"""


def parser(name: str = "mine", api: int = 1, factory: str = "planted_alpha:make") -> str:
    return PARSER.format(name=name, api=api, factory=factory)


def registry(**section: Any) -> Registry:
    return build_registry(PluginsSection(**section))


def test_a_planted_spec_is_found_loaded_and_called(plant: Plant) -> None:
    plant("alpha", parser())
    found = registry()
    assert found.get("parser", "mine").fingerprints == ("<x>",)
    assert found.load("parser", "mine") is sys.modules["planted_alpha"].make
    assert found.create("parser", "mine", ["tool"]) == ("made", ["tool"])
    assert [spec.name for spec in found.specs("parser")] == sorted(spec.name for spec in found.specs("parser"))


def test_two_registries_in_one_process_share_nothing(plant: Plant) -> None:
    plant("alpha", parser())
    first, second = registry(), registry(block=("alpha",))
    assert first.get("parser", "mine")
    with pytest.raises(UnknownPluginError, match=r"alpha 1\.0 is named in plugins.block"):
        second.get("parser", "mine")
    third = registry()
    assert third.get("parser", "mine") == first.get("parser", "mine")
    assert third is not first


@pytest.mark.parametrize(
    ("section", "state"),
    [({}, "chosen"), ({"allow": ("Alpha",)}, "chosen"), ({"allow": ()}, "blocked"), ({"block": ("alpha",)}, "blocked")],
)
def test_allow_and_block_lists_name_distributions(plant: Plant, section: dict[str, Any], state: str) -> None:
    plant("alpha", parser())
    states = {entry.state for entry in registry(**section).entries() if entry.distribution == "alpha"}
    assert states == {state}
    assert ("planted_alpha" in sys.modules) == (state == "chosen")


@pytest.mark.parametrize("blocked", ["mine", "parser:mine"])
def test_the_block_list_also_names_specs(plant: Plant, blocked: str) -> None:
    plant("alpha", parser())
    with pytest.raises(UnknownPluginError, match=r"'mine' of alpha 1\.0 is named in plugins.block"):
        registry(block=(blocked,)).get("parser", "mine")


def test_an_unknown_name_lists_what_exists_and_the_nearest(plant: Plant) -> None:
    plant("alpha", parser(name="hermes-9"))
    with pytest.raises(UnknownPluginError) as caught:
        registry().get("parser", "hermes_9")
    assert "no parser plugin 'hermes_9'" in str(caught.value)
    assert "did you mean 'hermes-9'?" in str(caught.value)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(UnknownPluginError, match="no plugin kind 'sampler'; the kinds are platform, model"):
        registry().specs("sampler")  # type: ignore[call-overload]


def test_two_owners_of_a_name_conflict_unless_the_config_prefers_one(plant: Plant) -> None:
    plant("alpha", parser())
    plant("beta", parser(factory="planted_beta:make"), version="2.5")
    with pytest.raises(PluginConflictError) as caught:
        registry()
    for part in ("parser 'mine'", "alpha 1.0", "beta 2.5", "plugins.prefer={'parser:mine': '"):
        assert part in str(caught.value)
    found = registry(prefer={"parser:mine": "alpha"})
    assert found.get("parser", "mine").factory == "planted_alpha:make"
    lost = next(entry for entry in found.entries() if entry.distribution == "beta")
    assert (lost.state, lost.reason) == ("available", "plugins.prefer chooses alpha")
    assert registry(block=("beta",)).get("parser", "mine").factory == "planted_alpha:make"


def test_one_architecture_has_one_owner_under_whatever_name(plant: Plant) -> None:
    plant("alpha", MODEL.format(name="one", architectures=("XForCausalLM",)))
    plant("beta", MODEL.format(name="two", architectures=("YForCausalLM", "XForCausalLM")))
    found = registry()
    with pytest.raises(PluginConflictError) as caught:
        found.specs("model")
    for part in ("'XForCausalLM'", "'one' of alpha 1.0", "'two' of beta 1.0", "plugins.block=['model:one']"):
        assert part in str(caught.value)
    assert [spec.name for spec in registry(block=("model:one",)).specs("model") if spec.name == "two"] == ["two"]


@pytest.mark.parametrize(("api", "cure"), [(2, "upgrade infer-engine"), (0, "upgrade the plugin")])
def test_another_contract_version_is_refused_with_both(
    plant: Plant, caplog: pytest.LogCaptureFixture, api: int, cure: str
) -> None:
    plant("alpha", parser(api=api))
    with caplog.at_level(logging.WARNING, "infer.plugins"):
        found = registry()
    expected = (
        f"parser 'mine' of alpha 1.0: built for version {api} of the parser contract, this infer supports 1; {cure}"
    )
    assert [record.getMessage() for record in caplog.records] == [f"plugin left out: {expected}"]
    with pytest.raises(PluginContractError, match=f"version {api} of the parser contract"):
        found.get("parser", "mine")
    with pytest.raises(PluginContractError, match="supports 1"):
        registry(allow=("alpha",))


def test_the_previous_contract_version_is_accepted(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONTRACTS, "parser", CONTRACTS["parser"]._replace(version=3))
    plant("alpha", parser(api=2))
    plant("beta", parser(name="old", api=1))
    found = registry()
    assert found.get("parser", "mine").api == 2
    with pytest.raises(PluginContractError, match="version 1 of the parser contract, this infer supports 2 and 3"):
        found.get("parser", "old")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fingerprints": "<x>"}, "fingerprints"),
        ({"api": "1"}, "api"),
        ({"api": True}, "api"),
        ({"example": None}, "example"),
        ({"name": ""}, "its name is empty"),
        ({"factory": "no colon"}, '"package.module:attribute"'),
        ({"factory": "pkg:"}, '"package.module:attribute"'),
    ],
)
def test_wrong_values_in_a_spec_are_refused(plant: Plant, change: dict[str, Any], message: str) -> None:
    fields = {"name": "mine", "api": 1, "factory": "m:f", "fingerprints": (), "example": {}} | change
    plant(
        "alpha",
        f"""
        from infer.plugins import ParserSpec, hookimpl

        @hookimpl
        def infer_parsers():
            return [ParserSpec(**{fields!r})]
        """,
    )
    (entry,) = (entry for entry in registry().entries() if entry.distribution == "alpha")
    assert entry.state == "refused"
    assert "alpha 1.0" in entry.reason
    assert message in entry.reason


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("    return None", "returned NoneType None"),
        ("    return 'text'", "returned str 'text'"),
        ("    return [1]", "returned int 1"),
        ("    yield 1", "returned generator"),
    ],
)
def test_a_hook_returns_a_list_of_its_specs(plant: Plant, body: str, message: str) -> None:
    plant("alpha", f"from infer.plugins import hookimpl\n@hookimpl\ndef infer_parsers():\n{body}\n")
    with pytest.raises(PluginContractError) as caught:
        registry(allow=("alpha",))
    assert message in str(caught.value)
    assert "returns a list of ParserSpec" in str(caught.value)


def test_an_async_hook_is_refused_and_leaves_no_unawaited_coroutine(
    plant: Plant, recwarn: pytest.WarningsRecorder
) -> None:
    plant("alpha", "from infer.plugins import hookimpl\n@hookimpl\nasync def infer_parsers():\n    return []\n")
    with pytest.raises(PluginContractError, match=r"returned coroutine.*plain function"):
        registry(allow=("alpha",))
    gc.collect()
    assert [str(warning.message) for warning in recwarn if "never awaited" in str(warning.message)] == []


def test_a_hook_name_that_does_not_exist_gets_a_suggestion(plant: Plant) -> None:
    plant("alpha", "from infer.plugins import hookimpl\n@hookimpl\ndef infer_parser():\n    return []\n")
    plant("beta", parser(factory="planted_beta:make"))
    found = registry()
    assert found.get("parser", "mine"), "the neighbour is not affected"
    (entry,) = (entry for entry in found.entries() if entry.distribution == "alpha")
    assert "did you mean 'infer_parsers'?" in entry.reason
    assert "plugins.block=['alpha']" in entry.reason


def test_a_plugin_without_hooks_is_refused(plant: Plant) -> None:
    plant("alpha", "def infer_parsers():\n    return []\n")
    with pytest.raises(PluginContractError, match=r"declares no hooks; mark functions .* `@infer.plugins.hookimpl`"):
        registry(allow=("alpha",))


def test_a_plugin_that_exits_at_import_does_not_end_the_application(plant: Plant) -> None:
    plant("alpha", "raise SystemExit(3)\n")
    (entry,) = (entry for entry in registry().entries() if entry.distribution == "alpha")
    assert (entry.kind, entry.state) == (None, "failed")
    assert "SystemExit" in entry.reason


def test_a_missing_dependency_is_named_in_the_cure(plant: Plant) -> None:
    plant("alpha", "import no_such_package_here\n")
    (entry,) = (entry for entry in registry().entries() if entry.distribution == "alpha")
    assert "install the package that provides 'no_such_package_here'" in entry.reason


def test_a_factory_that_is_missing_or_raises_names_its_distribution(plant: Plant) -> None:
    plant("alpha", parser(name="gone", factory="planted_alpha:gone"))
    plant("beta", parser(name="bad", factory="planted_beta:explode"))
    found = registry()
    with pytest.raises(
        PluginLoadError, match=r"parser 'gone' of alpha 1.0: factory 'planted_alpha:gone' .*repair alpha"
    ):
        found.load("parser", "gone")
    with pytest.raises(
        PluginLoadError, match=r"parser 'bad' of beta 1.0: its factory raised ZeroDivisionError: inside"
    ):
        found.create("parser", "bad", [])


def test_typed_errors_of_a_factory_pass_through(plant: Plant) -> None:
    source = parser(factory="planted_alpha:refuse")
    plant(
        "alpha",
        source + "\n    def refuse(tools):\n        from infer import ModelError\n        raise ModelError('no')\n",
    )
    with pytest.raises(ModelError, match=r"^no$"):
        registry().create("parser", "mine", [])


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"allow": ("alhpa",)}, "plugins.allow names distribution 'alhpa'.*did you mean 'alpha'"),
        ({"prefer": {"parser:mine": "nobody"}}, "plugins.prefer names distribution 'nobody'"),
        ({"prefer": {"praser:mine": "alpha"}}, "'praser:mine' is not of the form 'kind:name'"),
    ],
)
def test_the_config_cannot_name_what_is_not_there(plant: Plant, section: dict[str, Any], message: str) -> None:
    plant("alpha", parser())
    with pytest.raises(ConfigError, match=message) as caught:
        registry(**section)
    assert caught.value.fields[0] in ("plugins.allow", "plugins.prefer")


def test_a_preferred_distribution_must_provide_the_name(plant: Plant) -> None:
    plant("alpha", parser())
    with pytest.raises(
        UnknownPluginError, match=r"plugins\.prefer names 'parser:other' of alpha, which does not provide it"
    ):
        registry(prefer={"parser:other": "alpha"})


def test_built_in_leaves_are_found_by_walking_their_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package = tmp_path / "planted_leaves"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "_support.py").write_text("raise RuntimeError('must not be imported')")
    (package / "broken.py").write_text("import no_such_package_here")
    (package / "leaf.py").write_text(
        "from infer.plugins import ParserSpec, hookimpl\n@hookimpl\ndef infer_parsers():\n"
        "    return [ParserSpec(name='leaf', api=1, factory='a:b', fingerprints=(), example={})]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(plugin_builtins.PACKAGES, "parser", "planted_leaves")
    found = registry()
    states = {entry.name: (entry.distribution, entry.state) for entry in found.entries() if entry.kind == "parser"}
    assert states == {
        "leaf": ("infer-engine", "chosen"),
        "planted_leaves.broken": ("infer-engine", "failed"),
    }
    assert "no_such_package_here" in caplog.text


def test_a_package_that_does_not_exist_has_no_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plugin_builtins.PACKAGES, "parser", "infer.nowhere.at_all")
    assert plugin_builtins.builtin_modules("parser") == []


@given(kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=20), names=st.lists(st.text(min_size=1), max_size=4))
def test_a_kind_is_scanned_once_and_every_unknown_name_is_a_typed_error(kinds: list[Kind], names: list[str]) -> None:
    calls: list[Kind] = []

    def scan(kind: Kind) -> KindScan:
        calls.append(kind)
        chosen: dict[str, tuple[Spec, Origin]] = {}
        return KindScan(chosen, ())

    found = Registry(scan, ())
    for kind in kinds:
        assert found.specs(kind) == ()
        for name in names:
            with pytest.raises(UnknownPluginError):
                found.get(kind, name)
    assert sorted(calls) == sorted(set(kinds))
