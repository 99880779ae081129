"""Token ids and block tables that stay on the device: a step uploads what has changed, and which rows it is of.

Runs in the worker thread for platforms with staging; the only writer of these tensors. `InputBatch` says what changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infer.config.model import KVLayout
from infer.plugins.platform import AttentionMetadata, SupportsStaging

Ints = NDArray[np.int64]


class ResidentBatch:
    """The device's half of the persistent batch. Tables are copies of the host's, which are the truth."""

    def __init__(
        self,
        staging: SupportsStaging,
        tables: Sequence[NDArray[np.int32]],
        layout: KVLayout,
        *,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        """`tables`: the host's [slots, blocks], one per KV group."""
        self.upload = staging.upload
        self._host_tables = tables
        self._width = max_model_len + 1
        self._block_size = block_size
        self._last_id = vocab_size - 1
        self._windows = [group.window for group in layout.groups]
        num_slots = len(tables[0]) if tables else 0
        self.tokens = torch.zeros(num_slots, self._width, dtype=torch.int32, device=device)
        self._tables = [torch.zeros(table.shape, dtype=torch.int32, device=device) for table in tables]
        self._numbers = torch.arange(max(num_slots, max_model_len) + 1, device=device)
        self._starts = torch.arange(num_slots + 1, dtype=torch.int32, device=device)
        self._new_ids: dict[int, NDArray[np.int32]] = {}
        """Slot -> its first tokens, not uploaded yet."""
        self._changed: list[tuple[int, int, int, int]] = []
        """(group, slot, first, last): places of tables that are not uploaded yet. What lies there is looked up then."""

    def set_tokens(self, slot: int, ids: NDArray[np.int32]) -> None:
        """The row begins with these, from the next step on."""
        self._new_ids[slot] = ids

    def table_changed(self, group: int, slot: int, first: int, last: int) -> None:
        if first < last:
            self._changed.append((group, slot, first, last))

    def begin(self, arrays: Sequence[NDArray[Any]]) -> tuple[Tensor, ...]:
        """Upload these, and bring tokens and tables up to date with the same copy."""
        token_places = [np.arange(len(ids)) + slot * self._width for slot, ids in self._new_ids.items()]
        updates: list[NDArray[Any]] = [_joined(token_places, np.int64), _joined([*self._new_ids.values()], np.int32)]
        for group in range(len(self._tables)):
            updates += self._table_update(group)
        made = self.upload([*updates, *arrays])
        for target, places, values in zip(
            (self.tokens, *self._tables), made[0 : len(updates) : 2], made[1 : len(updates) : 2], strict=True
        ):
            if len(places):
                target.view(-1).index_copy_(0, places, values)
        self._new_ids.clear()
        self._changed.clear()
        return made[len(updates) :]

    def write(self, slots: Ints, places: Ints, ids: Tensor) -> None:
        """The ids [n], on the device, become those of these places."""
        (flat,) = self.upload([slots * self._width + places])
        self.tokens.view(-1).index_copy_(0, flat, ids.to(torch.int32))

    def rows(
        self, slots: Ints, starts: Ints, counts: Ints, query_starts: Ints, num_decode_rows: int
    ) -> tuple[Tensor, Tensor, tuple[AttentionMetadata, ...]]:
        """-> token ids and positions [T] int64 of a step's rows, and what attention reads, per group. R rows in forward
        order: row i owns tokens query_starts[i] .. query_starts[i + 1], of which the first has position starts[i]."""
        num_rows, num_tokens = len(slots), int(query_starts[-1])
        plain = num_decode_rows == num_rows
        if plain:
            slot, start = self.begin([slots, starts])
            slot_of_token, positions, query_start = slot, start, self._starts[: num_rows + 1]
            seq_len = start + 1
        else:
            slot, start, count, query_start = self.begin([slots, starts, counts, query_starts])
            row = torch.repeat_interleave(self._numbers[:num_rows], count, output_size=num_tokens)
            slot_of_token = slot[row]
            positions = start[row] + self._token_numbers(num_tokens) - query_start[row]
            query_start, seq_len = query_start.to(torch.int32), start + count
        ids = self.tokens.view(-1)[slot_of_token * self._width + positions]
        seq_lens_host = (starts + counts).tolist()
        attention = tuple(
            AttentionMetadata(
                query_starts=query_start,
                seq_lens=seq_len.to(torch.int32),
                block_table=self._block_table(group, slot, start, max(seq_lens_host)),
                slot_mapping=self._slot_mapping(group, slot_of_token, positions),
                query_lens_host=counts.tolist(),
                seq_lens_host=seq_lens_host,
                num_decode_rows=num_decode_rows,
            )
            for group in range(len(self._tables))
        )
        # A row that failed may have left anything behind, and a step in flight may still read there: any id will do.
        return ids.to(torch.int64).clamp_(0, self._last_id), positions, attention

    def _table_update(self, group: int) -> list[NDArray[Any]]:
        """Places in a flat table, each once, and what the host has there."""
        table = self._host_tables[group]
        spans = [
            np.arange(first, last) + slot * table.shape[1]
            for changed, slot, first, last in self._changed
            if changed == group
        ]
        places = np.unique(_joined(spans, np.int64))
        return [places, table.reshape(-1)[places]]

    def _block_table(self, group: int, slot: Tensor, start: Tensor, longest: int) -> Tensor:
        table = self._tables[group][:, : -(-longest // self._block_size)].index_select(0, slot)
        window = self._windows[group]
        if window is not None:  # blocks before the window may belong to others by now
            first_block = (start - window + 1).clamp_(min=0) // self._block_size
            table.masked_fill_(self._numbers[: table.shape[1]] < first_block[:, None], 0)
        return table

    def _slot_mapping(self, group: int, slot_of_token: Tensor, positions: Tensor) -> Tensor:
        width = self._tables[group].shape[1]
        block = self._tables[group].view(-1)[slot_of_token * width + positions // self._block_size]
        return block.to(torch.int64) * self._block_size + positions % self._block_size

    def _token_numbers(self, count: int) -> Tensor:
        """0 .. count; a step may have more tokens than a sequence."""
        if count > len(self._numbers):
            self._numbers = torch.arange(2 * count, device=self._numbers.device)
        return self._numbers[:count]


def _joined(parts: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.empty(0, dtype=dtype)
