"""`infer plugins show`, `check` and `new`, in process: reports, cures, refused names."""

from __future__ import annotations

import json
import keyword
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.cli.plugin_new import package, plugin_name, template
from infer.errors import ConfigError
from infer.plugins.registry import KINDS
from planted_plugins import Plant, plant

__all__ = ["plant"]
BROKEN = """
    from infer.plugins import ParserSpec, hookimpl

    class Silent:
        def __init__(self, tools): pass
        def feed(self, text, token_ids): return []
        def finish(self): return []

    @hookimpl
    def infer_parsers():
        return [ParserSpec(name="mute", api=1, factory=f"{__name__}:Silent", fingerprints=("<m>",),
                           example={"transcripts": [{"text": "Hi", "events": [["text", "Hi"]]}]})]
"""


def test_list_is_what_the_bare_command_says(infer: Any) -> None:
    assert infer("plugins", "list", "--json").out == infer("plugins", "--json").out


def test_show_tells_the_spec(infer: Any) -> None:
    done = infer("plugins", "show", "parser:hermes")
    assert done.code == 0
    lines = dict(line.split(": ", 1) for line in done.out.splitlines())
    assert lines["plugin"] == "parser:hermes"
    assert lines["distribution"].startswith("infer-engine ")
    assert lines["state"] == "chosen"
    assert lines["hook"] == "infer_parsers"
    assert lines["api"] == "1 (served here: 1)"
    assert lines["factory"] == "infer.parsers.hermes:create"
    assert lines["example"] == "has transcripts"


def test_show_of_a_name_and_of_a_distribution(infer: Any, plant: Plant) -> None:
    plant("alpha", BROKEN)
    by_name = json.loads(infer("plugins", "show", "mute", "--json").out)
    by_distribution = json.loads(infer("plugins", "show", "ALPHA", "--json").out)
    assert by_name == by_distribution
    assert [facts["plugin"] for facts in by_name] == ["parser:mute"]
    every = json.loads(infer("plugins", "show", "infer-engine", "--json").out)
    assert len(every) > 40


def test_show_says_why_not_and_the_cure(infer: Any, plant: Plant) -> None:
    plant("alpha", "raise RuntimeError('no license')")
    [facts] = json.loads(infer("plugins", "show", "alpha", "--json").out)
    assert facts["state"] == "failed"
    assert "no license" in facts["reason"] and "plugins.block=['alpha']" in facts["reason"]
    [facts] = json.loads(infer("plugins", "show", "alpha", "--json", "--plugins.block", "alpha").out)
    assert (facts["state"], facts["reason"]) == ("blocked", "named in plugins.block")


@pytest.mark.parametrize(
    ("plugin", "said"),
    [
        ("parser:hermse", "did you mean 'parser:hermes'"),
        ("hermse", "did you mean 'hermes'"),
        ("pytest", 'has no entry point in the group "infer"'),
        ("parsers:hermes", "did you mean 'parser:hermes'"),
    ],
)
def test_show_of_what_is_not_there(infer: Any, plugin: str, said: str) -> None:
    done = infer("plugins", "show", plugin)
    assert done.code == 1 and said in done.err and "`infer plugins` lists all" in done.err


def test_check_reports_what_fails_and_ends_with_1(infer: Any, plant: Plant) -> None:
    plant("alpha", BROKEN)
    before = logging.root.manager.disable
    done = infer("plugins", "check", "alpha")
    assert done.code == 1
    assert "passed parser:mute declaration\n" in done.out
    assert re.search(r"^FAILED parser:mute expected: 'Hi' gives \[\], expected ", done.out, re.MULTILINE)
    assert re.search(r"\n1 plugin: \d+ checks passed, \d+ failed\n$", done.out)
    assert logging.root.manager.disable == before
    results = json.loads(infer("plugins", "check", "alpha", "--json").out)
    assert {result["plugin"] for result in results} == {"parser:mute"}
    assert any(result["error"] for result in results) and not all(result["error"] for result in results)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise RuntimeError('no license')", r"raised RuntimeError: no license; .*plugins\.block=\['alpha'\]"),
        ("import a_package_nobody_has", "install the package that provides 'a_package_nobody_has'"),
        (
            "from infer.plugins import hookimpl\n@hookimpl\ndef infer_parser(): return []",
            "did you mean 'infer_parsers'",
        ),
        ("x = 1", "declares no hooks"),
        ("from infer.plugins import hookimpl\n@hookimpl\ndef infer_parsers(): return []", "its hooks return no spec"),
        (
            "from infer.plugins import hookimpl\n@hookimpl\ndef infer_parsers(): return 1",
            "returns a list of ParserSpec",
        ),
    ],
)
def test_a_broken_distribution_is_shown_with_its_cure(infer: Any, plant: Plant, source: str, said: str) -> None:
    plant("alpha", source)
    done = infer("plugins", "check", "alpha")
    assert done.code == 1
    assert re.search(f"^FAILED alpha (loads|declares): .*{said}", done.out, re.MULTILINE), done.out


