"""Failures of other engines (docs: routed experts, scenarios RE-nn), as far as the worker half decides them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from infer.config.capture import CaptureSection
from infer.config.engine import PluginsSection
from infer.config.model import RoutedLayer
from infer.engine.worker.captured_fields import captured_fields
from infer.errors import ConfigError
from infer.layers.moe import SparseMoE
from infer.models.llama import EXAMPLE as LLAMA
from infer.plugins.artifact_field import TapFacts
from infer.plugins.manager import build_registry
from infer.testing.tiny_models import make_checkpoint, model_config
from unit.engine.worker.built import build
from unit.engine.worker.capture_driver import (
    HIDDEN_STATES,
    MOE,
    MOE_ROUTES,
    ROUTES,
    Driver,
    aux,
    begin,
    kv_hashes,
    same,
)
from unit.engine.worker.toy_causal_lm import ToyLM, plan

A = [5, 9, 11, 2, 40, 17, 33, 8, 61, 70]
B = [7, 3, 90, 41, 12, 13, 14, 15, 16, 18]
WIDE = MOE | {"num_experts": 300, "moe_intermediate_size": 4}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(MOE, tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(WIDE, tmp_path_factory.mktemp("wide"))


@pytest.fixture
def driver(path: Path) -> Iterator[Driver]:
    made = Driver(path)
    yield made
    made.runner.close()


def sparse(driver: Driver) -> list[SparseMoE]:
    model: Any = driver.runner._model
    found: list[SparseMoE] = model._sparse()
    return found


# -- wrong rows that look right --------------------------------------------------------------------------------------


def hiding(self: SparseMoE, x: Tensor) -> Tensor:
    """A fused kernel: it routes inside, and tells nobody."""
    tap, self.route_tap = self.route_tap, None
    try:
        return visible(self, x)
    finally:
        self.route_tap = tap


def zeroing(self: SparseMoE, x: Tensor) -> Tensor:
    """The right shape, and every id 0."""
    tap = self.route_tap
    out = hiding(self, x)
    if tap is not None:
        tap[: len(x)].zero_()
    return out


def hashing(self: SparseMoE, x: Tensor) -> Tensor:
    """The first layer routes by something else than its router."""
    return hiding(self, x) if self.routed.layer_id == 0 else visible(self, x)


visible = SparseMoE.__call__


@pytest.mark.row("SAMPLE-ROUTED-EXPERTS", "RE-01, RE-06, RE-07: a layer whose routing cannot be read refuses the start")
@pytest.mark.parametrize("broken", [hiding, zeroing, hashing])
def test_re01_re06_re07_hidden_routing_is_refused_at_start(
    path: Path, monkeypatch: pytest.MonkeyPatch, broken: Any
) -> None:
    monkeypatch.setattr(SparseMoE, "__call__", broken)
    with pytest.raises(ConfigError, match="the router of layer 0 does not tell which experts it chose") as caught:
        build(path, capture=ROUTES)
    assert caught.value.fields == ("capture.routed_experts",)
    build(path)[0].close()  # without capture nobody minds


def test_re06_an_error_while_capture_is_set_up_stops_the_start(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr("infer.engine.worker.builder.make_tap", broken)
    with pytest.raises(RuntimeError, match="planted"):
        build(path, capture=ROUTES)


def test_re07_re36_layers_of_a_foreign_kind_are_refused_and_extra_heads_are_not_layers(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from infer.layers.decoder import Decoder
    from infer.layers.parameter import Layer

    made = Decoder.__init__

    class HashRouted(Layer):
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __call__(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x)
            return out

    def foreign(self: Any, **parts: Any) -> None:
        made(self, **parts)
        self.blocks[1].mlp = HashRouted(self.blocks[1].mlp)

    def extra_head(self: Any, **parts: Any) -> None:
        made(self, **parts)
        self.__dict__["_multi_token_head"] = (self.blocks[0].mlp, "an unbound head that never records")

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "__init__", foreign)
        with pytest.raises(ConfigError, match="layers 1 may route tokens by a router that cannot be read"):
            build(path, capture=ROUTES)
    monkeypatch.setattr(Decoder, "__init__", extra_head)
    driver = Driver(path)
    assert driver.profile().layer_ids == (0, 2)
    same(driver.rows(driver.prefill(0, A, 1).aux[0]), driver.expected(0, 0, 10))


@pytest.mark.row("X-AUX", "RE-03: rows belong to the content of a block, whatever physical block holds its KV")
def test_re03_restored_kv_finds_its_own_rows(driver: Driver) -> None:
    """A runs; its KV is saved; B takes the same physical blocks; A's KV comes back into others."""
    rows = driver.rows(driver.prefill(0, A, 1).aux[0])
    table = driver.runner._batch._tables[0][0, :2].tolist()
    saved = {layer: (keys[table].clone(), values[table].clone()) for layer, (keys, values) in driver.runner._kv.items()}
    driver.step([], aux=aux(ends=[(1, [])]), freed=[0])
    other = driver.step(
        [(0, 0, 10, 1)],
        [driver.admission(0, B, shared=[table])],
        aux(begins=[begin(2, 0)], hashes=[(2, kv_hashes(B))]),
    )
    assert driver.runner._batch._tables[0][0, :2].tolist() == table, "B holds A's blocks"
    elsewhere = [driver.free[0].pop(), driver.free[0].pop()]
    for layer, (keys, values) in driver.runner._kv.items():
        keys[elsewhere], values[elsewhere] = saved[layer]
    ids = [*A[:8], 50]
    hit = driver.step(
        [(1, 8, 1, 1)],
        [driver.admission(1, ids, shared=[elsewhere])],
        aux(begins=[begin(3, 1, 8, 0, kv_hashes(ids))]),
    )
    same(driver.rows(hit.aux[0])[:8], rows[:8])
    assert not np.array_equal(driver.rows(other.aux[0])[:8], rows[:8])


