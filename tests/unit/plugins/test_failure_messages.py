"""Everything that can be wrong with a plugin, and the whole sentence that its operator reads: what, of whom, what to do."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infer.config.engine import PluginsSection
from infer.engine.startup import _load_tokenizer
from infer.engine.structured import choose_backend
from infer.engine.worker.platforms import choose_platform
from infer.errors import ConfigError, PluginConflictError, PluginContractError, PluginError, PluginLoadError
from infer.plugins.contracts import CONTRACTS
from infer.plugins.manager import build_registry

Plant = Callable[..., None]
HEAD = "from infer.plugins import *\n"
PARSER = HEAD + (
    "@hookimpl\n"
    "def infer_parsers():\n"
    "    return [ParserSpec(name='mine', api={api}, factory='m:f', fingerprints=('<x>',), example={{}})]\n"
)
BROKEN: dict[str, tuple[str, type[PluginError], str]] = {
    "wrong return type": (
        HEAD + "@hookimpl\ndef infer_parsers():\n    return {'name': 'mine'}\n",
        PluginContractError,
        "alpha 1.0: hook infer_parsers returned dict {'name': 'mine'}; it must be a plain function that returns a list of "
        "ParserSpec",
    ),
    "hook typo": (
        HEAD + "@hookimpl\ndef infer_storage_target():\n    return []\n",
        PluginContractError,
        "alpha 1.0: unknown hook 'infer_storage_target'; did you mean 'infer_storage_targets'?; upgrade alpha, or exclude it "
        "with plugins.block=['alpha']",
    ),
    "import error": (
        "from infer.plugins import no_such_name\n",
        PluginLoadError,
        "alpha 1.0: entry point 'main' raised ImportError: cannot import name 'no_such_name' from 'infer.plugins'; upgrade or "
        "repair alpha, or exclude it with plugins.block=['alpha']",
    ),
    "missing optional dependency": (
        "import a_database_client\n",
        PluginLoadError,
        "alpha 1.0: entry point 'main' raised ModuleNotFoundError: No module named 'a_database_client'; install the package "
        "that provides 'a_database_client', or exclude it with plugins.block=['alpha']",
    ),
    "raises in its hook": (
        HEAD + "@hookimpl\ndef infer_parsers():\n    return [].pop()\n",
        PluginLoadError,
        "alpha 1.0: hook infer_parsers raised IndexError: pop from empty list; upgrade or repair alpha, or exclude it with "
        "plugins.block=['alpha']",
    ),
    "api too new": (
        PARSER.format(api=4),
        PluginContractError,
        "parser 'mine' of alpha 1.0: built for version 4 of the parser contract, this infer supports 2 and 3; upgrade "
        "infer-engine",
    ),
    "api too old": (
        PARSER.format(api=1),
        PluginContractError,
        "parser 'mine' of alpha 1.0: built for version 1 of the parser contract, this infer supports 2 and 3; upgrade the "
        "plugin",
    ),
}


@pytest.fixture
def third_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A contract with a past."""
    monkeypatch.setitem(CONTRACTS, "parser", CONTRACTS["parser"]._replace(version=3))
    # Other kinds' parsers are of version 1: they would be refused too, and that is not what is looked at.
    monkeypatch.setattr("infer.plugins.manager.builtin_modules", lambda kind: [])


