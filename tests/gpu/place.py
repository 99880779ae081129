"""Where a run takes place: the GPU, or for a dry run this CPU with Triton's interpreter and tiny sizes. Same code for both.

Runs in the process of a part; owns its device choice and the two ceilings it measures.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from gpu.clock import Clock
from gpu.sizes import REAL, TINY, Sizes
from infer.backends.cuda.device import DeviceFacts
from infer.backends.cuda.torch_device import TorchDevice

LEAST_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this card does at best, measured here with torch's own operations."""

    copy_bandwidth: float
    """Bytes per second, reads and writes counted, of a copy that no cache holds."""
    matmul: float
    """Operations per second of cuBLAS on a large square product in bf16."""


class Place:
    """`directory` takes checkpoints, a few GB on a GPU."""

    def __init__(self, directory: Path, *, dry_run: bool) -> None:
        self.dry_run = dry_run
        self.directory = directory
        self.sizes: Sizes = TINY if dry_run else REAL
        if not dry_run:
            refuse_unfit()
        self.device = torch.device("cpu" if dry_run else "cuda")
        self.dtype = torch.float32 if dry_run else torch.bfloat16
        """Of models."""
        self.kernel_dtype = torch.float16 if dry_run else torch.bfloat16
        """Of kernels: the interpreter computes bf16 wrongly."""
        self.platform = "cpu" if dry_run else "cuda"
        """Of engines. A dry run takes the platform whose results do not depend on the batch either."""
        self.clock = Clock(self.device, repeats=1 if dry_run else 20)

    @cached_property
    def facts(self) -> DeviceFacts:
        """As the platform reads them."""
        if self.dry_run:
            return DeviceFacts(multiprocessors=2, shared_memory=1 << 17, native_fp8=False)
        return TorchDevice().facts

    @cached_property
    def ceilings(self) -> Ceilings:
        sizes, device, dtype = self.sizes, self.device, self.dtype
        source = torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copied = 2 * sizes.copy_bytes / self.clock.seconds(lambda: target.copy_(source), cold=False)
        side = sizes.matmul_side
        left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        product = torch.empty(side, side, dtype=dtype, device=device)
        multiplied = 2 * side**3 / self.clock.seconds(lambda: torch.mm(left, right, out=product), cold=False)
        return Ceilings(copied, multiplied)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def refuse_unfit() -> None:
    """Raises `RuntimeError` in words when there is no GPU that the kernels are written for."""
    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} sees no GPU: install a CUDA build and a driver that fits it")
    capability = torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        name = torch.cuda.get_device_name()
        raise RuntimeError(f"{name} has compute capability {capability}; the kernels need {LEAST_CAPABILITY} or newer")