@pytest.mark.row("SAMPLE-ROUTED-EXPERTS", "RE-12: a cell that nobody wrote is no valid id; the rows fail, not the step")
@pytest.mark.parametrize("cell", [-1, 8, 255])
def test_re12_an_impossible_id_is_never_emitted_or_published(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, cell: int
) -> None:
    """-1 kept as uint8 would read 255: in a model of 256 experts a valid id."""
    broken = sparse(driver)[1]
    route = broken.route

    def skips(logits: Tensor, rule: Any, bias: Any, tap: Any) -> Any:
        out = route(logits, rule, bias, None)
        if tap is not None:
            tap[:6].copy_(out[1][:6])
            if cell != -1:
                tap[6:10].fill_(cell)
        return out

    known = kv_hashes(A)
    with monkeypatch.context() as patch:
        patch.setattr(broken, "route", skips)
        result = driver.prefill(0, A, 1)
    assert result.aux[0].error == "moe_routes of position 6 holds ids that the model does not have"
    assert (result.aux[0].count, result.aux[0].data) == (0, {MOE_ROUTES: b""})
    assert result.aux_refused == [(MOE_ROUTES, kv_hash, 0) for kv_hash in known]
    later = driver.step(
        [(0, 10, 1, 1), (1, 4, 1, 1)],
        [driver.admission(1, A[:5])],
        aux(begins=[begin(2, 1, 4, 0, known[:1])]),
    )
    assert later.aux[0].error is not None and later.aux[1].error is not None
    assert [len(ids) for ids in later.token_ids] == [1, 1]


