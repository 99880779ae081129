"""The runner against a dense reference: plan order, chunks, slots, windows, and rows that fail alone."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from infer.engine.sampling.philox import uniforms
from infer.engine.step import SamplingSpec, SlotAdmission, StepResult
from infer.engine.worker.runner import storage_bytes
from unit.engine.worker.toy_causal_lm import (
    BLOCK,
    NAN_TOKEN,
    VOCAB,
    Blocks,
    ToyLM,
    admission,
    generate,
    plan,
    toy_runner,
)

GREEDY = SamplingSpec(seed=0, temperature=0.0)


def dense_greedy(model: ToyLM, ids: list[int], count: int) -> list[int]:
    ids = list(ids)
    for _ in range(count):
        ids.append(int(model.dense_logits(ids)[-1].argmax()))
    return ids[-count:]


def test_a_request_alone_gives_the_tokens_of_the_dense_reference() -> None:
    model = ToyLM()
    tokens, results = generate(toy_runner(model), [5, 9, 11, 2, 40], GREEDY, 12)
    assert tokens == dense_greedy(model, [5, 9, 11, 2, 40], 12)
    assert all(result.errors == {} and result.logprobs == [None] for result in results)
    assert results[3].step_id == 3


def test_draws_are_keyed_by_seed_and_output_position() -> None:
    """The oracle: Philox, an exact cumulative sum, and the dense logits."""
    model, ids = ToyLM(), [5, 9, 11]
    spec = SamplingSpec(seed=2**62 + 5, temperature=2.0)
    tokens, _ = generate(toy_runner(model), ids, spec, 12)
    numbers = uniforms(np.full(12, spec.seed, dtype=np.uint64), np.arange(12, dtype=np.uint64))
    for position, number in enumerate(numbers.tolist()):
        logits = model.dense_logits(ids + tokens[:position])[-1].double()
        sums = list(itertools.accumulate(torch.softmax(logits / 2.0, dim=-1).tolist()))
        assert tokens[position] == next(i for i, total in enumerate(sums) if total > number)
    assert len(set(tokens)) > 4


def test_rows_come_back_in_the_plans_order_when_prefill_precedes_decode() -> None:
    model, blocks = ToyLM(), Blocks()
    runner = toy_runner(model)
    first, second, third = [1, 2, 3], [7, 8, 9, 10, 11], [20, 21]
    runner.execute(plan([(4, 0, 3, 1)], [admission(4, first, GREEDY, blocks)]))
    out = runner.execute(
        plan(
            [(1, 0, 5, 1), (4, 3, 1, 1), (0, 0, 2, 1)],
            [admission(1, second, GREEDY, blocks), admission(0, third, GREEDY, blocks)],
        )
    )
    assert out.token_ids == [
        dense_greedy(model, second, 1),
        dense_greedy(model, first, 2)[1:],
        dense_greedy(model, third, 1),
    ]


def test_a_prefill_chunk_that_is_not_the_last_emits_nothing_and_changes_nothing() -> None:
    model, blocks = ToyLM(), Blocks()
    runner = toy_runner(model)
    ids = list(range(1, 12))
    first = runner.execute(plan([(0, 0, 4, 0)], [admission(0, ids, GREEDY, blocks)]))
    second = runner.execute(plan([(0, 4, 6, 0)]))
    last = runner.execute(plan([(0, 10, 1, 1)]))
    assert (first.token_ids, second.token_ids) == ([[]], [[]])
    assert last.token_ids == [dense_greedy(model, ids, 1)]


def test_blocks_that_arrive_later_continue_the_table() -> None:
    model = ToyLM()
    runner = toy_runner(model)
    ids = [3, 1, 4, 1]
    token = runner.execute(plan([(0, 0, 4, 1)], [admission(0, ids, GREEDY, Blocks(), room=4)])).token_ids[0][0]
    after = runner.execute(plan([(0, 4, 1, 1)], new_blocks=[(0, 0, [100])])).token_ids[0][0]
    assert [token, after] == dense_greedy(model, ids, 2)


def test_a_slot_freed_and_admitted_in_one_plan_holds_nothing_of_its_predecessor() -> None:
    model, blocks = ToyLM(), Blocks()
    runner = toy_runner(model)
    penalised = SamplingSpec(seed=0, temperature=0.0, repetition_penalty=50.0)
    runner.execute(plan([(2, 0, 9, 1)], [admission(2, range(1, 10), penalised, blocks)]))
    out = runner.execute(plan([(2, 0, 3, 1)], [admission(2, [11, 12, 13], GREEDY, blocks, room=4)], freed=[2]))
    assert out.token_ids == [dense_greedy(model, [11, 12, 13], 1)]


def test_a_request_resumed_after_preemption_continues_with_the_same_draws() -> None:
    model = ToyLM()
    spec = SamplingSpec(seed=99, temperature=1.5, repetition_penalty=1.3, frequency_penalty=0.4, bad_words=((1, 2),))
    whole, _ = generate(toy_runner(model), [5, 6, 7], spec, 8)
    runner, blocks = toy_runner(model), Blocks()
    ids = [5, 6, 7, *whole[:5]]
    out = runner.execute(plan([(3, 0, 8, 1)], [admission(3, ids, spec, blocks, prompt_len=3)]))
    tokens = [out.token_ids[0][0]]
    for start in (8, 9):
        tokens.append(runner.execute(plan([(3, start, 1, 1)])).token_ids[0][0])
    assert tokens == whole[5:]


@pytest.mark.row("SAMPLE-N", "n=4 with seed s equals four requests with seeds s..s+3")
def test_forks_draw_and_continue_like_requests_of_their_own() -> None:
    model, blocks, ids = ToyLM(), Blocks(), [5, 9, 11, 2, 40, 17]  # one full block to share, one to copy
    specs = [SamplingSpec(seed=70 + i, temperature=1.5, presence_penalty=0.5, logprobs=1) for i in range(4)]
    alone = [generate(toy_runner(model), ids, spec, 6)[0] for spec in specs]
    runner = toy_runner(model)
    companion = admission(5, [1, 2, 3], GREEDY, blocks)
    first = admission(0, ids, specs[0], blocks)
    shared, last, *_ = first.block_ids[0]
    forks = [SlotAdmission(i, ids, 6, specs[i], ([shared, *blocks.take(4)],)) for i in (1, 2, 3)]
    step = plan([(5, 0, 3, 1), (0, 0, 6, 1)], [companion, first, *forks])
    step.forks = [(1, 1), (1, 2), (1, 3)]
    step.copies = [(0, last, fork.block_ids[0][1]) for fork in forks]
    outputs = [[ids[0]] for ids in runner.execute(step).token_ids[1:]]
    for start in range(6, 11):
        result = runner.execute(plan([(slot, start, 1, 1) for slot in (3, 0, 2, 1)]))
        for slot, token_ids in zip((3, 0, 2, 1), result.token_ids, strict=True):
            outputs[slot] += token_ids
    assert outputs == alone


@pytest.mark.row("X-POISON", "a choice that cannot be taken in fails alone; a failed prompt fails its choices")
def test_failed_forks_fail_alone_and_with_their_row() -> None:
    model, blocks = ToyLM(), Blocks()
    wrong = SamplingSpec(seed=0, allowed_token_ids=(VOCAB,))
    new = [admission(slot, [1, 2, 3], spec, blocks) for slot, spec in ((0, GREEDY), (1, wrong), (2, GREEDY))]
    new += [admission(3, [4, NAN_TOKEN], GREEDY, blocks), admission(4, [4, NAN_TOKEN], GREEDY, blocks)]
    step = plan([(0, 0, 3, 1), (3, 0, 2, 1)], new)
    step.forks = [(0, 1), (0, 2), (1, 4)]
    result = toy_runner(model).execute(step)
    token = dense_greedy(model, [1, 2, 3], 1)
    assert result.token_ids == [token, [], [], token, []]
    assert set(result.errors) == {1, 2, 4} and "allowed_token_ids" in result.errors[2]
    assert result.errors[4] == result.errors[1] == "logits hold NaN"


@pytest.mark.parametrize("window", [1, 5, 8])
def test_blocks_dropped_by_a_window_may_hold_anything(window: int) -> None:
    """The pool gives a dropped block to another request: what is in it must not matter."""
    model, blocks = ToyLM(window=window, groups=2), Blocks()
    runner = toy_runner(model)
    ids = list(range(1, 14))
    out = runner.execute(plan([(0, 0, 13, 1)], [admission(0, ids, GREEDY, blocks, groups=2)]))
    tokens = list(out.token_ids[0])
    table = runner._batch._tables[1][0].tolist()
    dropped = (13 - window + 1) // BLOCK
    assert dropped > 0
    for start in (13, 14, 15):
        for block in table[:dropped]:
            runner._kv[1][0][block] = float("nan")
        tokens += runner.execute(plan([(0, start, 1, 1)])).token_ids[0]
        full, sliding = model.tables
        assert full[0].all() and not sliding[0, :dropped].any(), "what was dropped is the null block, as promised"
    assert tokens == dense_greedy(model, ids, 4)


@pytest.mark.row("X-POISON", "a row whose logits hold NaN fails alone; companions get their solo tokens")
def test_a_row_with_nan_logits_fails_alone() -> None:
    model, blocks = ToyLM(), Blocks()
    runner = toy_runner(model)
    good = SamplingSpec(seed=4, temperature=1.0, top_k=20, logprobs=2)
    alone, _ = generate(toy_runner(model), [1, 2, 3], good, 3)
    out = runner.execute(
        plan(
            [(0, 0, 3, 1), (1, 0, 2, 1), (2, 0, 3, 1)],
            [
                admission(0, [1, 2, 3], good, blocks),
                admission(1, [4, NAN_TOKEN], good, blocks),
                admission(2, [1, 2, 3], good, blocks),
            ],
        )
    )
    assert out.errors == {1: "logits hold NaN"}
    assert out.token_ids == [[alone[0]], [], [alone[0]]]
    assert out.logprobs[1] is None and out.logprobs[0] == out.logprobs[2]
    later = runner.execute(plan([(0, 3, 1, 1), (2, 3, 1, 1)], freed=[1]))
    assert later.token_ids == [[alone[1]], [alone[1]]]


@pytest.mark.row("X-POISON", "a step in flight behind a failed row does not hurt the others")
def test_a_step_planned_before_a_row_failed_still_serves_the_others() -> None:
    model, blocks = ToyLM(), Blocks()
    runner = toy_runner(model)
    runner._batch._tokens.fill_(2**31 - 1)  # what memory that was never written may hold
    ids = {0: [1, 2, 3], 1: [4, NAN_TOKEN, 5], 2: [4, NAN_TOKEN]}
    specs = {0: GREEDY, 1: SamplingSpec(seed=0, prompt_logprobs=0), 2: GREEDY}
    new = [admission(slot, ids[slot], specs[slot], blocks) for slot in ids]
    first = runner.execute(plan([(slot, 0, len(ids[slot]), 1) for slot in ids], new))
    second = runner.execute(plan([(slot, len(ids[slot]), 1, 1) for slot in ids]))
    assert set(first.errors) == {1, 2}
    assert first.token_ids[0] + second.token_ids[0] == dense_greedy(model, ids[0], 2)


@pytest.mark.row("X-POISON", "a request with an id or setting the worker cannot take fails alone with its reason")
@pytest.mark.parametrize(
    ("ids", "spec", "reason"),
    [
        ([1, 10**30], GREEDY, "1000000000000000000000000000000"),
        ([1, VOCAB], GREEDY, "token id 64"),
        ([-1, 2], GREEDY, "token id -1"),
        ([1, 2], SamplingSpec(seed=0, temperature=float("nan")), "temperature=nan"),
        ([1, 2], SamplingSpec(seed=0, logit_bias=((3, float("inf")),)), "logit_bias"),
        ([1, 2], SamplingSpec(seed=0, logit_bias=((VOCAB, 1.0),)), "logit_bias names token id 64"),
        ([1, 2], SamplingSpec(seed=0, allowed_token_ids=(VOCAB,)), "allowed_token_ids names token id 64"),
        ([1, 2], SamplingSpec(seed=0, bad_words=((1, VOCAB),)), "bad_words names token id 64"),
        ([1, 2], SamplingSpec(seed=-1), "seed=-1"),
        ([1, 2], SamplingSpec(seed=0, allowed_token_ids=(5,), bad_words=((5,),)), "no token is left"),
        ([], GREEDY, "0 tokens"),
    ],
)
def test_a_poisoned_request_fails_alone(ids: list[int], spec: SamplingSpec, reason: str) -> None:
    model, blocks = ToyLM(), Blocks()
    runner = toy_runner(model)
    out = runner.execute(
        plan(
            [(0, 0, 2, 1), (1, 0, 3, 1)],
            [admission(0, ids, spec, blocks, prompt_len=2), admission(1, [1, 2, 3], GREEDY, blocks)],
        )
    )
    assert list(out.errors) == [0] and reason in out.errors[0]
    assert out.token_ids == [[], dense_greedy(model, [1, 2, 3], 1)]
    again = runner.execute(plan([(1, 3, 1, 1), (0, 0, 2, 1)], [admission(0, [8, 9], GREEDY, blocks)], [0]))
    assert again.errors == {} and again.token_ids[1] == dense_greedy(model, [8, 9], 1)


def test_a_step_whose_forward_raises_is_a_step_failure_and_the_runner_goes_on() -> None:
    model = ToyLM()
    runner = toy_runner(model)
    forward, model.forward = model.forward, None  # type: ignore[method-assign, assignment]
    with pytest.raises(TypeError):
        generate(runner, [1, 2], GREEDY, 1)
    model.forward = forward  # type: ignore[method-assign]
    assert generate(runner, [1, 2], GREEDY, 2)[0] == dense_greedy(model, [1, 2], 2)


def prompt_entries(chunks: list[int], ids: list[int], spec: SamplingSpec, model: ToyLM) -> list[StepResult]:
    runner, blocks = toy_runner(model), Blocks()
    runner.execute(plan([(0, 0, 2, 1)], [admission(0, [50, 51], GREEDY, blocks)]))
    results, start = [], 0
    for count in chunks:
        last = start + count == len(ids)
        new = [admission(1, ids, spec, blocks)] if start == 0 else []
        # a decoding companion after it in the plan, so that plan order is not forward order
        rows = [(1, start, count, int(last)), (0, 2 + len(results), 1, 1)]
        results.append(runner.execute(plan(rows, new)))
        start += count
    return results


@pytest.mark.row("SAMPLE-PROMPT-LOGPROBS", "with and without chunked prefill")
@pytest.mark.parametrize("chunks", [[11], [1, 10], [4, 4, 3], [10, 1], [1] * 11])
@pytest.mark.parametrize("mode", ["raw", "processed", "raw_logits", "processed_logits"])
def test_prompt_logprobs_cover_every_position_once(chunks: list[int], mode: str) -> None:
    model = ToyLM()
    ids = [5, 9, 11, 2, 40, 7, 7, 30, 12, 1, 6]
    candidates = (7, 0, 41)
    spec = SamplingSpec(seed=0, prompt_logprobs=3, logprobs_mode=mode, logprob_token_ids=candidates)  # type: ignore[arg-type]
    results = prompt_entries(chunks, ids, spec, model)
    entries = [entry for result in results for entry in result.prompt_logprobs.get(0, [])]
    logits = model.dense_logits(ids)[:-1].double()
    values = torch.log_softmax(logits, dim=-1) if mode in ("raw", "processed") else logits
    assert [entry.token_id for entry in entries] == ids[1:]
    for position, entry in enumerate(entries):
        row = values[position]
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert entry.rank == 1 + int((row > row[entry.token_id] + 1e-9).sum())
        best = row.topk(3)
        assert [i for i, _ in entry.top] == best.indices.tolist()
        assert [v for _, v in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert list(entry.candidates) == pytest.approx(row[list(candidates)].tolist(), abs=1e-4)
        assert entry.kept_logmass is None


@pytest.mark.row("SAMPLE-PROMPT-LOGPROBS", "extra memory bounded by chunk x vocabulary")
def test_prompt_logits_are_taken_a_fixed_number_of_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.engine.worker.runner.chunk_rows", lambda vocab_size: 3)
    monkeypatch.setattr("infer.engine.worker.runner.prompt_rows", lambda vocab_size: 4)
    model = ToyLM()
    results = prompt_entries([11], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], SamplingSpec(seed=0, prompt_logprobs=0), model)
    assert model.logits_rows == [1, 4, 4, 2, 2]
    assert len(results[0].prompt_logprobs[0]) == 10


def test_a_resumed_request_reports_prompt_positions_only() -> None:
    spec = SamplingSpec(seed=0, prompt_logprobs=0)
    out = toy_runner().execute(plan([(0, 0, 6, 1)], [admission(0, [1, 2, 3, 4, 5, 6], spec, Blocks(), prompt_len=4)]))
    assert [entry.token_id for entry in out.prompt_logprobs[0]] == [2, 3, 4]


def test_nan_at_a_prompt_position_fails_that_row_alone() -> None:
    model, blocks = ToyLM(), Blocks()
    spec = SamplingSpec(seed=0, temperature=0.0, prompt_logprobs=1)
    out = toy_runner(model).execute(
        plan(
            [(0, 0, 3, 1), (1, 0, 3, 1)],
            [admission(0, [1, NAN_TOKEN, 3], spec, blocks), admission(1, [1, 2, 3], spec, blocks)],
        )
    )
    assert list(out.errors) == [0] and "prompt position" in out.errors[0]
    assert list(out.prompt_logprobs) == [1] and out.token_ids == [[], dense_greedy(model, [1, 2, 3], 1)]


def test_warm_up_runs_the_widest_step_and_leaves_nothing_behind() -> None:
    model = ToyLM()
    runner = toy_runner(model)
    runner.warm_up()
    assert model.logits_rows == [8]
    assert not any(bool(tensor.any()) for pair in runner._kv.values() for tensor in pair)
    assert generate(runner, [1, 2], GREEDY, 3)[0] == dense_greedy(model, [1, 2], 3)


def test_an_empty_plan_only_frees() -> None:
    runner = toy_runner()
    generate(runner, [1, 2], GREEDY, 1)
    out = runner.execute(plan([], freed=[0], step_id=9))
    assert (out.step_id, out.token_ids, out.errors) == (9, [], {})
    assert runner._batch._rows[0] is None


def test_measured_counts_each_storage_once() -> None:
    tensor = torch.zeros(10, dtype=torch.bfloat16)
    assert storage_bytes([tensor, tensor[2:], torch.zeros(3)]) == 20 + 12
    assert toy_runner().measured()["kv_cache"] == 2 * 129 * BLOCK * 16 * 4


def test_close_twice_frees_the_model_and_refuses_steps() -> None:
    runner = toy_runner()
    runner.close()
    runner.close()
    with pytest.raises(RuntimeError, match="closed"):
        generate(runner, [1], GREEDY, 1)
