"""Constrained output through the real facade, loop and scheduler over a scripted model: what comes out, what is refused, and
that nobody else notices. The worker's half is in integration/test_structured_output.py."""

from __future__ import annotations

import json
import re
import threading
import time
from typing import Any

import anyio
import pytest

from infer import (
    ConfigError,
    EngineConfig,
    GrammarError,
    InvalidRequestError,
    QueueFullError,
    SamplingError,
    SamplingParams,
    StructuredOutput,
    UnknownPluginError,
)
from infer.engine.structured import GrammarStore
from infer.plugins.grammar import GrammarSource, GrammarSpec
from infer.testing.fake_engine import fake_engine
from served import answer_text, letters, letters_engine, settings, wait_until_idle

pytestmark = pytest.mark.anyio

CORE = "TOOLS-STRUCTURED-CORE"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def asking(max_tokens: int = 400, **structured: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=3, structured_output=structured)


KINDS: list[tuple[dict[str, Any], Any]] = [
    ({"json_schema": PERSON}, lambda text: 0 <= json.loads(text)["age"] <= 150),
    (
        {"json_schema": json.dumps(PERSON), "compact": True},
        lambda text: text == json.dumps(json.loads(text), separators=(",", ":")),
    ),
    ({"json_schema": PERSON, "whitespace_pattern": " ?"}, lambda text: "\n" not in text and json.loads(text)),
    ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    ({"regex": r"[a-c]{2,5}-\d{3}"}, lambda text: re.fullmatch(r"[a-c]{2,5}-\d{3}", text)),
    ({"choice": ["red", "green", "light green"]}, lambda text: text in ("red", "green", "light green")),
    ({"grammar": 'start: "(" start ")" | "x"'}, lambda text: re.fullmatch(r"\(*x\)*", text)),
    ({"grammar": 'root ::= "(" root ")" | "x"'}, lambda text: text.count("(") == text.count(")")),
]


@pytest.mark.row(CORE, "output is forced to fit a JSON schema, regex, choice list or grammar")
@pytest.mark.parametrize(("asked", "holds"), KINDS, ids=lambda value: "" if callable(value) else str(value)[:40])
@pytest.mark.parametrize("depth", [1, 2])
async def test_what_is_asked_for_comes_out(asked: dict[str, Any], holds: Any, depth: int) -> None:
    async with letters_engine(in_flight_depth=depth) as engine:
        free = [engine_answer async for engine_answer in _gather(engine, ["free one", "free two"])]
        done = await engine.generate("make it so", asking(**asked).model_copy(update={"n": 4}))
        for choice in done.choices:
            if choice.finish_reason == "stop":
                assert holds(choice.text), choice.text
        assert any(choice.finish_reason == "stop" for choice in done.choices)
        assert free == [answer_text("free one", 8, 3), answer_text("free two", 8, 3)]
        await wait_until_idle(engine)


async def _gather(engine: Any, prompts: list[str]) -> Any:
    for done in await engine.generate_many(prompts, SamplingParams(max_tokens=8, seed=3)):
        yield done.text


async def test_a_pydantic_model_is_a_schema() -> None:
    from pydantic import BaseModel

    class Point(BaseModel):
        x: bool
        y: bool

    asked = StructuredOutput(json_schema=Point, compact=True, forbid_additional_properties=True)
    params = SamplingParams(max_tokens=200, seed=1, structured_output=asked)
    async with letters_engine() as engine:
        done = await engine.generate("p", params)
    assert Point.model_validate_json(done.text)