@pytest.mark.usefixtures("third_version")
@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_plugin_is_one_warning_and_fatal_where_it_is_named(
    plant: Plant, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    source, error, message = BROKEN[fault]
    plant("alpha", source)
    registry = build_registry(PluginsSection())
    assert [_plain(record.getMessage()) for record in caplog.records] == [f"plugin left out: {message}"]
    assert [_plain(entry.reason) for entry in registry.entries() if entry.distribution == "alpha"] == [message]
    with pytest.raises(error) as caught:
        build_registry(PluginsSection(allow=("alpha",)))
    assert _plain(str(caught.value)) == message
    build_registry(PluginsSection(allow=()))  # one that the allow-list does not name says nothing
    assert len(caplog.records) == 1


def _plain(message: str) -> str:
    """Without the places of this machine."""
    start = message.find(" (/")
    return message if start < 0 else message[:start] + message[message.index(")", start) + 1 :]


def test_two_distributions_with_one_name(plant: Plant) -> None:
    plant("alpha", PARSER.format(api=1))
    plant("beta", PARSER.format(api=1), version="2.5")
    with pytest.raises(PluginConflictError) as caught:
        build_registry(PluginsSection())
    assert str(caught.value) == (
        "parser 'mine' is registered by alpha 1.0 and by beta 2.5; choose one with plugins.prefer={'parser:mine': 'beta'} or "
        "exclude one with plugins.block"
    )


@pytest.mark.parametrize("where", ["planted_alpha", "infer_parsers"])
def test_a_control_plane_plugin_that_imports_torch_to_declare_itself(
    plant: Plant, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """torch is loaded in this process: it is made to look as if it was not."""
    loaded = sys.modules["torch"] if "torch" in sys.modules else object()
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    line = "import sys; sys.modules['torch'] = sys.modules['stands_for_torch']\n"
    monkeypatch.setitem(sys.modules, "stands_for_torch", loaded)  # type: ignore[arg-type]
    source = PARSER.format(api=1)
    plant("alpha", line + source if where == "planted_alpha" else source.replace("    return", f"    {line}    return"))
    try:
        build_registry(PluginsSection())
    finally:
        sys.modules.pop("torch", None)
    assert [record.getMessage() for record in caplog.records] == [
        f"plugin left out: alpha 1.0: {where} imports torch while declaring its specs, which only platforms, models and "
        "quantization methods may; import it in the factory, or exclude the plugin with plugins.block=['alpha']"
    ]


PROBED = HEAD + (
    "def probe(*given):\n"
    "    {probe}\n"
    "@hookimpl\n"
    "def infer_platforms():\n"
    "    return [PlatformSpec(name='card', api=1, factory='m:f', probe='planted_alpha:probe', priority=99, example={{}})]\n"
    "@hookimpl\n"
    "def infer_grammars():\n"
    "    return [GrammarSpec(name='card', api=1, factory='m:f', probe='planted_alpha:probe', kinds=('regex',), priority=99,\n"
    "            example={{}})]\n"
    "@hookimpl\n"
    "def infer_tokenizers():\n"
    "    return [TokenizerSpec(name='card', api=1, factory='m:f', probe='planted_alpha:probe', priority=99, example={{}})]\n"
)
FAULTS = {
    "raise OSError('driver too old')": (
        "its probe raised OSError: driver too old; upgrade or repair alpha, or exclude it with plugins.block=['alpha']"
    ),
    "import a_driver": (
        "its probe raised ModuleNotFoundError: No module named 'a_driver'; install the package that provides 'a_driver', or "
        "exclude it with plugins.block=['alpha']"
    ),
    "return None": "its probe returned None; it must return True, False or an infer.plugins.Probe",
}
CHOICES: dict[str, Callable[..., Any]] = {
    "platform": choose_platform,
    "grammar": lambda registry, name: choose_backend(registry, name),
}


@pytest.mark.parametrize("kind", CHOICES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_probe_that_raises_is_passed_over_and_fatal_where_it_is_named(
    plant: Plant, caplog: pytest.LogCaptureFixture, kind: str, fault: str
) -> None:
    plant("alpha", PROBED.format(probe=fault))
    message = f"{kind} 'card' of alpha 1.0: {FAULTS[fault]}"
    registry = build_registry(PluginsSection())
    caplog.clear()
    assert CHOICES[kind](registry, "auto").name != "card"
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        f"plugin left out: {message}"
    ]
    for named, name in ((registry, "card"), (build_registry(PluginsSection(allow=("alpha",))), "auto")):
        with pytest.raises(PluginError) as caught:
            CHOICES[kind](named, name)
        assert str(caught.value) == message


def test_a_tokenizer_whose_probe_raises_is_passed_over(
    plant: Plant, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    plant("alpha", PROBED.format(probe="raise OSError('driver too old')"))
    registry = build_registry(PluginsSection())
    caplog.clear()
    with pytest.raises(ConfigError, match=r"no tokenizer plugin \(card, gguf, hf\) finds its files"):
        _load_tokenizer(registry, tmp_path)
    [warning] = [record.getMessage() for record in caplog.records]
    assert warning.startswith(
        "plugin left out: tokenizer 'card' of alpha 1.0: its probe raised OSError: driver too old;"
    )


def test_a_probe_may_answer_with_a_bool(plant: Plant) -> None:
    plant("alpha", PROBED.format(probe="return True"))
    assert choose_platform(build_registry(PluginsSection()), "auto").name == "card"
