"""Why a request waited, was preempted, or left what was cached: scripted scenarios, exact answers."""

from __future__ import annotations

import pytest

from capture_driver import ROUTES, CaptureDriver
from infer import EngineConfig, SamplingParams
from infer.engine.explanation import Explanation, explain
from infer.engine.history import MAX_ENDED, Preemption, Wait
from infer.engine.kv_cache import lineage
from infer.engine.kv_cache.lineage import Lineage, PrefixEnd
from infer.engine.request import Request
from infer.errors import InvalidRequestError
from infer.testing.fake_engine import fake_engine, scripted
from step_driver import StepDriver, cache_config, full_group, sliding_group

pytestmark = pytest.mark.row(
    "X-EXPLAIN", "in scripted scenarios the first differing token index and cause are exactly right"
)


def driver(num_blocks: int = 100, *, window: int | None = None, **options: object) -> StepDriver:
    groups = [full_group(num_blocks)] + ([sliding_group(num_blocks, window)] if window else [])
    return StepDriver(cache_config(*groups), **options)  # type: ignore[arg-type]


def why(driver: StepDriver, request: Request) -> Explanation:
    return explain(driver.scheduler, request.request_id)


def prefix(driver: StepDriver, prompt: list[int], **options: object) -> PrefixEnd:
    """What is said of the first admission of one more request."""
    request = driver.add(prompt, 1, **options)
    driver.run()
    (choice,) = why(driver, request).choices
    return choice.admissions[0].prefix


def numbers(*parts: tuple[int, int]) -> list[int]:
    return [base + i for base, count in parts for i in range(count)]


# -- where a prefix hit ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 15, 16, 17, 40, 47])
def test_the_first_other_token(at: int) -> None:
    cached = numbers((0, 64))
    steps = driver()
    steps.add(cached, 1)
    steps.run()
    changed = [*cached[:at], 500, *cached[at + 1 :]]
    assert prefix(steps, changed) == PrefixEnd(cause="other token", token=at, cached_id=cached[at])


def test_of_several_that_were_cached_the_one_that_agrees_longest() -> None:
    steps = driver()
    for tail in (3, 9, 5, 12):
        steps.add([*numbers((0, 16 + tail)), *numbers((900 + tail, 16))], 1)
    steps.run()
    assert prefix(steps, [*numbers((0, 26)), *numbers((800, 20))]) == PrefixEnd(
        cause="other token", token=26, cached_id=26
    )


def test_everything_that_can_be_reused() -> None:
    steps = driver()
    steps.add(numbers((0, 50)), 1)
    steps.run()
    assert prefix(steps, numbers((0, 49))) == PrefixEnd(cause="complete")
    assert prefix(steps, numbers((0, 48))) == PrefixEnd(cause="complete"), "the last token is always computed"


def test_nothing_was_computed_behind_it() -> None:
    steps = driver()
    steps.add(numbers((0, 40)), 1)  # its last 8 tokens fill no block
    steps.run()
    assert prefix(steps, numbers((0, 80))) == PrefixEnd(cause="never computed", token=32)
    assert prefix(driver(), numbers((0, 80))) == PrefixEnd(cause="never computed", token=0)


def test_another_salt() -> None:
    steps = driver()
    steps.add(numbers((0, 48)), 1, salt="a")
    steps.run()
    assert prefix(steps, numbers((0, 48)), salt="b") == PrefixEnd(cause="other salt", token=0)
    assert prefix(steps, numbers((0, 48)), salt="a") == PrefixEnd(cause="complete")


def test_evicted_and_reset() -> None:
    steps = driver(num_blocks=6)
    steps.add(numbers((0, 64)), 1)
    steps.run()
    steps.add(numbers((700, 50)), 1)  # takes 4 of the 6 blocks: the tail of the first goes
    steps.run()
    assert prefix(steps, numbers((0, 64))) == PrefixEnd(cause="evicted", token=32)
    assert steps.scheduler.reset_prefix_cache()
    assert prefix(steps, numbers((0, 64))) == PrefixEnd(cause="reset", token=0)
    assert prefix(steps, numbers((0, 64))) == PrefixEnd(cause="complete"), "computed again"


def test_reasons_that_are_no_tokens() -> None:
    steps = driver()
    steps.add(numbers((0, 48)), 1)
    steps.run()
    assert prefix(steps, numbers((0, 48)), prompt_logprobs=0) == PrefixEnd(cause="prompt logprobs")
    off = StepDriver(cache_config(full_group(100), prefix_caching=False))
    assert prefix(off, numbers((0, 48))) == PrefixEnd(cause="caching off")


def test_captured_rows_that_are_gone() -> None:
    steps = CaptureDriver(num_objects=1)
    steps.add(numbers((0, 48)), 1)  # nobody captured it
    steps.run()
    request = steps.add(numbers((0, 48)), 1, fields=(ROUTES.name,))
    steps.run()
    (choice,) = why(steps, request).choices
    assert choice.admissions[0].prefix == PrefixEnd(cause="captured rows missing", token=0)


def test_a_choice_that_shares_its_prompt() -> None:
    steps = driver()
    first = steps.add(numbers((0, 20)), 2, name="pair")
    from step_driver import new_request

    second = new_request(numbers((0, 20)), 2, arrival=1, name="pair")
    second.choice_index = 1
    steps.scheduler.finish(first, "abort")
    first = new_request(numbers((0, 20)), 2, arrival=2, name="pair")
    first.siblings = (second,)
    steps.scheduler.add(first)
    steps.run()
    choices = explain(steps.scheduler, "pair").choices
    assert [choice.admissions[0].prefix.cause for choice in choices] == ["never computed", "shared prompt"]


