"""Captured rows, worker half, over real tiny models: equal to what an independent recorder saw in the same forward pass."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from infer.config.capture import CaptureProfile
from infer.config.engine import PluginsSection
from infer.engine.step import SamplingSpec, StepResult
from infer.engine.worker.block_store import MissingBlockError
from infer.plugins.artifact_field import TapFacts
from infer.plugins.manager import build_registry
from infer.testing.tiny_models import make_checkpoint, random_transformers_model
from unit.engine.worker.capture_driver import (
    BLOCK,
    HIDDEN_STATES,
    MOE,
    MOE_ROUTES,
    TWO_GROUPS,
    Driver,
    aux,
    begin,
    kv_hashes,
    same,
)

A = [5, 9, 11, 2, 40, 17, 33, 8, 61, 70]
B = [7, 3, 90, 41]
MODELS = {
    "moe": MOE,
    "two groups": TWO_GROUPS,
    "300 experts": MOE | {"num_experts": 300, "moe_intermediate_size": 4, "num_experts_per_tok": 5},
    "256 experts": MOE | {"num_experts": 256, "moe_intermediate_size": 4},
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: make_checkpoint(config, tmp_path_factory.mktemp(name.replace(" ", "-")))
        for name, config in MODELS.items()
    }


@pytest.fixture
def driver(paths: dict[str, Path]) -> Iterator[Driver]:
    made = Driver(paths["moe"])
    yield made
    made.runner.close()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.row("SAMPLE-ROUTED-EXPERTS", "rows equal, bit for bit, the ids recorded independently in the same pass")
def test_rows_are_what_the_routers_chose(paths: dict[str, Path], name: str) -> None:
    """A prompt, a neighbour that joins, mixed steps, single-token batches; each choice once, in order."""
    driver = Driver(paths[name])
    first = driver.prefill(0, A, 1)
    piece = first.aux[0]
    assert (piece.start, piece.count, piece.num_cached, piece.versions) == (0, 10, 0, [(10, 0)])
    same(driver.rows(piece), driver.expected(0, 0, 10))
    mixed = driver.step(
        [(2, 0, 4, 1), (0, 10, 1, 1)], [driver.admission(2, B)], aux(begins=[begin(2, 2, hashes=kv_hashes(B))])
    )
    same(driver.rows(mixed.aux[0]), driver.expected(2, 0, 4))
    same(driver.rows(mixed.aux[1]), driver.expected(0, 10, 11))
    assert (mixed.aux[1].start, mixed.aux[1].count) == (10, 1)
    for position in (11, 12):
        alone = driver.decode(0)
        same(driver.rows(alone.aux[0]), driver.expected(0, position, position + 1))
    assert len(np.unique(driver.expected(0, 0, 13))) > 3
    driver.runner.close()


@pytest.mark.row("SAMPLE-ROUTED-EXPERTS", "rows equal transformers' own routers for the same tokens")
def test_rows_are_those_of_transformers(paths: dict[str, Path], driver: Driver) -> None:
    oracle = random_transformers_model(MOE)
    with torch.no_grad():
        logits = oracle(torch.tensor([A]), output_router_logits=True).router_logits
    expected = torch.stack([layer.topk(2).indices for layer in logits], dim=1)
    same(driver.rows(driver.prefill(0, A, 1).aux[0]), expected.numpy())


@pytest.mark.parametrize("cuts", [(2, 3), (1, 2, 3), (4, 8, 9), (3, 7)])
def test_chunks_emit_nothing_and_the_last_one_everything(driver: Driver, cuts: tuple[int, ...]) -> None:
    """A 2-row chunk emits nothing; the 1-row chunk that ends the prompt emits all 3."""
    ids = A[: cuts[-1]]
    results = []
    for start, stop in zip((0, *cuts), cuts, strict=False):
        new = [driver.admission(0, ids)] if start == 0 else []
        events = aux(begins=[begin(1, 0)]) if start == 0 else None
        results.append(driver.step([(0, start, stop - start, int(stop == cuts[-1]))], new, events))
    assert [result.aux for result in results[:-1]] == [{}] * (len(cuts) - 1)
    piece = results[-1].aux[0]
    assert (piece.start, piece.count) == (0, cuts[-1])
    same(driver.rows(piece), driver.expected(0, 0, cuts[-1]))


@pytest.mark.row("X-AUX", "rows survive a prefix hit: the reused ones come from the store, byte for byte")
@pytest.mark.parametrize("name", ["moe", "two groups"])
def test_rows_of_a_reused_prompt_come_from_the_store(paths: dict[str, Path], name: str) -> None:
    """Two groups (RE-04, RE-22): one logical position space, whatever blocks each group has."""
    driver = Driver(paths[name])
    before = driver.rows(driver.prefill(0, A, 1).aux[0])
    tables = [table[0].tolist()[:2] for table in driver.runner._batch._tables]
    ids = [*A[:8], 21, 22, 23]
    hit = driver.step(
        [(1, 8, 3, 1)],
        [driver.admission(1, ids, shared=tables)],
        aux(begins=[begin(2, 1, 8, 0, kv_hashes(ids))]),
    )
    piece = hit.aux[0]
    assert (piece.start, piece.count, piece.num_cached) == (0, 11, 8)
    same(driver.rows(piece)[:8], before[:8])
    same(driver.rows(piece)[8:], driver.expected(1, 8, 11))
    cold = Driver(paths[name])
    same(cold.rows(cold.prefill(0, ids, 1).aux[0]), driver.rows(piece))


@pytest.mark.parametrize(("emit_from", "cached"), [(3, 5), (8, 0), (10, 0)])
def test_rows_begin_where_the_request_wants_them(driver: Driver, emit_from: int, cached: int) -> None:
    driver.prefill(0, A, 1)
    tables = [table[0].tolist()[:2] for table in driver.runner._batch._tables]
    hit = driver.step(
        [(1, 8, 2, 1)],
        [driver.admission(1, A, shared=tables)],
        aux(begins=[begin(2, 1, 8, emit_from, kv_hashes(A))]),
    )
    if emit_from == 10:
        assert (hit.aux[0].start, hit.aux[0].count) == (10, 0)
    else:
        assert (hit.aux[0].start, hit.aux[0].num_cached) == (emit_from, cached)
        same(driver.rows(hit.aux[0]), driver.expected(0, emit_from, 10))
    later = driver.decode(1)
    same(driver.rows(later.aux[0]), driver.expected(1, 10, 11))


def test_a_block_that_a_neighbour_computes_in_the_same_step_can_be_read(driver: Driver) -> None:
    """All blocks of the batch are published before any row is emitted."""
    ids = [*A[:4], 21]
    new = [driver.admission(0, A)]
    shared = [[blocks[0]] for blocks in new[0].block_ids]
    events = aux(
        begins=[begin(1, 0), begin(2, 1, 4, 0, kv_hashes(ids))],
        hashes=[(1, kv_hashes(A))],
        retain=[(MOE_ROUTES, kv_hash, 0) for kv_hash in kv_hashes(A)],
    )
    result = driver.step([(1, 4, 1, 1), (0, 0, 10, 1)], [*new, driver.admission(1, ids, shared=shared)], events)
    same(driver.rows(result.aux[0])[:4], driver.expected(0, 0, 4))
    assert result.aux[0].num_cached == 4


def test_a_hash_that_comes_late_publishes_without_a_forward_pass(driver: Driver) -> None:
    driver.step([(0, 0, 10, 1)], [driver.admission(0, A)], aux(begins=[begin(1, 0)]))
    same(driver.rows(driver.decode(0).aux[0]), driver.expected(0, 10, 11))
    driver.step([], aux=aux(hashes=[(1, kv_hashes(A)[:1])]))
    driver.step([], aux=aux(ends=[(1, kv_hashes(A)[1:])]), freed=[0])
    tables = [table[3].tolist() for table in driver.runner._batch._tables]
    assert not any(tables[0])
    store = driver.runner._capture._stores[MOE_ROUTES]  # type: ignore[union-attr]
    key = driver.runner._capture._key  # type: ignore[union-attr]
    kept = store.read([key(MOE_ROUTES, kv_hash, 0) for kv_hash in kv_hashes(A)])
    expected = driver.expected(0, 0, 8).astype(np.uint8)
    assert kept == [expected[:4].tobytes(), expected[4:].tobytes()]


def test_only_requests_that_ask_get_rows_and_nobody_asking_closes_the_taps(driver: Driver) -> None:
    model: Any = driver.runner._model
    driver.step([(0, 0, 4, 1)], [driver.admission(0, B)])
    assert [layer.route_tap for layer in model._sparse()] == [None, None]
    both = driver.step([(0, 4, 1, 1), (1, 0, 10, 1)], [driver.admission(1, A)], aux(begins=[begin(1, 1)]))
    assert list(both.aux) == [1]
    same(driver.rows(both.aux[1]), driver.expected(1, 0, 10))
    assert all(layer.route_tap is not None for layer in model._sparse())
    driver.step([(0, 5, 1, 1)], aux=aux(ends=[(1, [])]), freed=[1])
    assert [layer.route_tap for layer in model._sparse()] == [None, None]


@pytest.mark.row("SAMPLE-N", "choices of one prompt share its rows")
def test_forks_take_over_the_rows_of_the_incomplete_block(driver: Driver) -> None:
    """The fork's first block of its own holds the prompt's last two rows; a later hit reads them."""
    ids = A[:6]
    first = driver.admission(0, ids)
    table = first.block_ids[0]
    fork = driver.admission(1, ids, shared=[table[:1]])
    step = driver.step(
        [(0, 0, 6, 1)],
        [first, fork],
        aux(begins=[begin(1, 0), begin(2, 1, 6, 6, kv_hashes(ids), parent=1)], hashes=[(1, kv_hashes(ids))]),
        forks=[(0, 1)],
        copies=[(0, table[1], fork.block_ids[0][1])],
    )
    assert (step.aux[0].count, step.aux[1].start, step.aux[1].count) == (6, 6, 0)
    rows = [driver.rows(driver.decode(1).aux[0]) for _ in range(2)]
    same(np.concatenate(rows), driver.expected(1, 6, 8))
    sequence = driver.ids[1][:8]
    driver.step([], aux=aux(hashes=[(2, kv_hashes(sequence)[1:])]))
    tables = [table[1].tolist()[:2] for table in driver.runner._batch._tables]
    again = [*sequence, 77]
    hit = driver.step(
        [(2, 8, 1, 1)],
        [driver.admission(2, again, shared=tables)],
        aux(begins=[begin(3, 2, 8, 0, kv_hashes(again))]),
    )
    expected = np.concatenate([driver.expected(0, 0, 6), driver.expected(1, 6, 8), driver.expected(2, 8, 9)])
    same(driver.rows(hit.aux[0]), expected)


@pytest.mark.row("X-WEIGHT-SPANS", "every row says under which weights it was computed")
def test_rows_carry_their_weight_version_and_mixed_blocks_are_not_shared(driver: Driver) -> None:
    known = kv_hashes(A)
    driver.step([(0, 0, 6, 0)], [driver.admission(0, A)], aux(begins=[begin(1, 0)], hashes=[(1, known[:1])]))
    last = driver.step([(0, 6, 4, 1)], aux=aux(3, hashes=[(1, known[1:])]))
    assert last.aux[0].versions == [(6, 0), (4, 3)]
    same(driver.rows(last.aux[0]), driver.expected(0, 0, 10))
    assert last.aux_refused == [(MOE_ROUTES, known[1], 3)]
    tables = [table[0].tolist()[:1] for table in driver.runner._batch._tables]
    new = [driver.admission(1, A[:5], shared=tables)]
    stale = driver.step([(1, 4, 1, 1)], new, aux(3, begins=[begin(2, 1, 4, 0, known)]))
    assert stale.aux[0].error is not None and "rows of the reused prompt are lost" in stale.aux[0].error
    assert stale.aux[0].count == 0 and len(stale.token_ids[0]) == 1


def test_reused_rows_are_those_of_the_version_that_the_hit_was_found_under(driver: Driver) -> None:
    driver.prefill(0, A, 1)
    tables = [table[0].tolist()[:2] for table in driver.runner._batch._tables]
    new = driver.admission(1, A, shared=tables)
    driver.step([(1, 8, 1, 0)], [new], aux(begins=[begin(2, 1, 8, 2, kv_hashes(A))]))
    last = driver.step([(1, 9, 1, 1)], aux=aux(4))
    assert (last.aux[0].num_cached, last.aux[0].versions) == (6, [(7, 0), (1, 4)])
    same(driver.rows(last.aux[0]), driver.expected(0, 2, 10))


def test_a_block_keeps_the_version_of_its_rows_when_its_hash_comes_after_a_commit(driver: Driver) -> None:
    driver.step([(0, 0, 8, 1)], [driver.admission(0, A[:8])], aux(begins=[begin(1, 0)]))
    driver.step([], aux=aux(5, hashes=[(1, kv_hashes(A))]))
    capture: Any = driver.runner._capture
    store, key = capture._stores[MOE_ROUTES], capture._key
    assert len(store.read([key(MOE_ROUTES, kv_hash, 0) for kv_hash in kv_hashes(A)])) == 2
    with pytest.raises(MissingBlockError):
        store.read([key(MOE_ROUTES, kv_hashes(A)[0], 5)])


@pytest.mark.row("X-AUX", "a request whose rows cannot be complete fails closed with a reason, its tokens go on")
def test_lost_blocks_fail_the_rows_and_nothing_else(driver: Driver) -> None:
    result = driver.step(
        [(0, 4, 1, 1), (1, 0, 4, 1)],
        [driver.admission(0, A[:5]), driver.admission(1, B)],
        aux(begins=[begin(1, 0, 4, 0, kv_hashes(A)), begin(2, 1)]),
    )
    assert result.aux[0].error is not None and kv_hashes(A)[0].hex() in result.aux[0].error
    assert [len(ids) for ids in result.token_ids] == [1, 1]
    same(driver.rows(result.aux[1]), driver.expected(1, 0, 4))
    later = driver.step([(0, 5, 1, 1), (1, 4, 1, 1)])
    assert later.aux[0].error == result.aux[0].error, "the reason stays"


def test_a_gap_fails_the_rows(driver: Driver) -> None:
    driver.prefill(0, A, 1)
    result = driver.step([(0, 12, 1, 1)])
    assert result.aux[0].error == "rows of position 10 were expected, the step computed 12 to 12"


def test_hashes_of_blocks_that_never_came_are_told_at_the_end(driver: Driver) -> None:
    driver.prefill(0, A, 1)
    ended = driver.step([], aux=aux(ends=[(1, [b"third"])]), freed=[0])
    assert ended.aux_refused == [(MOE_ROUTES, b"third", 0)]


def test_a_late_end_leaves_the_next_capture_of_the_slot_alone(driver: Driver) -> None:
    driver.prefill(0, A, 1)
    driver.step([(0, 0, 4, 1)], [driver.admission(0, B)], aux(begins=[begin(2, 0)]), freed=[0])
    later = driver.decode(0, aux(ends=[(1, [])]))
    same(driver.rows(later.aux[0]), driver.expected(0, 4, 5))


def test_an_unknown_field_and_a_lost_parent_fail_the_rows(driver: Driver) -> None:
    events = aux(begins=[begin(1, 0, fields=("mood",)), begin(2, 1, 0, 0, parent=99)])
    result = driver.step([(0, 0, 4, 1), (1, 0, 4, 1)], [driver.admission(0, B), driver.admission(1, B)], events)
    assert result.aux[0].error == "mood is not captured by this engine"
    assert result.aux[1].error == "the request it was forked from is not captured any more"


def test_a_failed_step_fails_its_rows_and_keeps_its_events(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    known = kv_hashes(A)
    driver.prefill(0, A, 1)
    model: Any = driver.runner._model
    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", lambda batch: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            driver.step([(0, 10, 1, 1)], aux=aux(release=[(MOE_ROUTES, known[1], 0), (MOE_ROUTES, known[0], 0)]))
    again = driver.decode(0, aux(ends=[], discard=[(MOE_ROUTES, known[0], 0)]))
    assert again.aux[0].error == "the step that computes these rows failed"
    rest = driver.step([], aux=aux(ends=[(1, [b"third"])]), freed=[0])
    assert rest.aux_refused == [(MOE_ROUTES, b"third", 0)], "what cannot come is told"
    new = driver.step([(1, 4, 1, 1)], [driver.admission(1, A[:5])], aux(begins=[begin(2, 1, 4, 0, known)]))
    assert new.aux[0].error is not None, "the discarded block is gone"


def test_rows_of_a_request_that_cannot_be_taken_in_are_not_published(driver: Driver) -> None:
    """Its tokens were never there: rows under their hash would be another prompt's."""
    wrong = driver.admission(0, A)
    wrong.sampling = SamplingSpec(seed=0, allowed_token_ids=(10**6,))
    known = kv_hashes(A)
    result = driver.step([(0, 0, 10, 1)], [wrong], aux(begins=[begin(1, 0)], hashes=[(1, known)]), failed=[0])
    assert result.aux[0].error is not None and result.aux[0].error.startswith("the request failed: allowed_token_ids")
    assert result.aux_refused == [(MOE_ROUTES, kv_hash, 0) for kv_hash in known]
    ended = driver.step([], aux=aux(ends=[(1, [])]), freed=[0])
    assert ended.aux_refused == []
    hit = driver.step([(1, 4, 1, 1)], [driver.admission(1, A[:5])], aux(begins=[begin(2, 1, 4, 0, known)]))
    assert hit.aux[0].error is not None


