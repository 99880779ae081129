"""Logits processors that a plugin might bring, for tests: one that forces, one that watches, one that fails.
Registered by `registered`, which lets an engine find this module as if it were built in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from torch import Tensor

from infer.plugins import LogitsProcessorSpec, LogitsRow, builtins, hookimpl
from infer.plugins.registry import Kind


class Sample:
    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def check(self, params: Mapping[str, Any]) -> None:
        return None


class Forces(Sample):
    """{"token": t}"""

    def check(self, params: Mapping[str, Any]) -> None:
        if not 0 <= params["token"] < self.vocab_size:
            raise ValueError(f"token {params['token']} is not of this vocabulary")

    def apply(self, logits: Tensor, rows: Sequence[LogitsRow]) -> None:
        for i, row in enumerate(rows):
            value = logits[i, row.params["token"]].item()
            logits[i] = float("-inf")
            logits[i, row.params["token"]] = value


class Watches(Sample):
    """{"list": [...]}: appends (prompt, output) to it at every call."""

    def apply(self, logits: Tensor, rows: Sequence[LogitsRow]) -> None:
        for row in rows:
            row.params["list"].append((tuple(row.prompt_ids), tuple(row.output_ids), len(rows)))


class Fails(Sample):
    """{"at": n}: raises for output token n."""

    def apply(self, logits: Tensor, rows: Sequence[LogitsRow]) -> None:
        if any(len(row.output_ids) == row.params["at"] for row in rows):
            logits += 1.0  # a half-done edit must not be seen
            raise RuntimeError("planted")


@hookimpl
def infer_logits_processors() -> list[LogitsProcessorSpec]:
    return [
        LogitsProcessorSpec(
            name=made.__name__.lower(), api=1, factory=f"{__name__}:{made.__name__}", example={"params": {}}
        )
        for made in (Forces, Watches, Fails)
    ]


def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that start from now on have these."""
    found = builtins.builtin_modules

    def with_samples(kind: Kind) -> list[str]:
        return [*found(kind), *([__name__] if kind == "logits_processor" else [])]

    monkeypatch.setattr("infer.plugins.manager.builtin_modules", with_samples)
