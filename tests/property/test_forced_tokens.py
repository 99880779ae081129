"""Tokens that a grammar forces, skipped or not: the same answers under any order of arrivals, ends, resets, failures and
results, against one request alone. The fake worker checks the content of every KV position that a step reads."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.engine.request import Request, Status
from infer.engine.sampling.guide import MAX_AHEAD, make_guide
from infer.engine.step import SamplingSpec, StepPlan
from infer.errors import GrammarError
from infer.plugins.grammar import GrammarSource, Matcher, Vocabulary
from infer.testing.fake_executor import hashed_token
from step_driver import (
    PlannedFailure,
    StepDriver,
    drawn_cache,
    fetch,
    new_request,
    output,
)

ROW = "ENG-SGLANG-BEHAVIOR-FLAG"
SIZE, STOP, END = 40, 3, 39
"""Of the vocabulary; an id that the caller stops at; the end of sequence."""
LIMIT = "a limit of the grammar"


def allowed(family: str, taken: Sequence[int]) -> tuple[set[int], bool]:
    """(what may come next, whether the answer may end here) of a made-up language: every beginning decides by chance, most
    allow one token alone. Raises `GrammarError` where the language cannot be followed."""
    chance = random.Random(f"{family}:{','.join(map(str, taken))}")
    kind = chance.random()
    if kind < 0.02:
        raise GrammarError(LIMIT)
    if len(taken) > 2 and kind < 0.05:
        return set(), True
    count = 1 if chance.random() < 0.7 else chance.randint(2, 6)
    return set(chance.sample(range(END), count)), chance.random() < 0.05


class MadeUp:
    """Implements `plugins.grammar.Matcher` over `allowed`."""

    def __init__(self, family: str) -> None:
        self.family = family
        self.taken: list[int] = []

    def _here(self) -> tuple[set[int], bool]:
        return allowed(self.family, self.taken)

    def accept(self, token_id: int) -> str | None:
        if token_id not in self._here()[0]:
            return f"token {token_id} does not fit"
        self.taken.append(token_id)
        return None

    def fill(self, mask: bytearray) -> None:
        mask[:] = bytes(len(mask))
        for token_id in self._here()[0] | ({END} if self.can_end else set()):
            mask[token_id >> 3] |= 1 << (token_id & 7)

    @property
    def can_end(self) -> bool:
        try:
            return self._here()[1]
        except GrammarError:
            return False

    @property
    def is_complete(self) -> bool:
        return self.can_end and not self._here()[0]


class MadeUpGrammars:
    """Implements `sampling.guide.Grammars`."""

    vocabulary = Vocabulary(
        tokens=[bytes([65 + token_id]) for token_id in range(SIZE)],
        special_ids=frozenset({END}),
        eos_token_ids=(END,),
        encode=lambda text: [byte - 65 for byte in text.encode()],
    )

    def __init__(self, *, skip: bool) -> None:
        self.skip_forced_tokens = skip

    def matcher(self, source: GrammarSource) -> Matcher:
        return MadeUp(source.text)


def expected(request: Request) -> tuple[list[int], str]:
    """(tokens, finish reason) of the request when nobody else exists and every token has its own step."""
    draw = hashed_token(SIZE)
    known, out = list(request.token_ids[: request.prompt_len]), list[int]()
    grammar = request.sampling.grammar
    while True:
        wanted = draw(known, request.sampling)
        if grammar is not None:
            try:
                choices, can_end = allowed(grammar.text, out)
            except GrammarError:  # the fake worker draws freely, and the guide then refuses
                return [*out, wanted], "error"
            may = sorted(choices | ({END} if can_end else set()))
            if may and wanted not in may:
                wanted = may[wanted % len(may)]
        out.append(wanted)
        known.append(wanted)
        if wanted in request.stop_ids:
            return out, "stop"
        if grammar is not None and _is_whole(grammar.text, out):
            return out, "stop"
        if len(out) >= request.max_tokens:
            return out, "length"


def _is_whole(family: str, out: Sequence[int]) -> bool:
    try:
        choices, can_end = allowed(family, out)
    except GrammarError:
        return False
    return can_end and not choices


configurations = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 4, 16]),
        "capacity": st.sampled_from([160, 320, 1600]),
        "window": st.sampled_from([None, None, 1, 5, 16]),
        "prefix_caching": st.booleans(),
        "depth": st.integers(1, 4),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.sampled_from([7, 16, 64]),
        "long_prefill_threshold": st.sampled_from([0, 20]),
    }
)
asked = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(0, END - 1), min_size=1, max_size=60),
        "max_tokens": st.integers(1, 40),
        "choices": st.sampled_from([1, 1, 2, 3]),
        "family": st.sampled_from([None, "a", "b", "c", "d"]),
        "logprobs": st.sampled_from([None, 0]),
        "priority": st.integers(0, 2),
    }
)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), asked),
        st.tuples(st.just("schedule"), st.sampled_from([False] * 9 + [True])),
        st.tuples(st.just("serve"), st.integers(1, 6)),
        st.tuples(st.just("end"), st.integers(0, 9)),
        st.tuples(st.just("reset"), st.booleans()),
    ),
    max_size=25,
)


def make_driver(values: dict[str, Any], *, skip: bool) -> StepDriver:
    values = dict(values)
    cache = drawn_cache(values)
    del values["depth"]
    driver = StepDriver(cache, next_token=hashed_token(SIZE), **values)
    driver.worker.grammars = MadeUpGrammars(skip=skip)
    return driver


class Load:
    """One scheduler with guided and free requests."""

    def __init__(self, values: dict[str, Any], *, skip: bool) -> None:
        self.depth: int = values["depth"]
        self.driver = make_driver(values, skip=skip)
        self.disturbed: set[str] = set()
        self.failures = False

    def add(self, prompt: list[int], max_tokens: int, choices: int, family: str | None, **options: Any) -> None:
        limit = self.driver.kv.max_request_tokens() or 0
        prompt = prompt[-(limit - 2) :]
        if family is not None:
            options |= {"grammar": GrammarSource(kind="regex", text=family), "end_ids": (END,)}
        first = len(self.driver.requests)
        group = [
            new_request(
                prompt,
                min(max_tokens, limit - len(prompt)),
                arrival=first + index,
                stop_ids={STOP: STOP, END: None},
                seed=index,
                **options,
            )
            for index in range(choices)
        ]
        for index, request in enumerate(group):
            request.choice_index = index
            request.outbox = group[0].outbox
        group[0].siblings = tuple(group[1:])
        self.driver.requests += group
        self.driver.scheduler.add(group[0])

    def schedule(self, failing: bool) -> bool:
        if len(self.driver.in_flight) >= self.depth:
            return False
        self.driver.worker.fail_at = _fail if failing else lambda plan: None
        step = self.driver.schedule()
        if step is None:
            return False
        self.failures = self.failures or failing
        assert step.plan.num_tokens <= self.driver.scheduler.config.max_num_batched_tokens
        return True

    def serve(self, steps: int) -> None:
        for _ in range(steps):
            while self.schedule(False):
                pass
            if self.driver.in_flight:
                self.driver.apply()
            self.check()

    def end(self, index: int) -> None:
        if index < len(self.driver.requests):
            request = self.driver.requests[index]
            if request.status is not Status.FINISHED:
                self.disturbed.add(request.request_id)
            self.driver.scheduler.finish(request, "abort")

    def reset(self, restart: bool) -> None:
        self.driver.scheduler.reset_prefix_cache(restart_running=restart)

    def check(self) -> None:
        for request in self.driver.requests:
            assert 0 <= request.num_discarded <= request.num_in_flight
            assert request.num_output + request.num_pending <= request.max_tokens or request.finish_reason
            if request.status is Status.RUNNING:
                assert request.num_computed <= len(request.token_ids) + request.num_pending

    def finish(self) -> list[tuple[list[int], str | None]]:
        """Serve to the end and compare with each request alone."""
        self.driver.worker.fail_at = lambda plan: None
        self.driver.run(self.depth)
        for request in self.driver.requests:
            tokens, reason = expected(request)
            if request.request_id in self.disturbed or (self.failures and request.finish_reason == "error"):
                assert output(request) == tokens[: len(output(request))]
            else:
                assert (output(request), request.finish_reason) == (tokens, reason)
        self.check_deliveries()
        self.driver.assert_nothing_left()
        return [(output(request), request.finish_reason) for request in self.driver.requests]

    def check_deliveries(self) -> None:
        by_outbox: dict[int, list[Request]] = {}
        for request in self.driver.requests:
            by_outbox.setdefault(id(request.outbox), []).append(request)
        for group in by_outbox.values():
            for update in fetch(group[0]):
                request = group[update.choice_index]
                assert update.token_ids == output(request)
                if request.sampling.logprobs is not None:
                    assert [entry.token_id for entry in update.logprobs] == update.token_ids


def _fail(plan: StepPlan) -> Exception:
    return PlannedFailure("planted")


def play(values: dict[str, Any], script: list[tuple[str, Any]], *, skip: bool) -> Load:
    load = Load(values, skip=skip)
    for name, argument in script:
        if name == "add":
            load.add(**argument)
        else:
            getattr(load, name)(argument)
        load.check()
    return load


@pytest.mark.row(ROW, "with forced-token skipping the tokens are identical, under any schedule")
@given(values=configurations, script=actions)
def test_skipping_changes_no_answer(values: dict[str, Any], script: list[tuple[str, Any]]) -> None:
    for skip in (False, True):
        load = play(values, script, skip=skip)
        load.finish()
        assert skip or load.driver.scheduler.stats.draft_tokens == 0


def random_script(chance: random.Random) -> list[tuple[str, Any]]:
    """Longer and more crowded than what Hypothesis likes to draw."""
    script: list[tuple[str, Any]] = []
    for _ in range(150):
        name = chance.choices(["add", "schedule", "serve", "end", "reset"], [20, 30, 40, 3, 7])[0]
        one = {
            "prompt": [chance.randrange(END) for _ in range(chance.randint(1, 60))],
            "max_tokens": chance.randint(1, 60),
            "choices": chance.choice([1, 1, 2, 3]),
            "family": chance.choice("abcdefgh"),
            "logprobs": chance.choice([None, 0]),
            "priority": chance.randint(0, 2),
        }
        arguments: dict[str, Any] = {
            "add": one,
            "schedule": chance.random() < 0.2,
            "serve": chance.randint(1, 4),
            "end": chance.randrange(40),
            "reset": chance.random() < 0.7,
        }
        script.append((name, arguments[name]))
    return script


def crowded(seed: int, *, skip: bool) -> Load:
    """A mix of that seed, served to its end."""
    chance = random.Random(seed)
    values = {
        "block_size": chance.choice([1, 4, 16]),
        "capacity": chance.choice([160, 320, 1600]),
        "window": chance.choice([None, None, 5, 16]),
        "prefix_caching": chance.random() < 0.8,
        "depth": chance.randint(1, 4),
        "policy": chance.choice(["fcfs", "priority"]),
        "max_num_seqs": chance.randint(1, 6),
        "max_num_batched_tokens": chance.choice([7, 16, 64]),
        "long_prefill_threshold": 0,
    }
    load = play(values, random_script(chance), skip=skip)
    load.finish()
    return load


@pytest.mark.row(ROW, "with forced-token skipping the tokens are identical, under any schedule")
@pytest.mark.parametrize("seed", range(24))
def test_crowded_mixes(seed: int) -> None:
    for skip in (False, True):
        assert bool(crowded(seed, skip=skip).driver.scheduler.stats.draft_tokens) is skip


@pytest.mark.row(ROW, "fewer model steps with identical tokens")
@given(values=configurations, batch=st.lists(asked, min_size=1, max_size=6))
@settings(max_examples=25)
def test_what_nobody_disturbs_takes_no_more_steps(values: dict[str, Any], batch: list[dict[str, Any]]) -> None:
    """Alone, so that no neighbour's budget or preemption counts."""
    values = values | {"capacity": 1600, "max_num_batched_tokens": 64}
    for one in batch:
        steps, answers, skipped = [], [], 0
        for skip in (False, True):
            load = play(values, [("add", one)], skip=skip)
            answers.append(load.finish())
            steps.append(len(load.driver.worker.plans))
            skipped = load.driver.scheduler.stats.draft_tokens
        assert answers[0] == answers[1]
        assert steps[1] <= steps[0]
        assert (steps[1] < steps[0]) or one["choices"] > 1 or skipped == 0