def test_check_of_a_file_and_of_a_module_here(infer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "planted_here.py").write_text(package("logits_processor", "here")["infer_here.py"])
    before = list(sys.path)
    for plugin in ("planted_here", "planted_here.py", str(tmp_path / "planted_here.py")):
        done = infer("plugins", "check", plugin)
        assert done.code == 0, done.out + done.err
        assert done.out.endswith("1 plugin: 7 checks passed, 0 failed\n")
        assert sys.path == before
        del sys.modules["planted_here"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import a_package_nobody_has", "No module named 'a_package_nobody_has'; install what it needs"),
        ("1 / 0", "cannot be imported: ZeroDivisionError"),
        ("raise SystemExit(3)", "cannot be imported: SystemExit: 3"),
        ("from infer.plugins import hookimpl\n@hookimpl\ndef infer_parser(): return []", "infer_parser"),
        (
            "from infer.plugins import hookimpl\n@hookimpl\ndef infer_parsers(): 1 / 0",
            "a hook raised ZeroDivisionError",
        ),
    ],
)
def test_a_broken_module_is_a_failed_check(infer: Any, tmp_path: Path, source: str, said: str) -> None:
    path = tmp_path / "planted_broken.py"
    path.write_text(source)
    done = infer("plugins", "check", str(path))
    sys.modules.pop("planted_broken", None)
    assert done.code == 1
    assert re.search(f"^FAILED {re.escape(str(path))} loads: .*{said}", done.out, re.MULTILINE), done.out


@pytest.mark.parametrize("plugin", ["no_such_module_here", "no-such-distribution", "absent.py", "a/b.py", "", "x..y"])
def test_check_of_what_is_not_there(infer: Any, plugin: str) -> None:
    done = infer("plugins", "check", plugin)
    assert done.code == 1
    assert "there is no" in done.out + done.err or "is neither a module's name" in done.out + done.err


def test_new_writes_a_package_and_says_what_is_next(infer: Any, tmp_path: Path) -> None:
    done = infer("plugins", "new", "logits-processor", "Infer_Shout", "--dir", str(tmp_path))
    assert done.code == 0, done.err
    target = tmp_path / "infer-shout"
    assert {path.name for path in target.iterdir()} == {
        "pyproject.toml",
        "infer_shout.py",
        "test_infer_shout.py",
        "README.md",
    }
    assert f"pip install -e {target}\n" in done.out
    assert 'name="shout"' in (target / "infer_shout.py").read_text()
    assert 'shout = "infer_shout"' in (target / "pyproject.toml").read_text()
    for path in target.iterdir():
        assert not re.search(r"my.name|MyName", path.read_text()), path


def test_new_never_writes_over_anything(infer: Any, tmp_path: Path) -> None:
    (tmp_path / "infer-shout").mkdir()
    done = infer("plugins", "new", "parser", "shout", "--dir", str(tmp_path))
    assert done.code == 1 and "infer-shout exists already" in done.err
    assert list((tmp_path / "infer-shout").iterdir()) == []
    (tmp_path / "infer-cry").write_text("a file")
    assert infer("plugins", "new", "parser", "cry", "--dir", str(tmp_path)).code == 1
    assert (tmp_path / "infer-cry").read_text() == "a file"
    (tmp_path / "infer-link").symlink_to(tmp_path / "elsewhere")
    assert infer("plugins", "new", "parser", "link", "--dir", str(tmp_path)).code == 1
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    "name",
    [
        "",
        "-",
        "../up",
        "a/b",
        "a\\b",
        "/abs",
        "..",
        "a b",
        "-a",
        "a-",
        "1st",
        "é",
        "a\n",
        "x" * 61,
        "infer-",
        "a\0b",
        "engine",
    ],
)
def test_new_refuses_names(infer: Any, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError):
        plugin_name(name)
    if not name.startswith("-"):
        assert infer("plugins", "new", "parser", name, "--dir", str(tmp_path)).code == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["parsers", "x"], "there is no kind of plugin 'parsers'; the kinds are platform, model"),
        (["parser", "hermes"], "parser 'hermes' is built in"),
        (["parser", "x", "--dir", "absent"], "there is no such directory"),
    ],
)
def test_new_refuses(infer: Any, arguments: list[str], said: str) -> None:
    done = infer("plugins", "new", *arguments)
    assert done.code == 1 and said in done.err


@given(st.from_regex(r"[A-Za-z][A-Za-z0-9._-]{0,20}[A-Za-z0-9]", fullmatch=True), st.sampled_from(KINDS))
def test_a_name_gives_python_that_compiles(name: str, kind: Any) -> None:
    """Whatever the name: keywords, names that hold a placeholder, doubled hyphens."""
    try:
        plain = plugin_name(name)
    except ConfigError:
        return
    files = package(kind, plain)
    for file, text in files.items():
        assert "/" not in file
        if file.endswith(".py"):
            compile(text, file, "exec")
            assert Path(file).stem.isidentifier() and not keyword.iskeyword(Path(file).stem)


def test_a_keyword_and_a_placeholder_are_good_names() -> None:
    assert "infer_class.py" in package("parser", plugin_name("class"))
    assert package("parser", plugin_name("infer-my-name"))["infer_my_name.py"] == template("parser")
