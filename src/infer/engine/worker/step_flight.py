"""A step between its beginning and its result: what is on its way from the device, and what is to be made of it.

Used on the worker thread; owns the step's result until it is handed over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from infer.engine.sampling.queued import Queued
from infer.engine.sampling.sampler import Sampled
from infer.engine.step import StepPlan, StepResult
from infer.engine.worker.capture import RowCapture
from infer.engine.worker.captured_step import CapturedStep
from infer.engine.worker.input_batch import Draws, StepRows
from infer.engine.worker.kv_transfers import KVTransfers
from infer.plugins.platform import Fetch, SupportsStaging


@dataclass(slots=True)
class StepFlight:
    """`RunningStep` of the runner. Steps end in the order in which they began."""

    plan: StepPlan
    result: StepResult
    context: Callable[[], AbstractContextManager[Any]]
    capture: RowCapture | None
    transfers: KVTransfers | None
    started: float = field(default_factory=time.perf_counter)
    captured: CapturedStep | None = None
    rows: StepRows | None = None
    drawn: tuple[Draws, Queued] | None = None
    """Tokens that the host does not know yet."""
    error: Exception | None = None
    """The step could not be begun. It ends in its turn, for what it captured is booked in the order of the steps."""
    _fetch: Fetch | None = None
    _concluded: bool = False

    def fetch(self, staging: SupportsStaging) -> None:
        """Send what the host wants to know on its way."""
        tensors: tuple[Tensor, ...] = () if self.drawn is None else self.drawn[1].tensors
        if self.captured is not None:
            tensors += self.captured.outgoing()
        if tensors:
            self._fetch = staging.fetch(tensors)

    def ready(self) -> bool:
        return self._fetch is None or self._fetch.ready()

    def conclude(self) -> None:
        """Under `step_context`: wait for the device and complete the result."""
        self._concluded = True
        try:
            if self.error is not None:
                raise self.error
            if self._fetch is not None:
                self._land(self._fetch.wait())
        except BaseException:
            if self.capture is not None and self.captured is not None:
                self.capture.abandon(self.captured)
            raise
        if self.capture is not None and self.captured is not None:
            self.capture.process(self.captured, self.rows, self.result)

    def finish(self) -> StepResult:
        if not self._concluded:
            with self.context():
                self.conclude()
        if self.transfers is not None:
            self.transfers.finish(self.plan.kv, self.result)
        self.result.seconds = time.perf_counter() - self.started
        return self.result

    def _land(self, fetched: tuple[Tensor, ...]) -> None:
        taken = 0
        if self.drawn is not None:
            draws, queued = self.drawn
            taken = len(queued.tensors)
            book(self.result, draws, queued.settle(fetched[:taken]))
        if self.captured is not None:
            self.captured.arrived(fetched[taken:])


@dataclass(frozen=True, slots=True)
class Finished:
    """A step with nothing left to do."""

    result: StepResult

    def ready(self) -> bool:
        return True

    def finish(self) -> StepResult:
        return self.result


def book(result: StepResult, draws: Draws, sampled: Sampled) -> None:
    """Put what was drawn into the result."""
    for k, index in enumerate(draws.results.tolist()):
        if k in sampled.errors:
            result.errors[index] = sampled.errors[k]
            continue
        result.token_ids[index].append(sampled.token_ids[k])
        if k in sampled.logprobs:
            result.logprobs[index] = [*(result.logprobs[index] or ()), sampled.logprobs[k]]