def test_re12_with_256_experts_255_is_a_valid_id_and_an_unwritten_cell_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tap is wider than what is kept."""
    driver = Driver(make_checkpoint(MOE | {"num_experts": 256, "moe_intermediate_size": 4}, tmp_path))
    assert driver.profile().dtype == "uint8"
    for layer in sparse(driver):

        def last_two(logits: Tensor, rule: Any, bias: Any, tap: Any, layer: Any = layer) -> Any:
            ids = torch.tensor([[255, 254]]).expand(len(logits), 2)
            if tap is not None:
                tap[: len(ids)].copy_(ids)
            return torch.full((len(logits), 2), 0.5), ids

        monkeypatch.setattr(layer, "route", driver._recording(last_two))
    same(driver.rows(driver.prefill(0, A, 1).aux[0]), np.tile([255, 254], (10, 2, 1)))
    for layer in sparse(driver):
        monkeypatch.setattr(layer, "route", driver._recording(lambda *a: (torch.ones(1, 2), torch.zeros(1, 2).long())))
    assert driver.decode(0).aux[0].error is not None
    driver.runner.close()


@pytest.mark.parametrize("renormalise", [True, False])
def test_re18_routes_of_negative_logits_are_the_top_k(
    path: Path, tmp_path: Path, renormalise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(make_checkpoint(MOE | {"norm_topk_prob": renormalise}, tmp_path))
    seen: list[Tensor] = []
    for layer in sparse(driver):

        def shifted(logits: Tensor, *rest: Any, route: Any = layer.route) -> Any:
            seen.append(logits - 50)
            return route(logits - 50, *rest)

        monkeypatch.setattr(layer, "route", shifted)
    found = driver.rows(driver.prefill(0, A, 1).aux[0])
    logits = torch.stack(seen, dim=1).double().numpy()
    assert (logits < 0).all()
    same(found, np.argsort(-logits, axis=-1, kind="stable")[..., :2])
    driver.runner.close()


# -- crashes and hangs -----------------------------------------------------------------------------------------------


@pytest.mark.row("X-AUX", "RE-24, RE-25: a step begins while an earlier one is unprocessed, and ends its request")
def test_re24_re25_a_step_begins_before_the_one_before_is_consumed(driver: Driver) -> None:
    """One thread; step 2 frees the slot and gives it to B, then both outputs are consumed in order."""
    runner = driver.runner
    capture: Any = runner._capture
    plans, taken = [], []
    for slot_ids, events, freed in (
        (A, aux(begins=[begin(1, 0)], hashes=[(1, kv_hashes(A)[:1])]), []),
        (B, aux(ends=[(1, kv_hashes(A)[1:])], begins=[begin(2, 0)]), [0]),
    ):
        plan = driver_plan(driver, slot_ids, events, freed)
        plans.append(plan)
        with runner._platform.step_context():
            step = capture.begin_step(plan)
            runner._batch.apply(plan)
            rows = runner._batch.arrange(plan)
            driver.calls.clear()
            runner._loaded().forward(runner._batch.forward_batch(rows, runner._kv))
            capture.snapshot(step, rows, torch.empty(0))
        driver.recorded[0] = {}
        driver._attribute([(0, 0, len(slot_ids), 1)])
        taken.append((step, rows, driver.expected(0, 0, len(slot_ids))))
    for (step, rows, expected), plan in zip(taken, plans, strict=True):
        result = empty_result(plan)
        capture.process(step, rows, result)
        same(driver.rows(result.aux[0]), expected)
        assert result.aux_refused == []
    key = capture._key
    assert len(capture._stores[MOE_ROUTES].read([key(MOE_ROUTES, kv_hash, 0) for kv_hash in kv_hashes(A)])) == 2


def driver_plan(driver: Driver, ids: list[int], events: Any, freed: list[int]) -> Any:
    made = plan([(0, 0, len(ids), 1)], [driver.admission(0, ids)], freed)
    made.aux = events
    return made


def empty_result(plan: Any) -> Any:
    from infer.engine.step import StepResult

    count = len(plan.slots)
    return StepResult(plan.step_id, [[] for _ in range(count)], [None] * count)


def test_re24_the_queue_of_the_store_is_no_reason_to_wait_in_begin_step(path: Path) -> None:
    """The writer is stuck; steps go on until its queue is full."""
    import threading

    driver = Driver(path)
    capture: Any = driver.runner._capture
    store = capture._stores[MOE_ROUTES]
    gate = threading.Event()
    store._submit(lambda: gate.wait(60) and None)
    driver.prefill(0, A, 1)
    assert [driver.decode(0).aux[0].count for _ in range(2)] == [1, 1]
    assert not gate.is_set()
    gate.set()
    driver.runner.close()


def test_re26_no_metadata_no_rows(path: Path) -> None:
    """Warm-up, which ran when the runner was built, and dummy steps."""
    driver = Driver(path)
    capture: Any = driver.runner._capture
    assert capture._captures == {} and capture._by_slot == {}
    assert capture._stores[MOE_ROUTES]._thread is None, "nothing was ever published"
    assert [layer.route_tap for layer in sparse(driver)] == [None, None]
    dummy = driver.step([(3, 0, 1, 1)], [driver.admission(3, [1])])
    assert (dummy.aux, dummy.aux_refused) == ({}, [])
    assert capture._stores[MOE_ROUTES]._thread is None
    driver.runner.close()


@pytest.mark.row("X-AUX", "RE-27: two engines in one process do not know of each other")
def test_re27_two_runners_in_one_process(path: Path, wide: Path) -> None:
    one, two = Driver(path), Driver(wide)
    first, second = one.prefill(0, A, 1), two.prefill(0, B, 1)
    for position in (10, 11):
        same(one.rows(one.decode(0).aux[0]), one.expected(0, position, position + 1))
        same(two.rows(two.decode(0).aux[0]), two.expected(0, position, position + 1))
    same(one.rows(first.aux[0]), one.expected(0, 0, 10))
    same(two.rows(second.aux[0]), two.expected(0, 0, 10))
    one.runner.close()
    same(two.rows(two.decode(0).aux[0]), two.expected(0, 12, 13))
    two.runner.close()


def test_re28_shared_memory_that_is_not_there_is_refused_when_the_runner_is_built(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(path, capture=ROUTES | {"shared_memory": True})
    same(driver.rows(driver.prefill(0, A, 1).aux[0]), driver.expected(0, 0, 10))
    driver.runner.close()
    monkeypatch.setattr("infer.engine.worker.builder.shared_store", lambda size, count, free: short(size, count))
    with pytest.raises(ConfigError, match=r"capture\.shared_memory=True"):
        build(path, capture=ROUTES | {"shared_memory": True})


def short(size: int, count: int) -> Any:
    from infer.engine.worker.block_store import shared_store

    return shared_store(size, count, size * count - 1)


@pytest.mark.row("SAMPLE-ROUTED-EXPERTS", "RE-29, RE-30: the dtype is that of the model, never of the values")
def test_re29_re30_small_ids_of_a_wide_model_keep_its_dtype(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(wide)
    assert (driver.profile().dtype, driver.profile().num_experts) == ("uint16", 300)
    for layer in sparse(driver):

        def chosen(logits: Tensor, rule: Any, bias: Any, tap: Any) -> Any:
            ids = torch.tensor([[1, 2]] if len(logits) < 10 else [[299, 256]]).expand(len(logits), 2)
            if tap is not None:
                tap[: len(ids)].copy_(ids)
            return torch.full((len(logits), 2), 0.5), ids

        monkeypatch.setattr(layer, "route", driver._recording(chosen))
    small, large = driver.prefill(0, A[:4], 1).aux[0], driver.prefill(1, A, 2).aux[0]
    assert (len(small.data[MOE_ROUTES]), len(large.data[MOE_ROUTES])) == (4 * 8, 10 * 8)
    same(driver.rows(small), np.tile([1, 2], (4, 2, 1)))
    same(driver.rows(large), np.tile([299, 256], (10, 2, 1)))
    driver.runner.close()


@pytest.mark.row("X-AUX", "RE-35: taps are as large as the largest step; a larger one costs the rows, not the step")
def test_re35_the_largest_step_fits_and_a_larger_one_is_refused(path: Path) -> None:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 8}
    driver = Driver(path, scheduler=limits)
    tap = driver.runner._capture._taps["router"].buffer  # type: ignore[union-attr]
    assert tuple(tap.shape) == (2, 8, 2)
    ids = (A + B)[:20]
    for start, count in ((0, 8), (8, 8), (16, 4)):
        new = [driver.admission(0, ids)] if start == 0 else []
        events = aux(begins=[begin(1, 0)]) if start == 0 else None
        result = driver.step([(0, start, count, int(start == 16))], new, events)
    same(driver.rows(result.aux[0]), driver.expected(0, 0, 20))
    larger = driver.step([(1, 0, 9, 1)], [driver.admission(1, ids[:9])], aux(begins=[begin(2, 1)]))
    assert larger.aux[0].error == "a step of 9 tokens is larger than the taps (8)"
    assert len(larger.token_ids[0]) == 1
    driver.runner.close()


# -- cost ------------------------------------------------------------------------------------------------------------


@pytest.mark.row("X-AUX", "RE-55: capture brings no wait for the device into a step")
def test_re55_nothing_is_read_back_before_the_output_is_consumed(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every torch operation in begin_step and snapshot: none gives a value or a size to Python."""
    waits = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_to_cpu")
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    capture: Any = driver.runner._capture
    for name in ("begin_step", "snapshot"):
        inner = getattr(capture, name)

        def watched(*args: Any, inner: Any = inner) -> Any:
            with Watch():
                return inner(*args)

        monkeypatch.setattr(capture, name, watched)
    same(driver.rows(driver.prefill(0, A, 1).aux[0]), driver.expected(0, 0, 10))
    assert seen, "the watch saw nothing"
    assert [name for name in seen if name.split(".")[0] in waits] == []


