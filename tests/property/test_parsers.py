"""Output parsers under every chunking: the split never matters, nothing raises, no text is lost, arguments are JSON."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from infer.config.engine import PluginsSection
from infer.plugins import ParserEvent, Registry, build_registry
from infer.plugins.parsing import SAMPLE_TOOLS, merge_events
from infer.plugins.parsing.coercion import ToolSchemas, coerce
from infer.plugins.parsing.json_text import read_json
from infer.plugins.parsing.source import Malformed, Source
from infer.testing.kits.parser import check_calls
from infer.text.output_parsing import collect, open_parser, parse_output


@lru_cache
def registry() -> Registry:
    return build_registry(PluginsSection(allow=()))


NAMES = [spec.name for spec in registry().specs("parser")]
JUNK = st.text(alphabet="<>{}[]()|\"'\\`:=,/ \nab1é", max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def outputs(draw: st.DrawFn, name: str) -> str:
    """Pieces of the format's own transcripts, cut anywhere and mixed with junk."""
    texts = [line["text"] for line in registry().get("parser", name).example["transcripts"]]
    pieces = []
    for _ in range(draw(st.integers(1, 4))):
        text = draw(st.sampled_from(texts))
        start = draw(st.integers(0, len(text)))
        pieces += [text[start : draw(st.integers(start, len(text)))], draw(JUNK)]
    return "".join(pieces)


@st.composite
def splits(draw: st.DrawFn, text: str) -> list[str]:
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def run(name: str, pieces: list[str], tools: list[dict[str, Any]] | None, prompt: str | None) -> list[ParserEvent]:
    parser = open_parser(registry(), registry().get("parser", name), tools, prompt)
    events = [event for piece in pieces for event in parser.feed(piece, [])]
    return merge_events([*events, *parser.finish()])


@pytest.mark.row(
    "TOOLS-STREAMING-PARSER", "any split into chunks gives the same final message, also for broken outputs"
)
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(data=st.data())
def test_the_split_does_not_matter(name: str, data: st.DataObject) -> None:
    text = data.draw(outputs(name))
    tools = data.draw(st.sampled_from([None, [], SAMPLE_TOOLS]))
    prompt = data.draw(st.sampled_from([None, "", "<think>\n", "</think>"]))
    whole = run(name, [text], tools, prompt)
    assert run(name, list(text), tools, prompt) == whole
    assert run(name, data.draw(splits(text)), tools, prompt) == whole
    check_calls(whole)


@pytest.mark.row("TOOLS-STREAMING-PARSER", "text that is no call comes out unchanged")
@pytest.mark.parametrize("name", NAMES)
@given(text=st.text(alphabet="ab <>{}[]().,:;|\n", max_size=30))
def test_text_without_marks_is_unchanged(name: str, text: str) -> None:
    prompt = "<|start|>assistant<|channel|>final<|message|>" if name == "gpt_oss" else None
    output = collect(run(name, [text], SAMPLE_TOOLS, prompt))
    assert output.calls == []
    assert output.text + output.reasoning == text


@pytest.mark.row(
    "TOOLS-STREAMING-PARSER", "streamed arguments of JSON formats concatenate to the object that was meant"
)
@given(arguments=st.dictionaries(st.text(max_size=8), JSON, max_size=4), ascii_only=st.booleans(), data=st.data())
def test_json_arguments_come_back(arguments: dict[str, Any], ascii_only: bool, data: st.DataObject) -> None:
    call = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=ascii_only)
    text = f"<tool_call>\n{call}\n</tool_call>"
    output = collect(run("hermes", data.draw(splits(text)), [], None))
    assert (output.text, len(output.calls)) == ("", 1)
    assert json.loads(output.calls[0].arguments) == arguments
    assert output.calls[0].complete


@pytest.mark.row("TOOLS-STREAMING-PARSER", "Python arguments come back as the JSON of the same values")
@given(arguments=st.dictionaries(st.from_regex(r"[a-z_]{1,6}", fullmatch=True), JSON, max_size=4))
def test_python_arguments_come_back(arguments: dict[str, Any]) -> None:
    call = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    output = collect(run("llama4_pythonic", list(f"[f({call})]"), [], None))
    assert (output.text, len(output.calls)) == ("", 1)
    assert json.loads(output.calls[0].arguments) == arguments


