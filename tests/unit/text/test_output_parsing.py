"""Choosing and opening parsers, collecting what they say, and ids of calls: what the API uses, without an engine."""

from __future__ import annotations

from typing import Any

import pytest

from infer.config.engine import PluginsSection
from infer.errors import UnknownPluginError
from infer.plugins import ParserEvent, Registry, build_registry
from infer.plugins.parsing import SAMPLE_TOOLS
from infer.text.output_parsing import (
    CallIds,
    ParsedCall,
    ParsedOutput,
    choose_parser,
    collect,
    open_parser,
    parse_output,
    starts_in_reasoning,
)

# What the fingerprints make of published templates; None where the format is none that we know.
CHOSEN = {
    "Apertus-8B-Instruct": None,
    "Bielik-11B-v3.0-Instruct": "qwen3",
    "ByteDance-Seed-OSS": "seed_oss",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "command_a",
    "GLM-4.6": "glm45",
    "GLM-4.7-Flash": "glm45",
    "GigaChat3-10B-A1.8B": None,
    "HuggingFaceTB-SmolLM3-3B": "think",
    "Kimi-K2-Instruct": "kimi_k2",
    "Kimi-K2-Thinking": "kimi_k2",
    "LFM2-8B-A1B": "lfm2",
    "MiniMax-M1": "hermes",
    "MiniMax-M2": "minimax_m2",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "qwen3_coder",
    "NVIDIA-Nemotron-Nano-v2": "nemotron",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "Qwen-QwQ-32B": "qwen3",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "qwen3",
    "Qwen3-Coder": "qwen3_coder",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek_r1",
    "deepseek-ai-DeepSeek-V3.1": "deepseek_v31",
    "deepseek-ai-DeepSeek-V3.2": "deepseek_v32",
    "fireworks-ai-llama-3-firefunction-v2": "phi4",
    "google-gemma-2-2b-it": "gemma3",
    "google-gemma-4-31B-it": "gemma4",
    "ibm-granite-granite-3.3-2B-Instruct": "granite",
    "ibm-granite-granite-4.0": "hermes",
    "llama-cpp-deepseek-r1": "deepseek_r1",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3_json",
    "microsoft-Phi-3.5-mini-instruct": None,
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "openai-gpt-oss-120b": "gpt_oss",
    "tencent-Hy3": None,
}


@pytest.fixture(scope="module")
def registry() -> Registry:
    return build_registry(PluginsSection(allow=()))


@pytest.mark.row("TOOLS-PARSER-BREADTH", "the parser is chosen by the fingerprint of the chat template")
@pytest.mark.parametrize("template", CHOSEN)
def test_a_template_chooses_its_parser(registry: Registry, chat_templates: dict[str, str], template: str) -> None:
    spec = choose_parser(registry, chat_templates[template])
    assert (spec.name if spec else None) == CHOSEN[template]


def test_templates_by_name_are_looked_at_together(registry: Registry) -> None:
    spec = choose_parser(registry, {"default": "{{ messages }}", "tool_use": "<tool_call>"})
    assert spec is not None
    assert spec.name == "hermes"


@pytest.mark.parametrize("template", [None, "", {}, "{{ messages }}"])
def test_no_template_that_fits_is_no_parser(registry: Registry, template: Any) -> None:
    assert choose_parser(registry, template) is None


@pytest.mark.row("TOOLS-PARSER-BREADTH", "a parser is chosen by name; an unknown name lists the registry")
def test_a_name_decides_over_the_template(registry: Registry) -> None:
    spec = choose_parser(registry, "<tool_call>", name="mistral")
    assert spec is not None
    assert spec.name == "mistral"
    with pytest.raises(UnknownPluginError) as caught:
        choose_parser(registry, "<tool_call>", name="qwen33")
    for part in ("qwen33", "hermes, internlm, kimi_k2", "did you mean 'qwen3'"):
        assert part in str(caught.value)


def test_every_fingerprint_is_the_own_one_of_its_spec(registry: Registry) -> None:
    """A template of nothing but one fingerprint chooses the spec that brought it."""
    for spec in registry.specs("parser"):
        for fingerprint in spec.fingerprints:
            chosen = choose_parser(registry, fingerprint.replace("…", " ... "))
            assert chosen is not None
            assert chosen.name == spec.name, fingerprint


def test_the_parts_of_a_fingerprint_come_in_order(registry: Registry) -> None:
    chosen = choose_parser(registry, "</think> then <tool_call>")
    assert chosen is not None
    assert chosen.name == "hermes"


