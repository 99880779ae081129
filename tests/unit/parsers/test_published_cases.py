"""The facts that vLLM's own parser tests assert, as outputs of ours: reasoning, and the suite that every tool parser runs.

Where `infer` decides otherwise the difference is a case of its own at the end, and in docs/parsers.md."""

from __future__ import annotations

import json
from typing import Any

import pytest

from infer.config.engine import PluginsSection
from infer.plugins import Registry, build_registry
from infer.text.output_parsing import ParsedOutput, collect, open_parser


@pytest.fixture(scope="module")
def registry() -> Registry:
    return build_registry(PluginsSection(allow=()))


def parse(registry: Registry, name: str, text: str, tools: Any = (), prompt: str | None = None) -> ParsedOutput:
    """The message, asserted to be the same whole, by characters and by sevens."""
    found = []
    for size in (1, 7, len(text) or 1):
        parser = open_parser(registry, registry.get("parser", name), list(tools), prompt)
        events = [event for at in range(0, len(text), size) for event in parser.feed(text[at : at + size], [])]
        found.append(collect([*events, *parser.finish()]))
    assert found[0] == found[1] == found[2]
    return found[0]


NO_THINKING = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
THINK = [  # parser, output, reasoning, text
    *(
        (name, output, reasoning, text)
        for name in ("deepseek_r1", "qwen3", "minimax_m2")
        for output, reasoning, text in (
            ("why so</think>because", "why so", "because"),
            ("why so</think>", "why so", ""),
            ("why so", "why so", ""),
            ("one\ntwo</think>three\nfour", "one\ntwo", "three\nfour"),
            ("</think>because", "", "because"),
            ("<think>why so</think>because", "why so", "because"),
            ("<think>why so</think>", "why so", ""),
            ("<think>one\ntwo</think>three\nfour", "one\ntwo", "three\nfour"),
            ("<think>why so", "why so", ""),
            ("", "", ""),
            ("\n<think>why so</think>\nbecause", "why so", "\nbecause"),
        )
    ),
    *(
        (name, output, reasoning, text)
        for name in (
            "glm45",
            "hermes",
            "qwen3_coder",
            "kimi_k2",
            "deepseek_v31",
            "nemotron",
            "granite",
            "phi4",
            "think",
        )
        for output, reasoning, text in (
            ("<think>why so</think>because", "why so", "because"),
            ("<think>one\ntwo</think>three\nfour", "one\ntwo", "three\nfour"),
            ("<think>why so</think>", "why so", ""),
            ("<think>why so", "why so", ""),
            ("because", "", "because"),
            ("before<think>why so</think>because", "why so", "beforebecause"),
            ("", "", ""),
        )
    ),
    ("mistral", "[THINK]why so[/THINK]because", "why so", "because"),
    ("mistral", "before[THINK]why so[/THINK]because", "why so", "beforebecause"),
    ("mistral", "[THINK]why so", "why so", ""),
    ("mistral", "because", "", "because"),
    ("granite", "Here is my thought process:why soHere is my response:because", "why so", "because"),
    ("granite", "Here's my thought process:why soHere's my response:because", "why so", "because"),
    ("granite", "Here is my thought process:one\ntwoHere is my response:three", "one\ntwo", "three"),
    ("granite", "because", "", "because"),
    ("granite", "Here is a thing", "", "Here is a thing"),
    ("command_a", "<|START_THINKING|>why so<|END_THINKING|>", "why so", ""),
    (
        "command_a",
        "<|START_THINKING|>A <co>red 🌈</co: 0:[1]><|END_THINKING|>\n<|START_RESPONSE|>foo <co>bar</co: 0:[1]><|END_RESPONSE|>",
        "A red 🌈",
        "foo bar",
    ),
    ("gemma4", "<|channel>thought\nwhy so<channel|>because", "why so", "because"),
    ("seed_oss", "<seed:think>why so</seed:think>because", "why so", "because"),
    ("olmo3", "<think>why so</think>because", "why so", "because"),
    ("gpt_oss", "<|channel|>analysis<|message|>why so<|end|>", "why so", ""),
    (
        "gpt_oss",
        "<|channel|>analysis<|message|>why so<|end|><|start|>assistant<|channel|>final <|constrain|>JSON<|message|>{}",
        "why so",
        "{}",
    ),
]


