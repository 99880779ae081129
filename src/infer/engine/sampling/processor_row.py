"""Logits processors by name for one engine, and what one answer has of them: its uses and its exact history.

Runs in the worker thread; a row's history is written by its `SamplingRow` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from infer.engine.step import ProcessorUse, SamplingSpec
from infer.errors import InvalidRequestError
from infer.plugins.logits_processor import LogitsProcessor, LogitsRow


@dataclass(slots=True)
class RowProcessors:
    """Of one answer. `uses[k]` belongs to the k-th processor that the request names."""

    prompt_ids: tuple[int, ...]
    output_ids: list[int]
    uses: list[tuple[ProcessorUse, LogitsProcessor | None, LogitsRow | None]] = field(default_factory=list)
    """(what was asked for, the plugin's object and its row, or None for a function of the caller's)."""
    failure: str | None = None
    """Why its next token cannot be drawn."""


class Processors:
    """Makes each named processor when a request first uses it; all requests share it."""

    def __init__(self, create: Callable[[str], LogitsProcessor] | None = None) -> None:
        """`create`: name -> object; None where nothing is registered."""
        self._create = create
        self._made: dict[str, LogitsProcessor] = {}

    def of_row(self, spec: SamplingSpec, token_ids: Sequence[int], prompt_len: int) -> RowProcessors | None:
        """For an answer that owns `token_ids` (prompt, then outputs so far); None when it uses none."""
        if not spec.logits_processors:
            return None
        row = RowProcessors(tuple(token_ids[:prompt_len]), list(token_ids[prompt_len:]))
        for use in spec.logits_processors:
            if use.function is not None:
                row.uses.append((use, None, None))
                continue
            state = LogitsRow(params=use.params, prompt_ids=row.prompt_ids, output_ids=row.output_ids)
            row.uses.append((use, self._get(use.name), state))
        return row

    def _get(self, name: str) -> Any:
        if name not in self._made:
            if self._create is None:
                raise InvalidRequestError(
                    f"there is no logits processor {name!r} here", parameter="logits_processors", value=name
                )
            self._made[name] = self._create(name)
        return self._made[name]