@pytest.mark.parametrize(
    ("name", "prompt", "inside"),
    [
        ("qwen3", None, True),
        ("qwen3", "<|im_start|>assistant\n", False),
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("deepseek_r1", "<｜Assistant｜>", True),
        ("deepseek_r1", "<｜Assistant｜><think>\n\n</think>\n\n", False),
        ("hermes", None, False),
        ("hermes", "<think>", True),
        ("hermes", "say <think> please", False),
        ("mistral", "[THINK]", True),
        ("llama3_json", "<think>", False),
    ],
)
def test_whether_an_output_begins_inside_reasoning(
    registry: Registry, name: str, prompt: str | None, inside: bool
) -> None:
    spec = registry.get("parser", name)
    assert starts_in_reasoning(spec, prompt) is inside
    output = parse_output(open_parser(registry, spec, [], prompt), "words")
    assert (output.reasoning, output.text) == (("words", "") if inside else ("", "words"))


@pytest.mark.row("SAMPLE-REASONING", "the spec says what ends reasoning, and forcing it does end it")
def test_forcing_the_close_ends_reasoning(registry: Registry) -> None:
    seen = 0
    for spec in registry.specs("parser"):
        if spec.reasoning_end:
            start = "" if starts_in_reasoning(spec, None) else spec.reasoning_start[0]
            output = parse_output(open_parser(registry, spec, []), f"{start}words{spec.reasoning_close}answer")
            assert output == ParsedOutput(text="answer", reasoning="words"), spec.name
            seen += 1
    assert seen >= 15


def test_no_tools_leave_calls_alone(registry: Registry) -> None:
    text = '<think>a</think><tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
    output = parse_output(open_parser(registry, registry.get("parser", "qwen3"), None), text)
    assert (output.reasoning, output.text, output.calls) == ("a", text.partition("</think>")[2], [])


def test_the_callers_tools_are_not_changed(registry: Registry) -> None:
    before = repr(SAMPLE_TOOLS)
    text = "<tool_call><function=get_weather><parameter=days>3</parameter></function></tool_call>"
    output = parse_output(open_parser(registry, registry.get("parser", "qwen3_coder"), SAMPLE_TOOLS), text)
    assert output.calls == [ParsedCall("get_weather", "", '{"days": 3}', complete=True)]
    assert repr(SAMPLE_TOOLS) == before


def test_events_are_collected() -> None:
    events = [
        ParserEvent("reasoning", "a"),
        ParserEvent("text", "b"),
        ParserEvent("tool_start", "f", 0, "own"),
        ParserEvent("tool_args", '{"x": ', 0),
        ParserEvent("tool_args", "1}", 0),
        ParserEvent("tool_end", "", 0),
        ParserEvent("tool_start", "g", 1),
        ParserEvent("tool_args", '{"cut', 1),
        ParserEvent("text", "c"),
    ]
    calls = [ParsedCall("f", "own", '{"x": 1}', complete=True), ParsedCall("g", "", '{"cut')]
    assert collect(events) == ParsedOutput(text="bc", reasoning="a", calls=calls)


@pytest.mark.row("TOOLS-STREAMING-PARSER", "parallel calls have unique ids in order")
def test_ids_are_unique_and_the_formats_own_where_it_has_some() -> None:
    ids = CallIds("call_abc")
    given = [ids.give(index, own) for index, own in enumerate(["functions.f:0", "", "functions.f:0", "0", "x"])]
    assert given == ["functions.f:0", "call_abc-1", "call_abc-2", "call_abc-3", "x"]


def test_a_parser_that_streams_says_everything_at_once_that_is_certain(registry: Registry) -> None:
    """What is held back is only what may still become a mark or a value."""
    parser = open_parser(registry, registry.get("parser", "hermes"), [])
    said = []
    for piece in ("I look", " <", "b> and <tool", "_call>", '{"name": "f", "argu', 'ments": {"a": "xy', "z", '"'):
        said.append("".join(f"{event.kind[:6]}:{event.text}" for event in parser.feed(piece, [])))
    assert said == [
        "text:I look",
        "text: ",
        "text:<b> and ",
        "",
        "",
        'tool_s:ftool_a:{"a": "xy',
        "tool_a:z",
        'tool_a:"',
    ]
    assert [event.text for event in parser.feed("}}</tool", [])] == ["}", ""]
    assert parser.finish() == [ParserEvent("text", "</tool")]
