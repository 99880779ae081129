"""Conformance of an output parser: its transcripts give their events in every split, and no output makes it raise,
lose text or hold it back. Runs on the calling thread; owns nothing."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from infer.plugins.parser import CallSyntax, Parser, ParserEvent, ParserSpec, SupportsPrompt
from infer.plugins.parsing.transcripts import merge_events
from infer.testing.kits import Check, expect, load

Split = Callable[[str], Sequence[str]]
"""A text to its pieces, as a tokenizer splits it."""
PLAIN = "Plain words, 1 < 2 and 3 > 2; so (it) goes on. "
MUTATIONS = 12
_TOKEN = re.compile(r"<[^<>\s]*>|\[[A-Z_/]+\]|\w+| ?[^\w\s]|\s+")
_WORD = re.compile(r"[a-z]{2,}")
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)")


def checks(spec: ParserSpec, split: Split | None = None) -> Iterator[Check]:
    """`split` is a real tokenizer's, on top of the words and marks that are tried anyway."""
    transcripts: list[dict[str, Any]] = spec.example.get("transcripts", [])
    yield Check("declares", lambda: _declares(spec, transcripts))
    for body in (_expected, _every_cut, _one_by_one, _calls, _prefixes, _mutations, _leaves_calls_alone, _independent):
        yield Check(body.__name__.strip("_"), partial(_each, body, spec, transcripts))
    yield Check("tokens", lambda: _tokens(spec, transcripts, split))
    yield Check("plain_text", lambda: _plain_text(spec))
    yield Check("call_syntaxes", lambda: _call_syntaxes(spec))


def _each(body: Callable[[ParserSpec, dict[str, Any]], None], spec: ParserSpec, transcripts: list[Any]) -> None:
    for transcript in transcripts:
        body(spec, transcript)


def _make(spec: ParserSpec, transcript: dict[str, Any], tools: Any = ...) -> Parser:
    parser: Parser = load(spec)(transcript.get("tools", []) if tools is ... else tools)
    if "prompt" in transcript:
        expect(isinstance(parser, SupportsPrompt), "a transcript has a prompt, but the parser has no begin(prompt)")
        parser.begin(transcript["prompt"])  # type: ignore[attr-defined]
    return parser


def _run(parser: Parser, pieces: Sequence[str]) -> list[ParserEvent]:
    events: list[ParserEvent] = []
    for number, piece in enumerate(pieces):
        events += parser.feed(piece, [number])
    return merge_events([*events, *parser.finish()])


def _whole(spec: ParserSpec, transcript: dict[str, Any], text: str | None = None) -> list[ParserEvent]:
    return _run(_make(spec, transcript), [transcript["text"] if text is None else text])


def _declares(spec: ParserSpec, transcripts: list[dict[str, Any]]) -> None:
    expect(spec.fingerprints and all(spec.fingerprints), "a spec without fingerprints is never chosen by a template")
    expect(transcripts, "there are no transcripts")
    kinds = {line[0] for transcript in transcripts for line in transcript["events"]}
    if "reasoning" in kinds:
        expect(spec.reasoning_end, "transcripts have reasoning, but the spec does not say what ends it")
        expect(
            spec.reasoning_close.endswith(spec.reasoning_end),
            f"forcing {spec.reasoning_close!r} does not end reasoning: reasoning_end is {spec.reasoning_end}",
        )
    else:
        expect(not spec.reasoning_end, "the spec says what ends reasoning, but no transcript has any")


def _lines(events: Sequence[ParserEvent]) -> list[list[Any]]:
    return [[event.kind, event.text, event.call_index, event.call_id] for event in events]


def _expected(spec: ParserSpec, transcript: dict[str, Any]) -> None:
    wanted = [[*line, *(0, "")[len(line) - 2 :]] for line in transcript["events"]]
    said = _lines(_whole(spec, transcript))
    expect(said == wanted, f"{transcript['text']!r} gives {said}, expected {wanted}")


def _same(spec: ParserSpec, transcript: dict[str, Any], pieces: Sequence[str]) -> None:
    said, whole = _run(_make(spec, transcript), pieces), _whole(spec, transcript, "".join(pieces))
    expect(said == whole, f"fed as {pieces!r} it gives {_lines(said)}, whole {_lines(whole)}")


def _every_cut(spec: ParserSpec, transcript: dict[str, Any]) -> None:
    text = transcript["text"]
    for cut in range(1, len(text)):
        _same(spec, transcript, [text[:cut], text[cut:]])


def _one_by_one(spec: ParserSpec, transcript: dict[str, Any]) -> None:
    text = transcript["text"]
    for size in (1, 2, 3):
        _same(spec, transcript, [text[at : at + size] for at in range(0, len(text), size)])


def _tokens(spec: ParserSpec, transcripts: list[dict[str, Any]], split: Split | None) -> None:
    for transcript in transcripts:
        for tokenize in (_TOKEN.findall, split):
            if tokenize is not None:
                tokens = list(tokenize(transcript["text"]))
                expect("".join(tokens) == transcript["text"], f"the split loses text: {tokens}")
                _same(spec, transcript, tokens)


def _calls(spec: ParserSpec, transcript: dict[str, Any]) -> None:
    """Calls come one after the other; the arguments of a complete one are a JSON object."""
    check_calls(_whole(spec, transcript))


