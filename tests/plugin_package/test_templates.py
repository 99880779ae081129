"""`infer plugins new` for every kind: the packages install, pass their kits as they are, and are what the pages show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from infer.cli.plugin_new import USE, package, template
from infer.plugins.registry import KINDS, Kind
from integration.documented_code import blocks
from integration.test_docs_pages import load_tool

SLOW: tuple[Kind, ...] = ("endpoint", "kv_connector", "storage_target")
"""Their kits take seconds: for every change their declarations are enough, the rest is heavy."""
PAGES = Path(__file__).parents[2] / "docs" / "plugins"


def environment(site: Path) -> dict[str, str]:
    source = Path(__file__).parents[2] / "src"
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(source)]), "OMP_NUM_THREADS": "1"}


def infer(site: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "infer", *arguments]
    return subprocess.run(
        command, cwd=cwd, env=environment(site), capture_output=True, text=True, check=False, timeout=280
    )


def distribution(kind: Kind) -> str:
    return f"infer-acme-{kind.replace('_', '-')}"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a new package of every kind, and `site`, where pip has installed them all."""
    made = tmp_path_factory.mktemp("packages")
    for kind in KINDS:
        target = made / distribution(kind)
        target.mkdir()
        for name, text in package(kind, f"acme-{kind.replace('_', '-')}").items():
            (target / name).write_text(text, "utf-8")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    sources = [str(made / distribution(kind)) for kind in KINDS]
    done = subprocess.run(
        [*command, "--target", str(made / "site"), *sources], check=False, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return made


def run_kits(home: Path, kinds: tuple[Kind, ...], *options: str) -> dict[str, list[str]]:
    """Kind -> its tests' results, "" for one that passed, of one pytest over the packages' own tests."""
    report = home / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", os.devnull]
    command += [f"--rootdir={home}", "--import-mode=prepend", f"--junitxml={report}", *options]
    command += [str(home / distribution(kind)) for kind in kinds]
    done = subprocess.run(
        command, cwd=home, env=environment(home / "site"), capture_output=True, text=True, check=False, timeout=1200
    )
    assert report.is_file(), done.stdout + done.stderr
    results: dict[str, list[str]] = {kind: [] for kind in kinds}
    for case in ElementTree.parse(report).iter("testcase"):
        module = str(case.get("classname")).rpartition(".test_infer_acme_")[2].partition(".")[0]
        failures = [f"{case.get('name')}: {child.get('message')}" for child in case if child.tag != "properties"]
        results[module].append("; ".join(failures))
    report.unlink()
    return results


@pytest.fixture(scope="module")
def results(home: Path) -> dict[str, list[str]]:
    quick = tuple(kind for kind in KINDS if kind not in SLOW)
    return run_kits(home, quick) | run_kits(home, SLOW, "-k", "declaration")


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_package_passes_its_kit_at_once(results: dict[str, list[str]], kind: Kind) -> None:
    assert len(results[kind]) >= (1 if kind in SLOW else 4)
    assert [failure for failure in results[kind] if failure] == []


@pytest.mark.heavy
def test_new_packages_with_slow_kits_pass_them_at_once(home: Path) -> None:
    for kind, outcomes in run_kits(home, SLOW).items():
        assert len(outcomes) > 5, kind
        assert [failure for failure in outcomes if failure] == [], kind


def test_every_new_package_is_found_by_its_entry_point(home: Path) -> None:
    done = infer(home / "site", "plugins", "--json", cwd=home)
    assert done.returncode == 0, done.stderr
    found = [entry for entry in json.loads(done.stdout) if entry["distribution"].startswith("infer-acme-")]
    assert {(entry["kind"], entry["distribution"]) for entry in found} == {(kind, distribution(kind)) for kind in KINDS}
    assert {(entry["state"], entry["version"]) for entry in found} == {("chosen", "0.1.0")}


def test_an_installed_distribution_is_checked_by_its_name(home: Path) -> None:
    done = infer(home / "site", "plugins", "check", "Infer_Acme.Parser", cwd=home)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed parser:acme-parser every_cut\n" in done.stdout
    assert done.stdout.endswith("1 plugin: 13 checks passed, 0 failed\n")


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_of_a_kind_shows_the_template_and_the_way(kind: Kind) -> None:
    tool = load_tool("plugin_pages")
    text = tool.page(kind).read_text("utf-8")
    assert text == tool.render(kind), "run `make docs` and commit the page"
    [code] = [block.text for block in blocks("python") if block.page == tool.page(kind)]
    assert code == template(kind)
    [way] = [block.text for block in blocks("sh") if block.page == tool.page(kind)]
    assert way.splitlines() == [
        f"infer plugins new {kind} my-name",
        "pip install -e ./infer-my-name",
        "infer plugins check infer-my-name",
    ]
    assert USE[kind] in text


def test_every_page_is_of_a_kind_and_in_the_index() -> None:
    assert {page.stem for page in PAGES.glob("*.md")} == set(KINDS)
    index = (PAGES.parent / "plugins.md").read_text("utf-8")
    assert [kind for kind in KINDS if f"](plugins/{kind}.md)" not in index] == []


def test_the_way_of_a_page_works_in_an_empty_folder(tmp_path: Path) -> None:
    """Line by line as a reader types it; pip installs into a directory of the test's own."""
    site = tmp_path / "site"
    [way] = [block.text for block in blocks("sh") if block.page == PAGES / "logits_processor.md"]
    for line in way.splitlines():
        words = line.split()
        if words[0] == "pip":
            options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(site)]
            command = [sys.executable, "-m", "pip", "install", *options, words[-1]]
            subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
        else:
            done = infer(site, *words[1:], cwd=tmp_path)
            assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("1 plugin: 7 checks passed, 0 failed\n")
    assert "my-name" not in {point.name for point in entry_points(group="infer")}
