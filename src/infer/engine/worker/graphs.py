"""Decode steps that are recorded once per number of rows and replayed: a step's operations without Python between them.

Used on the worker thread by the runner; owns the tensors that recorded operations read their input from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from infer.plugins.model import CausalLM, ForwardBatch
from infer.plugins.platform import AttentionMetadata, Graph, SupportsGraphs, SupportsGraphSizes

MAX_ROWS = 64
"""Steps of more rows compute for so long that what Python costs between operations no longer counts."""
MAX_LOGITS = 2**23
"""More logits than this are not part of what is recorded, for all of them lie in memory that is set aside."""

Best = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a forward pass gave; it lasts until the next step."""

    hidden: Tensor
    """[T, hidden], as of `CausalLM.forward`."""
    logits: Tensor | None = None
    """Of all rows [T, vocab], where they are part of a recorded step."""
    best: tuple[Tensor, Tensor] | None = None
    """As of `Ops.best`, of these logits."""


class DecodeGraphs:
    """Forward passes of steps in which every row has one token.

    A number of rows is recorded when it first occurs, which computes that step as well; a platform with sizes of its own
    (`SupportsGraphSizes`) has those recorded alone, and other steps are filled up with rows of the null block. What cannot
    be replayed (an operation of torch's own in a model) is noticed while recording and runs as it is from then on.
    """

    def __init__(
        self,
        platform: SupportsGraphs,
        max_num_seqs: int,
        table_width: int,
        device: torch.device,
        *,
        vocab_size: int,
        best: Best | None = None,
        max_model_len: int = 1,
        on_host: bool | None = None,
    ) -> None:
        """`max_num_seqs`: rows of the largest step; `table_width`: most blocks of a row; `best`: the platform's own way to the
        best token; `on_host`: whether tensors may be written to as arrays, by default those of the CPU."""
        sizes = tuple(platform.graph_sizes(max_num_seqs)) if isinstance(platform, SupportsGraphSizes) else None
        self.sizes = sizes
        """Numbers of rows that are recorded; None: each that occurs."""
        self.max_rows = min(max_num_seqs, MAX_ROWS) if sizes is None else max(sizes, default=0)
        self._max_model_len = max_model_len
        self._platform = platform
        self._table_width = table_width
        self._device = device
        self._max_scored = MAX_LOGITS // vocab_size if sizes is None else self.max_rows
        self._best = best
        self._put = _put_on_host if (device.type == "cpu" if on_host is None else on_host) else Tensor.copy_
        self._numbers = torch.arange(self.max_rows, device=device)
        self._input: ForwardBatch | None = None
        self._inputs: dict[int, ForwardBatch] = {}
        """Its first so many rows."""
        self._graphs: dict[tuple[int, bool, bool], Graph[tuple[Tensor, ...]] | None] = {}

    def takes(self, batch: ForwardBatch) -> bool:
        """Whether every row has one token, and there are few enough."""
        num_tokens = batch.token_ids.shape[0]
        return num_tokens <= self.max_rows and batch.attention[0].num_decode_rows == num_tokens

    def forward(self, model: CausalLM, batch: ForwardBatch, *, tapped: bool, scored: bool) -> Decoded:
        """tapped: the model writes into taps in this step; where they lie must not change between steps. scored: a token is
        drawn for every row, so logits of all are wanted."""
        num_rows = batch.token_ids.shape[0]
        size = num_rows
        if self.sizes is not None:
            size = next(size for size in self.sizes if size >= num_rows)
            scored = True  # a second recording of each size costs more than logits that nobody asked for
        scored = scored and size <= self._max_scored
        return self._forward((size, tapped, scored), model, batch, num_rows)

    def _forward(self, key: tuple[int, bool, bool], model: CausalLM, batch: ForwardBatch, num_rows: int) -> Decoded:
        size, tapped, scored = key
        if key in self._graphs:
            graph = self._graphs[key]
            if graph is not None:
                self._fill(batch, num_rows, size)
                return _decoded(graph.replay(), num_rows)
            if scored:  # the forward pass alone may be one
                return self._forward((size, tapped, False), model, batch, num_rows)
            return Decoded(model.forward(batch))
        fixed = self._fill(batch, num_rows, size)
        output, self._graphs[key] = self._platform.record(lambda: self._work(model, fixed, scored=scored))
        return _decoded(output, num_rows)

    def _work(self, model: CausalLM, fixed: ForwardBatch, *, scored: bool) -> tuple[Tensor, ...]:
        hidden = model.forward(fixed)
        if not scored:
            return (hidden,)
        logits = model.logits(hidden, self._numbers[: len(hidden)])
        return (hidden, logits) if self._best is None else (hidden, logits, *self._best(logits))

    @property
    def num_recorded(self) -> int:
        """Graphs that are replayed."""
        return sum(graph is not None for graph in self._graphs.values())

    def close(self) -> None:
        """Drop what was recorded."""
        self._graphs.clear()
        self._inputs.clear()
        self._input = None

    def _fill(self, batch: ForwardBatch, num_rows: int, size: int) -> ForwardBatch:
        """Copy the step's input to where recorded operations read it. -> that place as a batch of `size` rows."""
        put, fixed, own = self._put, self._rows(batch, size), self._rows(batch, num_rows)
        put(own.token_ids, batch.token_ids)
        put(own.positions, batch.positions)
        for place, given in zip(own.attention, batch.attention, strict=True):
            put(place.seq_lens, given.seq_lens)
            put(place.block_table[:, : given.block_table.shape[1]], given.block_table)
            put(place.slot_mapping, given.slot_mapping)
        if num_rows < size:
            _pad(fixed, num_rows)
        return fixed

    def _rows(self, batch: ForwardBatch, num_rows: int) -> ForwardBatch:
        """Kept: a view of a tensor costs as much as copying a few numbers into it."""
        found = self._inputs.get(num_rows)
        if found is None:
            found = self._inputs[num_rows] = self._first_rows(batch, num_rows)
        return found

    def _first_rows(self, batch: ForwardBatch, num_rows: int) -> ForwardBatch:
        if self._input is None:
            self._input = self._allocate(batch)
        most = self._input
        return replace(
            most,
            token_ids=most.token_ids[:num_rows],
            positions=most.positions[:num_rows],
            attention=tuple(
                replace(
                    own,
                    query_starts=own.query_starts[: num_rows + 1],
                    seq_lens=own.seq_lens[:num_rows],
                    block_table=own.block_table[:num_rows],
                    slot_mapping=own.slot_mapping[:num_rows],
                    # With sizes, what is recorded serves rows of any length.
                    query_lens_host=given.query_lens_host if self.sizes is None else [1] * num_rows,
                    seq_lens_host=given.seq_lens_host if self.sizes is None else [self._max_model_len] * num_rows,
                    num_decode_rows=num_rows,
                    scratch={},
                )
                for own, given in zip(most.attention, batch.attention, strict=True)
            ),
        )

    def _allocate(self, batch: ForwardBatch) -> ForwardBatch:
        rows, device = self.max_rows, self._device

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return replace(
            batch,
            token_ids=zeros(rows, dtype=torch.int64),
            positions=zeros(rows, dtype=torch.int64),
            attention=tuple(
                AttentionMetadata(
                    query_starts=torch.arange(rows + 1, dtype=torch.int32, device=device),
                    seq_lens=zeros(rows, dtype=torch.int32),
                    block_table=zeros(rows, self._table_width, dtype=torch.int32),
                    slot_mapping=zeros(rows, dtype=torch.int64),
                    query_lens_host=[],
                    seq_lens_host=[],
                    num_decode_rows=0,
                )
                for _ in batch.attention
            ),
        )


def _pad(fixed: ForwardBatch, num_rows: int) -> None:
    """Rows from there on are one token of the null block, whatever was there before."""
    fixed.token_ids[num_rows:].zero_()
    fixed.positions[num_rows:].zero_()
    for own in fixed.attention:
        own.seq_lens[num_rows:].fill_(1)
        own.block_table[num_rows:].zero_()
        own.slot_mapping[num_rows:].zero_()


def _decoded(made: tuple[Tensor, ...], num_rows: int) -> Decoded:
    if len(made[0]) > num_rows:  # a view of each costs microseconds, in every step
        made = tuple(tensor[:num_rows] for tensor in made)
    hidden, *scores = made
    if not scores:
        return Decoded(hidden)
    return Decoded(hidden, scores[0], (scores[1], scores[2]) if len(scores) > 1 else None)


def _put_on_host(own: Tensor, given: Tensor) -> None:
    """As `copy_`. Torch lets other threads run Python in every operation, and the event loop delivers tokens just then:
    with 32 requests the worker waited for it for half a millisecond."""
    np.copyto(own.numpy(), given.numpy())