# -- why it waited ---------------------------------------------------------------------------------------------------


def test_no_free_blocks() -> None:
    steps = driver(num_blocks=5)
    steps.add(numbers((0, 60)), 4)
    late = steps.add(numbers((500, 40)), 1)
    steps.run()
    (choice,) = why(steps, late).choices
    assert choice.waits == (Wait(reason="no free blocks", first_step=0, last_step=3, needed=3, free=1),)
    assert choice.admissions[0].step == 4 and choice.finish_reason == "length"


def test_no_free_slot_and_then_the_budget() -> None:
    steps = driver(max_num_seqs=1, max_num_batched_tokens=16)
    steps.add(numbers((0, 20)), 2)
    late = steps.add(numbers((500, 5)), 1)
    steps.run()
    (choice,) = why(steps, late).choices
    assert [(wait.reason, wait.first_step, wait.last_step) for wait in choice.waits] == [
        ("token budget", 0, 0),
        ("no free slot", 1, 2),
    ]


def test_who_is_not_next_waits_behind_others() -> None:
    steps = driver(max_num_seqs=1)
    for _ in range(3):
        steps.add([1, 2, 3], 3)
    steps.step()
    choices = [why(steps, request).choices[0] for request in steps.requests]
    assert [choice.status for choice in choices] == ["running", "waiting", "waiting"]
    assert [choice.queue_position for choice in choices] == [None, 0, 1]
    assert [len(choice.waits) for choice in choices] == [0, 1, 0]
    assert "now: waiting, 1 before it" in str(why(steps, steps.requests[2]))


def test_prompts_that_must_fit_a_step() -> None:
    steps = driver(max_num_batched_tokens=64, chunked_prefill=False, max_model_len=64)
    steps.add(numbers((0, 40)), 1)
    late = steps.add(numbers((500, 40)), 1)
    steps.run()
    assert why(steps, late).choices[0].waits == (
        Wait(reason="prompt longer than what is left of the step", first_step=0, last_step=0, needed=40, free=24),
    )


def test_limits_of_partial_prefills() -> None:
    steps = driver(max_num_batched_tokens=32, max_num_partial_prefills=1, long_prefill_threshold=16)
    steps.add(numbers((0, 60)), 1)
    late = steps.add(numbers((500, 60)), 1)
    steps.run()
    assert why(steps, late).choices[0].waits[0].reason == "too many partial prefills"


# -- why it was preempted --------------------------------------------------------------------------------------------


def test_who_took_its_blocks() -> None:
    steps = driver(num_blocks=4)
    first = steps.add(numbers((0, 30)), 30, name="first")
    second = steps.add(numbers((500, 30)), 30, name="second")
    steps.run()
    (choice,) = why(steps, second).choices
    assert [(loss.reason, loss.by) for loss in choice.preemptions] == [("no free blocks", "first")]
    assert len(choice.admissions) == 2 and choice.finish_reason == "length"
    assert why(steps, first).choices[0].preemptions == ()
    told = str(why(steps, second))
    assert f"step {choice.preemptions[0].step}: preempted: no free blocks, for request 'first'" in told


def test_reset_and_failure_are_named() -> None:
    steps = driver()
    request = steps.add(numbers((0, 30)), 8)
    steps.step()
    steps.scheduler.reset_prefix_cache(restart_running=True)
    steps.step()
    (choice,) = why(steps, request).choices
    assert choice.preemptions == (Preemption(step=1, reason="prefix cache reset"),)


# -- what is remembered ----------------------------------------------------------------------------------------------


def test_the_last_that_ended_are_remembered_and_no_more() -> None:
    steps = driver()
    for index in range(MAX_ENDED + 3):
        steps.add([index], 1)
        steps.run()
    assert why(steps, steps.requests[-1]).choices[0].status == "finished"
    assert why(steps, steps.requests[3]).choices[0].status == "finished"
    with pytest.raises(InvalidRequestError, match=r"no request '2' is known"):
        why(steps, steps.requests[2])
    assert not steps.scheduler.histories._live


def test_notes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineage, "MAX_BLOCKS", 10)
    notes = Lineage()
    for index in range(100):
        notes.note(b"root", b"%d" % index, [index % 7, index])
    assert len(notes._blocks) == 10 == sum(len(followers) for followers in notes._followers.values())
    assert notes.nearest(b"root", [99 % 7, 5]) == (1, 92 if 92 % 7 == 99 % 7 else 99)


@pytest.mark.anyio
async def test_an_engine_explains() -> None:
    async with fake_engine(scripted("yes"), EngineConfig(cache={"num_blocks": 40})) as engine:
        for name, tail in (("a", "one"), ("b", "two")):
            await engine.generate("x" * 32 + tail * 9, SamplingParams(max_tokens=4), request_id=name)
        explanation = engine.explain("b")
        assert explanation.choices[0].admissions[0].prefix == PrefixEnd(
            cause="other token", token=32, cached_id=ord("o")
        )
        assert "what is cached goes on otherwise at token 32 (id 111 there)" in str(explanation)
        with pytest.raises(InvalidRequestError):
            engine.explain("nobody")