@pytest.mark.row("SAMPLE-REASONING", "results equal the cases in vLLM's own parser tests")
@pytest.mark.parametrize(("name", "output", "reasoning", "text"), THINK)
def test_reasoning(registry: Registry, name: str, output: str, reasoning: str, text: str) -> None:
    parsed = parse(registry, name, output)
    assert (parsed.reasoning, parsed.text.removeprefix("\n") if name == "command_a" else parsed.text) == (
        reasoning,
        text,
    )
    assert parsed.calls == []


@pytest.mark.row("SAMPLE-REASONING", "with thinking switched off in the prompt everything is content")
@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1", "glm45", "hermes", "qwen3_coder", "nemotron", "minimax_m2"])
def test_thinking_that_the_prompt_closed(registry: Registry, name: str) -> None:
    parsed = parse(registry, name, "plain", prompt=NO_THINKING)
    assert (parsed.reasoning, parsed.text) == ("", "plain")


@pytest.mark.row("SAMPLE-REASONING", "thinking that the template opened needs no tag in the output")
@pytest.mark.parametrize(
    "name", ["qwen3", "deepseek_r1", "glm45", "hermes", "qwen3_coder", "nemotron", "minimax_m2", "think"]
)
def test_thinking_that_the_prompt_opened(registry: Registry, name: str) -> None:
    parsed = parse(registry, name, "why so</think>because", prompt="<|im_start|>assistant\n<think>\n")
    assert (parsed.reasoning, parsed.text) == ("why so", "because")


# -- the suite of every tool parser: parser -> how it writes calls ---------------------------------------------------

TYPES = {
    "string_field": "hello",
    "int_field": 42,
    "float_field": 3.14,
    "bool_field": True,
    "null_field": None,
    "array_field": ["a", "b", "c"],
    "object_field": {"nested": "value"},
    "empty_array": [],
    "empty_object": {},
}
ESCAPES = {
    "quoted": 'He said "hello"',
    "path": "C:\\Users\\file.txt",
    "newline": "line1\nline2",
    "unicode": "emoji: 🎉",
}
KINDS = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    list: "array",
    dict: "object",
}
TOOL = {
    "type": "function",
    "function": {
        "name": "test_function",
        "parameters": {
            "type": "object",
            "properties": {key: {"type": KINDS[type(value)]} for key, value in (TYPES | ESCAPES).items()},
        },
    },
}


def _json(name: str, arguments: Any, key: str = "arguments", name_key: str = "name") -> str:
    return json.dumps({name_key: name, key: arguments}, ensure_ascii=False)


def _xml(name: str, arguments: dict[str, Any], call: str, argument: str, end: str) -> str:
    def written(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value)

    return call % name + "".join(argument % (key, written(value)) for key, value in arguments.items()) + end


def _deepseek(name: str, arguments: Any) -> str:
    return (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"
    )