async def test_constrained_and_free_requests_share_steps_without_noticing() -> None:
    async with letters_engine(max_num_seqs=8) as engine:
        params = [asking(40, regex="[xyz]{20}"), SamplingParams(max_tokens=20, seed=3)] * 6
        alone = [await engine.generate(f"p{i}", each) for i, each in enumerate(params)]
        together = await engine.generate_many([f"p{i}" for i in range(12)], params)
        assert [done.token_ids for done in together] == [done.token_ids for done in alone]
        assert all(re.fullmatch("[xyz]{20}", done.text) for done in together[::2])
        assert {done.finish_reason for done in together[::2]} == {"stop"}


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_preempted_output_goes_on_where_it_was(depth: int) -> None:
    asked = asking(60, regex="(ab|cd|ef){10,25}!")
    async with fake_engine(letters, settings(cache={"num_blocks": 400}, in_flight_depth=depth)) as roomy:
        expected = [await roomy.generate(f"prompt {i} " * 3, asked) for i in range(8)]
    tight = settings(cache={"num_blocks": 10, "watermark": 0.0}, in_flight_depth=depth)
    async with fake_engine(letters, tight) as engine:
        done = await engine.generate_many([f"prompt {i} " * 3 for i in range(8)], asked)
        assert engine.statistics().preemptions > 0
    assert [one.text for one in done] == [one.text for one in expected]
    assert all(re.fullmatch("(ab|cd|ef){10,25}!", one.text) for one in done if one.finish_reason == "stop")


async def test_it_ends_where_nothing_may_follow_and_may_go_on_where_something_may() -> None:
    async with letters_engine() as engine:
        done = await engine.generate("x", asking(regex="abc"))
        assert (done.text, done.finish_reason, done.stop_reason, len(done.token_ids)) == ("abc", "stop", None, 3)
        late = await engine.generate("x", asking(max_tokens=3, regex="abc"))
        assert late.finish_reason == "stop", "complete and at its limit: complete"
        endless = SamplingParams(max_tokens=7, ignore_eos=True, seed=1, structured_output={"regex": "a+"})
        assert (await engine.generate("x", endless)).text == "aaaaaaa"


async def test_each_choice_has_its_own_state() -> None:
    async with letters_engine() as engine:
        done = await engine.generate(
            "x", SamplingParams(n=5, seed=1, structured_output={"regex": "[a-z]{1,12}0"}, max_tokens=40)
        )
    texts = {choice.text for choice in done.choices}
    assert len(texts) > 1
    assert all(re.fullmatch("[a-z]{1,12}0", text) for text in texts)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": {"not": {"type": "string"}}}, "not"),
    ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ({"json_schema": {"type": "array", "contains": {"type": "null"}}}, "contains"),
    ({"json_schema": {"if": {}, "then": {}}}, "if"),
    ({"json_schema": {"type": "object", "propertyNames": {"pattern": "a"}}}, "propertyNames"),
    ({"json_schema": {"type": "object", "dependentRequired": {"a": ["b"]}}}, "dependentRequired"),
    ({"json_schema": {"type": "string", "format": "phone"}}, "phone"),
    ({"json_schema": {"$ref": "http://elsewhere.example/x"}}, "elsewhere"),
    ({"json_schema": {"type": "string", "pattern": "(?=a)b"}}, "look-around"),
    ({"json_schema": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "oneOf"),
    ({"json_schema": {"type": "integer", "divisibleBy": 3}}, "divisibleBy"),
    ({"json_schema": {"type": "string", "nullable": True}}, "nullable"),
    ({"json_schema": {"type": "object", "minProperties": 3}}, "minProperties"),
    ({"json_schema": {"x-guidance": {"lenient": True}, "not": {}}}, "x-guidance"),
    ({"json_schema": False}, "false"),
    ({"json_schema": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}, "ever ends"),
    (
        {"json_schema": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}},
        "no value of the whole ever ends",
    ),
    ({"json_schema": "{broken"}, "not JSON"),
    ({"json_schema": "[1]"}, "object or a boolean"),
    ({"regex": "("}, "unclosed"),
    ({"regex": r"(a)\1"}, "reference"),
    ({"regex": "a{0}"}, "empty"),
    ({"choice": [""]}, "empty"),
    ({"grammar": "start: other"}, "other"),
    ({"grammar": "no grammar at all"}, "Expected"),
    ({"structural_tag": {"type": "structural_tag", "format": {"type": "token", "token": 3}}}, "token"),
]