# -- refusals at start -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(LLAMA, tmp_path_factory.mktemp("dense"))


@pytest.mark.row("SAMPLE-ROUTED-EXPERTS", "what cannot be captured is refused at start with the reason")
@pytest.mark.parametrize(
    ("capture", "more", "message", "field"),
    [
        (ROUTES, {}, "the model has no layer with experts", "capture.routed_experts"),
        ({"hidden_layers": [2]}, {}, "there is no layer 2; the model has layers 0 to 1", "capture.hidden_layers"),
        ({"hidden_layers": [-1]}, {}, "there is no layer -1", "capture.hidden_layers"),
        ({"fields": [HIDDEN_STATES]}, {}, "capture.hidden_layers, which is empty", "capture.hidden_layers"),
        (
            {"hidden_layers": [0]},
            {"cache": {"prefix_caching": False}},
            "capture.hidden_layers needs cache.prefix_caching=True",
            "cache.prefix_caching",
        ),
        (
            {"hidden_layers": [0], "max_bytes": 100},
            {"cache": {"block_size": 4, "num_blocks": 64}},
            "capture.max_bytes=100 is less than the 512 bytes",
            "capture.max_bytes",
        ),
    ],
)
def test_what_a_model_cannot_give_is_refused(
    dense: Path, capture: dict[str, Any], more: dict[str, Any], message: str, field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(dense, capture=capture, **more)
    assert message in str(caught.value) and field in caught.value.fields


def test_an_unknown_field_names_what_there_is(dense: Path) -> None:
    from infer.errors import UnknownPluginError

    with pytest.raises(UnknownPluginError, match=r"no artifact_field plugin 'moe_route'.*did you mean 'moe_routes'"):
        build(dense, capture={"fields": ["moe_route"]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tap": "sampled"}, "reads the tap 'sampled', which is reserved"),
        ({"coordinate": "request"}, "only rows of executed and of predicted tokens"),
        ({"coordinate": "predicted_token"}, "only the tap 'logits' tells what is predicted"),
        ({"reuse": "request_only"}, "cannot be kept with the prefix cache"),
    ],
)
def test_fields_of_plugins_that_cannot_be_captured_yet(
    dense: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], message: str
) -> None:
    import dataclasses

    registry = build_registry(PluginsSection())
    spec = dataclasses.replace(registry.get("artifact_field", MOE_ROUTES), name="mood", **changes)  # type: ignore[arg-type]
    get = registry.get
    monkeypatch.setattr(registry, "get", lambda kind, name: spec if name == "mood" else get(kind, name))
    with pytest.raises(ConfigError, match=message) as caught:
        build(dense, registry, capture={"fields": ["mood"]})
    assert caught.value.fields == ("capture.fields",)


