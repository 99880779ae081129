"""The whole table, on CPU tensors, under the conformance kit of platforms."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest
import torch

from infer.backends.cuda.device import DeviceFacts
from infer.backends.cuda.ops import make_ops
from infer.backends.reference.platform import inference
from infer.config.platform import PlatformLimits
from infer.plugins.platform import API_VERSION, Ops, PlatformSpec, Probe
from infer.testing.kits import platform as kit


class InterpretedPlatform:
    """The GPU's operations where there is none."""

    name = "interpreted"

    def __init__(self, invariant: bool) -> None:
        self.device = torch.device("cpu")
        facts = DeviceFacts(multiprocessors=2, shared_memory=1 << 17, native_fp8=False)
        self.ops: Ops = make_ops(facts, invariant=invariant)

    def limits(self) -> PlatformLimits:
        return PlatformLimits(
            name=self.name,
            total_memory=2,
            available_memory=1,
            dtypes=("float16", "float32"),
            threads=1,
            cache_dtypes=("float32", "float16", "fp8_e4m3"),
        )

    def memory_in_use(self) -> int:
        return 1

    def synchronize(self) -> None: ...

    def step_context(self) -> AbstractContextManager[None]:
        return inference(1)

    def close(self) -> None: ...


def create(invariant: bool) -> InterpretedPlatform:
    return InterpretedPlatform(invariant)


def probe() -> Probe:
    return Probe(True)


def spec(invariant: bool) -> PlatformSpec:
    return PlatformSpec(
        name="interpreted",
        api=API_VERSION,
        factory=f"{__name__}:create",
        probe=f"{__name__}:probe",
        example={"invariant": invariant},
    )


@pytest.fixture(autouse=True)
def loaded_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kit loads by name; this file is no module on the path."""
    monkeypatch.setattr(kit, "load", lambda spec, attribute="factory": {"factory": create, "probe": probe}[attribute])


@pytest.mark.parametrize("invariant", [False, True])
def test_the_platform_kit(invariant: bool) -> None:
    names = []
    for check in kit.checks(spec(invariant)):
        check.run()
        names.append(check.name)
    ops = create(invariant).ops
    assert ops.draw is not None and ops.uniforms is not None and ops.penalties is not None
    assert {"draw", "uniforms", "penalties", "attention[float16]", "fp8_cache[float32]"} <= set(names)
