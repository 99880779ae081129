"""What an artifact's provenance says of loops and logits processors, and what a replay makes of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from infer import NamedProcessor, SamplingParams
from infer.artifacts.provenance import with_sampling
from infer.artifacts.record import Provenance
from infer.artifacts.verify import recorded_params


def test_named_processors_come_back_and_the_rule_of_loops_is_readable() -> None:
    named = (NamedProcessor(name="plain"), NamedProcessor(name="no_repeat_ngram", params={"size": 3}))
    asked = SamplingParams(
        temperature=0.5,
        logits_processors=named,
        repetition_detection={"max_pattern_size": 8, "min_count": 3},  # type: ignore[arg-type]
    )
    made = with_sampling(Provenance(), asked, max_tokens=20)
    assert made.sampling["logits_processors"] == ("plain", '{"name": "no_repeat_ngram", "params": {"size": 3}}')
    assert made.sampling["repetition_detection"] == {"max_pattern_size": 8, "min_count": 3, "min_pattern_size": 1}
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=Provenance)
    replay = recorded_params(read)
    assert replay.logits_processors == named and replay.temperature == 0.5
    assert replay.repetition_detection is None, "a replay forces the tokens; nothing may end it early"


def test_a_function_is_named_and_cannot_be_replayed() -> None:
    made = with_sampling(Provenance(), SamplingParams(logits_processors=[abs]), max_tokens=20)
    assert made.sampling["logits_processors"] == ("<builtins.abs>",)
    (processor,) = recorded_params(made).logits_processors
    assert isinstance(processor, NamedProcessor) and processor.name == "<builtins.abs>"


@pytest.mark.parametrize(
    "form",
    [
        {"choice": ["yes", 'no "sir"', "é"]},
        {"json_schema": {"type": "object", "properties": {"a": {"enum": [1, None]}}}, "compact": True},
        {"structural_tag": {"format": {"type": "const_string", "value": "x"}}},
    ],
    ids=lambda form: next(iter(form)),
)
def test_the_form_of_an_answer_is_recorded(form: dict[str, Any]) -> None:
    """A list within a map has no place in the format; found by the combinations: the artifact could not be written."""
    asked = SamplingParams(structured_output=form)  # type: ignore[arg-type]
    made = with_sampling(Provenance(), asked, max_tokens=20)
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=Provenance)
    assert recorded_params(read).structured_output == asked.structured_output
