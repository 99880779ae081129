"""A platform that is slow and different: the reference, but norms and products are summed in another order.

`limits` from any thread, the rest on the worker thread. A second opinion: what changes with it depends on rounding.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from infer import EngineConfig
from infer.config.platform import PlatformLimits
from infer.plugins import Ops, Platform, PlatformSpec, Probe, build_registry, hookimpl


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., N], weight [N] -> [..., N], in float64 until the end."""
    wide = x.double()
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()).to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, I], weight [N, I], bias [N] or None -> [T, N]: one input feature after the other, added up in float64."""
    out = x.new_zeros(x.shape[0], weight.shape[0]).double()
    for feature in range(x.shape[1]):
        out.addr_(x[:, feature].double(), weight[:, feature].double())
    return (out if bias is None else out + bias.double()).to(x.dtype)


class SlowPlatform:
    """The reference platform's memory, threads and other operations."""

    name = "slow"

    def __init__(self, threads: int | None = None) -> None:
        built_in = build_registry(EngineConfig(plugins={"allow": ()}).plugins)
        self._base: Platform = built_in.create("platform", "reference", threads=threads)
        self.device = self._base.device
        self.ops: Ops = dataclasses.replace(self._base.ops, rms_norm=rms_norm, add_rms_norm=None, linear=linear)

    def limits(self) -> PlatformLimits:
        limits = self._base.limits()
        made_by = f"slow 1, {limits.kernel_fingerprint}"  # artifacts name the kernels they were made with
        return dataclasses.replace(limits, name=self.name, kernel_fingerprint=made_by)

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
    return Probe(True)


@hookimpl
def infer_platforms() -> list[PlatformSpec]:
    return [
        PlatformSpec(
            name="slow",
            api=1,
            factory=f"{__name__}:SlowPlatform",
            probe=f"{__name__}:probe",
            priority=-100,  # only where the configuration names it
            example={"threads": 1},
        )
    ]
