"""What an artifact of the open format can take at most, before any token exists."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from infer.artifacts.record import ChoiceRecord, FieldRows, GenerationRecord, WeightSpan
from infer.artifacts.v2.bounds import ArrayBound, FieldBound, bound_v2, field_bound
from infer.artifacts.v2.limits import MAX_ARRAY_CHUNKS, chunk_count, chunk_shape, most_chunks
from infer.artifacts.v2.writer import encode_v2
from infer.errors import ArtifactRefusedError

LAYERS = tuple(range(48))
PROMPT, OUTPUT = 3_000, 1_000


def largest(num_choices: int) -> GenerationRecord:
    """As long as admitted, incompressible."""
    chance = np.random.default_rng(0)
    prompt: Any = chance.integers(0, 128, (PROMPT, 48, 8)).astype(np.uint8)
    attributes = {"layer_ids": LAYERS, "expert_counts": (128,) * 48}
    choices = []
    for index in range(num_choices):
        rows = chance.integers(0, 128, (OUTPUT - 1, 48, 8)).astype(np.uint8)
        status = np.zeros(PROMPT, np.uint8), np.zeros(OUTPUT - 1, np.uint8)
        kept = chance.integers(0, 2**31, OUTPUT * 20).astype(np.int32)
        choices.append(
            ChoiceRecord(
                choice_index=index,
                prompt_token_ids=np.arange(PROMPT) << 40,
                output_token_ids=chance.integers(0, 2**62, OUTPUT),
                fields={
                    "moe_routes": [
                        FieldRows(values=prompt, status=status[0], attributes=attributes),
                        FieldRows(values=rows, row_start=PROMPT, status=status[1], attributes=attributes),
                    ],
                    "kept_set": FieldRows(values=kept, offsets=np.arange(OUTPUT + 1) * 20, row_start=PROMPT),
                    "selected_logprobs": FieldRows(values=chance.random(OUTPUT, np.float32), row_start=PROMPT),
                },
                weight_spans=[WeightSpan(0, PROMPT + OUTPUT, "v" * 64)],
                finish_reason="repetition",
                stop_reason="s" * 40,
                seed=2**63 - 1,
            )
        )
    return GenerationRecord(choices=choices)


FIELDS = [
    field_bound("moe_routes", layer_ids=LAYERS, expert_counts=(128,) * 48, width=8),
    field_bound("kept_set", most=20, with_status=False),
    field_bound("selected_logprobs", with_status=False),
    field_bound("weight_spans", with_status=False, versions=1),
]


@pytest.mark.parametrize("num_choices", [1, 3])
def test_a_full_generation_fits_and_the_bound_is_close(num_choices: int) -> None:
    bound = bound_v2(FIELDS, prompt_tokens=PROMPT, max_tokens=OUTPUT, num_choices=num_choices, longest_stop=40)
    for codec in ("none", "zstd"):
        encoded = encode_v2(largest(num_choices), codec=codec)  # type: ignore[arg-type]
        assert encoded.raw_bytes <= bound.raw_bytes < 1.01 * encoded.raw_bytes + 1_000
        assert encoded.header_bytes <= bound.header_bytes < 2 * encoded.header_bytes + 2_000
        assert encoded.actual_bytes <= bound.object_bytes
    assert bound.object_bytes < 1.02 * len(encode_v2(largest(num_choices), codec="none").data) + 20_000


def test_prompt_rows_count_once_or_for_each_choice() -> None:
    def raw(shared: bool) -> int:
        return bound_v2(FIELDS, prompt_tokens=PROMPT, max_tokens=1, num_choices=4, shared_prompt=shared).raw_bytes

    assert raw(False) - raw(True) == 3 * PROMPT * (48 * 8 + 1 + 8 + 4)


def test_a_field_of_a_plugin_and_of_the_request() -> None:
    plugin = FieldBound(name="acme.x", arrays={"values": ArrayBound(dtype="f64", row_shape=(3,))})
    summary = FieldBound(name="acme.y", arrays={"values": ArrayBound(dtype="u8", row_shape=(100,))}, rows=1)
    bare = bound_v2([], prompt_tokens=10, max_tokens=5, num_choices=2)
    assert bound_v2([plugin], prompt_tokens=10, max_tokens=5, num_choices=2).raw_bytes - bare.raw_bytes == 24 * (
        10 + 2 * 5
    )
    assert bound_v2([summary], prompt_tokens=10, max_tokens=5, num_choices=2).raw_bytes - bare.raw_bytes == 2 * 100


def test_admission_loads_no_numpy() -> None:
    code = "import sys, infer.artifacts.v2.bounds as b; assert 'numpy' not in sys.modules and b.field_bound('entropy')"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_field_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(ArtifactRefusedError, match="'entropie'") as caught:
        field_bound("entropie")
    assert caught.value.code == "artifact_unsupported"


@pytest.mark.parametrize("row", [(), (48, 8), (4, 100_000), (200_000,)])
def test_fewer_rows_never_take_more_chunks_than_counted(row: tuple[int, ...]) -> None:
    for most in (1, 1_000, 50_000, 10_000_000):
        counted = most_chunks((most, *row), 2, 2**16)
        assert counted <= MAX_ARRAY_CHUNKS
        for rows in {1, most // 7 + 1, most // 2 + 1, most - 1, most}:
            shape = (rows, *row)
            assert chunk_count(shape, chunk_shape(shape, 2, 2**16)) <= counted
