"""Staging of the platform "cuda" over a GPU that is not there: the kit's promise, and what a step may send over the bus."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from fakes.cuda_device import FakeDevice
from fakes.cuda_table import table_of
from infer.backends.cuda.cuda_platform import CudaPlatform
from infer.config.model import KVGroup, KVLayer, KVLayout
from infer.engine.worker.resident_batch import ResidentBatch
from infer.errors import InferError
from infer.plugins.platform import SupportsGraphs, SupportsGraphSizes, SupportsStaging, SupportsWorkspace
from infer.testing.kits._platform_staging import check_staging


def platform_on(device: FakeDevice) -> CudaPlatform:
    return CudaPlatform(device, table=table_of(device))


def test_the_platform_is_what_it_says() -> None:
    made = platform_on(FakeDevice())
    for protocol in (SupportsGraphs, SupportsGraphSizes, SupportsStaging, SupportsWorkspace):
        assert isinstance(made, protocol)
    limits = made.limits()
    assert (limits.name, limits.invariant) == ("cuda", False) and limits.kernel_fingerprint.startswith("cuda-")
    invariant = CudaPlatform(FakeDevice(), invariant=True, table=table_of(FakeDevice()))
    assert invariant.limits().invariant
    assert invariant.limits().kernel_fingerprint != limits.kernel_fingerprint


@pytest.mark.parametrize("late", [False, True])
def test_staging_keeps_the_promise_of_the_kit(late: bool) -> None:
    device = FakeDevice(lambda: late)
    made = platform_on(device)
    check_staging(made)
    made.close()
    device.check()


class Wrong(CudaPlatform):
    """One promise broken at a time."""

    broken = ""

    def upload(self, arrays: Sequence[NDArray[Any]]) -> tuple[Tensor, ...]:
        if self.broken == "upload":
            return tuple(torch.from_numpy(array) for array in arrays)
        return super().upload(arrays)

    def fetch(self, tensors: Sequence[Tensor]) -> Any:
        if self.broken != "fetch":
            return super().fetch(tensors)

        class Live:
            def ready(self) -> bool:
                return True

            def wait(self) -> tuple[Tensor, ...]:
                return tuple(tensors)

        return Live()


@pytest.mark.parametrize("broken", ["upload", "fetch"])
def test_the_kit_finds_staging_that_breaks_it(broken: str) -> None:
    device = FakeDevice()
    made = Wrong(device, table=table_of(device))
    made.broken = broken
    with pytest.raises((InferError, AssertionError), match="not what was fetched"):
        check_staging(made)


def test_what_a_graph_cannot_hold_is_told_once_and_computed_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    made = platform_on(FakeDevice())
    with made.step_context():
        (x,) = made.upload([np.arange(4)])
        for _ in range(2):
            result, graph = made.record(lambda: x * int(x[1].item()))
            assert result.tolist() == [0, 1, 2, 3] and graph is None
    assert caplog.text.count("not replayed as a graph") == 1


class Counted:
    """A platform's uploads, counted."""

    def __init__(self, made: CudaPlatform) -> None:
        self._made = made
        self.sent: list[int] = []

    def upload(self, arrays: Sequence[NDArray[Any]]) -> tuple[Tensor, ...]:
        self.sent.append(sum(array.nbytes for array in arrays))
        return self._made.upload(arrays)

    def fetch(self, tensors: Sequence[Tensor]) -> Any:
        return self._made.fetch(tensors)


@pytest.mark.row("KV-DEVICE-RESIDENCY", "only input-id, metadata and sampled-id copies")
def test_decode_steps_upload_what_is_new() -> None:
    """A hundred steps of three rows with a thousand blocks each: places and new blocks cross, tables and ids do not."""
    slots, width, size = 4, 1024, 4
    device = FakeDevice()
    made = platform_on(device)
    sent = Counted(made)
    layout = KVLayout(
        layers=(KVLayer(layer_id=0, num_kv_heads=1, head_size=4),),
        groups=(KVGroup(name="sliding", layer_ids=(0,), window=40),),
    )
    table = np.zeros((slots, width), dtype=np.int32)
    resident = ResidentBatch(
        sent, [table], layout, max_model_len=width * size - 1, block_size=size, vocab_size=1000, device=made.device
    )
    rows, prompt = np.array([2, 0, 3]), 200
    for slot in rows.tolist():
        table[slot, : prompt // size] = np.arange(1, prompt // size + 1) + 100 * slot
        resident.table_changed(0, slot, 0, prompt // size)
        resident.set_tokens(slot, np.full(prompt, slot + 1, dtype=np.int32))
    ones, starts, history = np.ones(3, dtype=np.int64), np.arange(4), dict[tuple[int, int], int]()
    for step in range(100):
        position = prompt + step
        if position % size == 0:
            for slot in rows.tolist():
                table[slot, position // size] = 500 + position + slot
                resident.table_changed(0, slot, position // size, position // size + 1)
        drawn = (rows * 7 + step) % 1000
        with made.step_context():
            (ids,) = made.upload([drawn])
            resident.write(rows, np.full(3, position), ids)
            found, positions, (meta,) = resident.rows(rows, np.full(3, position), ones, starts, 3)
            got = [tensor.tolist() for tensor in (found, positions, meta.slot_mapping, meta.block_table, meta.seq_lens)]
        history |= {(slot, position): token for slot, token in zip(rows.tolist(), drawn.tolist(), strict=True)}
        assert got[0] == drawn.tolist() and got[1] == [position] * 3 and got[4] == [position + 1] * 3
        assert got[2] == (table[rows, position // size].astype(np.int64) * size + position % size).tolist()
        first = max(0, position - 39) // size
        expected = table[rows, : position // size + 1].copy()
        expected[:, :first] = 0
        assert got[3] == expected.tolist()
    assert max(sent.sent[2:]) <= 3 * (8 + 8) + 3 * (8 + 4), "more than places, and a new block of each row"
    device.check()