def test_a_model_without_taps_is_refused() -> None:
    registry, facts = build_registry(PluginsSection()), model_config(LLAMA)
    model: Any = ToyLM()
    for section, message in (
        (CaptureSection(routed_experts=True), "does not let its routers be read"),
        (CaptureSection(hidden_layers=(0,)), "does not give out the hidden states"),
    ):
        with pytest.raises(ConfigError, match=message):
            captured_fields(registry, section, model, facts, "float32")


def test_routers_that_differ_are_refused() -> None:
    """Rows are one array: every router must choose as many of as many experts."""
    registry = build_registry(PluginsSection())
    for layers in (((0, 8, 2), (1, 16, 2)), ((0, 8, 2), (1, 8, 1)), ((0, 8, 0),), ((0, 2, 3),), ((-1, 8, 2),)):
        routed = tuple(RoutedLayer(layer_id=i, num_experts=n, top_k=k) for i, n, k in layers)
        facts = TapFacts(
            model_identity="x", dtype="float32", num_layers=2, hidden_size=4, routed_layers=routed, hidden_layers=()
        )
        with pytest.raises(ConfigError, match="every router must choose the same number"):
            registry.create("artifact_field", MOE_ROUTES, facts)


def test_the_plan_counts_what_capture_takes(path: Path) -> None:
    """Per token two routers, two ids of a byte; taps of at most four; two steps in flight; 128 blocks of 4."""
    _, resolved = build(path, capture=ROUTES)
    assert resolved.capture is not None
    assert resolved.memory.capture_steps == 64 * (2 * 2 * 4 + 2 * 2 * 2)
    assert resolved.memory.capture_store == resolved.capture.store_bytes() == 128 * 4 * 4
    assert (resolved.capture.queue_size, resolved.capture.num_objects) == (8, {MOE_ROUTES: 128})
    _, plain = build(path)
    assert (plain.capture, plain.memory.capture_steps) == (None, 0)
