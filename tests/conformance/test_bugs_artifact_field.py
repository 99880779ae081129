"""Planted bugs: the kit of artifact fields names the promise that a wrong one breaks."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from infer.config.capture import CaptureProfile
from infer.plugins import ArtifactFieldSpec, TapFacts
from infer.plugins.artifact_field import whole_rows
from infer.testing.kits import artifact_field
from planted_bugs import PlantBug, failures, plant_bug

__all__ = ["plant_bug"]


class Good:
    """Two chosen logits of every predicted token."""

    calls = 0

    def __init__(self, facts: TapFacts) -> None:
        self.facts = facts

    def profile(self) -> CaptureProfile:
        return CaptureProfile(
            name="bug",
            dtype="float32",
            row_shape=(2,),
            model_identity=self.facts.model_identity,
        )

    def select(self, tap: Tensor, tokens: Tensor, out: Tensor) -> None:
        out.copy_(tap[0, tokens, :2])

    def encode(self, rows: bytes, count: int) -> bytes:
        return rows

    def decode(self, data: bytes, count: int) -> bytes:
        return whole_rows(self.profile(), data, count)


class SortsTheTokens(Good):
    def select(self, tap: Tensor, tokens: Tensor, out: Tensor) -> None:
        out.copy_(tap[0, tokens.sort().values, :2])


class TakesTheFirst(Good):
    def select(self, tap: Tensor, tokens: Tensor, out: Tensor) -> None:
        out.copy_(tap[0, : len(tokens), :2])


class LooksAtNeighbours(Good):
    def select(self, tap: Tensor, tokens: Tensor, out: Tensor) -> None:
        rows = tap[0, tokens, :2]
        out.copy_(rows - rows.mean() if len(rows) else rows)


class ChangesTheTap(Good):
    def select(self, tap: Tensor, tokens: Tensor, out: Tensor) -> None:
        tap -= tap.amax(-1, keepdim=True)
        super().select(tap, tokens, out)


class WritesNothing(Good):
    def select(self, tap: Tensor, tokens: Tensor, out: Tensor) -> None:
        return None


class NeedsAToken(Good):
    def select(self, tap: Tensor, tokens: Tensor, out: Tensor) -> None:
        int(tokens[0])
        super().select(tap, tokens, out)


class AnotherProfileEachTime(Good):
    def profile(self) -> CaptureProfile:
        Good.calls += 1
        return msgspec.structs.replace(super().profile(), row_shape=(2, Good.calls))

    def select(self, tap: Tensor, tokens: Tensor, out: Tensor) -> None:
        out.copy_(tap[0, tokens, :2, None].expand(out.shape))


class AnotherName(Good):
    def profile(self) -> CaptureProfile:
        return msgspec.structs.replace(super().profile(), name="another")


class ForgetsTheModel(Good):
    def profile(self) -> CaptureProfile:
        return msgspec.structs.replace(super().profile(), model_identity="")


class EncodesWithLoss(Good):
    def encode(self, rows: bytes, count: int) -> bytes:
        return torch.frombuffer(bytearray(rows), dtype=torch.float32).half().numpy().tobytes() if rows else rows

    def decode(self, data: bytes, count: int) -> bytes:
        return torch.frombuffer(bytearray(data), dtype=torch.float16).float().numpy().tobytes() if data else data


class FailsOnNoRows(Good):
    def encode(self, rows: bytes, count: int) -> bytes:
        return rows if rows[0] >= 0 else b""


class AddsToTheBuffer(Good):
    def select(self, tap: Tensor, tokens: Tensor, out: Tensor) -> None:
        out += tap[0, tokens, :2]


class DecodesAnything(Good):
    def decode(self, data: bytes, count: int) -> bytes:
        return data


class PadsWithZeros(Good):
    def decode(self, data: bytes, count: int) -> bytes:
        return data.ljust(count * self.profile().row_bytes, b"\0")


class OneNumber(Good):
    """Correct: a row is a number, without an axis."""

    def profile(self) -> CaptureProfile:
        return msgspec.structs.replace(super().profile(), row_shape=())

    def select(self, tap: Tensor, tokens: Tensor, out: Tensor) -> None:
        out.copy_(tap[0, tokens, 0])


class LayersOfANumber(OneNumber):
    def profile(self) -> CaptureProfile:
        return msgspec.structs.replace(super().profile(), layer_ids=(0,))


class NothingInARow(Good):
    def profile(self) -> CaptureProfile:
        return msgspec.structs.replace(super().profile(), row_shape=(0,))

    def select(self, tap: Tensor, tokens: Tensor, out: Tensor) -> None:
        """There is no cell to fill."""


@pytest.mark.row("X-PLUGIN-KIT", "the kit fails six planted plugin bugs")
@pytest.mark.parametrize(
    ("bug", "broken"),
    [
        (Good, set()),
        (OneNumber, set()),
        (LayersOfANumber, {"profile"}),
        (NothingInARow, {"profile"}),
        (SortsTheTokens, {"select"}),
        (TakesTheFirst, {"select"}),
        (LooksAtNeighbours, {"select"}),
        (ChangesTheTap, {"select"}),
        (WritesNothing, {"select"}),
        (NeedsAToken, {"select_nothing"}),
        (AnotherProfileEachTime, {"profile"}),
        (AnotherName, {"profile"}),
        (ForgetsTheModel, {"profile"}),
        (EncodesWithLoss, {"codes"}),
        (FailsOnNoRows, {"codes"}),
        (AddsToTheBuffer, {"overwrites"}),
        (DecodesAnything, {"refuses_damaged"}),
        (PadsWithZeros, {"refuses_damaged"}),
    ],
)
def test_the_kit_names_the_broken_promise(plant_bug: PlantBug, bug: type[Good], broken: set[str]) -> None:
    failed = failures(artifact_field.checks(spec(plant_bug(bug))))
    assert failed >= broken
    assert bool(failed) == bool(broken)


@pytest.mark.parametrize(
    ("name", "profile", "said"),
    [
        ("entropy", {}, ""),
        ("best-logit", {}, ""),
        ("Best", {}, r"called 'kit\.Best'; a field's name has at most 64 lower-case letters"),
        ("b" * 65, {}, "at most 64"),
        (
            "moe_routes",
            {},
            r"a row \[layers, width\] of uint8 or uint16 or int32 with layer_ids and num_experts\. This one",
        ),
        ("indexer_topk", {"dtype": "int32", "row_shape": (1, 2), "layer_ids": (3,)}, "per predicted_token"),
        ("hidden_states", {"row_shape": (1, 2), "layer_ids": (3,)}, "per predicted_token; give it another name"),
    ],
)
def test_names_that_artifacts_cannot_carry_are_found(
    plant_bug: PlantBug, name: str, profile: dict[str, Any], said: str
) -> None:
    class Named(Good):
        def profile(self) -> CaptureProfile:
            return msgspec.structs.replace(super().profile(), name=name, **profile)

    named = dataclasses.replace(spec(plant_bug(Named)), name=name)
    [check] = [check for check in artifact_field.checks(named) if check.name == "profile"]
    if said:
        with pytest.raises(AssertionError, match=said):
            check.run()
    else:
        check.run()


def spec(factory: str) -> ArtifactFieldSpec:
    return ArtifactFieldSpec(
        name="bug",
        api=1,
        factory=factory,
        coordinate="predicted_token",
        reuse="request_only",
        tap="logits",
        encoding="raw",
        example={"vocab_size": 16},
    )
