"""Calls that the models' own chat templates render, parsed back: equal, whole and character by character."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from infer.config.engine import PluginsSection
from infer.plugins import Registry, build_registry
from infer.text.chat_template import ChatTemplate
from infer.text.output_parsing import ParsedOutput, choose_parser, collect, open_parser

PROPERTIES: dict[str, Any] = {
    "city": {"type": "string"},
    "zip": {"type": "string"},
    "days": {"type": "integer"},
    "limit": {"type": "number"},
    "detailed": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "where": {"type": "object"},
    "note": {"type": ["string", "null"]},
}


def tool(name: str, *properties: str) -> dict[str, Any]:
    declared = {key: {**PROPERTIES[key], "description": key} for key in properties}
    parameters = {"type": "object", "properties": declared, "required": []}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


TOOLS = [tool("get_weather", *PROPERTIES), tool("get_time")]
ARGUMENTS: dict[str, Any] = {
    "city": 'Oslo "x" \\ <b>é\n{1} , ',
    "zip": "0150",
    "days": 3,
    "limit": 2.5,
    "detailed": True,
    "tags": ["a", 'b"'],
    "where": {"k": [1, {"l": "m"}]},
    "note": None,
}
CALLS: list[tuple[str, dict[str, Any]]] = [("get_weather", ARGUMENTS), ("get_time", {})]
USER = [{"role": "user", "content": "Hi"}]
THOUGHT = "Two steps."

# template -> (parser, what the template writes before the model's own text)
TEMPLATES: dict[str, tuple[str, str]] = {
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", "<|im_start|>assistant\n"),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("hermes", "<|im_start|>assistant\n"),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", "<|im_start|>assistant\n"),
    "MiMo-VL": ("hermes", "<|im_start|>assistant\n"),
    "ibm-granite-granite-4.0": ("hermes", "<|start_of_role|>assistant<|end_of_role|>"),
    "ibm-granite-granite-4.1": ("hermes", "<|start_of_role|>assistant<|end_of_role|>"),
    "unsloth-Apriel-1.5": ("hermes", "<|assistant|>\n"),
    "Qwen-Qwen3-0.6B": ("qwen3", "<|im_start|>assistant\n"),
    "Qwen-QwQ-32B": ("qwen3", "<|im_start|>assistant\n"),
    "Bielik-11B-v3.0-Instruct": ("qwen3", "<|im_start|>assistant\n"),
    "Qwen3-Coder": ("qwen3_coder", "<|im_start|>assistant\n"),
    "Qwen3.5-4B": ("qwen3_coder", "<|im_start|>assistant\n"),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen3_coder", "<|im_start|>assistant\n"),
    "StepFun3.5-Flash": ("qwen3_coder", "<|im_start|>assistant\n"),
    "ByteDance-Seed-OSS": ("seed_oss", "<seed:bos>assistant\n"),
    "GLM-4.6": ("glm45", "<|assistant|>\n"),
    "GLM-4.7-Flash": ("glm45", "<|assistant|>"),
    "MiniMax-M2": ("minimax_m2", "]~b]ai\n"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek_r1", "<｜Assistant｜>"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek_v31", "<｜Assistant｜><think></think>"),
    "deepseek-ai-DeepSeek-V3.2": ("deepseek_v32", "<｜Assistant｜>"),
    "deepseek-ai-DeepSeek-V4": ("deepseek_v32", "<｜Assistant｜>"),
    "moonshotai-Kimi-K2": ("kimi_k2", "<|im_assistant|>assistant<|im_middle|>"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", ""),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral", ""),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral", ""),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3_json", "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3_json", "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("command_a", "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"),
    "Cohere2MoE": ("command_a", "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"),
    "NVIDIA-Nemotron-Nano-v2": ("nemotron", "<SPECIAL_11>Assistant\n"),
    "openai-gpt-oss-120b": ("gpt_oss", "<|start|>assistant"),
    "google-gemma-4-31B-it": ("gemma4", "<|turn>model\n"),
    "LFM2.5-8B-A1B": ("lfm2", "<|im_start|>assistant\n"),
}
NO_UNIONS = {"NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", "NousResearch-Hermes-3-Llama-3.1-8B-tool_use"}
"""Their templates never end on a list of types."""
TURN_ENDS = re.compile(r"<\|end_of_text\|>|<\|end\|>|</s>|<｜end▁of▁sentence｜>|<\|im_end\|>")
"""The engine stops there and does not show it."""
ONE_CALL = {"meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct", "openai-gpt-oss-120b"}
FOLLOWS = "CohereForAI-c4ai-command-r7b-12-2024-tool_use"
"""Adds the next generation prompt to every rendering."""


@pytest.fixture(scope="module")
def registry() -> Registry:
    return build_registry(PluginsSection(allow=()))


def message(calls: list[tuple[str, Any]]) -> dict[str, Any]:
    made = [
        {"id": f"abcdefgh{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "reasoning_content": THOUGHT, "tool_calls": made}


def parse(registry: Registry, name: str, text: str, prompt: str | None) -> list[ParsedOutput]:
    """Whole, and character by character."""
    found = []
    for pieces in ([text], list(text)):
        parser = open_parser(registry, registry.get("parser", name), TOOLS, prompt)
        events = [event for piece in pieces for event in parser.feed(piece, [])]
        found.append(collect([*events, *parser.finish()]))
    return found


def check(outputs: list[ParsedOutput], calls: list[tuple[str, Any]]) -> None:
    assert outputs[0] == outputs[1]
    (output, _) = outputs
    assert [(call.name, json.loads(call.arguments)) for call in output.calls] == calls
    assert all(call.complete for call in output.calls)
    assert output.text.strip() == ""
    assert output.reasoning.strip() in ("", THOUGHT)


@pytest.mark.row(
    "TOOLS-PARSER-BREADTH", "a tool call rendered by the model's own chat template and parsed back is equal"
)
@pytest.mark.parametrize("name", TEMPLATES)
def test_rendered_calls_come_back(registry: Registry, chat_templates: dict[str, str], name: str) -> None:
    parser, header = TEMPLATES[name]
    spec = choose_parser(registry, chat_templates[name])
    assert spec is not None
    assert spec.name == parser
    template = ChatTemplate(chat_templates[name], {"bos_token": "<s>", "eos_token": "</s>"})
    calls, tools = CALLS[:1] if name in ONE_CALL else CALLS, TOOLS
    if name in NO_UNIONS:
        calls = [(function, {**given, "note": "x"} if given else {}) for function, given in calls]
        tools = [tool("get_weather", *(key for key in PROPERTIES if key != "note")), tool("get_time")]
    prompt = template.render(USER, tools, add_generation_prompt=False, enable_thinking=True)
    whole = template.render([*USER, message(calls)], tools, add_generation_prompt=False, enable_thinking=True)
    if name == FOLLOWS:
        prompt = prompt.removesuffix("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>")
        whole = whole.removesuffix("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>")
    assert whole.startswith(prompt)
    answer = whole.removeprefix(prompt).lstrip("\n") if header else whole.removeprefix(prompt)
    assert answer.startswith(header)
    if name != "openai-gpt-oss-120b":  # there they are part of the format
        answer = TURN_ENDS.split(answer.removeprefix(header))[0]
    check(parse(registry, parser, answer.removeprefix(header), prompt + header), calls)


def as_json(name_key: str, arguments_key: str) -> str:
    return json.dumps([{name_key: name, arguments_key: arguments} for name, arguments in CALLS], ensure_ascii=False)


def as_python(separator: str) -> str:
    calls = (f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in CALLS)
    return separator.join(calls)


def as_gemma(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{as_gemma(inner, quote)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(as_gemma(inner, quote) for inner in value) + "]"
    return json.dumps(value)


# Formats whose published templates do not render calls, as the models are documented to write them.
WRITTEN = {
    "granite": f"<|tool_call|>{as_json('name', 'arguments')}",
    "phi4": f"<|tool_call|>{as_json('name', 'arguments')}<|/tool_call|>",
    "internlm": "".join(
        f"<|action_start|><|plugin|>\n{json.dumps({'name': name, 'parameters': arguments})}<|action_end|>\n"
        for name, arguments in CALLS
    ),
    "llama4_pythonic": f"[{as_python(', ')}]<|eot|>",
    "gemma3": f"```tool_code\n{as_python(chr(10))}\n```",
    "olmo3": f"<function_calls>{as_python(chr(10))}</function_calls>",
    "functiongemma": "".join(
        f"<start_function_call>call:{name}{as_gemma(arguments, '<escape>')}<end_function_call>"
        for name, arguments in CALLS
    ),
    "deepseek_v3": "<｜tool▁calls▁begin｜>"
    + "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in CALLS
    )
    + "<｜tool▁calls▁end｜>",
}


@pytest.mark.row("TOOLS-PARSER-BREADTH", "calls written as the format documents them come back equal")
@pytest.mark.parametrize("name", WRITTEN)
def test_written_calls_come_back(registry: Registry, name: str) -> None:
    check(parse(registry, name, WRITTEN[name], None), CALLS)


def test_every_format_with_calls_makes_the_round_trip(registry: Registry) -> None:
    covered = {parser for parser, _ in TEMPLATES.values()} | set(WRITTEN)
    assert {spec.name for spec in registry.specs("parser")} - covered == {"think"}
