"""The table of GPU operations as a platform, so that the public kits run over it. Used by the parts; owns nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from gpu.place import Place
from infer.backends.cuda.ops import make_ops
from infer.config.platform import PlatformLimits
from infer.plugins.platform import API_VERSION, Ops, PlatformSpec, Probe


class TablePlatform:
    """Operations and a device, without streams and graphs: what the engine adds is tested with the engine."""

    def __init__(self, place: Place, name: str, ops: Ops, dtypes: tuple[str, ...]) -> None:
        self.name, self.ops, self.device = name, ops, place.device
        self._place, self._dtypes = place, dtypes

    def limits(self) -> PlatformLimits:
        return PlatformLimits(
            name=self.name,
            total_memory=2,
            available_memory=1,
            dtypes=self._dtypes,
            threads=1,
            cache_dtypes=("float32", "bfloat16", "float16", "fp8_e4m3"),
        )

    def memory_in_use(self) -> int:
        return 1

    def synchronize(self) -> None:
        self._place.synchronize()

    def step_context(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = torch.inference_mode()
        return context

    def close(self) -> None:
        """Nothing is held."""


def cuda_tables(place: Place) -> dict[str, Ops]:
    """The plain and the invariant one."""
    return {
        name: make_ops(place.facts, invariant=invariant) for name, invariant in (("plain", False), ("invariant", True))
    }


def offer(platform: TablePlatform) -> PlatformSpec:
    """A spec whose factory gives that platform."""
    return PlatformSpec(
        name=platform.name,
        api=API_VERSION,
        factory=f"{__name__}:given",
        probe=f"{__name__}:probe",
        example={"platform": platform},
    )


def given(platform: TablePlatform) -> TablePlatform:
    return platform


def probe() -> Probe:
    return Probe(True)
