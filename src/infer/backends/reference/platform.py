"""The reference platform: plain torch on any device, always available, the oracle of the others.

`limits` from any thread, the rest on the worker thread; owns its thread count and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import Tensor

from infer.backends.reference import activation, attention, kv, linear, memory, moe, norm, rotary
from infer.backends.reference.affinity import run_on
from infer.backends.reference.scratch import Scratch
from infer.config.platform import PlatformLimits
from infer.plugins.hookspecs import hookimpl
from infer.plugins.platform import API_VERSION, UNSCALED, KVScales, Ops, PlatformSpec, Probe


def make_ops(scratch: Scratch) -> Ops:
    """The table whose large results lie in `scratch`."""

    def write_kv(
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        scales: KVScales = UNSCALED,
        /,
    ) -> None:
        if not scratch.dry:
            kv.write_kv(k, v, k_cache, v_cache, slot_mapping, scales)

    return Ops(
        embedding=partial(kv.embedding, scratch=scratch),
        linear=partial(linear.linear, scratch=scratch),
        rms_norm=partial(norm.rms_norm, scratch=scratch),
        rotary=partial(rotary.rotary, scratch=scratch),
        silu_and_mul=partial(activation.silu_and_mul, scratch=scratch),
        gelu_tanh_and_mul=partial(activation.gelu_tanh_and_mul, scratch=scratch),
        write_kv=write_kv,
        attention=partial(attention.attention, scratch=scratch),
        gather_rows=kv.gather_rows,
        add_rms_norm=partial(norm.add_rms_norm, scratch=scratch),
        topk_router=moe.topk_router,
        moe=partial(moe.moe, scratch=scratch),
    )


OPS = make_ops(Scratch())
"""All results from torch's allocator: for tests, and for backends that replace entries of it."""


def torch_fingerprint() -> str:
    """Which of torch's kernels run on this CPU."""
    return f"torch-{torch.__version__} {torch.backends.cpu.get_cpu_capability()}"


@contextmanager
def inference(threads: int) -> Iterator[None]:
    """Inference mode and torch's thread count for one step; both are as before afterwards."""
    before = torch.get_num_threads()
    if before != threads:
        torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            yield
    finally:
        if before != threads:
            torch.set_num_threads(before)


class ReferencePlatform:
    """Plain torch. Without `threads` torch's own setting is kept, lowered to the CPUs this process may use."""

    name = "reference"

    def __init__(self, threads: int | None = None, *, device: str = "cpu", cpus: Sequence[int] | None = None) -> None:
        self.device = torch.device(device)
        self._scratch = Scratch()
        self.ops = make_ops(self._scratch)
        self._let_go = run_on(cpus)
        self.threads = threads if threads is not None else min(torch.get_num_threads(), memory.usable_cpus())

    def limits(self) -> PlatformLimits:
        total, available = memory.memory()
        dtypes = ("bfloat16", "float32") if memory.native_bfloat16() else ("float32",)
        return PlatformLimits(
            name=self.name,
            total_memory=total,
            available_memory=available,
            dtypes=dtypes,
            threads=self.threads,
            cache_dtypes=("float32", "bfloat16", "float16", "fp8_e4m3"),
            kernel_fingerprint=f"{self.name} {torch_fingerprint()}",
        )

    def memory_in_use(self) -> int:
        return memory.resident_bytes()

    def planning_ops(self) -> tuple[Ops, Callable[[], int]]:
        scratch = Scratch(dry=True)
        return make_ops(scratch), lambda: scratch.high_water

    def reserve_workspace(self, num_bytes: int) -> None:
        if self.device.type == "cpu":
            self._scratch.reserve(num_bytes)

    def trim(self) -> None:
        self._scratch.trim()
        if self.device.type == "cpu":
            memory.return_free_memory()

    def synchronize(self) -> None:
        """Nothing is queued."""

    def step_context(self) -> AbstractContextManager[None]:
        return inference(self.threads)

    def close(self) -> None:
        """The buffer and what the model held go back to the operating system."""
        self._scratch.release()
        self._let_go()
        if self.device.type == "cpu":
            memory.return_free_memory()


def create(threads: int | None = None, cpus: Sequence[int] | None = None) -> ReferencePlatform:
    return ReferencePlatform(threads, cpus=cpus)


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
            settings=("cpus",),
            example={"threads": 1},
        )
    ]