def check_calls(events: Sequence[ParserEvent]) -> None:
    """The grammar of events, for any output: raises `AssertionError`."""
    current, arguments, ended = -1, "", True
    for event in events:
        if event.kind == "tool_start":
            current, arguments, ended = current + 1, "", False
            expect(event.call_index == current, f"call {event.call_index} starts where {current} is next")
            expect(event.text, "a call has no name")
        elif event.kind in ("tool_args", "tool_end"):
            expect(event.call_index == current and not ended, f"{event} is not of the call that is open")
            arguments += event.text
            if event.kind == "tool_end":
                ended = True
                expect(isinstance(_loads(arguments), dict), f"the arguments are no JSON object: {arguments!r}")
        else:
            ended = True  # a call that broke is not taken up again


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _words(text: str) -> Counter[str]:
    return Counter(_WORD.findall(_ESCAPE.sub(" ", text).lower().replace("none", "null")))


def _said(events: Sequence[ParserEvent]) -> Counter[str]:
    return _words(" ".join(event.text for event in events))


def _prefixes(spec: ParserSpec, transcript: dict[str, Any]) -> None:
    """Cut off anywhere, every word is said that is not a part of the format's marks."""
    text = transcript["text"]
    marks = set()
    for known in spec.example["transcripts"]:
        marks |= set(_words(known["text"]) - _words(" ".join(str(line[1]) for line in known["events"])))
    for end in range(len(text)):
        prefix = text[:end]
        events = _whole(spec, transcript, prefix)
        check_calls(events)
        lost = {word for word in _words(prefix) - _said(events) if not any(mark.startswith(word) for mark in marks)}
        expect(not lost, f"{prefix!r} loses {sorted(lost)}: it gives {_lines(events)}")


def _mutations(spec: ParserSpec, transcript: dict[str, Any]) -> None:
    """Nothing raises and no split matters, whatever is missing, doubled or foreign."""
    text = transcript["text"]
    draw = random.Random(text)
    for _ in range(MUTATIONS if text else 0):
        start = draw.randrange(len(text))
        end = min(len(text), start + draw.choice((1, 1, 5, 20)))
        filling = draw.choice(("", text[start:end] * 2, draw.choice(("{", "}", '"', "\\", "<", "[", "'", "\n", "é"))))
        broken = text[:start] + filling + text[end:]
        _same(spec, transcript, list(broken))
        check_calls(_whole(spec, transcript, broken))


def _leaves_calls_alone(spec: ParserSpec, transcript: dict[str, Any]) -> None:
    events = _run(_make(spec, transcript, None), [transcript["text"]])
    kinds = {event.kind for event in events}
    expect(kinds <= {"text", "reasoning"}, f"made without tools, it still finds calls: {_lines(events)}")


def _independent(spec: ParserSpec, transcript: dict[str, Any]) -> None:
    """Two parsers at once do not see each other."""
    one, two = _make(spec, transcript), _make(spec, transcript)
    said: list[list[ParserEvent]] = [[], []]
    for char in transcript["text"]:
        said[0] += one.feed(char, [])
        said[1] += two.feed(char, [])
    said[0] += one.finish()
    said[1] += two.finish()
    whole = _whole(spec, transcript)
    expect(merge_events(said[0]) == merge_events(said[1]) == whole, "two parsers of one spec share state")


def _plain_text(spec: ParserSpec) -> None:
    """Text without marks comes back unchanged, and at once: nothing waits for the end."""
    for pieces in ([PLAIN], list(PLAIN), [PLAIN, PLAIN]):
        parser = _make(spec, {})
        said = [event for piece in pieces for event in parser.feed(piece, [])]
        now = "".join(event.text for event in said)
        expect(now.rstrip() == "".join(pieces).rstrip(), f"of {''.join(pieces)!r} it has only said {now!r}")
        rest = "".join(event.text for event in parser.finish())
        expect(now + rest == "".join(pieces), f"plain text comes back as {now + rest!r}")


def write_calls(syntax: CallSyntax, calls: Sequence[tuple[str, str]]) -> str:
    """What a grammar of this syntax writes for calls of (name, arguments)."""
    written = [
        f"{syntax.before_name}{name}{syntax.before_arguments}{arguments}{syntax.end}" for name, arguments in calls
    ]
    return syntax.section_begin + syntax.separator.join(written) + syntax.section_end


def _call_syntaxes(spec: ParserSpec) -> None:
    """What a grammar writes is read as what was meant: one call, several, and behind text."""
    one, two = ("get_weather", '{"city": "O\\"slo", "days": [1, {"a": null}]}'), ("ns.get-time", "{}")
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name, _ in (one, two)]
    prompt = spec.reasoning_end[0] if spec.reasoning_end else ""
    for syntax in spec.call_syntaxes:
        for calls in ([one], [two, one], [two, two, two]):
            for before in ("", "I look.") if syntax.trigger else ("",):
                text = before + write_calls(syntax, calls)
                said = _run(_make(spec, {"prompt": prompt} if prompt else {}, tools), list(text))
                wanted = [["text", before, 0, ""]] if before else []
                for index, (name, arguments) in enumerate(calls):
                    wanted += [["tool_start", name, index, ""], ["tool_args", arguments, index, ""]]
                    wanted += [["tool_end", "", index, ""]]
                expect(_lines(said) == wanted, f"the syntax writes {text!r}, which is read as {_lines(said)}")
        start = syntax.section_begin or syntax.before_name
        expect(start.startswith(syntax.trigger), f"calls do not begin with the trigger {syntax.trigger!r}")
