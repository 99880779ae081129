"""Planted bugs: the kit of logits processors names the promise that a wrong one breaks."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

from infer.plugins import LogitsProcessorSpec, LogitsRow
from infer.testing.kits import logits_processor


class Good:
    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def check(self, params: Mapping[str, Any]) -> None:
        if params["by"] <= 0:
            raise ValueError("by")

    def apply(self, logits: Tensor, rows: Sequence[LogitsRow]) -> None:
        for i, row in enumerate(rows):
            logits[i, list(row.output_ids)] -= row.params["by"]


class TakesNothing(Good):
    def check(self, params: Mapping[str, Any]) -> None:
        raise ValueError("no")


class TakesAnything(Good):
    def check(self, params: Mapping[str, Any]) -> None:
        return None


class LooksAtNeighbours(Good):
    def apply(self, logits: Tensor, rows: Sequence[LogitsRow]) -> None:
        logits -= logits.mean()


class MixesUpRows(Good):
    def apply(self, logits: Tensor, rows: Sequence[LogitsRow]) -> None:
        logits[0, 0] -= len(rows)


class CountsCalls(Good):
    def apply(self, logits: Tensor, rows: Sequence[LogitsRow]) -> None:
        for i, row in enumerate(rows):
            row.state = (row.state or 0) + 1
            logits[i, 0] -= row.state


class NeedsOutput(Good):
    def apply(self, logits: Tensor, rows: Sequence[LogitsRow]) -> None:
        for i, row in enumerate(rows):
            logits[i, row.output_ids[-1]] -= 1


class WritesNan(Good):
    def apply(self, logits: Tensor, rows: Sequence[LogitsRow]) -> None:
        logits *= float("nan")


@pytest.mark.row("X-PLUGIN-KIT", "the kit fails six planted plugin bugs")
@pytest.mark.parametrize(
    ("bug", "broken"),
    [
        (Good, set()),
        (TakesNothing, {"takes"}),
        (TakesAnything, {"refuses"}),
        (LooksAtNeighbours, {"alone_as_in_a_batch"}),
        (MixesUpRows, {"alone_as_in_a_batch"}),
        (CountsCalls, {"again_is_the_same", "resumed_is_the_same"}),
        (NeedsOutput, {"no_output_yet", "alone_as_in_a_batch", "again_is_the_same", "resumed_is_the_same"}),
        (WritesNan, {"no_output_yet", "alone_as_in_a_batch", "again_is_the_same", "resumed_is_the_same"}),
    ],
)
def test_the_kit_names_the_broken_promise(monkeypatch: pytest.MonkeyPatch, bug: type[Good], broken: set[str]) -> None:
    module = ModuleType("planted_processor")
    module.make = bug  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "planted_processor", module)
    example = {"params": {"by": 1.0}, "refused": {"by": -1.0}}
    spec = LogitsProcessorSpec(name="bug", api=1, factory="planted_processor:make", example=example)
    failed = set()
    for check in logits_processor.checks(spec):
        try:
            check.run()
        except Exception:
            failed.add(check.name)
    assert failed == broken
