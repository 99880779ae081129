"""`/health` (steps complete), `/ready` (and new requests are admitted), `/ping` (the process answers).

Runs in request tasks; the monitor that notices a stuck step is a task of the server's.
"""

from __future__ import annotations

import anyio
from starlette.responses import Response

from infer.api.context import ApiContext
from infer.api.errors import ApiError
from infer.api.routing import ApiRoute, Call
from infer.errors import InferError
from infer.types import SamplingParams

PROBE_SECONDS = 2.0
"""How long a health check waits for a step of its own on an idle engine."""


def routes(context: ApiContext) -> list[ApiRoute]:
    return [
        ApiRoute(method="GET", path="/health", handler=health, public=True, always=True, summary="Steps complete"),
        ApiRoute(method="GET", path="/ready", handler=ready, public=True, always=True, summary="Admits requests"),
        ApiRoute(method="GET", path="/ping", handler=ping, public=True, always=True, summary="The process answers"),
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
    engine, deadline = context.engine, context.settings.health_deadline
    if not engine.is_alive:
        raise _unhealthy("the engine is dead")
    context.health.look()
    if context.health.stuck_for > deadline:
        raise _unhealthy(f"no step has completed for {context.health.stuck_for:.1f} s")
    statistics = engine.statistics()
    if statistics.running or statistics.waiting:
        return
    problem: str | None = "an idle engine did not complete a probe step in time"
    with anyio.move_on_after(min(PROBE_SECONDS, deadline)):
        try:
            await engine.generate([0], SamplingParams(max_tokens=1, temperature=0.0))
            problem = None
        except InferError as error:
            problem = f"a probe step failed: {error}"
    if problem is not None:
        raise _unhealthy(problem)


def _unhealthy(reason: str) -> ApiError:
    return ApiError(reason, status=503, code="unhealthy")
