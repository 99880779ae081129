"""What a running request has produced so far, in buffers of exactly the admitted size. Used by the request's own task.

Owns one anonymous mapping per request: pages that nothing was written to take no memory. Route rows are not copied into it:
they are handed over once, as the engine captured them.
"""

from __future__ import annotations

import math
import mmap
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from infer.artifacts.admission import GenerationBounds, payload_bytes
from infer.artifacts.v1.limits import id_width
from infer.config.capture import ITEM_SIZES
from infer.errors import ArtifactError
from infer.types import CapturedRows


@dataclass(frozen=True, slots=True)
class CapturedChoice:
    """One choice as bytes: int64 tokens, float32 log-probabilities, and the rows of its routes."""

    index: int
    num_prompt: int
    tokens: memoryview
    logprobs: memoryview | None
    routes: CapturedRows | None


class _Choice:
    """Places inside the mapping, and how much of each is filled."""

    def __init__(self, tokens: memoryview, logprobs: memoryview) -> None:
        self.tokens = tokens.cast("q")
        self.logprobs = logprobs.cast("f")
        self.routes: CapturedRows | None = None
        self.num_prompt = 0
        self.num_tokens = 0
        self.num_logprobs = 0


class Capture:
    """Tokens, log-probabilities and routes of one request. Every method raises `ArtifactError` on what does not fit."""

    def __init__(self, contents: tuple[str, ...], bounds: GenerationBounds) -> None:
        self._bounds = bounds
        self._layout = bounds.router_layout if "moe_routes" in contents else None
        self._with_logprobs = "selected_logprobs" in contents
        per_choice = payload_bytes(contents, bounds.prompt_tokens, bounds.max_tokens, None)
        # Tokens come first, so that each kind is aligned: 8-byte ids, then 4-byte floats.
        self._stride = -(-per_choice // 8) * 8
        self.capacity = self._stride * bounds.num_choices
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._mapping: mmap.mmap | None = mmap.mmap(-1, self.capacity, flags=flags)
        self._choices: dict[int, _Choice] = {}

    def record(
        self,
        choice_index: int,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        token_ids: Sequence[int] = (),
        logprobs: Sequence[float] | None = None,
    ) -> None:
        """Append what one delta of a choice brought, already trimmed. Earlier tokens are not touched."""
        choice = self._choice(choice_index)
        if prompt_token_ids is not None:
            self._record_prompt(choice, prompt_token_ids)
        if token_ids:
            self._record_tokens(choice, token_ids)
        if self._with_logprobs:
            values = () if logprobs is None else logprobs
            if len(values) != len(token_ids):
                raise _failed(f"{len(token_ids)} tokens came with {len(values)} logprobs")
            choice.logprobs[choice.num_logprobs : choice.num_logprobs + len(values)] = _floats(values)
            choice.num_logprobs += len(values)

    def set_routes(self, choice_index: int, rows: CapturedRows) -> None:
        """All rows of a choice whose last token was recorded. They are kept as they are, not copied."""
        choice = self._choice(choice_index)
        if self._layout is None:
            return
        if rows.error is not None:
            raise _failed(rows.error)
        needed = choice.num_tokens - self._bounds.route_start - 1
        if rows.start != self._bounds.route_start or rows.count != needed:
            raise _failed(
                f"choice {choice_index} has {rows.count} route rows from {rows.start} on; {choice.num_tokens} tokens from "
                f"{self._bounds.route_start} on need {needed}"
            )
        layout, width = self._layout, ITEM_SIZES[rows.dtype]
        shape = (layout.num_routers, layout.top_k)
        if rows.row_shape != shape or width != id_width(layout.num_experts - 1) or rows.layer_ids != layout.router_ids:
            raise _failed(f"route rows are {rows.dtype} of shape {rows.row_shape} from layers {rows.layer_ids[:8]}")
        if len(rows.data) != needed * math.prod(shape) * width:
            raise _failed(f"{len(rows.data)} bytes are not {needed} route rows of {math.prod(shape) * width}")
        choice.routes = rows

    def choices(self) -> list[CapturedChoice]:
        """Views of what is held, by choice. Raises when a choice, its prompt or its routes are missing."""
        if len(self._choices) != self._bounds.num_choices:
            raise _failed(f"{len(self._choices)} of {self._bounds.num_choices} choices were captured")
        return [self._captured(index, choice) for index, choice in sorted(self._choices.items())]

    def release(self) -> None:
        """Forget everything. The memory goes when an artifact built from it has gone too."""
        self._choices.clear()
        self._mapping = None

    def _choice(self, index: int) -> _Choice:
        if self._mapping is None:
            raise _failed("the capture was released")
        if index not in self._choices:
            if not 0 <= index < self._bounds.num_choices:
                raise _failed(f"choice {index} was not admitted")
            place = memoryview(self._mapping)[index * self._stride : (index + 1) * self._stride]
            tokens = 8 * self._bounds.num_tokens
            logprobs = tokens + (4 * self._bounds.max_tokens if self._with_logprobs else 0)
            self._choices[index] = _Choice(place[:tokens], place[tokens:logprobs])
        return self._choices[index]

    def _record_prompt(self, choice: _Choice, ids: Sequence[int]) -> None:
        if len(ids) != self._bounds.prompt_tokens:
            raise _failed(f"the prompt has {len(ids)} tokens; {self._bounds.prompt_tokens} were admitted")
        values = _ids(ids)
        if not choice.num_tokens:
            choice.tokens[: len(values)] = values
            choice.num_prompt = choice.num_tokens = len(values)
        elif choice.tokens[: choice.num_prompt] != memoryview(values):
            raise _failed("the prompt changed between two deltas")

    def _record_tokens(self, choice: _Choice, ids: Sequence[int]) -> None:
        if not choice.num_prompt:
            raise _failed("tokens came before the prompt")
        end = choice.num_tokens + len(ids)
        if end > self._bounds.num_tokens:
            raise _failed(f"{end - choice.num_prompt} completion tokens; {self._bounds.max_tokens} were admitted")
        choice.tokens[choice.num_tokens : end] = _ids(ids)
        choice.num_tokens = end

    def _captured(self, index: int, choice: _Choice) -> CapturedChoice:
        if not choice.num_prompt:
            raise _failed(f"choice {index} has no prompt")
        if self._layout is not None and choice.routes is None:
            raise _failed(f"choice {index} has no routes")
        return CapturedChoice(
            index=index,
            num_prompt=choice.num_prompt,
            tokens=choice.tokens[: choice.num_tokens].cast("B"),
            logprobs=choice.logprobs[: choice.num_logprobs].cast("B") if self._with_logprobs else None,
            routes=choice.routes,
        )


def _ids(ids: Sequence[int]) -> array[int]:
    try:
        return array("q", ids)
    except (OverflowError, TypeError):
        raise _failed("a token id is not a 64-bit integer") from None


def _floats(values: Sequence[float]) -> array[float]:
    try:
        return array("f", values)
    except (OverflowError, TypeError):
        raise _failed("a logprob is not a float") from None


def _failed(message: str) -> ArtifactError:
    return ArtifactError(message, code="artifact_capture_failed")
