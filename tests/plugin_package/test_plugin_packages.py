"""Installed distributions, good and broken, seen by a fresh interpreter: what is found, what is left out, what is said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from plugin_package.installing import BROKEN, HELLO, install, python

SURVEY = """
import json, logging, sys

warnings = []
handler = logging.Handler()
handler.emit = lambda record: warnings.append(record.getMessage())
logging.getLogger("infer.plugins").addHandler(handler)

from infer import EngineConfig, InferError
from infer.plugins import build_registry

sections = json.loads(sys.argv[1])
answers = []
for section in sections:
    warnings.clear()
    answer = {"error": None, "names": [], "states": {}}
    try:
        registry = build_registry(EngineConfig(plugins=section).plugins)
        kinds = ("storage_target", "model_source", "parser")
        answer["names"] = [spec.name for kind in kinds for spec in registry.specs(kind)]
        try:
            registry.load("parser", "missing-factory")
        except InferError as error:
            answer["load"] = str(error)
    except InferError as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    answer["warnings"] = list(warnings)
    answer["torch"] = "torch" in sys.modules
    answers.append(answer)
print(json.dumps(answers))
"""
# distribution -> (what the operator reads, the cure)
BROKEN_PLUGINS = {
    "broken-import 1.2": ("raised RuntimeError: this build lacks its license file", "plugins.block=['broken-import']"),
    "broken-hook 0.3": ("hook infer_parsers raised KeyError", "plugins.block=['broken-hook']"),
    "broken-return 4.0": ("returned ParserSpec ParserSpec(name='alone'", "returns a list of ParserSpec"),
    "broken-typo 1.0": ("unknown hook 'infer_parser'", "did you mean 'infer_parsers'?"),
    "broken-unmarked 1.0": (
        "declares no hooks",
        "mark functions such as `infer_models` with `@infer.plugins.hookimpl`",
    ),
    "needs-missing 1.0": ("No module named 'a_package_nobody_has'", "install the package that provides"),
    "too-new 3.1": ("version 7 of the parser contract, this infer supports 1", "upgrade infer-engine"),
    "too-old 3.1": ("version 0 of the parser contract, this infer supports 1", "upgrade the plugin"),
}


def survey(site: Path, *sections: dict[str, Any]) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = json.loads(python(SURVEY, site, json.dumps(sections)))
    return answers


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The good plugin beside every broken one, except those that need a process or a conflict of their own."""
    target = tmp_path_factory.mktemp("site")
    install(HELLO, target)
    for source in sorted(BROKEN.iterdir()):
        if source.name not in ("heavy-import", "heavy-hook", "twin-hello"):
            install(source, target)
    return target


@pytest.fixture(scope="module")
def answers(site: Path) -> dict[str, dict[str, Any]]:
    """One process, many configurations: an engine's registry leaves nothing behind for the next."""
    sections: dict[str, dict[str, Any]] = {
        "default": {},
        "allow hello": {"allow": ["infer-hello"]},
        "allow none": {"allow": []},
        "block hello": {"block": ["Infer_Hello"]},
        "again": {},
    }
    sections |= {plugin: {"allow": ["infer-hello", plugin.split()[0]]} for plugin in BROKEN_PLUGINS}
    return dict(zip(sections, survey(site, *sections.values()), strict=True))


@pytest.mark.row("ENG-PLUGIN-SYSTEM", "a pip-installed test package with entry points is found")
def test_an_installed_plugin_is_found_and_torch_is_not_needed_for_it(answers: dict[str, dict[str, Any]]) -> None:
    assert {"hello", "hello-log"} <= set(answers["default"]["names"])
    assert answers["default"]["torch"] is False


@pytest.mark.row("ENG-PLUGIN-SYSTEM", "can be excluded by an allow-list")
def test_allow_and_block_lists_leave_plugins_out(answers: dict[str, dict[str, Any]]) -> None:
    assert {"hello", "hello-log"} <= set(answers["allow hello"]["names"])
    assert answers["allow hello"]["warnings"] == []
    for excluded in ("allow none", "block hello"):
        assert {"hello", "hello-log"}.isdisjoint(answers[excluded]["names"]), excluded
        assert answers[excluded]["error"] is None
    assert answers["again"] == answers["default"]


@pytest.mark.parametrize("plugin", BROKEN_PLUGINS)
@pytest.mark.row("ENG-PLUGIN-SYSTEM", "one that raises is named in a warning while the engine still starts")
def test_an_unnamed_broken_plugin_is_one_warning(answers: dict[str, dict[str, Any]], plugin: str) -> None:
    told = [warning for warning in answers["default"]["warnings"] if plugin in warning]
    assert len(told) == 1
    for part in BROKEN_PLUGINS[plugin]:
        assert part in told[0]
    assert answers["default"]["error"] is None


