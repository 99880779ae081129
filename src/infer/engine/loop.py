"""The engine's heart: admit, schedule, execute, apply, deliver, until closed.

One task per engine; the only place that awaits the executor. Owns the steps in flight.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush

from infer.engine.executor.executor import Executor, PendingStep
from infer.engine.mailbox import Mailbox
from infer.engine.request import Request, Status
from infer.engine.scheduler.scheduler import Scheduler
from infer.errors import EngineClosedError, EngineDeadError, EngineError

logger = logging.getLogger(__name__)


class EngineLoop:
    """Keeps up to `depth` steps in flight. Depth 1 is plain; at depth 2 the next step is planned while one executes.

    A failed step ends the requests in it and the loop goes on; a dead worker (or a fault in the control plane) ends
    every request with `EngineDeadError`, and `death` holds the root cause from then on.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        mailbox: Mailbox,
        *,
        depth: int = 1,
        clock: Callable[[], float] = time.monotonic,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.death: EngineDeadError | None = None
        self.last_step_at: float | None = None
        self._scheduler = scheduler
        self._executor = executor
        self._mailbox = mailbox
        self._depth = depth
        self._clock = clock
        self._on_step = on_step
        self._in_flight: deque[PendingStep] = deque()
        self._deadlines: list[tuple[float, int, Request]] = []

    async def run(self) -> None:
        """Serve until cancelled. Never raises for a fault of its own: it records the death and fails the requests."""
        try:
            while True:
                self._admit()
                self._fill()
                if self._in_flight:
                    await self._consume()
                else:
                    self._end_stuck()
                    await self._mailbox.wait()
        except Exception as error:
            logger.error("the engine is dead: %s: %s", type(error).__name__, error)
            self._die(error)
        finally:
            self._end_all(EngineClosedError("the engine was closed while the request was running"))

    def _admit(self) -> None:
        """Take in what the request tasks left, and end what is past its deadline."""
        mailbox, scheduler = self._mailbox, self._scheduler
        for request in mailbox.arrivals:
            scheduler.add(request)
            if request.deadline is not None:
                self._watch(request, request.deadline)
        mailbox.arrivals.clear()
        for request, reason, stop_reason in mailbox.ends:
            scheduler.finish(request, reason, stop_reason)
        mailbox.ends.clear()
        calls, mailbox.calls = mailbox.calls, []
        for call in calls:
            call()
        while self._deadlines and (self._deadlines[0][2].status is Status.FINISHED or self._is_late()):
            scheduler.finish(heappop(self._deadlines)[2], "deadline")

    def _watch(self, request: Request, deadline: float) -> None:
        for choice in (request, *request.siblings):
            heappush(self._deadlines, (deadline, choice.arrival, choice))
        if len(self._deadlines) > 2 * self._scheduler.num_unfinished + 64:  # mostly ended ones: let them go
            self._deadlines = [item for item in self._deadlines if item[2].status is not Status.FINISHED]
            heapify(self._deadlines)

    def _is_late(self) -> bool:
        return self._deadlines[0][0] <= self._clock()

    def _fill(self) -> None:
        """Plan and submit steps until the depth is reached or nothing can run before a result arrives."""
        while len(self._in_flight) < self._depth:
            step = self._scheduler.schedule()
            if step is None:
                return
            self._in_flight.append(self._executor.submit(step.plan))

    async def _consume(self) -> None:
        """Wait for the oldest step, book it and deliver. The only await on the executor."""
        try:
            result = await self._in_flight[0].wait()
        except EngineDeadError:
            raise
        except Exception as error:
            self._in_flight.popleft()
            logger.warning("a step failed: %s: %s", type(error).__name__, error)
            self._scheduler.fail(error)
        else:
            self._in_flight.popleft()
            self._scheduler.apply(result)
        self.last_step_at = self._clock()
        self._on_step()

    def _end_stuck(self) -> None:
        """Nothing is in flight and nothing could be planned: a request that still waits would wait for ever."""
        waiting = self._scheduler.waiting
        while len(waiting) and self._mailbox.is_empty:
            error = EngineError(
                f"request {waiting[0].request_id!r} ({len(waiting[0].token_ids)} tokens) can never be scheduled: "
                "the KV cache is too small for it even when idle; raise cache.memory"
            )
            self._scheduler.finish(waiting[0], "error", error=error)

    def _die(self, error: Exception) -> None:
        if isinstance(error, EngineDeadError):
            self.death = error
        else:
            self.death = EngineDeadError(f"the engine died of {type(error).__name__}: {error}")
            self.death.__cause__ = error

    def _end_all(self, otherwise: EngineError) -> None:
        """End every request; their readers see the death, or `otherwise` when the engine is being closed."""
        error = self.death or otherwise
        scheduler, mailbox = self._scheduler, self._mailbox
        for request in [*scheduler.waiting, *scheduler.running, *mailbox.arrivals]:
            for choice in (request, *request.siblings):
                choice.finish("error", error=error)
                choice.deliver()
        mailbox.arrivals.clear()
        for call in mailbox.calls:  # somebody waits for the answer
            call()
        mailbox.calls.clear()
