"""The platform of NVIDIA GPUs: Triton kernels and cuBLAS, recorded decode steps, results that nobody waits for.

`limits` from any thread, the rest on the worker thread; owns the staging buffers and what the device keeps for it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor

from infer.backends.cuda.buckets import graph_sizes
from infer.backends.cuda.device import CaptureError, Device, DeviceFacts
from infer.backends.cuda.launch import Grid, Launch
from infer.backends.cuda.launch import launch as launch_kernel
from infer.backends.cuda.ops import make_ops
from infer.backends.cuda.side_stream import SideStream
from infer.backends.cuda.staging import Fetched, Staging
from infer.backends.cuda.torch_device import TorchDevice
from infer.backends.reference.platform import OPS as REFERENCE
from infer.backends.reference.platform import make_ops as make_reference
from infer.backends.reference.scratch import Scratch
from infer.config.platform import PlatformLimits
from infer.plugins.platform import Graph, Made, Ops

logger = logging.getLogger("infer.backends.cuda")
MakeOps = Callable[[DeviceFacts, bool, Launch], Ops]
"""(facts, whether a row's bits may depend on nothing else in the step, how kernels are started) -> the table."""


def kernels(facts: DeviceFacts, invariant: bool, launch: Launch) -> Ops:
    return make_ops(facts, invariant=invariant, launch=launch)


class CudaPlatform:
    """One GPU. `device` and `table` are replaced by tests; everything here is the same on both."""

    name = "cuda"

    def __init__(self, device: Device, *, invariant: bool = False, table: MakeOps = kernels) -> None:
        self._device = device
        self._invariant = invariant
        self._table = table
        self._staging = Staging(device)
        self._told: set[str] = set()
        self.device = device.torch_device
        self.ops = replace(table(device.facts, invariant, launch_kernel), beside=SideStream(device).beside)
        self._fingerprint = f"{_sources()} {device.name} torch-{torch.__version__} triton-{metadata.version('triton')}"

    def limits(self) -> PlatformLimits:
        total, free = self._device.memory.free()
        return PlatformLimits(
            name=self.name,
            total_memory=total,
            available_memory=free,
            dtypes=("bfloat16", "float16", "float32"),
            threads=1,
            cache_dtypes=("float32", "bfloat16", "float16", "fp8_e4m3"),
            invariant=self._invariant,
            kernel_fingerprint=f"{self._fingerprint}{' invariant' if self._invariant else ''}",
        )

    def memory_in_use(self) -> int:
        """The most since free memory was last given back: the allocator keeps what a step took."""
        return self._device.memory.in_use()

    def synchronize(self) -> None:
        self._device.synchronize()

    @contextmanager
    def step_context(self) -> Iterator[None]:
        """The main stream, whichever the application's own code has left current on this thread."""
        with torch.inference_mode(), self._device.using(self._device.main):
            yield

    def close(self) -> None:
        """Waits for the device: what is on its way still reads its memory."""
        self._device.synchronize()
        self._staging.close()
        self._device.memory.return_free()

    # SupportsStaging

    def upload(self, arrays: Sequence[NDArray[Any]]) -> tuple[Tensor, ...]:
        return self._staging.upload(arrays)

    def fetch(self, tensors: Sequence[Tensor]) -> Fetched:
        return self._staging.fetch(tensors)

    # SupportsGraphs and SupportsGraphSizes

    def graph_sizes(self, max_rows: int) -> tuple[int, ...]:
        return graph_sizes(max_rows)

    def record(self, work: Callable[[], Made]) -> tuple[Made, Graph[Made] | None]:
        """Done once as it is, which compiles what is new; then noted."""
        made = work()
        try:
            return made, self._device.capture(work)
        except CaptureError as error:
            reason = str(error).partition("\n")[0]
            if reason not in self._told:
                self._told.add(reason)
                logger.warning("a decode step is not replayed as a graph, which costs speed: %s", reason)
            return made, None

    # SupportsWorkspace

    def planning_ops(self) -> tuple[Ops, Callable[[], int]]:
        """The same wrappers, which allocate as always and start nothing; what is torch's own here has a dry form."""
        planned, dry = (
            self._table(self._device.facts, self._invariant, _start_nothing),
            make_reference(Scratch(dry=True)),
        )
        shared = {
            f.name: getattr(dry, f.name) for f in fields(Ops) if getattr(planned, f.name) is getattr(REFERENCE, f.name)
        }
        return replace(planned, **shared), lambda: 0

    def reserve_workspace(self, num_bytes: int) -> None:
        """Torch's allocator keeps what steps have taken; there is no buffer."""

    def trim(self) -> None:
        """What the widest step took is kept for the others: to take memory from the device makes it wait for all its work."""


def _start_nothing(kernel: Any, grid: Grid, *args: Any, **constants: Any) -> None: ...


def _sources() -> str:
    """Which kernels these are: a digest of this package's files."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"cuda-{digest.hexdigest()[:12]}"


def create(threads: int | None = None, numerics: Literal["auto", "fast", "invariant"] = "auto") -> CudaPlatform:
    """`threads` is for platforms that compute on the CPU. Invariant kernels where they are asked for by name: they cost
    speed on a GPU."""
    return CudaPlatform(TorchDevice(), invariant=numerics == "invariant")
