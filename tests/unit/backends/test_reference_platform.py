"""The reference platform: facts, and a step that leaves no trace in torch's global state."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch

from infer.backends.reference import platform as reference
from infer.backends.reference.platform import ReferencePlatform, create, infer_platforms, probe


def state() -> dict[str, Any]:
    return {
        "threads": torch.get_num_threads(),
        "interop": torch.get_num_interop_threads(),
        "dtype": torch.get_default_dtype(),
        "rng": torch.random.get_rng_state().tolist(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def step(platform: ReferencePlatform) -> None:
    with platform.step_context():
        assert torch.is_inference_mode_enabled()
        assert torch.get_num_threads() == platform.threads
        platform.ops.linear(torch.randn(2, 4, generator=torch.Generator()), torch.ones(3, 4), None)


@pytest.mark.row("X-EMBED", "torch default dtype and RNG state are equal before and after a step")
@pytest.mark.parametrize("threads", [1, 3])
def test_a_step_restores_torch(threads: int) -> None:
    before = state()
    step(create(threads))
    assert state() == before
    with contextlib.suppress(ZeroDivisionError), create(threads).step_context():
        _ = 1 / 0
    assert state() == before


def test_steps_on_a_worker_thread_do_not_reach_the_application() -> None:
    before = state()
    seen: list[int] = []

    def work() -> None:
        for threads in (3, 2):
            step(create(threads))
        seen.append(torch.get_num_threads())

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert state() == before
    assert seen == [before["threads"]]
    late: list[int] = []
    other = threading.Thread(target=lambda: late.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert late == [before["threads"]], "a thread that the application starts afterwards"


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = create(2).limits()
    assert (limits.name, limits.threads) == ("reference", 2)
    assert 0 < limits.available_memory <= limits.total_memory
    assert 1 <= create(None).limits().threads <= torch.get_num_threads()
    monkeypatch.setattr(reference.memory, "native_bfloat16", lambda: True)
    assert create(1).limits().dtypes == ("bfloat16", "float32")
    monkeypatch.setattr(reference.memory, "native_bfloat16", lambda: False)
    assert create(1).limits().dtypes == ("float32",)


def test_the_spec_makes_the_platform() -> None:
    (spec,) = infer_platforms()
    assert (spec.name, spec.priority, probe().available) == ("reference", 0, True)
    platform = create(**spec.example)
    assert platform.threads == spec.example["threads"]
    assert platform.memory_in_use() > 0
    platform.synchronize()
    platform.close()