def test_a_fork_that_cannot_be_taken_in_has_no_rows_either(driver: Driver) -> None:
    first, fork = driver.admission(0, A[:6]), driver.admission(1, A[:6])
    fork.sampling = SamplingSpec(seed=0, allowed_token_ids=(10**6,))
    events = aux(begins=[begin(1, 0), begin(2, 1, 6, 6, parent=1)])
    result = driver.step([(0, 0, 6, 1)], [first, fork], events, forks=[(0, 1)], failed=[1])
    same(driver.rows(result.aux[0]), driver.expected(0, 0, 6))
    assert result.aux[1].error is not None and "allowed_token_ids" in result.aux[1].error


def test_what_the_store_has_no_room_for_is_told(paths: dict[str, Path]) -> None:
    driver = Driver(paths["moe"], capture={"routed_experts": True, "max_bytes": BLOCK * 4})
    known = kv_hashes(A)
    first = driver.prefill(0, A, 1)
    same(driver.rows(first.aux[0]), driver.expected(0, 0, 10))
    driver.runner._capture._stores[MOE_ROUTES]._queue.join()  # type: ignore[union-attr]
    later = driver.step([], aux=aux(ends=[(1, [])]))
    assert first.aux_refused + later.aux_refused == [(MOE_ROUTES, known[1], 0)]
    driver.runner.close()


