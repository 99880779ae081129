"""Decode steps on the platform "cuda" over a fake GPU, with a model so small that NumPy says what must come out.

For tests: what an engine does with the device in a step, without an engine. Owns the steps in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fakes.cuda_device import FakeDevice
from fakes.cuda_table import table_of
from infer.backends.cuda.cuda_platform import CudaPlatform
from infer.engine.worker.graphs import DecodeGraphs
from infer.plugins.model import CausalLM, ForwardBatch
from infer.plugins.platform import AttentionMetadata, Fetch

WIDTH, VOCAB, MOST_ROWS = 3, 64, 6
HEAD = np.array([[1.0, -1.0], [0.5, 0.25]])
Ints = NDArray[np.int64]


class CountingModel:
    """Its cache is a row of numbers; a token adds to its place there, and the logits tell what is there now."""

    def __init__(self) -> None:
        self.cache = torch.zeros(32, dtype=torch.float64)
        self.head = torch.from_numpy(HEAD)

    def forward(self, batch: ForwardBatch) -> Tensor:
        meta = batch.attention[0]
        self.cache.index_add_(0, meta.slot_mapping, batch.token_ids.double() + 1)
        around = meta.block_table.double().sum(dim=1) + meta.seq_lens.double() + batch.positions.double()
        return torch.stack([self.cache.index_select(0, meta.slot_mapping), around], dim=1)

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        return hidden.index_select(0, rows) @ self.head


class DecodeDriver:
    """`step` begins one, `finish` compares the oldest with what NumPy says."""

    def __init__(
        self,
        is_late: Callable[[], bool] = lambda: False,
        platform: Callable[..., Any] = CudaPlatform,
        graphs: Any = DecodeGraphs,
    ) -> None:
        self.device = FakeDevice(is_late)
        self.platform = platform(self.device, table=table_of(self.device))
        self.model = CountingModel()
        self.graphs = graphs(
            self.platform,
            MOST_ROWS,
            WIDTH,
            self.platform.device,
            vocab_size=VOCAB,
            best=None,
            max_model_len=9,
            on_host=False,
        )
        self.cache = np.zeros(32)
        self.flying: deque[tuple[Fetch, NDArray[Any], NDArray[Any]]] = deque()
        self._number = 0

    def step(self, slots: Sequence[int]) -> None:
        """A token each of these rows, places 1 .. 31 of the cache."""
        self._number += 1
        rows = len(slots)
        given: dict[str, Ints] = {
            "ids": (np.arange(rows) * 5 + self._number) % VOCAB,
            "positions": np.arange(rows) + self._number % 7,
            "lengths": np.arange(rows) + 1,
            "table": (np.arange(rows * WIDTH).reshape(rows, WIDTH) + self._number) % 11,
            "slots": np.array(slots, dtype=np.int64),
        }
        with self.platform.step_context():
            first, then = list(given.values())[:2], list(given.values())[2:]
            ids, positions = self.platform.upload(first)
            lengths, table, places = self.platform.upload(then)
            meta = AttentionMetadata(
                query_starts=torch.arange(rows + 1, dtype=torch.int32),
                seq_lens=lengths.to(torch.int32),
                block_table=table.to(torch.int32),
                slot_mapping=places,
                query_lens_host=[1] * rows,
                seq_lens_host=given["lengths"].tolist(),
                num_decode_rows=rows,
            )
            batch = ForwardBatch(ids, positions, (meta,), {}, {})
            before = self.model.cache.clone() if not self.graphs.num_recorded or self._is_new(rows) else None
            decoded = self.graphs.forward(cast(CausalLM, self.model), batch, tapped=False, scored=True)
            if before is not None:  # recording runs the work twice here, and a cache that adds up would see it
                self.model.cache.copy_(before)
                self.model.cache.index_add_(0, places, ids.double() + 1)
            assert decoded.logits is not None
            fetch = self.platform.fetch([decoded.hidden, decoded.logits])
        np.add.at(self.cache, given["slots"], given["ids"] + 1)
        around = given["table"].sum(axis=1) + given["lengths"] + given["positions"]
        hidden = np.stack([self.cache[given["slots"]], around], axis=1).astype(np.float64)
        self.flying.append((fetch, hidden, hidden @ HEAD))

    def _is_new(self, rows: int) -> bool:
        size = next(size for size in self.graphs.sizes if size >= rows)
        return (size, False, True) not in self.graphs._graphs

    def finish(self) -> None:
        fetch, hidden, logits = self.flying.popleft()
        with self.platform.step_context():
            found = [tensor.numpy() for tensor in fetch.wait()]
        assert np.array_equal(found[0], hidden), "hidden states differ"
        assert np.allclose(found[1], logits), "logits differ"

    def close(self) -> None:
        """With whatever is in flight."""
        self.flying.clear()
        self.graphs.close()
        self.platform.close()
        self.device.check()
