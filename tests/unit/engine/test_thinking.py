"""Reasoning before the answer: where the grammar begins, and what a thinking budget forces. Marks are text of several tokens
here, as in models whose vocabulary has none of their own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from infer import ConfigError, EngineConfig, InvalidRequestError, SamplingParams, UnknownPluginError
from infer.engine.sampling.guide import Guide, make_guide
from infer.engine.sampling.thinking import Phase, Thinking
from infer.engine.step import ReasoningSpec, SamplingSpec
from infer.plugins.grammar import GrammarSource, Vocabulary
from infer.testing.fake_engine import EOS, fake_engine
from infer.testing.fake_executor import NextToken
from served import Script, letters

BUDGET = "SAMPLE-THINKING-BUDGET"
CLOSE = "</think>"
TOKENS = [bytes([byte]) for byte in range(256)] + [b"<think>", b"</think>", b"</s>", b"k>x", b"</th"]
START_ID, END_ID, EOS_ID, GLUED_ID, HALF_ID = range(256, 261)


def spec(*, is_open: bool = True, close: Sequence[int] = (END_ID,)) -> ReasoningSpec:
    return ReasoningSpec(starts=(b"<think>",), ends=(b"</think>",), close_ids=tuple(close), is_open=is_open)


def run(thinking: Thinking, ids: Sequence[int]) -> list[bytes | None]:
    return [thinking.accept(token_id) for token_id in ids]


@pytest.mark.row(BUDGET, "exactly N thinking tokens are produced before the end marker is forced")
@pytest.mark.parametrize("budget", [0, 1, 7])
@pytest.mark.parametrize("close", [(END_ID,), tuple(b"\n</think>\n\n")], ids=["one token", "eleven tokens"])
def test_the_end_is_forced_after_exactly_the_budget(budget: int, close: Sequence[int]) -> None:
    thinking = Thinking(spec(close=close), budget, TOKENS)
    for _ in range(budget):
        assert thinking.forced_id is None
        assert thinking.accept(ord("h")) is None
    forced = []
    while (token_id := thinking.forced_id) is not None:
        forced.append(token_id)
        thinking.accept(token_id)
    assert tuple(forced) == tuple(close)
    assert thinking.phase is Phase.OVER
    assert thinking.num_tokens == budget + len(close)


def test_a_mark_that_the_model_has_begun_is_completed_not_repeated() -> None:
    thinking = Thinking(spec(close=tuple(CLOSE.encode())), 6, TOKENS)
    run(thinking, b"abc</t")
    forced = []
    while (token_id := thinking.forced_id) is not None:
        forced.append(token_id)
        thinking.accept(token_id)
    assert bytes(forced) == b"hink>"


@pytest.mark.parametrize(
    ("ids", "rest"),
    [
        ([END_ID], b""),
        ([*b"hm", END_ID], b""),
        (list(b"hm</think>"), b""),
        ([*b"hm", HALF_ID, *b"in", GLUED_ID], b"x"),
    ],
)
def test_the_end_is_found_however_it_is_cut(ids: list[int], rest: bytes) -> None:
    thinking = Thinking(spec(), None, TOKENS)
    said = run(thinking, ids)
    assert said[-1] == rest
    assert set(said[:-1]) <= {None}


@pytest.mark.parametrize(
    ("ids", "phase"),
    [
        ([START_ID], Phase.INSIDE),
        (list(b"<think>"), Phase.INSIDE),
        (list(b" \n<think>"), Phase.INSIDE),
        (list(b" \n<th"), Phase.BEFORE),
        (list(b"<thorn"), Phase.OVER),
        (list(b"Hello"), Phase.OVER),
    ],
)
def test_reasoning_may_open_first(ids: list[int], phase: Phase) -> None:
    thinking = Thinking(spec(is_open=False), None, TOKENS)
    run(thinking, ids)
    assert thinking.phase is phase


class Digits:
    """Allows digits, may always end."""

    can_end, is_complete = True, False

    def accept(self, token_id: int) -> str | None:
        return None if chr(token_id).isdigit() else "no digit"

    def fill(self, mask: bytearray) -> None:
        mask[:] = bytes(len(mask))
        for byte in b"0123456789":
            mask[byte >> 3] |= 1 << (byte & 7)


class Grammars:
    skip_forced_tokens = False
    vocabulary = Vocabulary(
        tokens=TOKENS,
        special_ids=frozenset({START_ID, END_ID, EOS_ID}),
        eos_token_ids=(EOS_ID,),
        encode=lambda text: list(text.encode()),
    )

    def matcher(self, source: GrammarSource) -> Any:
        return Digits()


def guide(outputs: Sequence[int] = (), **fields: Any) -> Guide:
    source = GrammarSource(kind="regex", text="[0-9]*")
    made = SamplingSpec(**({"seed": 0, "grammar": source, "end_ids": (EOS_ID,), "reasoning": spec()} | fields))
    return make_guide(made, outputs, Grammars())


def allowed(made: Guide) -> set[int]:
    made.prepare()
    if made.mask is None:
        return set(range(len(TOKENS)))
    return {i for i in range(len(TOKENS)) if made.mask[i >> 3] >> (i & 7) & 1}


DIGITS = {*b"0123456789"}


@pytest.mark.row(BUDGET, "a grammar starts only after it")
def test_the_grammar_begins_where_reasoning_ends() -> None:
    made = guide()
    everything = set(range(len(TOKENS)))
    assert allowed(made) == everything - {EOS_ID}, "the answer is still to come"
    made.accept(ord("h"))
    assert allowed(made) == everything - {EOS_ID}
    made.accept(END_ID)
    assert allowed(made) == DIGITS | {EOS_ID}
    made.accept(ord("4"))
    assert allowed(made) == DIGITS | {EOS_ID}
    made.accept(EOS_ID)
    assert made.is_complete
    assert made.failure is None


def test_what_is_glued_to_the_end_belongs_to_the_answer() -> None:
    made = guide([*b"hm</thin", GLUED_ID])
    assert made.failure == "no digit"
    assert guide(list(b"hm</think>\n\n")).failure is not None, "white space behind the mark, but in the answer"
    assert guide([HALF_ID, *b"ink>"]).failure is None


def test_reasoning_that_is_not_open_may_open_or_be_left_out() -> None:
    before = {"reasoning": spec(is_open=False)}
    made = guide(**before)
    assert allowed(made) == DIGITS | {EOS_ID, START_ID}
    made.accept(ord("7"))
    assert allowed(made) == DIGITS | {EOS_ID}
    opened = guide([START_ID], **before)
    assert EOS_ID not in allowed(opened)
    assert allowed(guide([START_ID, *b"why", END_ID], **before)) == DIGITS | {EOS_ID}


def test_a_budget_without_a_grammar_leaves_the_rest_free() -> None:
    made = guide(grammar=None, thinking_budget=2)
    assert len(allowed(made)) == len(TOKENS)
    made.accept(1)
    made.accept(2)
    assert allowed(made) == {END_ID}
    made.accept(END_ID)
    assert len(allowed(made)) == len(TOKENS)
    assert not made.is_complete


@pytest.mark.parametrize("cut", range(14))
def test_a_state_made_again_from_its_tokens_is_the_same(cut: int) -> None:
    """Preemption, at every place: in reasoning, while its end is forced, in the answer."""
    close = tuple(CLOSE.encode())
    fields = {"reasoning": spec(close=close), "thinking_budget": 3}
    whole = [*b"abc", *close, *b"123"]
    made = guide(whole[:cut], **fields)
    for token_id in whole[cut:]:
        assert token_id in allowed(made)
        made.accept(token_id)
    assert made.failure is None
    assert allowed(made) == DIGITS | {EOS_ID}


# -- through the facade --------------------------------------------------------------------------------------------


def reasoning_engine(next_token: NextToken, **scheduler: Any) -> Any:
    config = EngineConfig(
        cache={"num_blocks": 200}, scheduler=scheduler, structured_output={"reasoning_parser": "deepseek_r1"}
    )
    return fake_engine(next_token, config)


@pytest.mark.anyio
@pytest.mark.row(BUDGET, "exactly N thinking tokens, the answer follows, and a grammar starts only after it")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [0, 5, 40])
async def test_budget_then_answer(depth: int, budget: int) -> None:
    async with reasoning_engine(letters, in_flight_depth=depth) as engine:
        params = SamplingParams(
            max_tokens=120, seed=5, thinking_budget=budget, structured_output={"regex": "[0-9]{3}-[a-z]+!"}
        )
        done = await engine.generate("think", params)
        assert done.token_ids[budget : budget + len(CLOSE)] == tuple(CLOSE.encode())
        answer = done.text.removeprefix(done.text[: budget + len(CLOSE)])
        assert done.finish_reason != "stop" or re.fullmatch("[0-9]{3}-[a-z]+!", answer)
        assert re.match("[0-9]{3}-[a-z]", answer)
        assert CLOSE not in done.text[:budget]
        assert done.usage.output_tokens == len(done.token_ids), "thinking is counted"


@pytest.mark.anyio
async def test_a_model_that_stops_thinking_by_itself_is_left_alone() -> None:
    async with reasoning_engine(Script("short</think>42")) as engine:
        done = await engine.generate("q", SamplingParams(max_tokens=50, seed=1, thinking_budget=30))
        assert done.text == "short</think>42"
        assert done.finish_reason == "stop"


@pytest.mark.anyio
async def test_the_end_of_sequence_waits_for_the_answer() -> None:
    async with reasoning_engine(Script("hm")) as engine:
        params = SamplingParams(max_tokens=40, seed=1, structured_output={"regex": "yes|no"}, thinking_budget=20)
        done = await engine.generate("q", params)
        assert done.text.endswith(("</think>yes", "</think>no"))
        assert done.finish_reason == "stop"
        assert EOS not in done.token_ids


@pytest.mark.anyio
async def test_a_prompt_that_closed_it_leaves_the_answer_alone() -> None:
    async with reasoning_engine(letters) as engine:
        params = SamplingParams(max_tokens=40, seed=1, structured_output={"choice": ["yes", "no"]})
        assert (await engine.generate("q<think>\n\n</think>\n\n", params)).text in ("yes", "no")


@pytest.mark.anyio
async def test_a_budget_needs_reasoning_that_is_known() -> None:
    async with fake_engine(letters, EngineConfig(cache={"num_blocks": 200})) as engine:
        with pytest.raises(InvalidRequestError, match="reasoning_parser") as refused:
            await engine.generate("q", SamplingParams(thinking_budget=3))
        assert refused.value.parameter == "thinking_budget"
    for name, error in (("deepseek", UnknownPluginError), ("llama3_json", ConfigError)):
        engine = fake_engine(letters, EngineConfig(structured_output={"reasoning_parser": name}))
        with pytest.raises(error, match=name):
            await engine.__aenter__()
