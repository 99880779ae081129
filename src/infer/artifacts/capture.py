"""What a running request has produced so far, in buffers of exactly the admitted size. Used by the request's own task.

Owns one anonymous mapping per request: pages that nothing was written to take no memory.
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from infer.artifacts.admission import GenerationBounds, payload_bytes, row_bytes
from infer.artifacts.router_layout import RouterLayout
from infer.artifacts.v1.limits import id_width
from infer.errors import ArtifactError


@dataclass(frozen=True, slots=True)
class CapturedChoice:
    """One choice as bytes: int64 tokens, float32 log-probabilities, routes of `route_width` bytes per id."""

    index: int
    num_prompt: int
    tokens: memoryview
    logprobs: memoryview | None
    routes: memoryview | None
    route_start: int
    route_width: int
    layout: RouterLayout | None


@dataclass(frozen=True, slots=True)
class RouteRows:
    """Routes of consecutive tokens, C order [rows, routers, experts per token], in the narrow type of the expert count."""

    token_start: int
    data: bytes | bytearray | memoryview


class _Choice:
    """Places inside the mapping, and how much of each is filled."""

    def __init__(self, tokens: memoryview, logprobs: memoryview, routes: memoryview) -> None:
        self.tokens = tokens.cast("q")
        self.logprobs = logprobs.cast("f")
        self.routes = routes
        self.num_prompt = 0
        self.num_tokens = 0
        self.num_logprobs = 0
        self.num_route_bytes = 0


class Capture:
    """Tokens, log-probabilities and routes of one request. Every method raises `ArtifactError` on what does not fit."""

    def __init__(self, contents: tuple[str, ...], bounds: GenerationBounds) -> None:
        self._bounds = bounds
        self._layout = bounds.router_layout if "moe_routes" in contents else None
        self._with_logprobs = "selected_logprobs" in contents
        self._row_bytes = 0 if self._layout is None else row_bytes(self._layout)
        self._width = 1 if self._layout is None else id_width(self._layout.num_experts - 1)
        per_choice = payload_bytes(contents, bounds.prompt_tokens, bounds.max_tokens, self._layout)
        # Tokens come first, so that each kind is aligned: 8-byte ids, 4-byte floats, routes of any width behind them.
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
        routes: RouteRows | None = None,
    ) -> None:
        """Append what one delta of a choice brought. Earlier tokens are not touched."""
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
        if routes is not None and self._layout is not None:
            self._record_routes(choice, routes)

    def trim(self, choice_index: int, completion_tokens: int) -> None:
        """Keep the first `completion_tokens`; log-probabilities and routes beyond them go too."""
        choice = self._choice(choice_index)
        held = choice.num_tokens - choice.num_prompt
        if not 0 <= completion_tokens <= held:
            raise _failed(f"{completion_tokens} completion tokens were returned and {held} were captured")
        choice.num_tokens = choice.num_prompt + completion_tokens
        choice.num_logprobs = min(choice.num_logprobs, completion_tokens)
        rows = max(0, choice.num_tokens - self._bounds.route_start - 1)
        choice.num_route_bytes = min(choice.num_route_bytes, rows * self._row_bytes)

    def choices(self) -> list[CapturedChoice]:
        """Views of what is held, by choice. Raises when a choice or its prompt is missing."""
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
            rows = (self._bounds.num_tokens - 1) * self._row_bytes
            self._choices[index] = _Choice(place[:tokens], place[tokens:logprobs], place[logprobs : logprobs + rows])
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

    def _record_routes(self, choice: _Choice, rows: RouteRows) -> None:
        view = memoryview(rows.data)
        if view.itemsize not in (1, self._width):
            raise _failed(f"routes came in ids of {view.itemsize} bytes; the model's are {self._width}")
        data = view.cast("B") if view.c_contiguous else memoryview(view.tobytes())
        if len(data) % self._row_bytes:
            raise _failed(f"{len(data)} bytes of routes are not whole rows of {self._row_bytes}")
        expected = self._bounds.route_start + choice.num_route_bytes // self._row_bytes
        if rows.token_start != expected:
            raise _failed(f"route rows start at token {rows.token_start}; token {expected} is next")
        end = choice.num_route_bytes + len(data)
        if end > len(choice.routes):
            raise _failed(f"{end // self._row_bytes} route rows exceed what was admitted")
        choice.routes[choice.num_route_bytes : end] = data
        choice.num_route_bytes = end

    def _captured(self, index: int, choice: _Choice) -> CapturedChoice:
        if not choice.num_prompt:
            raise _failed(f"choice {index} has no prompt")
        rows = choice.num_route_bytes // self._row_bytes if self._layout is not None else 0
        needed = choice.num_tokens - self._bounds.route_start - 1
        if self._layout is not None and (rows != needed or needed < 0):
            raise _failed(
                f"choice {index} has {rows} route rows; {choice.num_tokens} tokens from {self._bounds.route_start} on "
                f"need {needed}"
            )
        return CapturedChoice(
            index=index,
            num_prompt=choice.num_prompt,
            tokens=choice.tokens[: choice.num_tokens].cast("B"),
            logprobs=choice.logprobs[: choice.num_logprobs].cast("B") if self._with_logprobs else None,
            routes=choice.routes[: choice.num_route_bytes] if self._layout is not None else None,
            route_start=self._bounds.route_start,
            route_width=self._width,
            layout=self._layout,
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
