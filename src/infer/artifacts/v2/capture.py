"""What a running request has produced so far, for the open format. Used by the request's own task; loads no numpy.

Owns typed buffers of tokens and what was recorded beside them; captured rows are handed over once, as the engine has them.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from infer.artifacts.admission import GenerationBounds
from infer.artifacts.request import ArtifactRequest
from infer.artifacts.v2.admission import captured_fields
from infer.errors import ArtifactError
from infer.types import CapturedRows, FinishReason

EXCLUDED = -3.4028234663852886e38
"""The lowest float32: log-probability of an alternative that does not exist, because fewer tokens could be drawn."""
_ENTRY_FIELDS = ("selected_logprobs", "topk_logprobs", "kept_set", "kept_logmass")


class PositionEntry(Protocol):
    """`infer.engine.step.PositionLogprobs`."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    kept_ids: array[int] | None
    kept_logmass: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceEnd:
    """What is known when a choice has ended."""

    finish_reason: FinishReason
    stop_reason: int | str | None = None
    seed: int | None = None
    weight_versions: tuple[tuple[int, int, int], ...] = ()
    """(first output token, end, version)."""
    rows: Mapping[str, CapturedRows] = field(default_factory=dict)
    """By field name of the artifact."""


@dataclass(slots=True, eq=False)
class OpenChoice:
    """One choice, in order of its tokens."""

    tokens: array[int] = field(default_factory=lambda: array("q"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    top_ids: array[int] = field(default_factory=lambda: array("i"))
    top_logprobs: array[float] = field(default_factory=lambda: array("f"))
    kept: array[int] = field(default_factory=lambda: array("i"))
    kept_ends: array[int] = field(default_factory=lambda: array("q", (0,)))
    kept_logmass: array[float] = field(default_factory=lambda: array("f"))
    end: ChoiceEnd | None = None


class OpenCapture:
    """Everything of one request. Every method raises `ArtifactError` on what does not fit."""

    def __init__(self, request: ArtifactRequest, bounds: GenerationBounds) -> None:
        self.request = request
        self.bounds = bounds
        self.prompt = array("q")
        self.prompt_ids = array("i")
        """Of prompt_logprobs: [rows, 1 + k] flat, as the log-probabilities."""
        self.prompt_logprobs = array("f")
        self._choices: dict[int, OpenChoice] = {}
        self._entries = any(name in request.contents for name in _ENTRY_FIELDS)
        self._released = False

    def record(
        self,
        choice_index: int,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        token_ids: Sequence[int] = (),
        entries: Sequence[PositionEntry] = (),
    ) -> None:
        """Append what one delta of a choice brought, already trimmed."""
        choice = self._choice(choice_index)
        if prompt_token_ids is not None:
            self._record_prompt(prompt_token_ids)
        if not token_ids:
            return
        if not self.prompt:
            raise _failed("tokens came before the prompt")
        total = len(choice.tokens) + len(token_ids)
        if total > self.bounds.max_tokens:
            raise _failed(f"{total} completion tokens; {self.bounds.max_tokens} were admitted")
        choice.tokens.extend(_ids(token_ids))
        if self._entries:
            self._record_entries(choice, token_ids, entries)

    def record_prompt_logprobs(self, entries: Sequence[PositionEntry]) -> None:
        """Of the next prompt positions, from 1 on."""
        width = 1 + (self.bounds.prompt_logprobs or 0)
        if len(self.prompt_ids) + width * len(entries) > width * (self.bounds.prompt_tokens - 1):
            raise _failed("there are more prompt logprobs than prompt tokens")
        for entry in entries:
            self.prompt_ids.append(entry.token_id)
            self.prompt_logprobs.append(entry.logprob)
            _append_top(self.prompt_ids, self.prompt_logprobs, entry.top, width - 1)

    def finish(self, choice_index: int, end: ChoiceEnd) -> None:
        """The last of a choice whose tokens were all recorded. Rows are kept as they are, not copied."""
        choice = self._choice(choice_index)
        profiles = captured_fields(self.request.contents, self.bounds)
        needed = len(self.prompt) + len(choice.tokens) - 1 - self.bounds.route_start
        for name, profile in profiles.items():
            rows = end.rows.get(name)
            if rows is None or rows.error is not None:
                raise _failed(f"{name}: no rows came" if rows is None else str(rows.error))
            if (rows.start, rows.count) != (self.bounds.route_start, needed):
                raise _failed(f"{name}: {rows.count} rows from {rows.start} on, {needed} are needed")
            if (rows.dtype, rows.row_shape, rows.layer_ids) != (profile.dtype, profile.row_shape, profile.layer_ids):
                raise _failed(f"{name}: rows are {rows.dtype} of shape {rows.row_shape}")
            if len(rows.data) != needed * profile.row_bytes or len(rows.status) != needed:
                raise _failed(f"{name}: {len(rows.data)} bytes and {len(rows.status)} statuses are not {needed} rows")
        choice.end = end

    def choices(self) -> list[tuple[int, OpenChoice]]:
        """By index. Raises when a choice did not end, or the prompt's log-probabilities are not complete."""
        if self._released or len(self._choices) != self.bounds.num_choices:
            raise _failed(f"{len(self._choices)} of {self.bounds.num_choices} choices were captured")
        if any(choice.end is None for choice in self._choices.values()) or not self.prompt:
            raise _failed("a choice did not end, or had no prompt")
        needed = (self.bounds.prompt_tokens - 1) * (1 + (self.bounds.prompt_logprobs or 0))
        if "prompt_logprobs" in self.request.contents and len(self.prompt_ids) != needed:
            raise _failed("the prompt's logprobs are not complete")
        return sorted(self._choices.items())

    def release(self) -> None:
        """Forget everything. The memory goes when a record built from it has gone too."""
        self._released = True
        self._choices.clear()
        self.prompt, self.prompt_ids, self.prompt_logprobs = array("q"), array("i"), array("f")

    def _choice(self, index: int) -> OpenChoice:
        if self._released:
            raise _failed("the capture was released")
        if index not in self._choices:
            if not 0 <= index < self.bounds.num_choices:
                raise _failed(f"choice {index} was not admitted")
            self._choices[index] = OpenChoice()
        return self._choices[index]

    def _record_prompt(self, ids: Sequence[int]) -> None:
        if len(ids) != self.bounds.prompt_tokens:
            raise _failed(f"the prompt has {len(ids)} tokens; {self.bounds.prompt_tokens} were admitted")
        values = _ids(ids)
        if self.prompt and self.prompt != values:
            raise _failed("the prompt changed between two deltas")
        self.prompt = values

    def _record_entries(self, choice: OpenChoice, ids: Sequence[int], entries: Sequence[PositionEntry]) -> None:
        if len(entries) != len(ids):
            raise _failed(f"{len(ids)} tokens came with {len(entries)} logprobs")
        contents, bounds = self.request.contents, self.bounds
        keeps = "kept_set" in contents or "kept_logmass" in contents
        for token_id, entry in zip(ids, entries, strict=True):
            if entry.token_id != token_id:
                raise _failed(f"token {token_id} came with the logprob of token {entry.token_id}")
            choice.logprobs.append(entry.logprob)
            if "topk_logprobs" in contents:
                _append_top(choice.top_ids, choice.top_logprobs, entry.top, bounds.num_top)
            if keeps:
                self._keep(choice, entry)

    def _keep(self, choice: OpenChoice, entry: PositionEntry) -> None:
        if entry.kept_logmass is None:
            raise _failed("a token came without its kept set")
        kept = entry.kept_ids
        if "kept_set" in self.request.contents and kept is not None:
            if not 0 < len(kept) <= self.bounds.num_kept:
                raise _failed(f"a kept set of {len(kept)} tokens; 1 to {self.bounds.num_kept} were admitted")
            choice.kept.extend(kept)
        choice.kept_ends.append(len(choice.kept))
        choice.kept_logmass.append(entry.kept_logmass)


def _append_top(ids: array[int], logprobs: array[float], top: tuple[tuple[int, float], ...], width: int) -> None:
    """The best `width`; what is not there has the id 0 and the lowest value."""
    for token_id, logprob in top[:width]:
        ids.append(token_id)
        logprobs.append(logprob)
    for _ in range(width - len(top)):
        ids.append(0)
        logprobs.append(EXCLUDED)


def _ids(ids: Sequence[int]) -> array[int]:
    try:
        return array("q", ids)
    except (OverflowError, TypeError):
        raise _failed("a token id is not a 64-bit integer") from None


def _failed(message: str) -> ArtifactError:
    return ArtifactError(message, code="artifact_capture_failed")
