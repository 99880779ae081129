"""The status machine of one request: it ends once, keeps every accepted token in order, and its cursors never cross."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from infer.engine.request import Status
from step_driver import fetch, new_request

STOP = 9


class RequestMachine(RuleBasedStateMachine):
    """Drives a request as the scheduler does, and keeps the books a second time, naively."""

    @initialize(prompt_len=st.integers(1, 6), max_tokens=st.integers(1, 12))
    def start(self, prompt_len: int, max_tokens: int) -> None:
        self.request = new_request(range(prompt_len), max_tokens, stop_ids={STOP: STOP})
        self.accepted: list[int] = []
        self.ends: list[str] = []
        self.in_flight: list[bool] = []
        """One entry per sample in flight: is it void?"""

    @precondition(lambda self: self.request.status is Status.WAITING and not self.request.num_pending)
    @rule(cached=st.integers(0, 3))
    def admit(self, cached: int) -> None:
        self.request.start(0, min(cached, len(self.request.token_ids) - 1), 0, 1.0)

    @precondition(lambda self: self.request.status is Status.RUNNING and self.request.num_to_compute > 0)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.request.num_to_compute))
        if count == self.request.num_to_compute:
            self.request.num_in_flight += 1
            self.in_flight.append(False)
        self.request.num_computed += count

    @precondition(lambda self: self.in_flight)
    @rule(token_ids=st.lists(st.integers(0, 9), min_size=1, max_size=4))
    def result(self, token_ids: list[int]) -> None:
        self.request.num_in_flight -= 1
        if self.in_flight.pop(0):
            self.request.num_discarded -= 1
            return
        if self.request.status is Status.FINISHED:
            return
        expected, reason = self.expected_of(token_ids)
        kept = self.request.accept(token_ids)
        assert kept == len(expected)
        self.accepted += expected
        self.ends += [reason] if reason else []
        self.request.deliver(token_ids[:kept])

    def expected_of(self, token_ids: list[int]) -> tuple[list[int], str | None]:
        room = self.request.max_tokens - len(self.accepted)
        for index, token_id in enumerate(token_ids, start=1):
            if token_id == STOP:
                return token_ids[:index], "stop"
            if index == room:
                return token_ids[:index], "length"
        return token_ids, None

    @precondition(lambda self: self.request.status is Status.RUNNING)
    @rule()
    def preempt(self) -> None:
        self.request.preempt()

    @precondition(lambda self: self.request.status is Status.RUNNING)
    @rule()
    def restart(self) -> None:
        self.request.discard_in_flight()
        self.in_flight = [True] * len(self.in_flight)
        self.request.preempt()

    @rule(reason=st.sampled_from(["abort", "deadline", "error"]))
    def end(self, reason: Any) -> None:
        if self.request.status is not Status.FINISHED:
            self.ends.append(reason)
        self.request.finish(reason)
        self.request.deliver()

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "request"):
            return
        request = self.request
        assert request.token_ids[request.prompt_len :] == self.accepted
        assert request.num_output == len(self.accepted) <= request.max_tokens
        assert request.num_in_flight == len(self.in_flight)
        assert request.num_discarded == sum(self.in_flight)
        assert request.num_pending == self.in_flight.count(False)
        assert len(self.ends) <= 1
        assert (request.status is Status.FINISHED) == bool(self.ends)
        assert request.finish_reason == (self.ends[0] if self.ends else None)
        if request.status is Status.RUNNING:
            assert request.num_computed <= len(request.token_ids) + request.num_pending

    def teardown(self) -> None:
        if hasattr(self, "request") and self.ends:
            (update,) = fetch(self.request)
            assert (update.token_ids, update.finish_reason) == (self.accepted, self.ends[0])


RequestMachine.TestCase.settings = settings(parent=settings(), stateful_step_count=40)
TestRequest = RequestMachine.TestCase


@given(
    steps=st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 5), max_size=3), st.booleans()), max_size=30),
    interval=st.integers(1, 5),
)
def test_an_outbox_neither_loses_nor_reorders_whenever_it_is_read(
    steps: list[tuple[int, list[int], bool]], interval: int
) -> None:
    """Three choices share the outbox; `True` reads what is due. At the end all is there, each choice in order."""
    choices = [new_request([1], 1000, interval=interval) for _ in range(3)]
    for index, choice in enumerate(choices):
        choice.choice_index = index
        choice.outbox = choices[0].outbox
    sent: dict[int, list[int]] = {0: [], 1: [], 2: []}
    read: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for index, token_ids, reads in steps:
        choices[index].deliver(token_ids)
        sent[index] += token_ids
        if reads and choices[0].outbox._ready:
            updates = fetch(choices[0])
            assert updates, "ready means that something is due"
            for update in updates:
                assert len(update.token_ids) >= interval
                read[update.choice_index] += update.token_ids
    for choice in choices:
        choice.finish("length")
        choice.deliver()
    for update in fetch(choices[0]):
        read[update.choice_index] += update.token_ids
        assert update.finish_reason == "length"
    assert read == sent