@pytest.mark.parametrize("plugin", BROKEN_PLUGINS)
@pytest.mark.row(
    "ENG-PLUGIN-SYSTEM", "one built for another plugin-API version is refused with both versions in the message"
)
def test_a_broken_plugin_that_the_config_names_is_fatal(answers: dict[str, dict[str, Any]], plugin: str) -> None:
    error = answers[plugin]["error"]
    assert error is not None
    assert error.startswith(("PluginLoadError: ", "PluginContractError: "))
    for part in (plugin, *BROKEN_PLUGINS[plugin]):
        assert part in error


def test_a_missing_factory_is_told_when_it_is_needed(answers: dict[str, dict[str, Any]]) -> None:
    for part in ("missing-factory 1.0", "'missing_factory:gone'", "plugins.block=['missing-factory']"):
        assert part in answers["default"]["load"]


def test_no_broken_plugin_is_forgotten_here() -> None:
    listed = {plugin.split()[0] for plugin in BROKEN_PLUGINS}
    assert {source.name for source in BROKEN.iterdir()} == listed | {
        "heavy-import",
        "heavy-hook",
        "missing-factory",
        "twin-hello",
    }


def test_two_distributions_with_one_name_are_both_told(tmp_path: Path) -> None:
    install(HELLO, tmp_path)
    install(BROKEN / "twin-hello", tmp_path)
    undecided, preferred, blocked = survey(
        tmp_path, {}, {"prefer": {"storage_target:hello-log": "twin-hello"}}, {"block": ["twin-hello"]}
    )
    assert undecided["error"].startswith("PluginConflictError: storage_target 'hello-log'")
    for part in ("infer-hello 0.1.0", "twin-hello 9.9", "plugins.prefer={'storage_target:hello-log': '"):
        assert part in undecided["error"]
    for decided in (preferred, blocked):
        assert decided["error"] is None
        assert decided["names"].count("hello-log") == 1


@pytest.mark.parametrize(
    ("name", "what"),
    [("heavy-import 2.0", "heavy_import imports torch"), ("heavy-hook 2.1", "infer_parsers imports torch")],
)
def test_a_control_plane_plugin_may_not_import_torch_to_declare_itself(tmp_path: Path, name: str, what: str) -> None:
    install(BROKEN / name.split()[0], tmp_path)
    (answer,) = survey(tmp_path, {})
    (warning,) = answer["warnings"]
    for part in (name, what, "import it in the factory", f"plugins.block=['{name.split()[0]}']"):
        assert part in warning
    assert [found for found in answer["names"] if found.startswith("heavy")] == []


def test_pip_installs_the_example_and_its_target_works(tmp_path: Path) -> None:
    """The packaging itself, through pip and the build backend that a user runs."""
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", str(site), str(HELLO)], check=True, capture_output=True, timeout=120)
    code = """
import anyio, sys
from infer import EngineConfig
from infer.plugins import build_registry

registry = build_registry(EngineConfig(plugins={"allow": ["infer-hello"]}).plugins)
entry = next(entry for entry in registry.entries() if entry.name == "hello-log")

async def main():
    target = registry.create("storage_target", "hello-log", "hello-log:" + sys.argv[1], {})
    await target.put(b"payload", if_absent=True)
    await target.aclose()

anyio.run(main)
print(entry.distribution, entry.version, entry.state)
"""
    out = tmp_path / "artifacts" / "a.bin"
    assert python(code, site, str(out)).split() == ["infer-hello", "0.1.0", "chosen"]
    assert out.read_bytes() == b"payload"
    assert [path.name for path in out.parent.iterdir()] == ["a.bin"]


@pytest.mark.model
@pytest.mark.row("ENG-PLUGIN-SYSTEM", "one that raises is named in a warning while the engine still starts")
def test_the_engine_starts_beside_broken_plugins(site: Path, smollm2_gguf: Path) -> None:
    code = """
import anyio, logging, sys
logging.basicConfig(stream=sys.stdout, format="%(message)s")
from infer import Engine, EngineConfig, SamplingParams

async def main():
    async with Engine(EngineConfig(model=sys.argv[1], cache={"num_blocks": 16})) as engine:
        done = await engine.generate("The capital of France is", SamplingParams(max_tokens=2, temperature=0))
        print(f"answer:{done.text}")

anyio.run(main)
"""
    said = python(code, site, str(smollm2_gguf))
    assert "answer: Paris" in said
    for plugin in BROKEN_PLUGINS:
        assert said.count(f"plugin left out: {plugin}") + said.count(f" of {plugin}: built for") == 1
