"""Both halves of capture together: the real scheduler, KV accounting and worker half; only the model is a function.

The same loads as in test_captured_rows, where a model stands in for the worker half."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

import capture_driver
from capture_driver import HIDDEN, PROFILES, ROUTES, row
from infer.artifacts.fields.hidden_states import HiddenStates
from infer.artifacts.fields.moe_routes import MoeRoutes
from infer.config.capture import ResolvedCapture
from infer.config.model import RoutedLayer
from infer.engine.step import StepPlan, StepResult
from infer.engine.worker.background_store import BackgroundStore
from infer.engine.worker.block_store import ArenaStore, private_store
from infer.engine.worker.capture import RowCapture
from infer.engine.worker.captured_fields import CapturedField
from infer.engine.worker.captured_step import CapturedStep
from infer.engine.worker.input_batch import StepRows
from infer.engine.worker.taps import HiddenTap, RouterTap
from infer.plugins.artifact_field import TapFacts
from property.test_captured_rows import random_load

MAX_TOKENS = 1024
FACTS = TapFacts(
    model_identity="",
    dtype="float32",
    num_layers=2,
    hidden_size=2,
    routed_layers=tuple(RoutedLayer(layer_id=i, num_experts=256, top_k=2) for i in range(2)),
    hidden_layers=(0,),
)


class Function:
    """A model that writes into its taps whatever the driver says belongs there."""

    def __init__(self) -> None:
        self.routes: Mapping[int, Tensor] = {}
        self.hidden: Mapping[int, Tensor] = {}

    def routed_layers(self) -> tuple[RoutedLayer, ...]:
        return FACTS.routed_layers

    def unbound_layers(self) -> tuple[int, ...]:
        return ()

    def set_route_taps(self, taps: Mapping[int, Tensor]) -> None:
        self.routes = taps

    def hidden_shape(self) -> tuple[int, int]:
        return 2, 2

    def set_hidden_taps(self, taps: Mapping[int, Tensor]) -> None:
        self.hidden = taps

    def write(self, token: int, cells: dict[str, bytes]) -> None:
        ids = np.frombuffer(cells[ROUTES.name], np.uint8).reshape(2, 2).astype(np.int16)
        for layer, tap in self.routes.items():
            tap[token] = torch.from_numpy(ids[layer])
        for tap in self.hidden.values():
            tap[token] = torch.frombuffer(bytearray(cells[HIDDEN.name]), dtype=torch.float32)


class DirectStore:
    """A `BackgroundStore` without the thread: the loads stay reproducible."""

    def __init__(self, store: ArenaStore) -> None:
        self.inner = store
        self.object_bytes, self.num_objects = store.object_bytes, store.num_objects
        self.refused: list[bytes] = []
        self.num_reads = 0

    def put(self, objects: Mapping[bytes, bytes], retain: Sequence[bytes], release: Sequence[bytes]) -> None:
        self.refused += self.inner.put(objects, retain, release)

    def take_refused(self) -> list[bytes]:
        refused, self.refused = self.refused, []
        return refused

    def read(self, keys: Sequence[bytes]) -> list[bytes]:
        self.num_reads += 1
        return self.inner.read(keys)

    def discard(self, keys: Sequence[bytes]) -> None:
        self.inner.discard(keys)


class RealCaptures:
    """`capture_driver.ModelCaptures`, but it is the product that works."""

    def __init__(self, num_objects: dict[str, int], block_size: int) -> None:
        self.model = Function()
        device = torch.device("cpu")
        fields = (
            CapturedField(ROUTES, "router", MoeRoutes(FACTS)),
            CapturedField(HIDDEN, "hidden", HiddenStates(FACTS)),
        )
        self.direct = {
            p.name: DirectStore(private_store(block_size * p.row_bytes, num_objects[p.name])) for p in PROFILES
        }
        self.real = RowCapture(
            fields,
            {
                "router": RouterTap(self.model, MAX_TOKENS, device),
                "hidden": HiddenTap(self.model, (0,), "float32", MAX_TOKENS, device),
            },
            cast(dict[str, BackgroundStore], self.direct),
            ResolvedCapture(
                profiles=PROFILES,
                block_size=block_size,
                num_objects=num_objects,
                max_step_tokens=MAX_TOKENS,
                queue_size=2,
            ),
        )
        self.break_field = None

    def begin(self, plan: StepPlan) -> tuple[CapturedStep, StepPlan, list[Any]]:
        return self.real.begin_step(plan), plan, []

    def snapshot(
        self, begun: tuple[CapturedStep, StepPlan, list[Any]], tokens: Callable[[int], tuple[list[int], bool]]
    ) -> None:
        step, plan, arranged = begun
        rows = arrange(plan)
        arranged.append(rows)
        token = 0
        for slot, start, count in zip(rows.slots.tolist(), rows.starts.tolist(), rows.counts.tolist(), strict=True):
            ids, void = tokens(slot)
            for position in range(start, start + count):
                cells = {
                    p.name: bytes(p.row_bytes) if void else row(p, ids[: position + 1], step.version) for p in PROFILES
                }
                self.model.write(token, cells)
                token += 1
        self.real.snapshot(step, rows, torch.empty(0))

    def process(self, begun: tuple[CapturedStep, StepPlan, list[Any]], result: StepResult | None) -> None:
        step, _, arranged = begun
        if result is None:
            self.real.abandon(step)
        else:
            self.real.process(step, arranged[0], result)

    # -- what the checks look at

    @property
    def captures(self) -> Any:
        return self.real._captures

    @property
    def by_slot(self) -> Any:
        return self.real._by_slot

    @property
    def num_reads(self) -> int:
        return sum(store.num_reads for store in self.direct.values())

    @property
    def stores(self) -> dict[str, Any]:
        parse = self.real._parse
        return {
            name: SimpleNamespace(
                capacity=store.num_objects,
                retained={parse(name, key) for key in store.inner._references},
                data={parse(name, key): store.inner.read([key])[0] for key in list(store.inner._slots)},
            )
            for name, store in self.direct.items()
        }


def arrange(plan: StepPlan) -> StepRows:
    """Rows with one token first."""
    order = sorted(range(len(plan.slots)), key=lambda i: plan.counts[i] != 1)
    counts = np.array([plan.counts[i] for i in order], dtype=np.int64)
    return StepRows(
        plan_rows=np.array(order, dtype=np.int64),
        slots=np.array([plan.slots[i] for i in order], dtype=np.int64),
        starts=np.array([plan.starts[i] for i in order], dtype=np.int64),
        counts=counts,
        samples=np.array([plan.samples[i] != 0 for i in order], dtype=np.bool_),
        query_starts=np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts))),
        num_decode_rows=int((counts == 1).sum()),
        forks=plan.forks,
    )


@pytest.mark.row("X-AUX", "rows survive prefix hits, chunks, preemption, failed steps, weight commits and depth 2")
@pytest.mark.parametrize("first", range(0, 24, 8))
def test_random_loads(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    monkeypatch.setattr(capture_driver, "ModelCaptures", RealCaptures)
    loads = [random_load(seed) for seed in range(first, first + 8)]
    assert all(isinstance(load.driver.captures, RealCaptures) for load in loads)
    assert sum(load.driver.captures.num_reads for load in loads) > 10, "hits were read from the store"
    assert sum(load.driver.aux.stats.rows for load in loads) > 500


@pytest.mark.heavy
@pytest.mark.parametrize("first", range(1000, 3000, 100))
def test_random_loads_at_length(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    monkeypatch.setattr(capture_driver, "ModelCaptures", RealCaptures)
    for seed in range(first, first + 100):
        random_load(seed, failing=0.05)
