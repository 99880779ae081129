"""What an engine has counted and timed since it started: plain numbers, shown by whoever reads them.

Written by the loop task (the scheduler), read on the same event loop; nothing here waits. Owns the histograms.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from infer.types import RequestTimings

if TYPE_CHECKING:
    from infer.engine.request import Request

TOKENS = tuple(m * 10**e for e in range(7) for m in (1, 2, 5))
STEP_TOKENS = (1, *(2**n for n in range(3, 15)))
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_SECONDS = (
    *(0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_SECONDS = (
    *(0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class Histogram:
    """How often a value fell into each bucket; bounds are inclusive above, the last bucket is open."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        """Sum of all values."""

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """(upper bound, values up to it), the last bound infinite."""
        return zip((*self.bounds, float("inf")), accumulate(self.counts), strict=True)


@dataclass(slots=True)
class EngineMetrics:
    """Counters and histograms of one engine. A request's choices count one each, its prompt once."""

    prompt_tokens: int = 0
    """Of requests that got their first token, cached ones included."""
    cached_tokens: int = 0
    """Of those, taken from the prefix cache."""
    output_tokens: int = 0
    """Accepted by the engine; a few may lie behind a stop string and reach no reader."""
    finished: Counter[str] = field(default_factory=Counter)
    """Ended choices by finish reason."""
    step_tokens: Histogram = field(default_factory=lambda: Histogram(STEP_TOKENS))
    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_SECONDS))
    inter_token: Histogram = field(default_factory=lambda: Histogram(TOKEN_SECONDS))
    request_token: Histogram = field(default_factory=lambda: Histogram(TOKEN_SECONDS))
    """Per ended choice, its mean seconds per output token after the first."""
    total: Histogram = field(default_factory=lambda: Histogram(REQUEST_SECONDS))
    queued: Histogram = field(default_factory=lambda: Histogram(REQUEST_SECONDS))
    prefill: Histogram = field(default_factory=lambda: Histogram(REQUEST_SECONDS))
    decode: Histogram = field(default_factory=lambda: Histogram(REQUEST_SECONDS))
    inference: Histogram = field(default_factory=lambda: Histogram(REQUEST_SECONDS))
    prompt_length: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    output_length: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    max_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    preemptions: Histogram = field(default_factory=lambda: Histogram((0, 1, 2, 5, 10, 20, 50)))

    def produced(self, request: Request, count: int, now: float) -> None:
        """`count` more output tokens of a choice were accepted."""
        self.output_tokens += count
        last = request.last_token_at
        request.last_token_at = now
        if last is not None:
            self.inter_token.observe((now - last) / count, count)
            return
        request.first_token_at = now
        self.first_token.observe(now - request.arrived_at)
        if request.choice_index == 0:
            self.prompt_tokens += request.prompt_len
            self.cached_tokens += request.num_cached_tokens or 0

    def ended(self, request: Request, now: float) -> None:
        """A choice has ended, for whatever reason."""
        request.ended_at = now
        self.finished[request.finish_reason or "error"] += 1
        timings = request_timings([request], now)
        self.total.observe(timings.total)
        self.queued.observe(timings.queued)
        self.prefill.observe(timings.prefill)
        self.decode.observe(timings.decode)
        self.inference.observe(timings.prefill + timings.decode)
        if request.num_output > 1:
            self.request_token.observe(timings.decode / (request.num_output - 1))
        self.prompt_length.observe(request.prompt_len)
        self.output_length.observe(request.num_output)
        self.max_tokens.observe(request.max_tokens)
        self.preemptions.observe(request.num_preemptions)


def request_timings(choices: Sequence[Request], now: float) -> RequestTimings:
    """Where the time of a request went; the phases add up to the total.

    From arrival to the first choice's start, from there to the first token of any, from there to the end of the last.
    Choices that the engine has not ended yet (their reader met a stop string) end now. Time spent waiting after a
    preemption belongs to the phase that it interrupted.
    """
    arrived = choices[0].arrived_at
    ended = max(now if choice.ended_at is None else choice.ended_at for choice in choices)
    started = _earliest(choice.first_scheduled_at for choice in choices)
    first = _earliest(choice.first_token_at for choice in choices)
    prefill_at = ended if started is None else started
    decode_at = ended if first is None else first
    return RequestTimings(
        queued=prefill_at - arrived,
        first_token=None if first is None else first - arrived,
        total=ended - arrived,
        prefill=decode_at - prefill_at,
        decode=ended - decode_at,
        num_preemptions=sum(choice.num_preemptions for choice in choices),
    )


def _earliest(moments: Iterator[float | None]) -> float | None:
    return min((moment for moment in moments if moment is not None), default=None)
