"""Every output parser of the registry against its kit, and the kit against planted bugs."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from infer.config.engine import PluginsSection
from infer.plugins import ParserEvent, ParserSpec, Registry, build_registry
from infer.plugins.parsing import Dialect, JsonCalls, Reasoning, TableParser
from infer.testing.kits import parser
from infer.testing.kits.parser import Split


def names() -> list[str]:
    return [spec.name for spec in build_registry(PluginsSection(allow=())).specs("parser")]


@pytest.fixture(scope="module")
def registry() -> Registry:
    return build_registry(PluginsSection(allow=()))


@pytest.fixture(scope="module")
def split(registry: Registry) -> Split:
    """A byte-level tokenizer trained on the transcripts: its tokens end inside marks, and with whole characters."""
    texts = [line["text"] for spec in registry.specs("parser") for line in spec.example["transcripts"]]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet))

    def tokens(text: str) -> list[str]:
        stream = decoders.DecodeStream()
        pieces = [stream.step(backend, id_) or "" for id_ in backend.encode(text).ids]
        return [piece for piece in pieces if piece]

    return tokens


@pytest.mark.row("SAMPLE-REASONING", "for every parser whole, per-character and per-token feeding give the same events")
@pytest.mark.row(
    "TOOLS-STREAMING-PARSER",
    "recorded outputs give the same events in every split, mid-character too; nothing is held back",
)
@pytest.mark.parametrize("name", names())
def test_parser(registry: Registry, split: Split, name: str) -> None:
    failed = []
    for check in parser.checks(registry.get("parser", name), split):
        try:
            check.run()
        except Exception as error:
            failed.append(f"{check.name}: {type(error).__name__}: {error}")
    assert failed == []


def test_the_kit_runs_every_check(registry: Registry) -> None:
    checks = [check.name for check in parser.checks(registry.get("parser", "hermes"))]
    assert checks == [
        *("declares", "expected", "every_cut", "one_by_one", "calls", "prefixes", "mutations"),
        *("leaves_calls_alone", "independent", "tokens", "plain_text", "call_syntaxes"),
    ]


# -- planted bugs --------------------------------------------------------------------------------------------------

DIALECT = Dialect(
    reasoning=Reasoning(),
    calls=(JsonCalls(openers=("<tool_call>",), closers=("</tool_call>",)),),
)
Bug = type[TableParser]


class Correct(TableParser):
    def __init__(self, tools: Any) -> None:
        super().__init__(DIALECT, tools)


class HoldsEverythingBack(Correct):
    held = ""

    def feed(self, text: str, token_ids: Sequence[int]) -> list[ParserEvent]:
        self.held += text
        return []

    def finish(self) -> list[ParserEvent]:
        return [*super().feed(self.held, []), *super().finish()]


class DropsTheEnd(Correct):
    """What may become a mark is forgotten when the output ends."""

    def finish(self) -> list[ParserEvent]:
        return [event for event in super().finish() if event.kind != "text"]


class WaitsForWholeTags(Correct):
    """Sees a mark only where it arrives in one piece."""

    def feed(self, text: str, token_ids: Sequence[int]) -> list[ParserEvent]:
        events = super().feed(text, token_ids)
        if text.endswith(("<", "</", "<t")):
            self._source.complete = True
            events += self._advance()
            self._source.complete = False
            self._reader = None
        return events


class Raises(Correct):
    def feed(self, text: str, token_ids: Sequence[int]) -> list[ParserEvent]:
        events = super().feed(text, token_ids)
        if any(event.kind == "text" and "{{" in event.text for event in events):
            raise ValueError("malformed")
        return events


class EndsBrokenCalls(Correct):
    """Says that a call is complete that was cut off."""

    def finish(self) -> list[ParserEvent]:
        events = super().finish()
        started = self._calls.started if self._calls else 0
        return [*events, ParserEvent("tool_end", "", started - 1)] if started else events


class CountsFromOne(Correct):
    def feed(self, text: str, token_ids: Sequence[int]) -> list[ParserEvent]:
        return [
            dataclasses.replace(event, call_index=event.call_index + event.kind.startswith("tool"))
            for event in super().feed(text, token_ids)
        ]


class LosesBrokenCalls(Correct):
    """Text that began as a call is swallowed."""

    def feed(self, text: str, token_ids: Sequence[int]) -> list[ParserEvent]:
        return [event for event in super().feed(text, token_ids) if not event.text.startswith("<tool_call>")]


class IgnoresNoTools(Correct):
    def __init__(self, tools: Any) -> None:
        super().__init__(tools or [])


class SharesItsSource(Correct):
    shared: Any = None

    def __init__(self, tools: Any) -> None:
        super().__init__(tools)
        if SharesItsSource.shared is None or SharesItsSource.shared.complete:
            SharesItsSource.shared = self._source
        self._source = SharesItsSource.shared


class TrimsText(Correct):
    def feed(self, text: str, token_ids: Sequence[int]) -> list[ParserEvent]:
        return [
            dataclasses.replace(event, text=event.text.strip()) if event.kind == "text" else event
            for event in super().feed(text, token_ids)
        ]


@pytest.fixture
def spec(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> Callable[[Bug], ParserSpec]:
    def make(bug: Bug) -> ParserSpec:
        module = ModuleType("planted_parser")
        module.create = bug  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "planted_parser", module)
        return dataclasses.replace(registry.get("parser", "hermes"), factory="planted_parser:create", example=EXAMPLE)

    return make


EXAMPLE = {
    "transcripts": [
        {
            "text": "Say <think>why</think> so",
            "events": [["text", "Say ", 0], ["reasoning", "why", 0], ["text", " so", 0]],
        },
        {
            "text": 'I look.<tool_call>{"name": "alpha", "arguments": {"city": "Oslo"}}</tool_call> Done',
            "events": [
                ["text", "I look.", 0],
                ["tool_start", "alpha", 0],
                ["tool_args", '{"city": "Oslo"}', 0],
                ["tool_end", "", 0],
                ["text", " Done", 0],
            ],
        },
        {"text": "<tool_call>{{broken</tool_call>", "events": [["text", "<tool_call>{{broken</tool_call>", 0]]},
    ]
}


@pytest.mark.row("X-PLUGIN-KIT", "the kit fails six planted plugin bugs")
@pytest.mark.parametrize(
    ("bug", "broken"),
    [
        (Correct, set()),
        (HoldsEverythingBack, {"plain_text"}),
        (DropsTheEnd, {"prefixes"}),
        (WaitsForWholeTags, {"every_cut", "one_by_one"}),
        (Raises, {"expected", "mutations"}),
        (EndsBrokenCalls, {"calls", "prefixes"}),
        (CountsFromOne, {"expected", "calls"}),
        (LosesBrokenCalls, {"expected", "prefixes"}),
        (IgnoresNoTools, {"leaves_calls_alone"}),
        (SharesItsSource, {"independent"}),
        (TrimsText, {"expected", "plain_text"}),
    ],
)
def test_the_kit_names_the_promise_that_a_bug_breaks(
    spec: Callable[[Bug], ParserSpec], bug: Bug, broken: set[str]
) -> None:
    failed = set()
    for check in parser.checks(spec(bug)):
        try:
            check.run()
        except Exception:
            failed.add(check.name)
    assert failed >= broken
    assert bool(failed) == bool(broken)


@pytest.mark.parametrize(
    "wrong",
    [
        {"fingerprints": ()},
        {"reasoning_end": ()},
        {"reasoning_close": "</thought>"},
        {"example": {"transcripts": []}},
        {"example": {}},
    ],
)
def test_the_kit_reads_the_declaration(registry: Registry, wrong: dict[str, Any]) -> None:
    spec = dataclasses.replace(registry.get("parser", "hermes"), **wrong)
    (declares,) = (check for check in parser.checks(spec) if check.name == "declares")
    with pytest.raises(AssertionError):
        declares.run()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"end": "}</tool_call"}, "is read as"),
        ({"separator": ", and "}, "is read as"),
        ({"before_arguments": '", "with": '}, "is read as"),
        ({"trigger": "<tool>"}, "trigger"),
    ],
)
def test_the_kit_finds_a_syntax_that_the_parser_does_not_read(
    registry: Registry, wrong: dict[str, str], said: str
) -> None:
    spec = registry.get("parser", "hermes")
    broken = dataclasses.replace(spec, call_syntaxes=(dataclasses.replace(spec.call_syntaxes[0], **wrong),))
    [check] = [check for check in parser.checks(broken) if check.name == "call_syntaxes"]
    with pytest.raises(AssertionError, match=said):
        check.run()