@pytest.mark.row(CORE, "a bad grammar is a 400 for that request alone")
@pytest.mark.parametrize(("asked", "word"), REFUSED, ids=lambda value: str(value)[:50])
async def test_what_cannot_be_kept_is_refused_by_name(asked: dict[str, Any], word: str) -> None:
    async with letters_engine() as engine:
        async with anyio.create_task_group() as group:
            neighbours: list[str] = []

            async def neighbour() -> None:
                neighbours.append((await engine.generate("hello", SamplingParams(max_tokens=12, seed=3))).text)

            group.start_soon(neighbour)
            with pytest.raises(GrammarError) as refused:
                await engine.generate("x", asking(**asked))
        assert re.search(re.escape(word), str(refused.value)), str(refused.value)
        assert refused.value.parameter == "structured_output"
        assert len(str(refused.value)) < 900
        assert neighbours == [answer_text("hello", 12, 3)]


WRONG: list[tuple[Any, str]] = [
    ({}, "exactly one"),
    ({"regex": "a", "choice": ["b"]}, "exactly one"),
    ({"json_object": True, "json_schema": {}}, "exactly one"),
    ({"regex": "a", "compact": True}, "compact"),
    ({"json_object": True, "compact": True, "whitespace_pattern": " "}, "whitespace_pattern"),
    ({"choice": []}, "choice"),
    ({"choice": [1]}, "choice"),
    ({"regex": ""}, "regex"),
    ({"json_schema": 5}, "json_schema"),
    ({"json_schema": {"a": {1, 2}}}, "not JSON"),
    ({"json_schema": {"a": float("nan")}}, "not JSON"),
    ({"jsonschema": {}}, "jsonschema"),
    ("a+", "structured_output"),
]


@pytest.mark.parametrize(("value", "word"), WRONG, ids=lambda value: str(value)[:50])
def test_a_malformed_request_is_refused_by_name(value: Any, word: str) -> None:
    with pytest.raises(InvalidRequestError, match=word) as refused:
        SamplingParams(structured_output=value)
    assert refused.value.parameter == "structured_output"


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def _fan_out() -> dict[str, Any]:
    defs: dict[str, Any] = {"d0": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    for i in range(1, 30):
        defs[f"d{i}"] = {"type": "object", "properties": {key: {"$ref": f"#/$defs/d{i - 1}"} for key in "abcdefghij"}}
    return {"$defs": defs, "$ref": "#/$defs/d29"}


def _doubling(letter: str, last: str) -> dict[str, Any]:
    """Two to the twentieth of `last`."""
    rules = [f"{letter}{i}: {letter}{i - 1} {letter}{i - 1}" for i in range(1, 21)]
    return {"grammar": "\n".join([f"start: {letter}20", *rules, f"{letter}0: {last}"])}


def _properties(count: int) -> dict[str, Any]:
    return {"json_schema": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}}}


BOMBS: list[tuple[str, dict[str, Any], bool]] = [
    ("more than a megabyte", {"json_schema": {"enum": ["x" * 100] * 12_000}}, False),
    ("a 10,000-value enum", {"json_schema": {"enum": [f"value-{i}" for i in range(10_000)]}}, True),
    ("99,999 choices", {"choice": [f"choice-{i}" for i in range(99_999)]}, False),
    ("15,000 properties", _properties(15_000), False),
    ("4,000 optional properties", _properties(4_000), False),
    ("nested 90 deep", {"json_schema": _nested(90)}, True),
    ("nested 300 deep", {"json_schema": _nested(300)}, False),
    ("ten to the thirtieth", {"json_schema": _fan_out()}, True),
    ("a large multipleOf", {"json_schema": {"type": "integer", "multipleOf": 999_983}}, False),
    ("a catastrophic regex", {"regex": "(a+)+b"}, True),
    ("two to the thirtieth states", {"regex": "(a|b)*a(a|b){30}"}, True),
    ("nested counts", {"regex": "((a{1,100}){1,100}){1,100}"}, True),
    ("terminals that double", _doubling("A", '"x" | "y"'), False),
    ("rules that double", _doubling("a", '"x"'), True),
    ("all ways at once", {"grammar": 'start: s\ns: s s | "a" | "aa" | ""'}, True),
]


