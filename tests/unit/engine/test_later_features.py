"""Behaviour cases of features that do not exist yet: what the engine says today when they are asked for, by name."""

from __future__ import annotations

from typing import Any

import pytest

from infer import ConfigError, EngineConfig, InvalidRequestError, SamplingParams
from served import letters_engine

LATER_PARAMETERS = [
    pytest.param("repetition_detection", {"min_count": 3}, marks=pytest.mark.waits("SAMPLE-REPETITION"), id="case_15"),
    pytest.param("structured_output", {"regex": "a+"}, marks=pytest.mark.waits("TOOLS-STRUCTURED-CORE"), id="case_25"),
    pytest.param("structured_output", {"json": {}}, marks=pytest.mark.waits("TOOLS-STRUCTURED-CORE"), id="case_26"),
]


@pytest.mark.parametrize(("name", "value"), LATER_PARAMETERS)
def test_a_parameter_of_a_later_feature_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=name) as refused:
        SamplingParams(**{name: value})
    assert refused.value.parameter == name


LATER_SETTINGS = [
    pytest.param({"speculative": {"method": "ngram"}}, marks=pytest.mark.waits("SPEC-NGRAM"), id="case_16"),
    pytest.param({"scheduler": {"num_draft_tokens": 3}}, marks=pytest.mark.waits("SPEC-REJECTION"), id="case_17"),
    pytest.param({"connectors": ["handoff"]}, marks=pytest.mark.waits("KV-CONNECTORS"), id="case_22"),
    pytest.param({"model": {"max_loras": 1}}, marks=pytest.mark.waits("LORA-RUNTIME"), id="case_23"),
]


@pytest.mark.parametrize("values", LATER_SETTINGS)
def test_a_setting_of_a_later_feature_is_refused_by_name(values: dict[str, Any]) -> None:
    (section,) = values
    with pytest.raises(ConfigError, match="unknown setting") as refused:
        EngineConfig(**values)
    assert any(section in field for field in refused.value.fields)


LATER_ARGUMENTS = [
    pytest.param("lora", "my-adapter", marks=pytest.mark.waits("LORA-RUNTIME"), id="case_23"),
    pytest.param(
        "artifact", {"fields": ["moe_routes"]}, marks=pytest.mark.waits("SAMPLE-ROUTED-EXPERTS"), id="artifact"
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
