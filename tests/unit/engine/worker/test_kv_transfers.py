"""The worker half of the external KV store: blocks as bytes, and connectors that fail, lie and are late."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from infer.config.model import KVGroup, KVLayer, KVLayout
from infer.engine.step import KVPlan, StepResult
from infer.engine.worker.kv_blocks import TensorKVBlocks
from infer.engine.worker.kv_transfers import KVTransfers
from infer.plugins.kv_connector import KVBlock, KVReport, KVTransfer


class Scripted:
    """A worker half that does what `start` and `poll` are told."""

    def __init__(self) -> None:
        self.started: list[KVTransfer] = []
        self.reports: list[Any] = []
        self.start_error: Exception | None = None
        self.poll_error: Exception | None = None
        self.timeouts: list[float] = []
        self.num_closed = 0

    def bind(self, blocks: Any) -> None:
        raise NotImplementedError

    def start(self, transfers: Sequence[KVTransfer]) -> None:
        if self.start_error is not None:
            raise self.start_error
        self.started += transfers

    def poll(self, timeout: float) -> list[Any]:
        self.timeouts.append(timeout)
        if self.poll_error is not None:
            raise self.poll_error
        found, self.reports = self.reports, []
        return found

    def close(self) -> None:
        self.num_closed += 1
        raise OSError("half closed")


def transfer(job_id: int, *, wait: bool = False, num_blocks: int = 2) -> KVTransfer:
    blocks = tuple(KVBlock(bytes(32), 0, index + 1, index) for index in range(num_blocks))
    return KVTransfer(job_id, "load", "r", blocks, wait)


def step(transfers: KVTransfers, plan: KVPlan | None) -> StepResult:
    result = StepResult(0, [], [])
    transfers.begin(plan)
    transfers.finish(plan, result)
    return result


def test_reports_come_with_the_step_that_finds_them() -> None:
    half = Scripted()
    transfers = KVTransfers(half, 1.0)
    assert step(transfers, KVPlan([transfer(1), transfer(2)])).kv_reports == []
    half.reports = [KVReport(2, (1,))]
    assert step(transfers, KVPlan([])).kv_reports == [KVReport(2, (1,))]
    half.reports = [KVReport(1)]
    assert step(transfers, KVPlan([], wait=0.5)).kv_reports == [KVReport(1)]
    assert half.timeouts == [0.0, 0.0, 0.5]
    assert step(transfers, None).kv_reports == [] and len(half.timeouts) == 3


def test_a_failed_step_loses_no_report() -> None:
    half = Scripted()
    transfers = KVTransfers(half, 1.0)
    half.reports = [KVReport(1)]
    transfers.begin(KVPlan([transfer(1, wait=True)]))  # the forward pass raises, and nobody finishes
    assert step(transfers, None).kv_reports == [KVReport(1)]


def test_what_was_not_taken_has_failed() -> None:
    half = Scripted()
    half.start_error = OSError("no thread")
    result = step(KVTransfers(half, 1.0), KVPlan([transfer(1), transfer(2, wait=True)]))
    assert [(report.job_id, report.failed) for report in result.kv_reports] == [(1, (0, 1)), (2, (0, 1))]
    assert result.kv_reports[0].reason == "OSError: no thread" and result.kv_late == []


def test_a_step_waits_for_its_load_and_not_for_ever() -> None:
    now = 0.0

    class Slow(Scripted):
        def poll(self, timeout: float) -> list[Any]:
            nonlocal now
            now += 0.4
            return super().poll(timeout)

    half = Slow()
    transfers = KVTransfers(half, 1.0, clock=lambda: now)
    result = step(transfers, KVPlan([transfer(1, wait=True), transfer(2)]))
    assert result.kv_late == [1] and result.kv_reports == []
    assert half.timeouts[:3] == [1.0, 0.6, pytest.approx(0.2)]
    half.reports = [KVReport(1)]
    assert step(transfers, KVPlan([])).kv_reports == [KVReport(1)]  # late is not over: the report still comes


def test_a_connector_that_cannot_be_asked_stops_no_step(caplog: pytest.LogCaptureFixture) -> None:
    half = Scripted()
    half.poll_error = RuntimeError("lost its mind")
    transfers = KVTransfers(half, 1.0)
    assert step(transfers, KVPlan([transfer(1, wait=True)])).kv_late == [1]
    step(transfers, KVPlan([]))
    assert sum("lost its mind" in record.message for record in caplog.records) == 1
    half.poll_error, half.reports = None, [KVReport(1)]
    assert step(transfers, KVPlan([])).kv_reports == [KVReport(1)]


def test_reports_that_cannot_be_are_not_passed_on(caplog: pytest.LogCaptureFixture) -> None:
    half = Scripted()
    transfers = KVTransfers(half, 1.0)
    half.reports = [KVReport(9), KVReport(1, (0, 2)), KVReport(1)]
    (report,) = step(transfers, KVPlan([transfer(1)])).kv_reports
    assert report.failed == (0, 1) and "names blocks (0, 2) of 2" in report.reason
    assert sum("which is not running" in record.message for record in caplog.records) == 2


def test_a_close_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    half = Scripted()
    KVTransfers(half, 1.0).close()
    assert half.num_closed == 1 and "half closed" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_a_block_is_the_bytes_of_its_layers(dtype: torch.dtype) -> None:
    layout = KVLayout(
        groups=(KVGroup(name="a", layer_ids=(0, 2)), KVGroup(name="b", layer_ids=(1,), window=8)),
        layers=tuple(KVLayer(layer_id=i, num_kv_heads=2, head_size=4, value_head_size=2) for i in range(3)),
    )
    tensors = {}
    for layer in layout.layers:
        shape = (5, 4, layer.num_kv_heads)
        pair = [torch.randint(0, 120, (*shape, size * dtype.itemsize), dtype=torch.uint8) for size in layer.head_sizes]
        tensors[layer.layer_id] = (pair[0].view(dtype), pair[1].view(dtype))
    waits: list[None] = []
    blocks = TensorKVBlocks(tensors, layout, lambda: waits.append(None))
    before = {i: [t.view(torch.uint8).clone() for t in pair] for i, pair in tensors.items()}
    data = blocks.read(0, 3)
    assert len(data) == blocks.num_bytes(0) == 2 * 4 * 2 * (4 + 2) * dtype.itemsize
    assert data == b"".join(t.view(torch.uint8)[3].numpy().tobytes() for i in (0, 2) for t in tensors[i])
    blocks.write(0, 1, data)
    assert blocks.read(0, 1) == data and len(waits) == 3
    for i, pair in tensors.items():
        for tensor, old in zip(pair, before[i], strict=True):
            changed = (tensor.view(torch.uint8) != old).flatten(1).any(dim=1).nonzero().flatten().tolist()
            assert changed == ([] if i == 1 else [1])
    with pytest.raises(ValueError, match="are no block of group 1"):
        blocks.write(1, 1, data)
