"""The real engine on random tiny models under load: many prompts at once, chunks, preemption, two steps in flight.
Oracle: transformers, one prompt at a time. The step trace is what the executor was given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from infer import Engine, SamplingParams
from infer.engine.step import StepPlan

from .engine_support import (
    ARCHITECTURES,
    Oracle,
    Trace,
    assert_nothing_held,
    engine_config,
    greedy,
    ids,
    mostly_compared,
    parts_of,
    prompt,
    record,
    same_tokens,
    serve,
    spoil,
    write_checkpoint,
)

LLAMA = ARCHITECTURES["llama"]
LENGTHS = [3, 70, 9, 41, 1, 120, 17, 33, 64, 5, 90, 25, 2, 48, 11, 77]
PROMPTS = [prompt(length) for length in LENGTHS]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), LLAMA)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle.random(LLAMA)


def rows(plan: StepPlan) -> list[tuple[int, int, int]]:
    return list(zip(plan.slots, plan.starts, plan.counts, strict=True))


def assert_running_first(trace: Trace) -> int:
    """Rows that hold a slot come before rows that take one, and none of the former is left out. Returns admissions."""
    running: set[int] = set()
    admissions = 0
    for plan in trace.plans:
        running -= set(plan.freed_slots)
        new = [admission.slot for admission in plan.admissions]
        assert list(plan.slots)[len(plan.slots) - len(new) :] == new
        if new:
            assert set(plan.slots) - set(new) == running
        running |= set(new)
        admissions += len(new)
    return admissions


def test_the_oracle_repeats_itself(oracle: Oracle) -> None:
    """Five runs give equal bits: a difference between us and it is never its own noise."""
    runs = [oracle.logits(PROMPTS[1]) for _ in range(5)]
    assert all(torch.equal(run, runs[0]) for run in runs)
    answers = [oracle.greedy(PROMPTS[1], 8) for _ in range(5)]
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.row("ENG-SCHED-CORE", "16 mixed-length prompts at once give the tokens of transformers one at a time")
@pytest.mark.row("ENG-SCHED-CORE", "the step trace never exceeds budget or max sequences, running before waiting")
@pytest.mark.parametrize("depth", [1, 2])
def test_sixteen_prompts_at_once(model: Path, oracle: Oracle, depth: int) -> None:
    scheduler = {"max_num_seqs": 6, "max_num_batched_tokens": 48, "in_flight_depth": depth}
    with serve(model, scheduler=scheduler) as engine:
        trace = record(engine)
        done = engine.generate_many(PROMPTS, greedy(32), max_concurrent=16)
        assert_nothing_held(engine)
    counts = [same_tokens(c.token_ids, oracle.greedy(p, 32)) for p, c in zip(PROMPTS, done, strict=True)]
    mostly_compared(counts, 16 * 32)
    assert all(plan.num_tokens <= 48 and len(set(plan.slots)) == len(plan.slots) <= 6 for plan in trace.plans)
    assert max(len(plan.slots) for plan in trace.plans) == 6 and max(plan.num_tokens for plan in trace.plans) == 48
    assert trace.num_tokens == sum(LENGTHS) + 16 * 31  # the last token of each is never fed back
    if depth == 1:  # at depth 2 a row whose last token is in flight sits a step out
        assert assert_running_first(trace) == 16


def test_a_wrong_rotation_is_noticed(model: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: without rotary embeddings it does."""
    spoil(monkeypatch, lambda ops: {"rotary": lambda q, k, cos, sin: (q, k)})
    with serve(model) as engine:
        done = engine.generate_many(PROMPTS[:4], greedy(32))
    expected = [oracle.greedy(p, 32) for p in PROMPTS[:4]]
    with pytest.raises(AssertionError):
        for completion, answer in zip(done, expected, strict=True):
            same_tokens(completion.token_ids, answer)


