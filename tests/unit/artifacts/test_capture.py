"""What a request has produced so far: bounds, alignment, trimming, and what it costs to hold."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest

from infer.artifacts import ArtifactChoice, GenerationArtifact, RoutedExperts, SelectedLogprobs, decode
from infer.artifacts.admission import GenerationBounds, payload_bytes
from infer.artifacts.assembly import assemble, encode_source
from infer.artifacts.capture import Capture, RouteRows
from infer.artifacts.router_layout import RouterLayout
from infer.errors import ArtifactError

LAYOUT = RouterLayout((3, 7), 4, 2)
ALL = ("moe_routes", "selected_logprobs")


def capture(contents: tuple[str, ...] = ALL, layout: RouterLayout | None = LAYOUT, **changes: Any) -> Capture:
    facts: dict[str, Any] = {"prompt_tokens": 2, "max_tokens": 3, "router_layout": layout} | changes
    return Capture(contents, GenerationBounds(**facts))


def rows(start: int, count: int, width: int = 1) -> RouteRows:
    values = (np.arange(start, start + count).repeat(4) % 4).astype(f"u{width}")
    return RouteRows(start, values.tobytes())


def expected_ids(start: int, count: int) -> Any:
    return (np.arange(start, start + count).repeat(4) % 4).reshape(count, 2, 2)


def filled() -> Capture:
    made = capture()
    made.record(0, prompt_token_ids=[101, 102], token_ids=[201], logprobs=[-0.25], routes=rows(0, 2))
    made.record(0, token_ids=[202, 203], logprobs=[-0.5, -1.5], routes=rows(2, 2))
    return made


def failure(step: Any) -> str:
    with pytest.raises(ArtifactError) as caught:
        step()
    assert caught.value.code == "artifact_capture_failed"
    return str(caught.value)


def test_two_deltas_make_an_artifact() -> None:
    """T48, T60."""
    expected = ArtifactChoice(
        0,
        2,
        [101, 102, 201, 202, 203],
        RoutedExperts(0, expected_ids(0, 4), (3, 7), (4, 4)),
        SelectedLogprobs(2, [-0.25, -0.5, -1.5]),
    )
    assert decode(encode_source(filled(), 2**26).data) == GenerationArtifact([expected])


@pytest.mark.parametrize("keep", [0, 1, 2, 3])
def test_one_trim_cuts_everything(keep: int) -> None:
    """BR-23."""
    made = filled()
    made.trim(0, keep)
    (choice,) = assemble(made).choices
    assert choice.moe_routes is not None and choice.selected_logprobs is not None
    assert list(choice.sequence_token_ids) == [101, 102, 201, 202, 203][: 2 + keep]
    assert len(choice.selected_logprobs.logprobs) == keep
    assert np.array_equal(choice.moe_routes.expert_ids, expected_ids(0, 1 + keep))


def test_routes_from_a_later_token() -> None:
    """T51: also from the end of the prompt with one token, which has no row."""
    made = capture(route_start=1)
    made.record(0, prompt_token_ids=[1, 2], token_ids=[3, 4], logprobs=[-1, -2], routes=rows(1, 2))
    (choice,) = assemble(made).choices
    assert choice.moe_routes is not None and choice.moe_routes.token_start == 1
    assert np.array_equal(choice.moe_routes.expert_ids, expected_ids(1, 2))
    empty = capture(("moe_routes",), route_start=2)
    empty.record(0, prompt_token_ids=[1, 2], token_ids=[3])
    found = decode(encode_source(empty, 2**26).data).choices[0].moe_routes
    assert found is not None and np.asarray(found.expert_ids).shape == (0, 2, 2)


def test_four_choices_in_one_object() -> None:
    """BR-17."""
    made = capture(num_choices=4)
    for index in (2, 0, 3, 1):
        made.record(index, prompt_token_ids=[1, 2], token_ids=[index], logprobs=[-index], routes=rows(0, 2))
    choices = decode(encode_source(made, 2**26).data).choices
    assert [(choice.choice_index, list(choice.sequence_token_ids)) for choice in choices] == [
        (index, [1, 2, index]) for index in range(4)
    ]


@pytest.mark.parametrize(("experts", "width"), [(256, 1), (257, 2), (65_536, 2), (65_537, 4)])
def test_routes_are_held_in_the_width_of_the_expert_count(experts: int, width: int) -> None:
    """BR-02."""
    layout = RouterLayout((0, 1), experts, 2)
    made = capture(("moe_routes",), layout)
    assert made.capacity == 8 * -(-payload_bytes(("moe_routes",), 2, 3, layout) // 8)
    made.record(0, prompt_token_ids=[1, 2], token_ids=[3], routes=rows(0, 2, width))
    (choice,) = assemble(made).choices
    assert choice.moe_routes is not None
    assert np.asarray(choice.moe_routes.expert_ids).dtype.itemsize == width
    wide = memoryview(np.zeros((1, 2, 2), np.int64))
    assert "8 bytes" in failure(lambda: made.record(0, token_ids=[4], routes=RouteRows(2, wide)))


VIOLATIONS: dict[str, Any] = {
    "too many tokens": {"token_ids": [1] * 4, "logprobs": [-1.0] * 4},
    "logprobs missing": {"token_ids": [1]},
    "logprobs without tokens": {"logprobs": [-1.0]},
    "a logprob that is none": {"token_ids": [1], "logprobs": [None]},
    "a token beyond 64 bits": {"token_ids": [2**63], "logprobs": [-1.0]},
    "a token that is text": {"token_ids": ["a"], "logprobs": [-1.0]},
    "another prompt": {"prompt_token_ids": [1, 3]},
    "a longer prompt": {"prompt_token_ids": [1, 2, 3]},
    "a gap in the routes": {"routes": rows(1, 1)},
    "half a row": {"routes": RouteRows(0, b"\0\0")},
    "more rows than admitted": {"routes": rows(0, 5)},
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_violations(name: str) -> None:
    """Section 6.2; T57, T65, T66."""
    made = capture()
    made.record(0, prompt_token_ids=[1, 2])
    failure(lambda: made.record(0, **VIOLATIONS[name]))


def test_more_violations() -> None:
    made = capture()
    failure(lambda: made.record(0, token_ids=[1], logprobs=[-1.0]))
    failure(lambda: made.record(1, prompt_token_ids=[1, 2]))
    failure(lambda: made.record(-1, prompt_token_ids=[1, 2]))
    failure(lambda: assemble(capture()))
    failure(lambda: made.trim(0, 1))
    made.release()
    failure(lambda: made.record(0, prompt_token_ids=[1, 2]))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_an_incomplete_artifact_is_none(count: int) -> None:
    """T56: two tokens and one prompt need two rows."""
    made = capture(("moe_routes",))
    made.record(0, prompt_token_ids=[1, 2], token_ids=[3], routes=rows(0, count) if count else None)
    failure(lambda: assemble(made))


def test_what_is_held_is_what_was_admitted() -> None:
    """BR-09: beside the mapping of the admitted size, a hundred thousand tokens leave next to nothing."""
    limits = GenerationBounds(prompt_tokens=1, max_tokens=100_000, router_layout=RouterLayout((0,), 64, 8))
    tracemalloc.start()
    made = Capture(ALL, limits)
    made.record(0, prompt_token_ids=[1])
    for start in range(0, 100_000, 1000):
        ids = np.zeros((1000, 1, 8), np.uint8)
        made.record(0, token_ids=[7] * 1000, logprobs=[-1.0] * 1000, routes=RouteRows(start, memoryview(ids)))
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert made.capacity == 100_001 * 8 + 100_000 * 4 + 100_000 * 8
    assert held < 65_536


def test_no_row_is_lost_when_the_artifact_outlives_the_capture() -> None:
    made = filled()
    artifact = assemble(made)
    made.release()
    assert list(artifact.choices[0].sequence_token_ids) == [101, 102, 201, 202, 203]


def test_nothing_but_the_codec_loads_numpy() -> None:
    """The control plane and the facade may import these."""
    code = (
        "import sys, infer.artifacts, infer.artifacts.pipeline; print('numpy' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