@pytest.mark.row(
    CORE, "recursive schemas, 1 MB schemas, catastrophic regexes, large enums and grammar bombs are bounded"
)
@pytest.mark.parametrize(("asked", "accepted"), [bomb[1:] for bomb in BOMBS], ids=[bomb[0] for bomb in BOMBS])
async def test_a_bomb_is_bounded_and_hurts_nobody_else(asked: dict[str, Any], accepted: bool) -> None:
    async with letters_engine() as engine:
        gaps: list[float] = []

        async def ticks() -> None:
            last = time.monotonic()
            while True:
                await anyio.sleep(0.005)
                now = time.monotonic()
                gaps.append(now - last)
                last = now

        async with anyio.create_task_group() as group:
            group.start_soon(ticks)
            with anyio.fail_after(60):
                try:
                    await engine.generate("x", asking(60, **asked))
                    survived = True
                except GrammarError:
                    survived = False
            group.cancel_scope.cancel()
        assert survived is accepted
        assert max(gaps, default=0) < 5, "the event loop stood still while the grammar was compiled"
        assert (await engine.generate("hello", SamplingParams(max_tokens=8, seed=3))).text == answer_text("hello", 8, 3)


RELEASE = threading.Event()
"""What "slow" waits for."""


class SlowBackend:
    """Compiles for longer than anyone waits, or fails in its own way; matches like the real one."""

    def __init__(self, vocabulary: Any) -> None:
        from infer.grammars.llguidance import LLGuidanceBackend

        self.real = LLGuidanceBackend(vocabulary)

    def compile(self, source: GrammarSource) -> Any:
        if source.text == "slow":
            RELEASE.wait(30)
        if source.text == "broken":
            raise ZeroDivisionError("oops")
        grammar = self.real.compile(source)
        if source.text == "refuses":
            return Refuses(grammar)
        return grammar


class Refuses:
    """Says no to the third token, whatever it allowed."""

    def __init__(self, grammar: Any) -> None:
        self.grammar = grammar

    def start(self) -> Any:
        matcher, accept = self.grammar.start(), None

        class Third:
            count = 0
            can_end, is_complete = False, False

            def accept(self, token_id: int) -> str | None:
                self.count += 1
                return "no third token" if self.count == 3 else matcher.accept(token_id)

            def fill(self, mask: bytearray) -> None:
                matcher.fill(mask)

        assert accept is None
        return Third()


def planted(monkeypatch: pytest.MonkeyPatch, **section: Any) -> EngineConfig:
    """A configuration whose grammar backend is `SlowBackend`."""
    import sys
    from types import ModuleType

    module = ModuleType("planted_grammar")
    module.SlowBackend = SlowBackend  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "planted_grammar", module)
    monkeypatch.setattr(
        "infer.engine.structured.choose_backend",
        lambda registry, name: GrammarSpec(
            name="planted",
            api=1,
            factory="planted_grammar:SlowBackend",
            probe="infer.grammars.llguidance:probe",
            kinds=("regex",),
            example={},
        ),
    )
    monkeypatch.setattr(
        GrammarStore,
        "_open",
        lambda self: self._backend or setattr(self, "_backend", SlowBackend(self.vocabulary)) or self._backend,
    )
    return EngineConfig(cache={"num_blocks": 200}, structured_output=section)


async def test_compiling_has_a_time_limit_and_what_is_left_behind_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    RELEASE.clear()
    async with fake_engine(letters, planted(monkeypatch, compile_timeout=0.2)) as engine:
        await engine.generate("x", asking(5, regex="warm{1,9}"))
        outcomes: list[str] = []

        async def slow() -> None:
            try:
                await engine.generate("x", asking(5, regex="slow"))
            except (GrammarError, QueueFullError) as error:
                outcomes.append(type(error).__name__)

        async with anyio.create_task_group() as group:
            for _ in range(8):
                group.start_soon(slow)
            done = await engine.generate("hello", SamplingParams(max_tokens=8, seed=3))
        assert done.text == answer_text("hello", 8, 3)
        # Four at a time; one may begin when the first of them is given up, before the fourth is.
        assert len(outcomes) == 8 and 4 <= outcomes.count("GrammarError") <= 7
        with pytest.raises(QueueFullError, match="still being compiled"):
            await engine.generate("x", asking(5, regex="slow"))
        RELEASE.set()
        with anyio.fail_after(60):
            while True:  # once the threads are done, everything is as before
                try:
                    await engine.generate("x", asking(5, regex="ok{2}"))
                    break
                except QueueFullError:
                    await anyio.sleep(0.1)