def _python(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


Calls = list[tuple[str, dict[str, Any]]]
WRITERS: dict[str, Any] = {
    "hermes": lambda calls: "\n".join(f"<tool_call>\n{_json(*call)}\n</tool_call>" for call in calls),
    "llama3_json": lambda calls: "; ".join(_json(*call, key="parameters") for call in calls),
    "mistral": lambda calls: f"[TOOL_CALLS] [{', '.join(_json(*call) for call in calls)}]",
    "granite": lambda calls: f"<|tool_call|> [{', '.join(_json(*call) for call in calls)}]",
    "phi4": lambda calls: f"functools[{', '.join(_json(*call) for call in calls)}]",
    "nemotron": lambda calls: f"<TOOLCALL>[{', '.join(_json(*call) for call in calls)}]</TOOLCALL>",
    "internlm": lambda calls: "".join(
        f"<|action_start|><|plugin|>{_json(*call, key='parameters')}<|action_end|>" for call in calls
    ),
    "command_a": lambda calls: "<|START_ACTION|>[{}]<|END_ACTION|>".format(
        ", ".join(_json(*call, key="parameters", name_key="tool_name") for call in calls)
    ),
    "kimi_k2": lambda calls: "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>".format(
        "".join(
            f"<|tool_call_begin|>functions.{name}:{index} <|tool_call_argument_begin|>{json.dumps(arguments)}<|tool_call_end|>"
            for index, (name, arguments) in enumerate(calls)
        )
    ),
    "deepseek_v3": lambda calls: "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>".format(
        "\n".join(_deepseek(*call) for call in calls)
    ),
    "deepseek_v31": lambda calls: "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>".format(
        "".join(
            f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(given)}<｜tool▁call▁end｜>" for name, given in calls
        )
    ),
    "qwen3_coder": lambda calls: "\n".join(
        _xml(*call, "<tool_call>\n<function=%s>\n", "<parameter=%s>\n%s\n</parameter>\n", "</function>\n</tool_call>")
        for call in calls
    ),
    "glm45": lambda calls: "\n".join(
        _xml(
            *call,
            "<tool_call>%s\n",
            "<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>\n",
            "</tool_call>",
        )
        for call in calls
    ),
    "llama4_pythonic": lambda calls: f"[{', '.join(_python(*call) for call in calls)}]",
    "gpt_oss": lambda calls: "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(given)}<|call|>"
        for name, given in calls
    ),
}


def said_calls(output: ParsedOutput) -> Calls:
    assert all(call.complete for call in output.calls)
    return [(call.name, json.loads(call.arguments)) for call in output.calls]


@pytest.mark.row(
    "TOOLS-PARSER-BREADTH", "vLLM's suite for every tool parser: one, several, no arguments, types, escapes, text"
)
@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(
    "calls",
    [
        [("get_weather", {"city": "Tokyo"})],
        [("get_weather", {"city": "Tokyo"}), ("get_time", {"timezone": "Asia/Tokyo"})],
        [("refresh", {})],
        [("test_function", TYPES)],
        [("test_function", ESCAPES)],
    ],
    ids=["one", "parallel", "no_arguments", "types", "escapes"],
)
def test_calls(registry: Registry, name: str, calls: Calls) -> None:
    tools = [TOOL] if calls[0][0] == "test_function" else []
    output = parse(registry, name, WRITERS[name](calls), tools)
    assert said_calls(output) == calls
    assert output.text == ""


@pytest.mark.row(
    "TOOLS-PARSER-BREADTH", "vLLM's suite for every tool parser: plain text is unchanged, text around is kept"
)
@pytest.mark.parametrize("name", WRITERS)
def test_text_around_calls(registry: Registry, name: str) -> None:
    plain = "This is a regular response without any tool calls."
    assert parse(registry, name, plain) == ParsedOutput(text=plain)
    if name in ("llama4_pythonic", "gpt_oss"):  # there a call is a message of its own
        return
    output = parse(registry, name, "Let me check.\n" + WRITERS[name]([("f", {"a": 1})]) + "\nWould you like more?")
    assert said_calls(output) == [("f", {"a": 1})]
    assert output.text == "Let me check.\n\nWould you like more?"


