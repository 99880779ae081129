"""A causal LM that needs no backend: the hidden state is the mean of the embeddings seen through the block table.

Test-only; with its dense reference, a resolved configuration and plan builders for the runner's tests.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from infer.config.memory_plan import MemoryPlan
from infer.config.model import KVGroup, KVLayer, KVLayout
from infer.config.resolve import CacheGroup, ResolvedCache, ResolvedConfig, ResolvedScheduler
from infer.engine.step import SamplingSpec, SlotAdmission, StepPlan, StepResult
from infer.engine.worker.runner import Runner
from infer.plugins.model import ForwardBatch
from infer.plugins.platform import AttentionMetadata

VOCAB = 64
WIDTH = 16
BLOCK = 4
NAN_TOKEN = 63
"""Its embedding is NaN: a prompt that holds it has NaN logits."""


def gather_context(cache: Tensor, meta: AttentionMetadata, row: int) -> Tensor:
    """[seq_len, WIDTH] of a row, through its block table."""
    length = meta.seq_lens_host[row]
    blocks = meta.block_table[row, : -(-length // BLOCK)].long()
    return cache[blocks].flatten(0, 1)[:length, 0]


class ToyLM:
    """Mean-of-context model with optional sliding window group (layer 1)."""

    def __init__(self, *, window: int | None = None, groups: int = 1) -> None:
        generator = torch.Generator().manual_seed(7)
        self.embedding = torch.randn(VOCAB, WIDTH, generator=generator)
        self.embedding[NAN_TOKEN] = float("nan")
        self.head = torch.randn(VOCAB, WIDTH, generator=generator) * 2
        self.window = window
        self.groups = groups
        self.logits_rows: list[int] = []
        self.tables: list[Tensor] = []
        """Block tables of the last step, per layer."""

    def kv_layout(self) -> KVLayout:
        groups = (KVGroup(name="full", layer_ids=(0,)), KVGroup(name="sliding", layer_ids=(1,), window=self.window))
        layers = tuple(KVLayer(layer_id=i, num_kv_heads=1, head_size=WIDTH) for i in range(self.groups))
        return KVLayout(groups=groups[: self.groups], layers=layers)

    def forward(self, batch: ForwardBatch) -> Tensor:
        embedded = self.embedding[batch.token_ids]
        out = embedded * 0.1 + batch.positions[:, None] * 0.01
        self.tables = [meta.block_table for meta in batch.attention]
        for layer, (keys, _) in batch.kv.items():
            meta = batch.attention[batch.group_of_layer[layer]]
            keys.view(-1, 1, WIDTH)[meta.slot_mapping] = embedded[:, None]
            window = None if layer == 0 else self.window
            starts = meta.query_starts.tolist()
            assert meta.query_lens_host[: meta.num_decode_rows] == [1] * meta.num_decode_rows
            for row, (length, count) in enumerate(zip(meta.seq_lens_host, meta.query_lens_host, strict=True)):
                context = gather_context(keys, meta, row)
                for k in range(count):
                    end = length - count + k + 1
                    out[starts[row] + k] += mean_context(context, end, window)
        return out

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        self.logits_rows.append(len(rows))
        return hidden[rows] @ self.head.T

    def weight_table(self) -> Any:
        raise NotImplementedError

    def dense_logits(self, token_ids: Sequence[int]) -> Tensor:
        """The reference: [len, VOCAB], no cache, no batch."""
        embedded = self.embedding[torch.tensor(list(token_ids))]
        out = embedded * 0.1 + torch.arange(len(embedded))[:, None] * 0.01
        for layer in range(self.groups):
            window = None if layer == 0 else self.window
            for i in range(len(embedded)):
                out[i] += mean_context(embedded, i + 1, window)
        return out @ self.head.T


def mean_context(context: Tensor, end: int, window: int | None) -> Tensor:
    first = 0 if window is None else max(0, end - window)
    return context[first:end].mean(dim=0)


class ToyPlatform:
    """CPU, nothing but a device."""

    name = "toy"
    device = torch.device("cpu")
    ops: Any = SimpleNamespace(draw=None, draw_allowed=None, best=None, uniforms=None, penalties=None)
    closed = False

    def limits(self) -> Any:
        raise NotImplementedError

    def memory_in_use(self) -> int:
        return 0

    def synchronize(self) -> None:
        return

    @contextlib.contextmanager
    def step_context(self) -> Iterator[None]:
        with torch.inference_mode():
            yield

    def close(self) -> None:
        self.closed = True


def resolved(groups: Sequence[tuple[str, int | None]] = (("full", None),), **scheduler: int) -> ResolvedConfig:
    values: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_num_active_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_num_waiting": None,
        "policy": "fcfs",
        "chunked_prefill": True,
        "long_prefill_threshold": 0,
        "max_num_partial_prefills": 0,
        "max_long_partial_prefills": 0,
        "reserve_full_prompt": False,
        "in_flight_depth": 1,
        "stream_interval": 1,
        "scheduler_class": None,
        "max_model_len": 48,
        **scheduler,
    }
    return ResolvedConfig(
        dtype="float32",
        platform="toy",
        threads=1,
        scheduler=ResolvedScheduler(**values),
        cache=ResolvedCache(
            block_size=BLOCK,
            dtype="float32",
            prefix_caching=False,
            watermark=0.0,
            groups=tuple(CacheGroup(name=n, window=w, num_blocks=128, bytes_per_block=1) for n, w in groups),
        ),
        memory=MemoryPlan(weights=0, kv_cache=0, workspace=0, load_transient=0, available=2**40),
        notices=(),
    )


def toy_runner(model: ToyLM | None = None, **scheduler: int) -> Runner:
    model = model or ToyLM()
    config = resolved((("full", None), ("sliding", model.window))[: model.groups], **scheduler)
    kv = {
        layer: (torch.zeros(129, BLOCK, 1, WIDTH), torch.zeros(129, BLOCK, 1, WIDTH)) for layer in range(model.groups)
    }
    return Runner(model, ToyPlatform(), config, kv, VOCAB, 0)


class Blocks:
    """Hands out block ids so that neighbouring positions of a row are not neighbours in the cache."""

    def __init__(self) -> None:
        self._next = iter([(i * 37) % 128 + 1 for i in range(128)])

    def take(self, count: int) -> list[int]:
        return [next(self._next) for _ in range(count)]


def admission(
    slot: int,
    ids: Sequence[int],
    sampling: SamplingSpec,
    blocks: Blocks,
    *,
    prompt_len: int | None = None,
    room: int = 32,
    groups: int = 1,
) -> SlotAdmission:
    num_blocks = -(-room // BLOCK)
    return SlotAdmission(
        slot, list(ids), prompt_len or len(ids), sampling, tuple(blocks.take(num_blocks) for _ in range(groups))
    )


def plan(
    rows: Sequence[tuple[int, int, int, int]],
    admissions: Sequence[SlotAdmission] = (),
    freed: Sequence[int] = (),
    new_blocks: Sequence[tuple[int, int, list[int]]] = (),
    step_id: int = 0,
) -> StepPlan:
    """Rows are (slot, start, count, samples)."""
    slots, starts, counts, samples = zip(*rows, strict=True) if rows else ((), (), (), ())
    return StepPlan(
        step_id,
        array("q", slots),
        array("q", starts),
        array("q", counts),
        array("q", samples),
        list(admissions),
        list(new_blocks),
        list(freed),
    )


def generate(
    runner: Runner,
    ids: Sequence[int],
    sampling: SamplingSpec,
    count: int,
    *,
    slot: int = 0,
    blocks: Blocks | None = None,
) -> tuple[list[int], list[StepResult]]:
    """One request alone: prefill in one step, then `count - 1` decode steps."""
    results = [
        runner.execute(plan([(slot, 0, len(ids), 1)], [admission(slot, ids, sampling, blocks or Blocks())], [slot]))
    ]
    for i in range(1, count):
        results.append(runner.execute(plan([(slot, len(ids) + i - 1, 1, 1)], step_id=i)))
    return [result.token_ids[0][0] for result in results], results