def test_a_captured_block_of_equal_cells_is_counted(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = driver.runner._model

    def stuck(logits: torch.Tensor, rule: Any, bias: Any, tap: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.full((len(logits), 2), 3)
        if tap is not None:
            tap[: len(ids)].copy_(ids)
        return torch.ones(len(ids), 2), ids

    for layer in model._sparse():
        monkeypatch.setattr(layer, "route", driver._recording(stuck))
    assert driver.prefill(0, A, 1).aux_uniform_blocks == 2
    assert driver.prefill(1, B).aux_uniform_blocks == 0


def test_rows_held_for_a_long_answer_do_not_grow(driver: Driver) -> None:
    driver.prefill(0, A, 1)
    capture = driver.runner._capture._captures[1]  # type: ignore[union-attr]
    known = 2
    for _ in range(20):
        ids = driver.ids[0]
        fresh = kv_hashes(ids[:-1], known) if len(ids) % BLOCK == 1 else []
        known += len(fresh)
        driver.decode(0, aux(hashes=[(1, fresh)]) if fresh else None)
    assert len(capture._rows[MOE_ROUTES]) <= 2 * BLOCK * capture.row_bytes[MOE_ROUTES]


# -- hidden states ---------------------------------------------------------------------------------------------------


@pytest.mark.row(
    "X-AUX", "routed experts and hidden states of one request have equal row counts and match transformers"
)
def test_hidden_states_are_those_of_transformers(paths: dict[str, Path]) -> None:
    driver = Driver(paths["moe"], capture={"routed_experts": True, "hidden_layers": (1, 0)})
    fields = (MOE_ROUTES, HIDDEN_STATES)
    cut = driver.step([(0, 0, 7, 0)], [driver.admission(0, A)], aux(begins=[begin(1, 0, fields=fields)]))
    assert cut.aux == {}
    piece = driver.step([(0, 7, 3, 1)]).aux[0]
    oracle = random_transformers_model(MOE)
    with torch.no_grad():
        states = oracle(torch.tensor([A]), output_hidden_states=True).hidden_states
    expected = torch.stack([states[1][0], states[2][0]], dim=1).numpy()
    found = driver.rows(piece, HIDDEN_STATES)
    assert found.shape == expected.shape == (10, 2, 32)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    same(driver.rows(piece), driver.expected(0, 0, 10))
    only = driver.step([(1, 0, 4, 1)], [driver.admission(1, B)], aux(begins=[begin(2, 1, fields=(HIDDEN_STATES,))]))
    assert list(only.aux[0].data) == [HIDDEN_STATES]


def test_hidden_states_in_bfloat16_are_the_bits_of_the_tap(paths: dict[str, Path]) -> None:
    driver = Driver(
        paths["moe"], model={"ref": str(paths["moe"]), "dtype": "bfloat16"}, capture={"hidden_layers": (2,)}
    )
    driver.step([(0, 0, 4, 1)], [driver.admission(0, B)], aux(begins=[begin(1, 0, fields=(HIDDEN_STATES,))]))
    result = driver.decode(0)
    tap = driver.runner._capture._taps["hidden"].buffer  # type: ignore[union-attr]
    assert result.aux[0].data[HIDDEN_STATES] == tap[0, :1].view(torch.uint8).numpy().tobytes()
    assert driver.profile(HIDDEN_STATES).dtype == "bfloat16" and driver.profile(HIDDEN_STATES).layer_ids == (2,)
    driver.runner.close()


# -- off -------------------------------------------------------------------------------------------------------------


@pytest.mark.row("X-AUX", "with capture off nothing of it exists")
def test_capture_off_allocates_nothing_and_opens_no_tap(paths: dict[str, Path]) -> None:
    driver = Driver(paths["moe"], capture={})
    model: Any = driver.runner._model
    assert driver.runner._capture is None and driver.resolved.capture is None
    assert driver.runner.measured()["capture"] == 0
    tracemalloc.start(1)
    try:
        driver.prefill(0, A)
        driver.decode(0)
        found = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    names = ("capture.py", "captured_rows.py", "block_store.py", "background_store.py", "taps.py")
    traced = [s for s in found.statistics("filename") if Path(s.traceback[0].filename).name in names]
    assert traced == []
    assert [layer.route_tap for layer in model._sparse()] == [None, None] and model.hidden_taps == {}


def test_capture_changes_no_token(paths: dict[str, Path]) -> None:
    def tokens(capture: dict[str, Any], capture_id: int | None) -> list[StepResult]:
        driver = Driver(paths["moe"], capture=capture)
        results = [driver.prefill(0, A, capture_id), *(driver.decode(0) for _ in range(6))]
        driver.runner.close()
        return results

    on, off = tokens({"routed_experts": True}, 1), tokens({}, None)
    assert [result.token_ids for result in on] == [result.token_ids for result in off]
    assert all(result.aux == {} and result.aux_refused == [] for result in off)


# -- a field of a plugin ---------------------------------------------------------------------------------------------


class BestExpert:
    """The first choice of every router, as int32: another reading of the same tap."""

    def __init__(self, facts: TapFacts) -> None:
        shape = (len(facts.routed_layers),)
        self._profile = CaptureProfile(
            name="best_expert", dtype="int32", row_shape=shape, model_identity=facts.model_identity
        )

    def profile(self) -> CaptureProfile:
        return self._profile

    def select(self, tap: torch.Tensor, tokens: torch.Tensor, out: torch.Tensor) -> None:
        if (tokens >= 8).any():
            raise ValueError("planted")
        out.copy_(tap[:, :, 0].index_select(1, tokens).T)

    def encode(self, rows: bytes, count: int) -> bytes:
        return rows

    def decode(self, data: bytes, count: int) -> bytes:
        return data


class WithBestExpert:
    """A registry in which somebody's plugin declares it."""

    def __init__(self) -> None:
        self.inner = build_registry(PluginsSection())

    def specs(self, kind: Any) -> Any:
        return self.inner.specs(kind)

    def get(self, kind: Any, name: str) -> Any:
        if name == "best_expert":
            return dataclasses.replace(self.inner.get("artifact_field", MOE_ROUTES), name=name)
        return self.inner.get(kind, name)

    def origin(self, kind: Any, name: str) -> Any:
        return self.inner.origin(kind, MOE_ROUTES)

    def create(self, kind: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        return BestExpert(*args) if name == "best_expert" else self.inner.create(kind, name, *args, **kwargs)

    def probe(self, kind: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        return self.inner.probe(kind, name, *args, **kwargs)


@pytest.mark.row("X-AUX-KINDS", "a further kind is a small adapter; nothing of the life of a row changes")
def test_a_field_of_a_plugin_rides_along(paths: dict[str, Path]) -> None:
    """Prompt, prefix hit and answer; an error of the plugin costs its rows alone."""
    registry: Any = WithBestExpert()
    capture = {"routed_experts": True, "fields": ["best_expert"]}
    driver = Driver(paths["moe"], registry=registry, capture=capture)
    fields, known = (MOE_ROUTES, "best_expert"), kv_hashes(A)
    ids = A[:8]
    first = driver.step(
        [(0, 0, 8, 1)], [driver.admission(0, ids)], aux(begins=[begin(1, 0, fields=fields)], hashes=[(1, known)])
    )
    same(driver.rows(first.aux[0], "best_expert"), driver.expected(0, 0, 8)[:, :, 0])
    tables = [table[0].tolist()[:1] for table in driver.runner._batch._tables]
    hit = driver.step(
        [(1, 4, 4, 1)],
        [driver.admission(1, ids, shared=tables)],
        aux(begins=[begin(2, 1, 4, 0, known, fields=("best_expert",))]),
    )
    assert (hit.aux[0].num_cached, list(hit.aux[0].data)) == (4, ["best_expert"])
    same(driver.rows(hit.aux[0], "best_expert"), driver.expected(0, 0, 8)[:, :, 0])
    failed = driver.step(
        [(2, 0, 10, 1), (0, 8, 1, 1)],
        [driver.admission(2, A)],
        aux(begins=[begin(3, 2, fields=("best_expert",))]),
    )
    assert failed.aux[0].error == "best_expert could not be captured: ValueError: planted"
    assert [len(token_ids) for token_ids in failed.token_ids] == [1, 1]
    driver.runner.close()
