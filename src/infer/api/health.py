"""`/health` (steps complete), `/ready` (and new requests are admitted), `/ping` (the process answers).

Runs in request tasks; the monitor that notices a stuck step is a task of the server's.
"""

from __future__ import annotations

import anyio
from starlette.responses import Response

from infer.api.context import ApiContext
from infer.api.errors import ApiError
from infer.api.routing import ApiRoute, Call
from infer.config.engine import ApiSection
from infer.errors import InferError
from infer.types import SamplingParams

PROBE_SHARE = 1 / 3
"""Of `api.health_deadline`, for a probe: its step is the smallest there is."""


def routes(context: ApiContext) -> list[ApiRoute]:
    facts = (
        ("/health", health, "Steps complete"),
        ("/ready", ready, "Admits requests"),
        ("/ping", ping, "The process answers"),
    )
    return [
        ApiRoute(method="GET", path=path, handler=handler, public=True, always=True, monitoring=True, summary=summary)
        for path, handler, summary in facts
    ]


async def health(call: Call) -> Response:
    await check_health(call.context)
    return call.json({"status": "ok"})


async def ready(call: Call) -> Response:
    context = call.context
    if context.calls.draining:
        raise ApiError("the server is shutting down", status=503, code="shutting_down")
    limit = context.engine.resolved.scheduler.max_num_waiting if context.engine.is_alive else None
    if limit is not None and limit and context.engine.statistics().waiting >= limit:
        raise ApiError(f"the queue is full (scheduler.max_num_waiting={limit})", status=503, code="queue_full")
    await check_health(context)
    return call.json({"status": "ready"})


async def ping(call: Call) -> Response:
    return call.json({"status": "ok"})


async def check_health(context: ApiContext) -> None:
    """Raises `ApiError` 503 when the engine is dead, a step is overdue, or an idle engine does not complete a probe."""
    engine, monitor, settings = context.engine, context.health, context.settings
    if not engine.is_alive:
        raise _unhealthy("the engine is dead")
    monitor.look()
    if monitor.stuck_for > settings.health_deadline:
        raise _unhealthy(f"no step has completed for {monitor.stuck_for:.1f} s")
    limit = probe_deadline(settings)
    if monitor.probe_waits_for >= limit:
        raise _unhealthy(f"an idle engine has not completed a probe step for {monitor.probe_waits_for:.1f} s")
    statistics = engine.statistics()
    if statistics.running or statistics.waiting:
        return
    monitor.probe_sent()
    problem: str | None = f"an idle engine did not complete a probe step within {limit:g} s"
    with anyio.move_on_after(limit):
        try:
            await engine.generate([0], SamplingParams(max_tokens=1, temperature=0.0))
            problem = None
        except InferError as error:
            problem = f"a probe step failed: {error}"
        monitor.probe_answered()
    if problem is not None:
        raise _unhealthy(problem)


def probe_deadline(settings: ApiSection) -> float:
    """Seconds that a probe may take."""
    if settings.health_probe_deadline is None:
        return settings.health_deadline * PROBE_SHARE
    return min(settings.health_probe_deadline, settings.health_deadline)


def _unhealthy(reason: str) -> ApiError:
    return ApiError(reason, status=503, code="unhealthy")
