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
from infer.artifacts.capture import Capture
from infer.artifacts.router_layout import RouterLayout
from infer.errors import ArtifactError
from infer.types import CapturedRows

LAYOUT = RouterLayout((3, 7), 4, 2)
ALL = ("moe_routes", "selected_logprobs")
DTYPES = {1: "uint8", 2: "uint16", 4: "int32"}


def capture(contents: tuple[str, ...] = ALL, layout: RouterLayout | None = LAYOUT, **changes: Any) -> Capture:
    facts: dict[str, Any] = {"prompt_tokens": 2, "max_tokens": 3, "router_layout": layout} | changes
    return Capture(contents, GenerationBounds(**facts))


def rows(start: int, count: int, width: int = 1, **changes: Any) -> CapturedRows:
    facts: dict[str, Any] = {
        "field": "moe_routes",
        "start": start,
        "count": count,
        "data": expected_ids(start, count).astype(f"<u{width}").tobytes(),
        "dtype": DTYPES[width],
        "row_shape": (2, 2),
        "layer_ids": (3, 7),
        "num_experts": 4,
    }
    return CapturedRows(**(facts | changes))


def expected_ids(start: int, count: int) -> Any:
    return (np.arange(start, start + count).repeat(4) % 4).reshape(count, 2, 2)


def filled() -> Capture:
    made = capture()
    made.record(0, prompt_token_ids=[101, 102], token_ids=[201], logprobs=[-0.25])
    made.record(0, token_ids=[202, 203], logprobs=[-0.5, -1.5])
    made.set_routes(0, rows(0, 4))
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


def test_routes_from_a_later_token() -> None:
    """T51: also from the end of the prompt with one token, which has no row."""
    made = capture(route_start=1)
    made.record(0, prompt_token_ids=[1, 2], token_ids=[3, 4], logprobs=[-1, -2])
    made.set_routes(0, rows(1, 2))
    (choice,) = assemble(made).choices
    assert choice.moe_routes is not None and choice.moe_routes.token_start == 1
    assert np.array_equal(choice.moe_routes.expert_ids, expected_ids(1, 2))
    empty = capture(("moe_routes",), route_start=2)
    empty.record(0, prompt_token_ids=[1, 2], token_ids=[3])
    empty.set_routes(0, rows(2, 0))
    found = decode(encode_source(empty, 2**26).data).choices[0].moe_routes
    assert found is not None and np.asarray(found.expert_ids).shape == (0, 2, 2)


def test_four_choices_in_one_object() -> None:
    """BR-17."""
    made = capture(num_choices=4)
    for index in (2, 0, 3, 1):
        made.record(index, prompt_token_ids=[1, 2], token_ids=[index], logprobs=[-index])
        made.set_routes(index, rows(0, 2))
    choices = decode(encode_source(made, 2**26).data).choices
    assert [(choice.choice_index, list(choice.sequence_token_ids)) for choice in choices] == [
        (index, [1, 2, index]) for index in range(4)
    ]


@pytest.mark.parametrize(("experts", "width"), [(256, 1), (257, 2), (65_536, 2), (65_537, 4)])
def test_routes_are_held_in_the_width_of_the_expert_count(experts: int, width: int) -> None:
    """BR-02: and they are not copied; what is held beside them was admitted for tokens and log-probabilities."""
    layout = RouterLayout((0, 1), experts, 2)
    made = capture(("moe_routes",), layout)
    given = rows(0, 2, width, layer_ids=(0, 1), num_experts=experts)
    made.record(0, prompt_token_ids=[1, 2], token_ids=[3])
    made.set_routes(0, given)
    assert made.choices()[0].routes is given
    assert made.capacity + len(given.data) * 2 == payload_bytes(("moe_routes",), 2, 3, layout)
    (choice,) = assemble(made).choices
    assert choice.moe_routes is not None
    assert np.asarray(choice.moe_routes.expert_ids).dtype.itemsize == width
    other = 2 if width == 1 else width // 2
    wrong = rows(0, 2, other, layer_ids=(0, 1), num_experts=experts)
    assert DTYPES[other] in failure(lambda: made.set_routes(0, wrong))


VIOLATIONS: dict[str, Any] = {
    "too many tokens": {"token_ids": [1] * 4, "logprobs": [-1.0] * 4},
    "logprobs missing": {"token_ids": [1]},
    "logprobs without tokens": {"logprobs": [-1.0]},
    "a logprob that is none": {"token_ids": [1], "logprobs": [None]},
    "a token beyond 64 bits": {"token_ids": [2**63], "logprobs": [-1.0]},
    "a token that is text": {"token_ids": ["a"], "logprobs": [-1.0]},
    "another prompt": {"prompt_token_ids": [1, 3]},
    "a longer prompt": {"prompt_token_ids": [1, 2, 3]},
}
WRONG_ROWS: dict[str, CapturedRows] = {
    "one too few": rows(0, 1),
    "one too many": rows(0, 3),
    "none": rows(0, 0),
    "another start": rows(1, 2),
    "half a row": rows(0, 2, data=b"\0" * 7),
    "another shape": rows(0, 2, row_shape=(1, 4)),
    "other layers": rows(0, 2, layer_ids=(3, 8)),
    "incomplete": rows(0, 2, error="the rows of a block were lost"),
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
    made.release()
    failure(lambda: made.record(0, prompt_token_ids=[1, 2]))


@pytest.mark.parametrize("name", WRONG_ROWS)
def test_wrong_rows_are_no_artifact(name: str) -> None:
    """T56: two tokens and one prompt need two rows."""
    made = capture(("moe_routes",))
    made.record(0, prompt_token_ids=[1, 2], token_ids=[3])
    failure(lambda: made.set_routes(0, WRONG_ROWS[name]))
    failure(lambda: assemble(made))


def test_rows_that_nobody_asked_for_are_left_alone() -> None:
    made = capture(())
    made.record(0, prompt_token_ids=[1, 2], token_ids=[3])
    made.set_routes(0, rows(0, 2))
    assert made.choices()[0].routes is None


def test_what_is_held_is_what_was_admitted() -> None:
    """BR-09: beside the mapping of the admitted size, a hundred thousand tokens leave next to nothing."""
    limits = GenerationBounds(prompt_tokens=1, max_tokens=100_000, router_layout=RouterLayout((0,), 64, 8))
    tracemalloc.start()
    made = Capture(ALL, limits)
    made.record(0, prompt_token_ids=[1])
    for _ in range(100):
        made.record(0, token_ids=[7] * 1000, logprobs=[-1.0] * 1000)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert made.capacity == 100_001 * 8 + 100_000 * 4
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
