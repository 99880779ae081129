"""The fake GPU finds what a real one would punish some day: each test puts one ordering bug into the code and must fail."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from fakes.decode_driver import DecodeDriver
from fakes.order import OrderError
from infer.backends.cuda import cuda_platform, staging
from infer.engine.worker import graphs


@pytest.fixture
def mutated() -> Iterator[Any]:
    """`mutated(module, (old, new), ...)`: the module from its source, with these lines exchanged."""
    names = []

    def make(module: ModuleType, *changes: tuple[str, str]) -> ModuleType:
        source = inspect.getsource(module)
        for old, new in changes:
            assert source.count(old) == 1, f"{old!r} is not there once any more: plant the bug where it went"
            source = source.replace(old, new)
        made = ModuleType(f"{module.__name__}_mutated")
        made.__file__ = module.__file__
        names.append(made.__name__)
        sys.modules[made.__name__] = made
        exec(compile(source, f"<{made.__name__}>", "exec"), made.__dict__)
        return made

    yield make
    for name in names:
        sys.modules.pop(name, None)


def drive(driver: DecodeDriver) -> None:
    """Three steps in flight, sizes that come again, a step that is never finished."""
    for slots in ([3, 4], [5, 6, 7], [3, 9]):
        driver.step(slots)
    for slots in ([1], [4, 3], [5, 6, 8, 9], [2, 3, 7], [9], [4, 5], [9, 3], [9]):
        driver.finish()
        driver.step(slots)
    driver.close()


def late() -> bool:
    return True


def driver_with(monkeypatch: pytest.MonkeyPatch, made: ModuleType) -> DecodeDriver:
    monkeypatch.setattr(cuda_platform, "Staging", made.Staging)
    return DecodeDriver(late)


def test_the_code_as_it_is_has_none() -> None:
    drive(DecodeDriver(late))


FOLLOW = "        self._results.follow(self._device.main.mark())\n"
KEEP = "        self._on_their_way.append((landed, packed, buffer))\n"
PLANTED = {
    "the copy of results does not wait for the step": ((FOLLOW, ""), "on stream 1 reads a transfer's device memory"),
    "a buffer of uploads is used again while the device reads it": (
        ("self._pool.give_back(buffer, self._device.main.mark())", "self._pool.give_back(buffer)"),
        "the host uses pinned buffer .* while main",
    ),
    "a buffer is taken again without looking at its event": (
        ("resting[0][1] is None or resting[0][1].done()", "True"),
        "the host uses pinned buffer .* while main",
    ),
    "results are read before they have landed": (
        ("            self._landed.wait()\n", ""),
        "the host uses pinned buffer .* while stream 1",
    ),
    "what a copy reads is freed under it": ((KEEP, ""), "freed (while|before)"),
    "what a copy reads is forgotten before it has landed": (
        ("while self._on_their_way and self._on_their_way[0][0].done():", "while len(self._on_their_way) > 1:"),
        "freed (while|before)",
    ),
    "the uploads go by the stream of the results": (
        (
            "        self._device.copy(landing, buffer[:total])\n",
            "        with self._device.using(self._results):\n            self._device.copy(landing, buffer[:total])\n",
        ),
        "while stream 1 may still be at it",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_it_is_found_in_staging(name: str, mutated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    change, expected = PLANTED[name]
    driver = driver_with(monkeypatch, mutated(staging, change))
    with pytest.raises(OrderError, match=expected):
        drive(driver)


def test_the_event_of_a_step_that_is_marked_too_early_is_found(mutated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    early = ("        self._forget_landed()\n", "        self._forget_landed()\n" + FOLLOW)
    driver = driver_with(monkeypatch, mutated(staging, (FOLLOW, ""), early))
    with pytest.raises(OrderError, match="on stream 1 reads a transfer's device memory"):
        drive(driver)


def test_a_platform_that_closes_under_a_copy_is_found(mutated: Any) -> None:
    old = "        self._device.synchronize()\n        self._staging.close()\n"
    made = mutated(cuda_platform, (old, "        self._staging.close()\n"))
    with pytest.raises(OrderError, match="is freed while stream 1"):
        drive(DecodeDriver(late, platform=made.CudaPlatform))


def test_a_graph_that_reads_a_step_s_own_tensors_is_found(mutated: Any) -> None:
    """Its input is copied by the graph itself, from where the first step had it."""
    old = "self._platform.record(lambda: self._work(model, fixed, scored=scored))"
    new = "self._platform.record(lambda: self._work(model, self._fill(batch, num_rows, size), scored=scored))"
    with pytest.raises(OrderError, match="replayed on memory that was freed"):
        drive(DecodeDriver(late, graphs=mutated(graphs, (old, new)).DecodeGraphs))


def test_a_graph_that_is_replayed_on_the_last_step_s_input_is_found(mutated: Any) -> None:
    old = "                self._fill(batch, num_rows, size)\n                return _decoded(graph.replay(), num_rows)"
    with pytest.raises(AssertionError, match="hidden states differ"):
        drive(DecodeDriver(late, graphs=mutated(graphs, (old, old.partition("\n")[2])).DecodeGraphs))


def test_rows_that_fill_a_step_up_and_write_to_a_block_of_others_are_found(mutated: Any) -> None:
    old = "        own.slot_mapping[num_rows:].zero_()\n"
    with pytest.raises(AssertionError, match="hidden states differ"):
        drive(DecodeDriver(late, graphs=mutated(graphs, (old, "")).DecodeGraphs))


def test_a_capture_that_allocates_is_found() -> None:
    driver = DecodeDriver(late)
    import numpy as np

    with (
        driver.platform.step_context(),
        pytest.raises(OrderError, match="page-locked memory is allocated while a graph"),
    ):
        driver.platform.record(lambda: driver.platform.upload([np.zeros(1 << 14)])[0])


def test_results_of_a_graph_that_are_copied_where_they_lie_are_found(
    mutated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next replay writes to the same memory; what the recording step made is freed even before."""
    old = "                self._device.copy(buffer[:total], packed)\n"
    new = """                for place, tensor in zip(places, tensors, strict=True):
                    lies = tensor.reshape(-1).view(torch.uint8)
                    self._device.copy(buffer[place.start : place.start + place.num_bytes], lies)
"""
    driver = driver_with(monkeypatch, mutated(staging, (old, new)))
    with pytest.raises(OrderError, match=r"freed before the copy was done|replay on main writes a graph's result"):
        drive(driver)
