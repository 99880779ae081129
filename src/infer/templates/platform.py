"""A platform: plain torch for everything, and two kernels of its own, RMS normalisation and the gated activation.

`limits` from any thread, the rest on the worker thread. Begins as the reference platform: correct before it is fast.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from infer import EngineConfig
from infer.config.platform import PlatformLimits
from infer.plugins import Ops, Platform, PlatformSpec, Probe, build_registry, hookimpl

NAME = "my-name"


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., N], weight [N] -> [..., N]; the mean square in float32."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def silu_and_mul(x: Tensor) -> Tensor:
    """x [T, 2N]: gate, then up -> silu(gate) * up [T, N]."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate.float()).to(x.dtype) * up


class MyNamePlatform:
    """The reference platform's memory, threads and other kernels; replace them one by one."""

    name = NAME

    def __init__(self, threads: int | None = None) -> None:
        built_in = build_registry(EngineConfig(plugins={"allow": ()}).plugins)
        self._base: Platform = built_in.create("platform", "reference", threads=threads)
        self.device = self._base.device
        self.ops: Ops = dataclasses.replace(
            self._base.ops,
            rms_norm=rms_norm,
            add_rms_norm=None,  # optional: without it layers add, and then call rms_norm
            silu_and_mul=silu_and_mul,
        )

    def limits(self) -> PlatformLimits:
        limits = self._base.limits()
        made_by = f"{NAME} 1, {limits.kernel_fingerprint}"  # artifacts name the kernels they were made with
        return dataclasses.replace(limits, name=NAME, kernel_fingerprint=made_by)

    def memory_in_use(self) -> int:
        return self._base.memory_in_use()

    def synchronize(self) -> None:
        self._base.synchronize()

    def step_context(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._base.step_context()
        return context

    def close(self) -> None:
        self._base.close()


def probe() -> Probe:
    """Whether it can run here. `Probe(False, "no such device")` says why not."""
    return Probe(True)


@hookimpl
def infer_platforms() -> list[PlatformSpec]:
    return [
        PlatformSpec(
            name=NAME,
            api=1,
            factory=f"{__name__}:MyNamePlatform",
            probe=f"{__name__}:probe",
            priority=-10,  # after the built-in ones: used where the configuration names it
            example={"threads": 1},
        )
    ]