@given(document=JSON, indent=st.sampled_from([None, 1]), cut=st.integers(0, 40))
def test_json_is_accepted_whole_and_passed_on_unchanged(document: Any, indent: int | None, cut: int) -> None:
    text = json.dumps(document, indent=indent, ensure_ascii=False)
    passed: list[str] = []
    source = Source()
    reader = read_json(source, passed.append)
    for piece in (text[:cut], text[cut:]):
        source.append(piece)
        next(reader, None)
    source.complete = True
    next(reader, None)
    assert json.loads("".join(passed)) == document
    assert source.pos == len(text)


@given(text=st.text(alphabet='{}[]",:0123.-eE+truefalsn\\ \n', max_size=20))
@example('{"a": 1,}')
@example("[1,]")
@example("01")
@example("-")
@example('{"a" 1}')
@example("nan")
def test_json_is_refused_where_json_refuses_it(text: str) -> None:
    """But for the two slips that are mended, which the alphabet can only make inside strings."""
    passed: list[str] = []
    source = Source()
    source.append(text)
    source.complete = True
    try:
        for _ in read_json(source, passed.append):
            pass
    except Malformed:
        with pytest.raises(ValueError):
            json.loads(text.strip(), parse_constant=_refuse)
    else:
        json.loads("".join(passed))


def _refuse(word: str) -> Any:
    raise ValueError(word)


@pytest.mark.row("TOOLS-STREAMING-PARSER", "argument types follow the tool's schema")
@given(value=JSON, data=st.data())
def test_coercion_gives_back_every_json_value_of_its_type(value: Any, data: st.DataObject) -> None:
    """As templates write them: strings as they are, everything else as JSON."""
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    kind = "null" if value is None else kinds[type(value)]
    others = data.draw(st.sets(st.sampled_from([*kinds.values(), "null"]))) if kind != "string" else set()
    written = value if isinstance(value, str) else json.dumps(value)
    assert json.loads(coerce(written, frozenset({kind} | others))) == value


@given(
    text=st.text(max_size=20), types=st.none() | st.frozensets(st.sampled_from(["string", "integer", "array", "null"]))
)
def test_coercion_never_loses_what_it_cannot_read(text: str, types: frozenset[str] | None) -> None:
    value = json.loads(coerce(text, types))
    if isinstance(value, str):
        assert value == text


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "integer"}, {"integer"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"type": "float"}, {"number"}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"integer", "null"}),
        ({"oneOf": [{"type": "string"}, {"enum": [1, 2.5]}]}, {"string", "integer", "number"}),
        ({"allOf": [{"type": ["string", "null"]}, {"type": "string"}]}, {"string"}),
        ({"enum": ["a", True, None, [], {}]}, {"string", "boolean", "null", "array", "object"}),
        ({"const": 3}, {"integer"}),
        ({"$ref": "#/$defs/count"}, {"integer"}),
        ({"$ref": "#/$defs/loop"}, None),
        ({"$ref": "#/$defs/absent"}, None),
        ({"anyOf": [{"type": "integer"}, {}]}, None),
        ({"description": "anything"}, None),
        (True, None),
        ({"type": "unheard-of"}, None),
    ],
)
def test_the_types_that_a_schema_allows(schema: Any, types: set[str] | None) -> None:
    parameters = {
        "type": "object",
        "properties": {"x": schema},
        "$defs": {"count": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}},
    }
    for tool in (
        {"type": "function", "function": {"name": "f", "parameters": parameters}},
        {"name": "f", "parameters": parameters},
    ):
        assert ToolSchemas([tool]).types("f", "x") == types


@pytest.mark.parametrize(
    "text", ['{"a": ' * 3000, "[" * 5000, '{"name": "f", "arguments": ' * 500, "[f(a=" + "[" * 5000]
)
@pytest.mark.parametrize("name", NAMES)
def test_deep_nesting_is_bounded(name: str, text: str) -> None:
    spec = registry().get("parser", name)
    opener = {"hermes": "<tool_call>", "qwen3": "</think><tool_call>"}.get(name, "")
    output = parse_output(open_parser(registry(), spec, []), opener + text)
    assert output.text or output.reasoning or output.calls
