"""Behaviour cases and clauses of features that do not exist yet: what the engine says today when they are asked for,
by name."""

from __future__ import annotations

from typing import Any

import pytest

from infer import (
    ConfigError,
    EngineConfig,
    InvalidRequestError,
    SamplingParams,
)
from served import letters_engine

LATER_SETTINGS = [
    pytest.param({"speculative": {"method": "ngram"}}, marks=pytest.mark.waits("SPEC-NGRAM"), id="case_16"),
    pytest.param({"scheduler": {"num_draft_tokens": 3}}, marks=pytest.mark.waits("SPEC-REJECTION"), id="case_17"),
    pytest.param({"connectors": ["handoff"]}, marks=pytest.mark.waits("KV-CONNECTORS"), id="case_22"),
    pytest.param({"model": {"max_loras": 1}}, marks=pytest.mark.waits("LORA-RUNTIME"), id="case_23"),
    pytest.param(
        {"executor": {"kind": "process"}},
        marks=[
            pytest.mark.row("ENG-CORE-BUSY-LOOP", "an engine process that is killed, and one whose parent dies"),
            pytest.mark.waits("PAR-TP"),
        ],
        id="process_executor",
    ),
]


@pytest.mark.parametrize("values", LATER_SETTINGS)
def test_a_setting_of_a_later_feature_is_refused_by_name(values: dict[str, Any]) -> None:
    (section,) = values
    with pytest.raises(ConfigError, match="unknown setting") as refused:
        EngineConfig(**values)
    assert any(section in field for field in refused.value.fields)


LATER_ARGUMENTS = [
    pytest.param(
        "lora",
        "my-adapter",
        marks=[
            pytest.mark.row("KV-PREFIX-CACHE", "a request under another adapter shares 0 tokens, end to end"),
            pytest.mark.waits("LORA-RUNTIME"),
        ],
        id="case_23",
    ),
]


@pytest.mark.anyio
@pytest.mark.parametrize(("name", "value"), LATER_ARGUMENTS)
async def test_an_argument_of_a_later_feature_is_refused_by_name(name: str, value: Any) -> None:
    async with letters_engine() as engine:
        with pytest.raises(InvalidRequestError, match=f"{name} is not available in this version") as refused:
            await engine.generate("abc", **{name: value})
        assert (refused.value.parameter, refused.value.value) == (name, value)
        done = await engine.generate("abc", SamplingParams(max_tokens=2))
        assert done.artifact is None


@pytest.mark.anyio
@pytest.mark.row("KV-PREFIX-CACHE", "another image shares 0 tokens, end to end")
@pytest.mark.waits("ENG-MM-INPUT-PIPELINE")
async def test_an_image_in_a_message_is_refused_by_name() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    async with letters_engine() as engine:
        with pytest.raises(InvalidRequestError, match="image_url"):
            await engine.generate([{"role": "user", "content": [picture]}])
