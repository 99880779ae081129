"""The reference platform: plain torch on any device, always available, the oracle of the others.

`limits` from any thread, the rest on the worker thread; owns its thread count and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn import functional as F

from infer.backends.reference import activation, attention, kv, memory, moe, norm, rotary
from infer.config.platform import PlatformLimits
from infer.plugins.hookspecs import hookimpl
from infer.plugins.platform import API_VERSION, Ops, PlatformSpec, Probe

OPS = Ops(
    embedding=kv.embedding,
    linear=F.linear,
    rms_norm=norm.rms_norm,
    rotary=rotary.rotary,
    silu_and_mul=activation.silu_and_mul,
    gelu_tanh_and_mul=activation.gelu_tanh_and_mul,
    write_kv=kv.write_kv,
    attention=attention.attention,
    gather_rows=kv.gather_rows,
    topk_router=moe.topk_router,
    moe=moe.moe,
)
"""The table that other backends start from."""


class ReferencePlatform:
    """Plain torch. Without `threads` torch's own setting is kept, lowered to the CPUs this process may use."""

    name = "reference"

    def __init__(self, threads: int | None = None, *, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.ops = OPS
        self.threads = threads if threads is not None else min(torch.get_num_threads(), memory.usable_cpus())

    def limits(self) -> PlatformLimits:
        total, available = memory.memory()
        dtypes = ("bfloat16", "float32") if memory.native_bfloat16() else ("float32",)
        return PlatformLimits(
            name=self.name, total_memory=total, available_memory=available, dtypes=dtypes, threads=self.threads
        )

    def memory_in_use(self) -> int:
        return memory.resident_bytes()

    def synchronize(self) -> None:
        """Nothing is queued."""

    @contextmanager
    def step_context(self) -> Iterator[None]:
        """Inference mode and the thread count for one step; both are as before afterwards."""
        before = torch.get_num_threads()
        if before != self.threads:
            torch.set_num_threads(self.threads)
        try:
            with torch.inference_mode():
                yield
        finally:
            if before != self.threads:
                torch.set_num_threads(before)

    def close(self) -> None:
        """Nothing is held; what the model held goes back to the operating system."""
        if self.device.type == "cpu":
            memory.return_free_memory()


def create(threads: int | None = None) -> ReferencePlatform:
    return ReferencePlatform(threads)


def probe() -> Probe:
    return Probe(True)


@hookimpl
def infer_platforms() -> list[PlatformSpec]:
    return [
        PlatformSpec(
            name="reference",
            api=API_VERSION,
            factory=f"{__name__}:create",
            probe=f"{__name__}:probe",
            priority=0,
            example={"threads": 1},
        )
    ]
