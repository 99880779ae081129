"""Which library is loaded where there is no compiler, and what is said about it."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest
import torch

from infer import Engine, EngineConfig, SamplingParams
from infer.backends.cpu import build, prebuilt
from infer.backends.cpu.library import Library
from infer.backends.cpu.ops import make_kernels, make_ops
from infer.backends.reference.platform import OPS
from infer.cli.app import main
from infer.errors import ConfigError
from infer.models import llama
from infer.testing.tiny_models import make_checkpoint

BEST = prebuilt.LEVELS[0]
X86 = [level for level in prebuilt.LEVELS if level.machine == "x86_64"]


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("PATH", str(empty))


def cpu(monkeypatch: pytest.MonkeyPatch, machine: str, flags: set[str]) -> None:
    monkeypatch.setattr(prebuilt.host, "machine", lambda: machine)
    monkeypatch.setattr(prebuilt, "cpu_facts", lambda: {"flags": " ".join(flags)})


def put(directory: Path, *levels: prebuilt.Level, digest: str | None = None) -> None:
    directory.mkdir(exist_ok=True)
    for level in levels:
        (directory / prebuilt._file_name(level, digest or build.sources_digest())).write_text(level.name)


@pytest.mark.parametrize("level", X86, ids=lambda level: str(level.name))
def test_the_best_level_of_the_cpu_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: prebuilt.Level
) -> None:
    put(tmp_path, *prebuilt.LEVELS)
    cpu(monkeypatch, "x86_64", set(level.needs) | {"sse2", "avx512_fp16"})
    found = prebuilt.find_prebuilt(tmp_path)
    assert found is not None and found[1] == level and found[0].read_text() == level.name


def test_levels_are_never_taken_for_another_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, *prebuilt.LEVELS)
    cpu(monkeypatch, "aarch64", set())
    found = prebuilt.find_prebuilt(tmp_path)
    assert found is not None and found[1].name == "aarch64"
    cpu(monkeypatch, "x86_64", {"sse2"})
    assert prebuilt.find_prebuilt(tmp_path) is None
    cpu(monkeypatch, "riscv64", set())
    assert prebuilt.find_prebuilt(tmp_path) is None


def test_a_named_directory_without_a_fitting_library_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu(monkeypatch, "x86_64", set(BEST.needs))
    with pytest.raises(ConfigError, match=r"platform\.kernels=.*gone holds no kernels; .* infer-cpu-x86-64-v4-bf16-"):
        prebuilt.kernel_library(tmp_path, tmp_path / "gone")
    put(tmp_path / "old", BEST, digest="0" * 64)
    with pytest.raises(ConfigError, match=r"holds infer-cpu-x86-64-v4-bf16-0000000000000000\.so") as caught:
        prebuilt.kernel_library(tmp_path, tmp_path / "old")
    assert caught.value.fields == ("platform.kernels",)


@pytest.mark.usefixtures("no_compiler")
def test_a_packaged_library_is_taken_where_nothing_can_be_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prebuilt, "PACKAGED", tmp_path / "packaged")
    with pytest.raises(ConfigError, match="need a C"):
        prebuilt.kernel_library(tmp_path, None)
    cpu(monkeypatch, "x86_64", set(BEST.needs))
    put(tmp_path / "packaged", BEST)
    with caplog.at_level(logging.INFO, "infer"):
        library = prebuilt.kernel_library(tmp_path, None)
    assert library.parent == tmp_path / "packaged"
    assert "prebuilt for x86-64-v4-bf16" in caplog.text and "none is on the path" in caplog.text


@pytest.fixture
def native(kernel_cache: Path, tmp_path: Path) -> Path:
    """A directory with the library of this machine, under the names of all levels that it has."""
    built = build.build_library(kernel_cache)
    directory = tmp_path / "native"
    directory.mkdir()
    for level in prebuilt._levels_here():
        shutil.copy(built, directory / prebuilt._file_name(level, build.sources_digest()))
    return directory


async def answer(path: Path, **platform: object) -> tuple[str, list[int]]:
    config = EngineConfig(
        model={"ref": str(path), "skip_tokenizer": True, "dtype": "float32"},
        platform={"threads": 1, **platform},
        cache={"num_blocks": 8},
    )
    async with Engine(config) as engine:
        done = await engine.generate([3, 17, 9], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
        return engine.resolved.platform, list(done.token_ids)


@pytest.mark.anyio
@pytest.mark.platform("cpu", "which library of kernels it takes, and that the reference is its last resort")
async def test_an_engine_without_a_compiler(
    native: Path,
    tmp_path: Path,
    no_compiler: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(prebuilt, "PACKAGED", tmp_path / "packaged")
    path = make_checkpoint(llama.infer_models()[0].example, tmp_path / "model")
    with caplog.at_level(logging.INFO, "infer"):
        name, tokens = await answer(path, kernels=str(native))
        assert name == "cpu" and "prebuilt for" in caplog.text
        caplog.clear()
        assert await answer(path) == ("reference", tokens), "the last resort"
        assert "platform cpu cannot be used, a slower one is" in caplog.text
        assert "none is on the path" in caplog.text
        caplog.clear()
        shutil.copytree(native, tmp_path / "packaged")
        assert await answer(path) == ("cpu", tokens)
        assert "not built for this CPU" in caplog.text
    with pytest.raises(ConfigError, match="need a C"):
        shutil.rmtree(tmp_path / "packaged")
        await answer(path, name="cpu")


def damage(directory: Path) -> None:
    for library in directory.iterdir():
        library.write_bytes(b"\x7fELF and no more")


@pytest.mark.anyio
async def test_a_damaged_library_is_named(native: Path, tmp_path: Path) -> None:
    damage(native)
    path = make_checkpoint(llama.infer_models()[0].example, tmp_path / "model")
    with pytest.raises(ConfigError, match=r"kernels .*native/infer-cpu-.* cannot be loaded: .*; delete the file"):
        await answer(path, name="cpu", kernels=str(native))


def test_the_command_builds_all_levels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = tmp_path / "g++"
    tool.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nwhile [ "$1" != -o ]; do shift; done; echo made > "$2"\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(prebuilt.host, "machine", lambda: "x86_64")
    assert main(["kernels", "build", "--out", str(tmp_path / "out")]) == 0
    names = [prebuilt._file_name(level, build.sources_digest()) for level in X86]
    assert [Path(line).name for line in capsys.readouterr().out.split()] == names
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(names)
    calls = (tmp_path / "calls").read_text()
    assert "-march=native" not in calls and "-mavx512bf16" in calls and "-march=x86-64-v3" in calls
    assert main(["kernels", "build", "--out", str(tmp_path / "one"), "--level", "x86-64-v3"]) == 0
    assert len(list((tmp_path / "one").iterdir())) == 1
    capsys.readouterr()
    assert main(["kernels", "build", "--out", str(tmp_path / "x"), "--level", "sparc"]) == 1
    assert "levels here are x86-64-v4-bf16, x86-64-v4-vnni, x86-64-v4, x86-64-v3" in capsys.readouterr().err
    assert main(["kernels", "build", "--out", str(tmp_path / "x"), "--platform", "reference"]) == 1
    assert "no kernels that can be built" in capsys.readouterr().err


@pytest.mark.heavy
@pytest.mark.parametrize("level", prebuilt._levels_here(), ids=lambda level: str(level.name))
def test_every_level_that_runs_here_computes(tmp_path: Path, level: prebuilt.Level) -> None:
    (path,) = prebuilt.build_prebuilt(tmp_path, [level.name])
    library = Library(path, 2)
    try:
        ops = make_ops(*make_kernels(library))
        assert ops.pack is not None and ops.blocks is not None
        for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.05)):
            x, weight = torch.randn(5, 64).to(dtype), torch.randn(48, 64).to(dtype)
            exact = x.double() @ weight.double().T
            torch.testing.assert_close(ops.linear(x, ops.pack(weight), None).double(), exact, rtol=tolerance, atol=0.05)
            norm = OPS.rms_norm(x, torch.ones(64, dtype=dtype), 1e-6)
            torch.testing.assert_close(ops.rms_norm(x, torch.ones(64, dtype=dtype), 1e-6), norm, rtol=0.02, atol=0.02)
    finally:
        library.close()


def thread_ids() -> set[int]:
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["cpu", "reference"])
async def test_threads_run_on_the_cpus_they_are_given(tmp_path: Path, name: str) -> None:
    path = make_checkpoint(llama.infer_models()[0].example, tmp_path / "model")
    before, cpu_id = os.sched_getaffinity(0), max(os.sched_getaffinity(0))
    known = thread_ids()
    config = EngineConfig(
        model={"ref": str(path), "skip_tokenizer": True, "dtype": "float32"},
        platform={"name": name, "cpus": (cpu_id,)},
        cache={"num_blocks": 8},
    )
    async with Engine(config) as engine:
        assert engine.resolved.threads == 1
        await engine.generate([3, 17, 9], SamplingParams(max_tokens=2))
        confined = [thread for thread in thread_ids() - known if os.sched_getaffinity(thread) == {cpu_id}]
        assert confined or len(before) == 1, "the worker's thread"
        assert os.sched_getaffinity(0) == before, "not the application's"
    with pytest.raises(ConfigError, match=r"platform\.cpus names 8191; this process may use "):
        async with Engine(config.model_copy(update={"platform": config.platform.model_copy(update={"cpus": (8191,)})})):
            pass
