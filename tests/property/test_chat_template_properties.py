"""Random conversations through published chat templates against transformers' own rendering."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from infer.errors import InvalidRequestError
from infer.text.chat_template import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
NAMES = [
    *("Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B", "meta-llama-Llama-3.1-8B-Instruct", "google-gemma-2-2b-it"),
    *("mistralai-Mistral-Nemo-Instruct-2407", "microsoft-Phi-3.5-mini-instruct", "deepseek-ai-DeepSeek-V3.1"),
    *("HuggingFaceTB-SmolLM3-3B", "ibm-granite-granite-3.3-2B-Instruct", "openai-gpt-oss-120b"),
]
TEXT = st.text(max_size=20) | st.sampled_from(
    ["", " ", "\n x \n", "<think>a</think> b", "</s>", "{{ x }}", "<|im_end|>"]
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": TEXT},
    optional={"reasoning_content": TEXT, "name": st.just("tool_1")},
)
CHAT = st.lists(MESSAGE, min_size=1, max_size=5)


@lru_cache
def compiled(source: str) -> ChatTemplate:
    return ChatTemplate(source, SPECIAL)


def by_transformers(source: str, messages: list[dict[str, Any]], **options: Any) -> str | None:
    try:
        return str(render_jinja_template([messages], chat_template=source, **SPECIAL, **options)[0][0])
    except Exception:
        return None


def by_us(source: str, messages: list[dict[str, Any]], **options: Any) -> str | None:
    try:
        return compiled(source).render(messages, **options)
    except InvalidRequestError:
        return None


@pytest.mark.row("SERVE-CHAT-TEMPLATE", "text equals transformers with thinking switches")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data(), messages=CHAT, prompt=st.booleans(), thinking=st.booleans())
def test_text_equals_transformers(
    chat_templates: dict[str, str], data: st.DataObject, messages: list[dict[str, Any]], prompt: bool, thinking: bool
) -> None:
    source = chat_templates[data.draw(st.sampled_from(NAMES))]
    options = {"add_generation_prompt": prompt, "enable_thinking": thinking}
    assert by_us(source, messages, **options) == by_transformers(source, messages, **options)


@given(data=st.data(), opening=TEXT, ending=TEXT)
def test_a_continued_message_ends_the_prompt(
    chat_templates: dict[str, str], data: st.DataObject, opening: str, ending: str
) -> None:
    source = chat_templates[data.draw(st.sampled_from(NAMES))]
    messages = [{"role": "user", "content": opening}, {"role": "assistant", "content": ending}]
    text = by_us(source, messages, continue_final_message=True)
    expected = by_transformers(source, messages, continue_final_message=True, add_generation_prompt=False)
    assert text == expected
