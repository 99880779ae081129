"""Reading one choice: special tokens reach the parser and not the reader, and reasoning is counted in tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.api.answers import AnswerFormats, AnswerPlan, AnswerReader, Piece
from infer.api.tool_requests import read_tools
from infer.config.engine import PluginsSection
from infer.plugins import build_registry
from infer.plugins.registry import Registry
from infer.testing.fake_engine import ByteTokenizer

NAMES = {256: "<think>", 257: "</think>", 258: "<tool_call>", 259: "</tool_call>", 260: "<|pad|>"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


class MarkTokenizer(ByteTokenizer):
    """Bytes, and marks as special tokens."""

    special_token_ids = frozenset(NAMES)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        pieces = [NAMES[i].encode() if i in NAMES else bytes([i]) for i in token_ids]
        return b"".join(pieces).decode("utf-8", "replace")


@pytest.fixture(scope="module")
def registry() -> Registry:
    return build_registry(PluginsSection())


def plan(registry: Registry, **more: bool) -> AnswerPlan:
    spec = registry.get("parser", "hermes")
    formats = AnswerFormats(registry=registry, template="tools", calls=spec, reasoning=spec, calls_known=True)
    return AnswerPlan(formats=formats, asked=read_tools(TOOLS, None, None), calls=spec, **more)


def read(asked: AnswerPlan, pieces: Sequence[Sequence[int]]) -> tuple[Piece, AnswerReader]:
    tokenizer = MarkTokenizer()
    reader = AnswerReader(asked, [], tokenizer, "id", lambda token_id: NAMES.get(token_id, ""))
    whole = Piece()
    for number, ids in enumerate(pieces):
        text = tokenizer.decode(ids)
        said = reader.feed(text, ids, last=number == len(pieces) - 1)
        whole.text += said.text
        whole.reasoning += said.reasoning
        for call in said.calls:
            if call.name:
                whole.calls.append(call)
            else:
                whole.calls[call.index].arguments += call.arguments
    return whole, reader


def ids(*parts: str | int) -> list[int]:
    return [i for part in parts for i in ([part] if isinstance(part, int) else part.encode())]


WRITTEN = ids(
    256, "So", 260, " it is.", 257, "I <|pad|> ", 260, "call", 258, '{"name": "f", "arguments": {"a": 1}}', 259
)


def test_special_tokens_reach_the_parser_and_not_the_reader(registry: Registry) -> None:
    message, reader = read(plan(registry), [WRITTEN[:20], WRITTEN[20:]])
    assert message.reasoning == "So it is."
    assert message.text.startswith("I ") and message.text.endswith("call")
    assert [(call.name, call.arguments) for call in message.calls] == [("f", '{"a": 1}')]
    assert reader.complete_calls == 1
    assert reader.count_reasoning(WRITTEN) == len("So it is.") + 1, "the hidden token was thought, too"


def test_they_are_shown_to_who_asks(registry: Registry) -> None:
    message, _ = read(plan(registry, hides_special=False), [WRITTEN])
    assert (message.reasoning, message.text) == ("So<|pad|> it is.", "I <|pad|> <|pad|>call")


def test_text_that_only_looks_like_one_stays(registry: Registry) -> None:
    message, _ = read(plan(registry), [ids("write <|pad|> here")])
    assert message.text == "write <|pad|> here"


def test_what_was_said_is_told_in_its_order(registry: Registry) -> None:
    call = '{"name": "f", "arguments": {}}'
    written = ids(256, "a", 260, "b <", 257, "c <", 258, call, 259, "d", 256, "e", 257)
    reader = AnswerReader(plan(registry), [], MarkTokenizer(), "id", lambda token_id: NAMES.get(token_id, ""))
    events = [event for i in written for event in reader.read(MarkTokenizer().decode([i]), [i])] + reader.read(
        "", (), last=True
    )
    told = [
        (kind, "".join(event.text for event in run))
        for kind, run in itertools.groupby(events, lambda event: event.kind)
    ]
    assert told == [
        ("reasoning", "ab <"),
        ("text", "c <"),
        ("tool_start", "f"),
        ("tool_args", "{}"),
        ("tool_end", ""),
        ("text", "d"),
        ("reasoning", "e"),
    ], "what looked like the beginning of a special token is told where it stood"
    assert next(event for event in events if event.kind == "tool_start").call_id == "id-0"


@pytest.mark.row("SAMPLE-REASONING", "tokens of reasoning are counted without their marks, several runs of it too")
def test_counting_several_runs(registry: Registry) -> None:
    written = ids(256, "ab", 257, 258, '{"name": "f", "arguments": {}}', 259, 256, "ab", 257, "ab")
    message, reader = read(plan(registry), [written])
    assert (message.reasoning, message.text) == ("abab", "ab")
    assert reader.count_reasoning(written) == 4


@given(cuts=st.lists(st.integers(0, len(WRITTEN)), max_size=8))
def test_no_split_matters(registry: Registry, cuts: list[int]) -> None:
    whole, _ = read(plan(registry), [WRITTEN])
    places = [0, *sorted(cuts), len(WRITTEN)]
    split, reader = read(plan(registry), [WRITTEN[a:b] for a, b in itertools.pairwise(places)])
    assert split == whole
    assert reader.count_reasoning(WRITTEN) == len("So it is.") + 1