OPTIONAL = {
    "count": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": 5},
    "query": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "names": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
    "where": {"oneOf": [{"type": "object"}, {"type": "null"}]},
    "either": {"type": ["integer", "null"]},
    "mixed": {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
    "ratio": {"type": "float"},
}


@pytest.mark.row("TOOLS-STREAMING-PARSER", "argument types follow the tool's schema, unions included")
@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
def test_values_of_optional_parameters(registry: Registry, name: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": OPTIONAL}}}
    given = {
        "count": 5,
        "query": "hello",
        "names": ["a", "b"],
        "where": {"k": "v"},
        "either": 42,
        "mixed": "some",
        "ratio": 3.5,
    }
    assert said_calls(parse(registry, name, WRITERS[name]([("f", given)]), [tool])) == [("f", given)]


def test_a_value_whose_end_is_missing(registry: Registry) -> None:
    text = (
        "Let me check:\n<tool_call>\n<function=f>\n<parameter=city>\nDallas\n<parameter=state>\nTX\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    output = parse(registry, "qwen3_coder", text)
    assert output.text == "Let me check:\n"
    assert said_calls(output) == [("f", {"city": "Dallas", "state": "TX"})]


@pytest.mark.row("TOOLS-PARSER-BREADTH", "one broken call of a list takes none of its siblings along")
@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("[bad(x=b'z'), good(a=1)]", ["good"]),
        ("[bad(x=1e999), good(a=1)]", ["good"]),
        ("[good(a=1), bad(a='x 'y', b='z')]", ["good"]),
        ("[bad(a='x 'y' 'z), bad(b='p 'q' 'r)]", []),
        ("[good(a=1)]]", ["good"]),
    ],
)
def test_broken_siblings(registry: Registry, text: str, names: list[str]) -> None:
    output = parse(registry, "llama4_pythonic", text)
    assert [call.name for call in output.calls if call.complete] == names
    assert all(json.loads(call.arguments) for call in output.calls if call.complete)


BROKEN = [
    ("hermes", '<tool_call>{"name": "func", "arguments": {'),
    ("hermes", '<tool_call>{"name": "func", "arguments": {}</tool_call>'),
    ("hermes", "<tool_call>not json</tool_call>"),
    ("phi4", 'functools[{"name": "func", "arguments": "not a dict"}]'),
    ("phi4", 'functools{"name": "func"}'),
    ("phi4", "functools[ This is just text ]"),
    ("internlm", "<|action_start|><|plugin|>"),
    ("internlm", '<|action_start|><|plugin|>{"name": "func", "parameters": "not a dict"}<|action_end|>'),
    ("granite", '[{"name": "func", "arguments": "not a dict"}]'),
    ("granite", 'Some text [{"name": "func"}]'),
    ("llama3_json", "{hello world[A(A=\t)A(A=,\t"),
    ("llama4_pythonic", "[A(A=\t)A(A=,\t)A(A=,\t"),
    ("llama4_pythonic", "[f(a='x 'y' 'z), g(b='p 'q' 'r)]"),
    ("mistral", '[TOOL_CALLS]add_this_and_that{"a": 3.5, "b": 4'),
    ("glm45", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>incomplete\n</tool_call>"),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"),
]


@pytest.mark.row("TOOLS-STREAMING-PARSER", "malformed calls never raise and never lose text")
@pytest.mark.parametrize(("name", "text"), BROKEN)
def test_malformed_calls(registry: Registry, name: str, text: str) -> None:
    output = parse(registry, name, text)
    words = output.text + "".join(f"{call.name} {call.arguments}" for call in output.calls)
    for part in ("func", "not a dict", "just text", "incomplete", "A=", "add_this", "world"):
        assert (part in text) == (part in words)


def test_what_infer_decides_otherwise(registry: Registry) -> None:
    """A call streams as it comes, so it cannot be taken back: what broke later is text, without an end of the call."""
    parsed = parse(registry, "glm45", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>Beij")
    assert [(call.name, call.complete) for call in parsed.calls] == [("f", False)]
    # A call whose arguments are complete is one, though a closing bracket is missing.
    parsed = parse(registry, "nemotron", '<TOOLCALL>[{"name": "f", "arguments": {}</TOOLCALL>')
    assert [(call.name, call.complete) for call in parsed.calls] == [("f", True)]
    # Several openers of Mistral's list are several calls, not an error.
    twice = '[TOOL_CALLS] [{"name": "add", "arguments":{"a": 1}}][TOOL_CALLS] [{"name": "sub", "arguments":{"b": 2}}]'
    assert [call.name for call in parse(registry, "mistral", twice).calls] == ["add", "sub"]
    # Text behind a call is kept, and arguments that are no object are text.
    assert parse(registry, "hermes", '<tool_call>{"name": "f", "arguments": "hello"}</tool_call>').calls == []