@pytest.mark.row("ENG-CHUNKED-PREFILL", "tokens and logprobs at budgets 16, 37 and 512 agree within 1e-5")
def test_a_long_prompt_in_chunks_of_any_size(model: Path, oracle: Oracle) -> None:
    long = prompt(300)
    answers = {}
    for budget in (16, 37, 512):
        with serve(model, scheduler={"max_num_batched_tokens": budget}) as engine:
            trace = record(engine)
            answers[budget] = engine.generate(long, greedy(16, logprobs=3))
            chunks = [plan.num_tokens for plan in trace.plans if plan.starts[0] < 300]
            assert chunks == [budget] * (300 // budget) + ([300 % budget] if 300 % budget else [])
            assert [sum(plan.samples) for plan in trace.plans[: len(chunks)]] == [0] * (len(chunks) - 1) + [1]
    expected = oracle.greedy(long, 16)
    for answer in answers.values():
        assert same_tokens(answer.token_ids, expected) == 16
        for entry, other in zip(answer.logprobs or (), answers[512].logprobs or (), strict=True):
            assert entry.logprob == pytest.approx(other.logprob, abs=1e-5)
            assert [i for i, _ in entry.top] == [i for i, _ in other.top]
            assert [v for _, v in entry.top] == pytest.approx([v for _, v in other.top], abs=1e-5)


@pytest.mark.row("ENG-CHUNKED-PREFILL", "another request's decode appears between two chunks in the trace")
def test_others_decode_while_a_long_prompt_is_computed(model: Path, oracle: Oracle) -> None:
    """The short request holds slot A before the long one comes; A decodes in each step that computes a chunk."""
    long, short = prompt(300), prompt(8)

    async def main() -> tuple[Any, Any, Trace]:
        async with Engine(engine_config(model, scheduler={"max_num_batched_tokens": 32})) as engine:
            trace = record(engine)
            answers: dict[str, Any] = {}

            async def ask(name: str, token_ids: list[int], params: SamplingParams) -> None:
                answers[name] = await engine.generate(token_ids, params)

            async with anyio.create_task_group() as tasks, engine.stream(short, greedy(60)) as stream:
                got = list((await anext(stream)).token_ids)
                tasks.start_soon(ask, "long", long, greedy(4))
                async for delta in stream:
                    got += delta.token_ids
            return got, answers["long"], trace

    got, answer, trace = anyio.run(main)
    same_tokens(got, oracle.greedy(short, 60))
    same_tokens(answer.token_ids, oracle.greedy(long, 4))
    slot = next(a.slot for plan in trace.plans for a in plan.admissions if a.prompt_len == 300)
    chunks = [i for i, plan in enumerate(trace.plans) for s, start, n in rows(plan) if s == slot and start + n <= 300]
    assert len(chunks) == 10  # 31 tokens a step beside one decode row
    for first, second in pairwise(chunks):
        assert any(s != slot and n == 1 for plan in trace.plans[first : second + 1] for s, _, n in rows(plan))


def resumed(trace: Trace) -> int:
    """Admissions that bring output tokens along: requests computed again after preemption."""
    return sum(len(a.token_ids) > a.prompt_len for plan in trace.plans for a in plan.admissions)


@pytest.mark.row("ENG-PREEMPT-RECOMPUTE", "tokens equal the uncapped run; counter matches the trace; free equals total")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_preempted_requests_lose_nothing(model: Path, oracle: Oracle, depth: int, prefix_caching: bool) -> None:
    prompts = [prompt(length, seed=5) for length in (30, 22, 40, 18, 27, 35)]
    params = [greedy(40, logprobs=0), SamplingParams(seed=3, max_tokens=40, ignore_eos=True)] * 3
    scheduler = {"in_flight_depth": depth}
    with serve(model, scheduler=scheduler) as engine:
        free = engine.generate_many(prompts, params)
        assert engine.engine.statistics().preemptions == 0
    cache = {"num_blocks": 16, "prefix_caching": prefix_caching}
    with serve(model, scheduler=scheduler, cache=cache) as engine:
        trace = record(engine)
        tight = engine.generate_many(prompts, params)
        preemptions = engine.engine.statistics().preemptions
        assert_nothing_held(engine)
    assert preemptions >= 3
    assert preemptions == sum(len(plan.admissions) for plan in trace.plans) - len(prompts)
    assert 0 < resumed(trace) <= preemptions
    assert ids(tight) == ids(free)
    for index in (0, 2, 4):
        same_tokens(tight[index].token_ids, oracle.greedy(prompts[index], 40))
        mine, other = tight[index].logprobs or (), free[index].logprobs or ()
        assert [e.logprob for e in mine] == pytest.approx([e.logprob for e in other], abs=1e-5)


STRESS = [
    (prompt(150, seed=9), greedy(20)),  # three chunks and more
    (prompt(10, seed=9), greedy(1)),  # one token only
    (prompt(60, seed=9), SamplingParams(seed=1, max_tokens=48, ignore_eos=True, logprobs=1)),
    (prompt(33, seed=9), SamplingParams(seed=2, max_tokens=40, stop=("e", "t"), ignore_eos=True)),
    (prompt(7, seed=9), greedy(1, logprobs=2)),
    (prompt(90, seed=9), SamplingParams(seed=4, max_tokens=50, repetition_penalty=1.3, frequency_penalty=0.5)),
    (prompt(21, seed=9), SamplingParams(seed=5, max_tokens=44, bad_words=("the",), min_tokens=5)),
    (prompt(45, seed=9), greedy(36, prompt_logprobs=1)),
    (prompt(16, seed=9), SamplingParams(seed=6, max_tokens=30, n=3)),
]


def run_stress(model: Path, depth: int) -> tuple[list[Any], int, int]:
    """Everything at once over a small pool, and one request aborted halfway. Returns answers, preemptions, lowest
    count of samples in flight that any request ever had."""

    async def main() -> tuple[list[Any], int, int]:
        config = engine_config(
            model,
            scheduler={"in_flight_depth": depth, "max_num_batched_tokens": 50},
            cache={"num_blocks": 18, "watermark": 0.0},
        )
        async with Engine(config) as engine:
            scheduler = parts_of(engine).scheduler
            apply, lowest = scheduler.apply, 0
            depths: Counter[int] = Counter()

            def watched(result: Any) -> None:
                nonlocal lowest
                depths[len(scheduler._in_flight)] += 1
                apply(result)
                pending = [r.num_in_flight for r in [*scheduler.running, *scheduler.waiting]]
                lowest = min([lowest, *pending])

            scheduler.apply = watched
            answers: list[Any] = [None] * len(STRESS)

            async def ask(index: int) -> None:
                answers[index] = await engine.generate(*STRESS[index])

            async def leave_early() -> None:
                async with engine.stream(prompt(26, seed=9), greedy(200)) as stream:
                    async for _ in stream:
                        if len(stream._choices[0].token_ids) >= 12:
                            break

            async with anyio.create_task_group() as tasks:
                for index in range(len(STRESS)):
                    tasks.start_soon(ask, index)
                tasks.start_soon(leave_early)
            for _ in range(100):
                if not scheduler.num_unfinished:
                    break
                await anyio.sleep(0.01)
            assert_nothing_held(engine)
            assert max(depths) == depth
            return answers, engine.statistics().preemptions, lowest

    return anyio.run(main)


@pytest.fixture(scope="module")
def stressed(model: Path) -> Iterator[dict[int, tuple[list[Any], int, int]]]:
    yield {depth: run_stress(model, depth) for depth in (1, 2, 4)}


@pytest.mark.row("ENG-ASYNC-SCHED", "a stress mix gives identical tokens with it on and off")
@pytest.mark.row("ENG-ASYNC-SCHED", "pending-placeholder counts never go negative")
def test_steps_in_flight_change_nothing(stressed: dict[int, tuple[list[Any], int, int]], oracle: Oracle) -> None:
    plain = stressed[1][0]
    assert plain[3].finish_reason == "stop" and plain[3].stop_reason in ("e", "t")
    for answers, preemptions, lowest in stressed.values():
        assert preemptions > 0 and lowest == 0
        for answer, other in zip(answers, plain, strict=True):
            assert [c.token_ids for c in answer.choices] == [c.token_ids for c in other.choices]
            assert [(c.text, c.finish_reason) for c in answer.choices] == [
                (c.text, c.finish_reason) for c in other.choices
            ]
    for index in (0, 1, 4, 7):
        token_ids, params = STRESS[index]
        same_tokens(plain[index].token_ids, oracle.greedy(token_ids, params.max_tokens or 0))


@pytest.mark.row("ENG-ASYNC-SCHED", "on by default where compatible")
def test_two_steps_in_flight_is_the_default(model: Path) -> None:
    with serve(model) as engine:
        assert engine.engine.config.scheduler.in_flight_depth == "auto"
        assert engine.engine.resolved.scheduler.in_flight_depth == 2
