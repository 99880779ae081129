"""Decode steps are recorded once per number of rows, replayed on fresh input, and left alone where they cannot be."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor

from infer.engine.worker.graphs import MAX_ROWS, DecodeGraphs
from infer.plugins.model import CausalLM, ForwardBatch
from infer.plugins.platform import AttentionMetadata, Graph

WIDTH = 6


class Model:
    """Its hidden state says what it was given."""

    def __init__(self) -> None:
        self.calls = 0

    def forward(self, batch: ForwardBatch) -> Tensor:
        self.calls += 1
        meta = batch.attention[0]
        return torch.stack(
            [batch.token_ids, batch.positions, meta.seq_lens, meta.slot_mapping, *meta.block_table[:, :2].T], dim=1
        ).double()


class RecordedCall:
    def __init__(self, work: Callable[[], Tensor], result: Tensor) -> None:
        self.work, self.result = work, result

    def replay(self) -> Tensor:
        return self.result.copy_(self.work())


class Recording:
    """A platform whose graphs do the work again in Python."""

    def __init__(self, *, can: bool = True) -> None:
        self.can, self.records, self.replays = can, 0, 0

    def record(self, work: Callable[[], Tensor]) -> tuple[Tensor, Graph | None]:
        self.records += 1
        result = work()
        return result, RecordedCall(work, result) if self.can else None


def batch(rows: int, *, seed: int, decode: bool = True, width: int = 3) -> ForwardBatch:
    draw = torch.Generator().manual_seed(seed)

    def ints(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(0, 1000, shape, generator=draw, dtype=dtype)

    meta = AttentionMetadata(
        query_starts=torch.arange(rows + 1, dtype=torch.int32),
        seq_lens=ints(rows, dtype=torch.int32),
        block_table=ints(rows, width, dtype=torch.int32),
        slot_mapping=ints(rows),
        query_lens_host=[1] * rows,
        seq_lens_host=[1] * rows,
        num_decode_rows=rows if decode else rows - 1,
    )
    return ForwardBatch(token_ids=ints(rows), positions=ints(rows), attention=(meta,), kv={}, group_of_layer={})


def graphs(platform: Recording, max_num_seqs: int = 8) -> DecodeGraphs:
    return DecodeGraphs(platform, max_num_seqs, WIDTH, torch.device("cpu"))


def test_only_steps_of_single_tokens_are_taken() -> None:
    mine = graphs(Recording())
    assert mine.takes(batch(8, seed=0))
    assert not mine.takes(batch(9, seed=0))
    assert not mine.takes(batch(3, seed=0, decode=False))
    assert not graphs(Recording(), max_num_seqs=1000).takes(batch(MAX_ROWS + 1, seed=0))


def test_every_step_sees_its_own_input() -> None:
    platform, model, plain = Recording(), Model(), Model()
    mine = graphs(platform)
    for step, rows in enumerate([3, 3, 8, 1, 3, 8, 1, 2]):
        given = batch(rows, seed=step, width=2 + step % (WIDTH - 1))
        found = mine.forward(cast(CausalLM, model), given, tapped=False)
        assert torch.equal(found, plain.forward(given))
    assert platform.records == 4


def test_tapped_steps_have_graphs_of_their_own() -> None:
    platform = Recording()
    mine, model = graphs(platform), cast(CausalLM, Model())
    for tapped in (False, True, False, True):
        mine.forward(model, batch(2, seed=0), tapped=tapped)
    assert platform.records == 2


def test_what_cannot_be_recorded_runs_on_the_given_batch() -> None:
    platform, model = Recording(can=False), Model()
    mine = graphs(platform)
    for step in range(3):
        given = batch(2, seed=step)
        assert torch.equal(mine.forward(cast(CausalLM, model), given, tapped=False), Model().forward(given))
    assert (platform.records, model.calls) == (1, 3)


def test_a_failed_recording_is_tried_again() -> None:
    class Failing(Model):
        def forward(self, batch: ForwardBatch) -> Tensor:
            if self.calls == 0:
                self.calls += 1
                raise MemoryError("planted")
            return super().forward(batch)

    platform, model = Recording(), Failing()
    mine = graphs(platform)
    with pytest.raises(MemoryError):
        mine.forward(cast(CausalLM, model), batch(2, seed=0), tapped=False)
    assert torch.equal(
        mine.forward(cast(CausalLM, model), batch(2, seed=1), tapped=False), Model().forward(batch(2, seed=1))
    )
