"""Hand-made step plans over a real runner, and an independent recorder of what its routers chose. Test-only."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infer.config.capture import HIDDEN_STATES, MOE_ROUTES, CaptureProfile
from infer.config.resolve import ResolvedConfig
from infer.engine.step import AuxBegin, AuxPlan, AuxRows, SamplingSpec, SlotAdmission, StepPlan, StepResult
from infer.engine.worker.runner import Runner
from infer.models.qwen2_moe import EXAMPLE as QWEN2
from infer.models.qwen3_moe import EXAMPLE as QWEN3
from unit.engine.worker.built import build
from unit.engine.worker.toy_causal_lm import plan

BLOCK = 4
GREEDY = SamplingSpec(seed=0, temperature=0.0)
MOE = QWEN3 | {"num_hidden_layers": 3, "mlp_only_layers": [1], "num_experts_per_tok": 2}
"""Routers in layers 0 and 2; 8 experts, 2 chosen."""
TWO_GROUPS = QWEN2 | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "qkv_bias": False}
"""Layer 0 slides, layer 1 sees everything."""
ROUTES = {"routed_experts": True}
Rows = NDArray[Any]


def kv_hashes(ids: Sequence[int], first: int = 0) -> list[bytes]:
    """A chain over the complete blocks, from block `first` on."""
    chain, found = b"root", []
    for start in range(0, len(ids) - BLOCK + 1, BLOCK):
        chain = hashlib.sha256(chain + repr(list(ids[start : start + BLOCK])).encode()).digest()
        found.append(chain)
    return found[first:]


def begin(
    capture_id: int, slot: int, start: int = 0, emit_from: int = 0, hashes: Sequence[bytes] = (), **more: Any
) -> AuxBegin:
    values: dict[str, Any] = {"fields": (MOE_ROUTES,), **more}
    return AuxBegin(
        capture_id=capture_id, slot=slot, start=start, emit_from=emit_from, hashes=list(hashes), **values
    )  # fmt: skip


def aux(weight_version: int = 0, **lists: Any) -> AuxPlan:
    names = ("ends", "begins", "hashes", "retain", "release", "discard")
    return AuxPlan(weight_version=weight_version, **{name: list(lists.get(name, ())) for name in names})


class Driver:
    """A runner, the token ids of its slots, and per slot and position what the routers returned."""

    def __init__(self, path: Path, **sections: Any) -> None:
        sections.setdefault("capture", ROUTES)
        self.runner: Runner
        self.resolved: ResolvedConfig
        self.runner, self.resolved = build(path, **sections)
        self.free = [
            random.Random(i).sample(range(1, group.num_blocks + 1), group.num_blocks)
            for i, group in enumerate(self.resolved.cache.groups)
        ]
        self.ids: dict[int, list[int]] = {}
        self.recorded: dict[int, dict[int, Rows]] = {}
        self.calls: list[Tensor] = []
        """Ids that the routers returned in the last forward pass, a layer each."""
        self.step_id = 0
        model: Any = self.runner._model
        for layer in model._sparse():
            layer.route = self._recording(layer.route)

    def admission(self, slot: int, ids: Sequence[int], *, room: int = 40, shared: Any = None) -> SlotAdmission:
        """With its own blocks, or with another slot's tables in front."""
        self.ids[slot] = list(ids)
        self.recorded[slot] = {}
        tables = []
        for group, free in enumerate(self.free):
            front = [] if shared is None else shared[group]
            tables.append([*front, *(free.pop() for _ in range(room // BLOCK - len(front)))])
        return SlotAdmission(slot, list(ids), len(ids), GREEDY, tuple(tables))

    def step(
        self,
        rows: Sequence[tuple[int, int, int, int]],
        admissions: Sequence[SlotAdmission] = (),
        aux: AuxPlan | None = None,
        freed: Sequence[int] = (),
        forks: Sequence[tuple[int, int]] = (),
        copies: Sequence[tuple[int, int, int]] = (),
        failed: Sequence[int] = (),
    ) -> StepResult:
        """Rows are (slot, start, count, samples); `failed` are the results that must be errors."""
        self.step_id += 1
        made: StepPlan = plan(rows, admissions, freed, step_id=self.step_id)
        made.aux, made.forks, made.copies = aux, list(forks), list(copies)
        self.calls.clear()
        result = self.runner.execute(made)
        assert sorted(result.errors) == list(failed)
        if rows:
            self._attribute(rows)
        slots = [slot for slot, *_ in rows] + [slot for _, slot in forks]
        for slot, token_ids in zip(slots, result.token_ids, strict=True):
            self.ids[slot] += token_ids
        return result

    def prefill(
        self, slot: int, ids: Sequence[int], capture_id: int | None = None, retain: bool = True, **lists: Any
    ) -> StepResult:
        """One request in one step, captured from the start with the hashes of its complete blocks."""
        events = None
        if capture_id is not None:
            known = kv_hashes(ids)
            keys = [(MOE_ROUTES, kv_hash, 0) for kv_hash in known] if retain else []
            events = aux(begins=[begin(capture_id, slot)], hashes=[(capture_id, known)], retain=keys, **lists)
        return self.step([(slot, 0, len(ids), 1)], [self.admission(slot, ids)], events)

    def decode(self, slot: int, events: AuxPlan | None = None) -> StepResult:
        return self.step([(slot, len(self.ids[slot]) - 1, 1, 1)], aux=events)

    def expected(self, slot: int, start: int, stop: int) -> Rows:
        """[stop - start, routers, K] as recorded."""
        return np.stack([self.recorded[slot][position] for position in range(start, stop)])

    def profile(self, name: str = MOE_ROUTES) -> CaptureProfile:
        assert self.resolved.capture is not None
        found = self.resolved.capture.profile(name)
        assert found is not None
        return found

    def rows(self, piece: AuxRows, name: str = MOE_ROUTES) -> Rows:
        """The rows of a piece as an array."""
        assert piece.error is None
        profile = self.profile(name)
        assert len(piece.data[name]) == piece.count * profile.row_bytes
        assert sum(count for count, _ in piece.versions) == piece.count
        return np.frombuffer(piece.data[name], profile.dtype).reshape(piece.count, *profile.row_shape)

    def _recording(self, route: Any) -> Any:
        def recorded(logits: Tensor, rule: Any, bias: Any, tap: Any) -> tuple[Tensor, Tensor]:
            weights, ids = route(logits, rule, bias, tap)
            self.calls.append(ids.clone())
            return weights, ids

        return recorded

    def _attribute(self, rows: Sequence[tuple[int, int, int, int]]) -> None:
        """Rows with one token come first in the forward pass."""
        ids = torch.stack(self.calls, dim=1).numpy()
        token = 0
        for slot, start, count, _ in sorted(rows, key=lambda row: row[2] != 1):
            for position in range(start, start + count):
                self.recorded[slot][position] = ids[token]
                token += 1
        assert token == len(ids)


def same(found: Rows, expected: Rows) -> None:
    """Equal in shape and in every value, however wide the integers."""
    assert found.shape == expected.shape
    assert np.array_equal(found, expected)


__all__ = [
    "BLOCK",
    "GREEDY",
    "HIDDEN_STATES",
    "MOE",
    "MOE_ROUTES",
    "TWO_GROUPS",
    "Driver",
    "aux",
    "begin",
    "kv_hashes",
    "same",
]
