"""Decode steps that are recorded once per number of rows and replayed: a step's operations without Python between them.

Used on the worker thread by the runner; owns the tensors that recorded operations read their input from.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from infer.plugins.model import CausalLM, ForwardBatch
from infer.plugins.platform import AttentionMetadata, Graph, SupportsGraphs

MAX_ROWS = 64
"""Steps of more rows compute for so long that what Python costs between operations no longer counts."""


class DecodeGraphs:
    """Forward passes of steps in which every row has one token.

    A number of rows is recorded when it first occurs, which computes that step as well. What cannot be replayed (an
    operation of torch's own in a model) is noticed while recording and runs as it is from then on.
    """

    def __init__(self, platform: SupportsGraphs, max_num_seqs: int, table_width: int, device: torch.device) -> None:
        """`table_width`: most blocks of a row."""
        self.max_rows = min(max_num_seqs, MAX_ROWS)
        self._platform = platform
        self._table_width = table_width
        self._device = device
        self._input: ForwardBatch | None = None
        self._inputs: dict[int, ForwardBatch] = {}
        """Its first so many rows."""
        self._graphs: dict[tuple[int, bool], Graph | None] = {}

    def takes(self, batch: ForwardBatch) -> bool:
        """Whether every row has one token, and there are few enough."""
        num_tokens = batch.token_ids.shape[0]
        return num_tokens <= self.max_rows and batch.attention[0].num_decode_rows == num_tokens

    def forward(self, model: CausalLM, batch: ForwardBatch, *, tapped: bool) -> Tensor:
        """-> final hidden states [T, hidden], as `CausalLM.forward`; they last until the next step.

        tapped: the model writes into taps in this step; where they lie must not change between steps.
        """
        num_rows = batch.token_ids.shape[0]
        key = num_rows, tapped
        if key in self._graphs:
            graph = self._graphs[key]
            if graph is None:
                return model.forward(batch)
            self._fill(batch, num_rows)
            return graph.replay()
        fixed = self._fill(batch, num_rows)
        output, self._graphs[key] = self._platform.record(lambda: model.forward(fixed))
        return output

    def close(self) -> None:
        """Drop what was recorded."""
        self._graphs.clear()
        self._inputs.clear()
        self._input = None

    def _fill(self, batch: ForwardBatch, num_rows: int) -> ForwardBatch:
        """Copy the step's input to where recorded operations read it. -> that place as a batch of so many rows."""
        fixed = self._inputs.get(num_rows)
        if fixed is None:
            fixed = self._inputs[num_rows] = self._first_rows(batch, num_rows)
        fixed.token_ids.copy_(batch.token_ids)
        fixed.positions.copy_(batch.positions)
        for own, given in zip(fixed.attention, batch.attention, strict=True):
            own.seq_lens.copy_(given.seq_lens)
            own.block_table[:, : given.block_table.shape[1]] = given.block_table
            own.slot_mapping.copy_(given.slot_mapping)
        return fixed

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
                    query_lens_host=given.query_lens_host,
                    seq_lens_host=given.seq_lens_host,
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