class Endless(MadeUp):
    """Goes on with the only one for ever."""

    def _here(self) -> tuple[set[int], bool]:
        return {len(self.taken) % 7 + 4}, False


class EndlessGrammars(MadeUpGrammars):
    def matcher(self, source: GrammarSource) -> Matcher:
        return Endless(source.text)


class Line(MadeUp):
    """Only 4, 5, 6 may be written, and then something is wrong, or over."""

    def _here(self) -> tuple[set[int], bool]:
        if len(self.taken) == 3 and self.family == "limit":
            raise GrammarError(LIMIT)
        return ({4 + len(self.taken)}, False) if len(self.taken) < 3 else (set(), True)


class LineGrammars(MadeUpGrammars):
    def matcher(self, source: GrammarSource) -> Matcher:
        return Line(source.text)


@pytest.mark.parametrize("family", ["limit", "end"])
def test_what_lies_behind_forced_tokens_is_told_when_they_are_accepted(family: str) -> None:
    """The last one before an end or a failure is drawn, so that nothing is drawn behind it."""
    spec = SamplingSpec(seed=0, grammar=GrammarSource(kind="regex", text=family), end_ids=(END,))
    guide = make_guide(spec, (), LineGrammars(skip=True))
    guide.prepare()
    assert guide.drafts == [4, 5]
    for token_id in (4, 5, 6):
        assert guide.mask == bytes([1 << token_id, *bytes(7)])
        assert not guide.is_complete
        guide.accept(token_id)
        assert guide.failure is None, "a mask that cannot be made is missed when one is due"
    assert guide.is_complete is (family == "end")
    guide.prepare()
    assert guide.failure == (LIMIT if family == "limit" else None)


def test_a_token_that_is_not_the_forced_one_ends_the_output() -> None:
    spec = SamplingSpec(seed=0, grammar=GrammarSource(kind="regex", text="end"), end_ids=(END,))
    guide = make_guide(spec, (), LineGrammars(skip=True))
    guide.prepare()
    guide.accept(9)
    assert "token 9" in (guide.failure or "")
    assert guide.drafts == []


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_grammar_that_leaves_no_choice_for_ever_is_followed_to_the_limit(depth: int) -> None:
    spec: dict[str, Any] = {"grammar": GrammarSource(kind="regex", text="x"), "end_ids": (END,)}
    guide = make_guide(SamplingSpec(seed=0, **spec), (), EndlessGrammars(skip=True))
    guide.prepare()
    assert len(guide.drafts) == MAX_AHEAD
    driver = StepDriver(next_token=hashed_token(SIZE))
    driver.worker.grammars = EndlessGrammars(skip=True)
    request = driver.add([1, 2], 300, **spec)
    driver.run(depth)
    assert output(request) == [position % 7 + 4 for position in range(300)]
    assert request.finish_reason == "length"
    assert len(driver.worker.plans) < 30
