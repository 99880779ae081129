"""Conformance of an artifact field: a profile fixed by the model, rows selected in order and narrowed, encoded and back.

On the calling thread, over taps of the spec's example; owns nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from infer.config.capture import CaptureProfile
from infer.config.model import RoutedLayer
from infer.errors import ArtifactCorruptError
from infer.plugins.artifact_field import ArtifactField, ArtifactFieldSpec, TapFacts, profile_problem
from infer.testing.kits import Check, expect, load

STEP_TOKENS = 7
TOKENS = (4, 0, 6, 1)


def checks(spec: ArtifactFieldSpec) -> Iterator[Check]:
    """The example gives the arguments of `TapFacts`; what it leaves out is the kit's."""
    for body in (_profile, _select, _overwrites, _select_nothing, _codes, _refuses_damaged):
        yield Check(body.__name__.strip("_"), partial(body, spec))


def facts(spec: ArtifactFieldSpec) -> TapFacts:
    values: dict[str, Any] = {
        "model_identity": "kit",
        "dtype": "float32",
        "num_layers": 2,
        "hidden_size": 8,
        "hidden_layers": (),
        "vocab_size": 16,
        **spec.example,
    }
    layers = values.pop("routed_layers", ())
    routed = tuple(RoutedLayer(layer_id=i, num_experts=experts, top_k=k) for i, experts, k in layers)
    return TapFacts(routed_layers=routed, **values)


def _made(spec: ArtifactFieldSpec) -> tuple[ArtifactField, CaptureProfile]:
    field: ArtifactField = load(spec)(facts(spec))
    return field, field.profile()


def _tap(spec: ArtifactFieldSpec) -> Tensor:
    """Of the shape and type that the spec's tap has for the example, each cell another value."""
    model = facts(spec)
    if spec.tap == "router":
        layers, width, dtype = len(model.routed_layers), model.routed_layers[0].top_k, torch.int16
        top = model.routed_layers[0].num_experts
        cells = torch.arange(layers * STEP_TOKENS * width) * 37 % top
    elif spec.tap == "logits":
        layers, width, dtype = 1, model.vocab_size, torch.float32
        cells = torch.arange(STEP_TOKENS * width) * 37 % 101 / 8
    else:
        layers, width, dtype = len(model.hidden_layers), model.hidden_size, getattr(torch, model.dtype)
        cells = torch.arange(layers * STEP_TOKENS * width) / 8
    return cells.to(dtype).reshape(layers, STEP_TOKENS, width)


def _out(profile: CaptureProfile, count: int) -> Tensor:
    return torch.zeros((count, *profile.row_shape), dtype=getattr(torch, profile.dtype))


def _profile(spec: ArtifactFieldSpec) -> None:
    """The same model gives the same rows."""
    _, profile = _made(spec)
    expect(profile == _made(spec)[1], "two objects of one model have different profiles")
    problem = profile_problem(spec, profile, "kit")
    expect(not problem, problem)
    expect(profile.model_identity == facts(spec).model_identity, "the profile does not name the model")


def _select(spec: ArtifactFieldSpec) -> None:
    """Row i is that of token i, alone or among others, and the tap stays as it is."""
    field, profile = _made(spec)
    tap, together = _tap(spec), _out(profile, len(TOKENS))
    before = tap.clone()
    field.select(tap, torch.tensor(TOKENS), together)
    expect(torch.equal(tap, before), "select changed the tap")
    for row, token in enumerate(TOKENS):
        alone = _out(profile, 1)
        field.select(tap, torch.tensor([token]), alone)
        expect(torch.equal(alone[0], together[row]), f"row {row} is not that of token {token}")
    expect(not torch.equal(together[0], together[1]), "different tokens gave equal rows")


def _overwrites(spec: ArtifactFieldSpec) -> None:
    """Whatever the buffer held: it is used again and again."""
    field, profile = _made(spec)
    tap, written = _tap(spec), []
    for before in (0, 1):
        out = _out(profile, len(TOKENS)).fill_(before)
        field.select(tap, torch.tensor(TOKENS), out)
        written.append(out)
    expect(torch.equal(*written), "what the buffer held before shows in the rows")


def _select_nothing(spec: ArtifactFieldSpec) -> None:
    field, profile = _made(spec)
    field.select(_tap(spec), torch.empty(0, dtype=torch.int64), _out(profile, 0))


def _codes(spec: ArtifactFieldSpec) -> None:
    field, profile = _made(spec)
    for count in (0, 3):
        rows = bytes(range(256)) * (count * profile.row_bytes // 256 + 1)
        rows = rows[: count * profile.row_bytes]
        expect(field.decode(field.encode(rows, count), count) == rows, f"{count} rows did not come back")


def _refuses_damaged(spec: ArtifactFieldSpec) -> None:
    """Bytes that are cut off, or of another number of rows, are an error and never other rows."""
    field, profile = _made(spec)
    data = field.encode(bytes(3 * profile.row_bytes), 3)
    for wrong, count in ((data[:-1], 3), (data, 4), (b"", 1)):
        try:
            rows = field.decode(wrong, count)
        except ArtifactCorruptError:
            continue
        raise AssertionError(
            f"decode() makes {len(rows)} bytes of {len(wrong)} for {count} rows, and should refuse them"
        )
