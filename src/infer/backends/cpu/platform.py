"""The CPU platform with native kernels: built for this machine at first use, invariant to batching by construction.

`limits` from any thread, the rest on the worker thread; owns the kernel library and its threads.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from infer.backends.cpu.library import Library
from infer.backends.cpu.ops import make_kernels, make_ops
from infer.backends.cpu.prebuilt import kernel_library
from infer.backends.cpu.tape import Arena, Tape, record
from infer.backends.reference import memory
from infer.backends.reference.affinity import run_on
from infer.backends.reference.platform import inference, torch_fingerprint
from infer.backends.reference.scratch import Scratch
from infer.config.platform import PlatformLimits
from infer.errors import ConfigError
from infer.plugins.hookspecs import hookimpl
from infer.plugins.model_source import ProgressCallback
from infer.plugins.platform import API_VERSION, Made, Ops, PlatformSpec, Probe

ARENA = 1 << 26
"""Bytes of address space for what recorded steps write; of it, pages that they use cost memory."""


class NativePlatform:
    """C++ kernels on the CPUs this process may use, or on `threads` of them."""

    name = "cpu"

    def __init__(
        self,
        threads: int | None,
        cache_dir: Path,
        progress: ProgressCallback | None = None,
        cpus: Sequence[int] | None = None,
        kernels: Path | None = None,
    ) -> None:
        self.device = torch.device("cpu")
        library = kernel_library(cache_dir, kernels, progress)
        self._let_go = run_on(cpus)
        self.threads = threads if threads is not None else min(torch.get_num_threads(), memory.usable_cpus())
        try:
            self._library = Library(library, self.threads)
        except OSError as error:
            self._let_go()
            raise ConfigError(
                f"the kernels {library} cannot be loaded: {error}; delete the file and start again",
                fields=("platform.name",),
            ) from error
        self._fingerprint = f"{library.stem.removeprefix('infer-')} {torch_fingerprint()}"  # named by its content
        self._scratch = Scratch()
        self._kernels = make_kernels(self._library, self._scratch)
        self._arena = Arena()
        self.ops = make_ops(*self._kernels)

    def limits(self) -> PlatformLimits:
        total, available = memory.memory()
        dtypes = ("bfloat16", "float32") if memory.native_bfloat16() else ("float32", "bfloat16")
        return PlatformLimits(
            name=self.name,
            total_memory=total,
            available_memory=available,
            dtypes=dtypes,
            threads=self.threads,
            compute_dtypes=("float32", "bfloat16"),
            cache_dtypes=("float32", "bfloat16", "fp8_e4m3"),
            invariant=True,
            kernel_fingerprint=self._fingerprint,
        )

    def memory_in_use(self) -> int:
        return memory.resident_bytes()

    def planning_ops(self) -> tuple[Ops, Callable[[], int]]:
        scratch = Scratch(dry=True)
        return make_ops(*make_kernels(self._library, scratch)), lambda: scratch.high_water

    def record(self, work: Callable[[], Made]) -> tuple[Made, Tape[Made] | None]:
        if not self._arena.reserved:
            self._arena.reserve(ARENA)
        return record(self._library, self._kernels, self._arena, work)

    def reserve_workspace(self, num_bytes: int) -> None:
        self._scratch.reserve(num_bytes)

    def trim(self) -> None:
        self._scratch.trim()
        memory.return_free_memory()

    def synchronize(self) -> None:
        """Nothing is queued."""

    def step_context(self) -> AbstractContextManager[None]:
        """One thread for the little that torch still computes: its OpenMP threads spin while they wait, beside ours."""
        return inference(1)

    def close(self) -> None:
        """End the threads; the buffer and what the model held go back to the operating system."""
        self._scratch.release()
        self._arena.release()
        self._library.close()
        self._let_go()
        memory.return_free_memory()


def create(
    threads: int | None = None,
    cache_dir: Path | None = None,
    progress: ProgressCallback | None = None,
    cpus: Sequence[int] | None = None,
    kernels: Path | None = None,
) -> NativePlatform:
    """Without `cache_dir` the library is kept in a folder of this user's own under the temporary directory."""
    if cache_dir is not None:
        return NativePlatform(threads, cache_dir, progress, cpus, kernels)
    folder = Path(tempfile.gettempdir()) / f"infer-kernels-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = folder.lstat()
    if stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o022:
        return NativePlatform(threads, folder, progress, cpus, kernels)
    with tempfile.TemporaryDirectory(prefix="infer-kernels-") as private:  # a loaded library needs its file no more
        return NativePlatform(threads, Path(private), progress, cpus, kernels)


def probe() -> Probe:
    if not sys.platform.startswith("linux"):
        return Probe(False, "native kernels are for Linux")
    return Probe(True)


@hookimpl
def infer_platforms() -> list[PlatformSpec]:
    return [
        PlatformSpec(
            name="cpu",
            api=API_VERSION,
            factory=f"{__name__}:create",
            probe=f"{__name__}:probe",
            priority=10,
            compiles=True,
            settings=("cpus", "kernels"),
            prebuild="infer.backends.cpu.prebuilt:build_prebuilt",
            example={"threads": 2},
        )
    ]