async def test_case_25_a_backend_that_breaks_while_compiling_ends_that_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_engine(letters, planted(monkeypatch)) as engine:
        with pytest.raises(GrammarError, match="ZeroDivisionError: oops"):
            await engine.generate("x", asking(regex="broken"))
        with pytest.raises(GrammarError, match="choice is not supported by the grammar backend 'planted'"):
            await engine.generate("x", asking(choice=["a"]))
        assert (await engine.generate("x", asking(regex="fine"))).text == "fine"


@pytest.mark.parametrize("depth", [1, 2])
async def test_case_26_a_grammar_that_cannot_take_the_token_ends_that_request(
    monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    config = planted(monkeypatch)
    config = config.model_copy(update={"scheduler": config.scheduler.model_copy(update={"in_flight_depth": depth})})
    async with fake_engine(letters, config) as engine:
        delivered: list[int] = []
        put = type(engine)  # the outbox is what the reader sees before the error
        assert put is not None
        from infer.engine.outputs import Outbox

        original = Outbox.put

        def watch(self: Any, request: Any, token_ids: Any = (), *rest: Any) -> None:
            delivered.extend(token_ids)
            original(self, request, token_ids, *rest)

        monkeypatch.setattr(Outbox, "put", watch)
        with pytest.raises(SamplingError, match="no third token"):
            await engine.generate("x", asking(regex="refuses"))
        assert bytes(delivered) == b"ref", "the token that the grammar could not take is returned, too"
        assert (await engine.generate("hello", SamplingParams(max_tokens=8, seed=3))).text == answer_text("hello", 8, 3)
        await wait_until_idle(engine)


async def test_forced_tokens_that_leave_the_grammar_fail_their_request_alone() -> None:
    async with letters_engine() as engine:
        fits = SamplingParams(forced_token_ids=tuple(b"ab"), max_tokens=9, seed=1, structured_output={"regex": "abc+d"})
        assert (await engine.generate("x", fits)).text.startswith("abc")
        with pytest.raises(SamplingError, match="does not fit the grammar"):
            await engine.generate("x", fits.model_copy(update={"forced_token_ids": tuple(b"ax")}))
        with pytest.raises(SamplingError, match=r"no token is left|ends the answer"):
            await engine.generate(
                "x", SamplingParams(forced_token_ids=(257,), seed=1, structured_output={"regex": "ab"})
            )


def test_the_backend_is_chosen_at_start() -> None:
    from infer.config.engine import PluginsSection
    from infer.config.structured_output import StructuredOutputSection
    from infer.engine.structured import choose_backend
    from infer.plugins.manager import build_registry

    registry = build_registry(PluginsSection(allow=()))
    assert choose_backend(registry, "auto").name == "llguidance"
    assert choose_backend(registry, "llguidance").name == "llguidance"
    with pytest.raises(UnknownPluginError, match="llguidance"):
        choose_backend(registry, "llguidence")
    with pytest.raises(ConfigError, match="structured_output"):
        EngineConfig(structured_output={"compile_timeout": 0})
    assert StructuredOutputSection().backend == "auto"


@pytest.mark.row("TOOLS-GUIDANCE-OUTLINES", "a missing package is a named error at start")
@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
async def test_a_missing_package_is_a_named_error_at_start(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == backend else find(name, *rest))
    engine = fake_engine(letters, EngineConfig(structured_output={"backend": backend}))
    with pytest.raises(ConfigError, match=rf"{backend}: not available here .*pip install {backend}"):
        await engine.__aenter__()


async def test_the_cache_keeps_what_runs_and_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    from infer.grammars.llguidance import LLGuidanceBackend

    compiled: list[str] = []
    compile_ = LLGuidanceBackend.compile

    def watch(self: Any, source: GrammarSource) -> Any:
        compiled.append(source.text)
        return compile_(self, source)

    monkeypatch.setattr(LLGuidanceBackend, "compile", watch)
    config = EngineConfig(cache={"num_blocks": 200}, structured_output={"cache_size": 2})
    async with fake_engine(letters, config) as engine:
        for regex in ("aa", "aa", "bb", "aa", "cc", "bb"):
            await engine.generate("x", asking(regex=regex))
        assert compiled == ["aa", "bb", "cc", "bb"]
