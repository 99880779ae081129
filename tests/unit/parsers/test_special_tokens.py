"""Ids to events: marks that are special tokens of the vocabulary, through the detokenizer and into a parser."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from infer.config.engine import PluginsSection
from infer.plugins import build_registry
from infer.plugins.parsing import SAMPLE_TOOLS
from infer.text.detokenizer import Detokenizer
from infer.text.output_parsing import ParsedOutput, collect, open_parser
from infer.tokenizers._fast import FastTokenizer

REGISTRY = build_registry(PluginsSection(allow=()))
ARGUMENTS = {"city": "Tromsø 🧀", "days": 3}


def tokenizer(special: list[str]) -> FastTokenizer:
    """One token per byte, so that characters arrive in parts, and the marks as special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in special])
    return FastTokenizer(backend, bos_token_id=None, eos_token_ids=(), chat_template=None, special_tokens={})


def parse(name: str, text: str, special: list[str], skip_special_tokens: bool) -> ParsedOutput:
    """As the API does it: every id through the detokenizer, its text and id into the parser."""
    vocabulary = tokenizer(special)
    detokenizer = Detokenizer(vocabulary, [], skip_special_tokens)
    parser = open_parser(REGISTRY, REGISTRY.get("parser", name), SAMPLE_TOOLS)
    ids = vocabulary.encode(text, add_special_tokens=False)
    assert len(ids) < len(text.encode()), "the marks are not special tokens"
    events = [event for id_ in ids for event in parser.feed(detokenizer.feed(id_), [id_])]
    return collect([*events, *parser.feed(detokenizer.finish(), []), *parser.finish()])


CASES = {
    "qwen3": (
        f"<think>Bø?</think>\n\n<tool_call>\n{json.dumps({'name': 'get_weather', 'arguments': ARGUMENTS})}\n</tool_call>",
        ["<think>", "</think>", "<tool_call>", "</tool_call>"],
    ),
    "deepseek_v31": (
        "<think>Bø?</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        f"{json.dumps(ARGUMENTS, ensure_ascii=False)}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [
            "<think>",
            "</think>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
        ],
    ),
    "gpt_oss": (
        "<|channel|>analysis<|message|>Bø?<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        f"<|constrain|>json<|message|>{json.dumps(ARGUMENTS, ensure_ascii=False)}<|call|>",
        ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "<|call|>"],
    ),
    "glm45": (
        "<think>Bø?</think><tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Tromsø 🧀</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        [
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
        ],
    ),
}


@pytest.mark.row("TOOLS-STREAMING-PARSER", "ids one by one, characters in parts, marks that are special tokens")
@pytest.mark.parametrize("name", CASES)
def test_special_tokens_are_seen(name: str) -> None:
    output = parse(name, *CASES[name], skip_special_tokens=False)
    assert (output.reasoning, output.text) == ("Bø?", "")
    assert [(call.name, json.loads(call.arguments), call.complete) for call in output.calls] == [
        ("get_weather", ARGUMENTS, True)
    ]


@pytest.mark.parametrize("name", CASES)
def test_skipped_special_tokens_hide_the_marks(name: str) -> None:
    """Why the API must show special tokens when a parser is on."""
    output = parse(name, *CASES[name], skip_special_tokens=True)
    assert output.calls == []
    assert "Bø?" in output.text + output.reasoning
