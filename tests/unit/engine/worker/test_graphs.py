"""Decode steps are recorded once per number of rows, replayed on fresh input, and left alone where they cannot be."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor

from infer.engine.worker import graphs as module
from infer.engine.worker.graphs import MAX_ROWS, Decoded, DecodeGraphs
from infer.plugins.model import CausalLM, ForwardBatch
from infer.plugins.platform import AttentionMetadata, Graph, Made

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

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        return hidden[rows] * torch.tensor([1.0, -1.0, 2.0, 0.5, 3.0, -2.0])


class RecordedCall:
    def __init__(self, work: Callable[[], tuple[Tensor, ...]]) -> None:
        self.work = work

    def replay(self) -> tuple[Tensor, ...]:
        return self.work()


class Recording:
    """A platform whose graphs do the work again in Python; without `can` there is none for work with so many results."""

    def __init__(self, *, cannot: tuple[int, ...] = ()) -> None:
        self.cannot, self.records = cannot, 0

    def record(self, work: Callable[[], Made]) -> tuple[Made, Graph[Made] | None]:
        self.records += 1
        made = work()
        graph = None if len(made) in self.cannot else RecordedCall(cast(Callable[[], tuple[Tensor, ...]], work))
        return made, cast(Graph[Made] | None, graph)


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


def best(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = logits.max(dim=-1)
    return ids, values


def graphs(platform: Recording, max_num_seqs: int = 8) -> DecodeGraphs:
    return DecodeGraphs(platform, max_num_seqs, WIDTH, torch.device("cpu"), vocab_size=6, best=best)


def decode(
    mine: DecodeGraphs, model: Model, given: ForwardBatch, *, tapped: bool = False, scored: bool = False
) -> Decoded:
    return mine.forward(cast(CausalLM, model), given, tapped=tapped, scored=scored)


def check(found: Decoded, given: ForwardBatch, *, scored: bool) -> None:
    model = Model()
    hidden = model.forward(given)
    assert torch.equal(found.hidden, hidden)
    assert (found.logits is not None) == scored
    if found.logits is not None and found.best is not None:
        logits = model.logits(hidden, torch.arange(len(hidden)))
        assert torch.equal(found.logits, logits)
        assert all(map(torch.equal, found.best, best(logits)))


def test_only_steps_of_single_tokens_are_taken() -> None:
    mine = graphs(Recording())
    assert mine.takes(batch(8, seed=0))
    assert not mine.takes(batch(9, seed=0))
    assert not mine.takes(batch(3, seed=0, decode=False))
    assert not graphs(Recording(), max_num_seqs=1000).takes(batch(MAX_ROWS + 1, seed=0))


def test_every_step_sees_its_own_input() -> None:
    platform, model = Recording(), Model()
    mine = graphs(platform)
    for step, rows in enumerate([3, 3, 8, 1, 3, 8, 1, 2]):
        given = batch(rows, seed=step, width=2 + step % (WIDTH - 1))
        check(decode(mine, model, given), given, scored=False)
    assert platform.records == 4


def test_a_step_that_draws_for_all_rows_holds_their_logits() -> None:
    platform, model = Recording(), Model()
    mine = graphs(platform)
    for step, (rows, scored) in enumerate([(3, True), (3, False), (3, True), (5, True), (3, False)]):
        given = batch(rows, seed=step)
        check(decode(mine, model, given, scored=scored), given, scored=scored)
    assert platform.records == 3


def test_too_many_logits_are_left_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LOGITS", 4 * 6)
    mine, model = graphs(Recording()), Model()
    for step, rows in enumerate([4, 5, 4, 5]):
        given = batch(rows, seed=step)
        check(decode(mine, model, given, scored=True), given, scored=rows == 4)


def test_where_only_logits_cannot_be_recorded_the_rest_is() -> None:
    platform, model = Recording(cannot=(4,)), Model()
    mine = graphs(platform)
    for step, scored in enumerate([True, False, False, False]):  # the first one is computed while it is recorded
        given = batch(3, seed=step)
        check(decode(mine, model, given, scored=True), given, scored=scored)
    assert (platform.records, model.calls) == (2, 4)
    assert mine._graphs[3, False, False] is not None


def test_tapped_steps_have_graphs_of_their_own() -> None:
    platform = Recording()
    mine, model = graphs(platform), Model()
    for tapped in (False, True, False, True):
        decode(mine, model, batch(2, seed=0), tapped=tapped)
    assert platform.records == 2


def test_what_cannot_be_recorded_runs_on_the_given_batch() -> None:
    platform, model = Recording(cannot=(1,)), Model()
    mine = graphs(platform)
    for step in range(3):
        given = batch(2, seed=step)
        check(decode(mine, model, given), given, scored=False)
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
        decode(mine, model, batch(2, seed=0))
    check(decode(mine, model, batch(2, seed=1)), batch(2, seed=1), scored=False)
