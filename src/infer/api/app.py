"""The ASGI application: every topic module's routes over one engine.

Runs once at start; owns nothing. To add routes, write a module that exports `routes(context) -> list[ApiRoute]` and
name it in TOPICS (built in) or hand it to `build_app(..., topics=...)`. A handler gets a `Call`: see `api.routing`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from infer.api import generate, health, metrics, ollama, render, render_completions, sglang, utility
from infer.api.answers import AnswerFormats
from infer.api.anthropic import messages
from infer.api.auth import key_digests
from infer.api.context import ApiContext, CallRegister
from infer.api.endpoints import check_paths, open_endpoints
from infer.api.errors import ApiError, error_response
from infer.api.gate import Gate
from infer.api.monitor import HealthMonitor
from infer.api.openai import batches, chat, completions, models
from infer.api.openai.responses import endpoints as response_endpoints
from infer.api.openai.responses.store import MemoryResponseStore, ResponseStore
from infer.api.openapi import DESCRIPTION, with_description
from infer.api.routing import ApiRoute, Endpoint
from infer.api.web import page
from infer.config.engine import ApiSection
from infer.engine.engine import Engine
from infer.plugins.endpoint import EndpointServer

Topic = Callable[[ApiContext], list[ApiRoute]]

TOPICS: tuple[Topic, ...] = (
    page.routes,
    health.routes,
    models.routes,
    chat.routes,
    completions.routes,
    response_endpoints.routes,
    batches.routes,
    messages.routes,
    render.routes,
    render_completions.routes,
    generate.routes,
    sglang.routes,
    ollama.routes,
    utility.routes,
    metrics.routes,
)


def build_context(
    engine: Engine, settings: ApiSection | None = None, *, responses: ResponseStore | None = None
) -> ApiContext:
    """What the routes share. The engine must be open. `responses`: keeps what /v1/responses answered; None: memory,
    within `api.responses_max_count` and `api.responses_max_bytes`. Raises `PluginError` for an endpoint that cannot be
    made."""
    settings = settings if settings is not None else engine.config.api
    if responses is None and settings.responses_max_count and settings.responses_max_bytes:
        responses = MemoryResponseStore(settings.responses_max_count, settings.responses_max_bytes)
    context = ApiContext(
        engine=engine,
        settings=settings,
        model_names=settings.served_model_names or (engine.config.model.ref,),
        key_digests=key_digests(settings),
        calls=CallRegister(settings.max_concurrent_requests),
        health=HealthMonitor(engine),
        answers=AnswerFormats.of(engine, settings),
        responses=responses,
    )
    server = EndpointServer(engine=engine, model_names=context.model_names)
    context.endpoint_routes = open_endpoints(
        engine.registry, settings.endpoints, server, context.endpoint_outcomes, settings.endpoint_options
    )
    return context


def build_app(context: ApiContext, topics: Sequence[Topic] = TOPICS) -> ASGIApp:
    """The application for one open engine; any ASGI server can run it, `serve` does with hypercorn."""
    return Gate(_router(context, all_routes(context, topics)), context.settings.cors_origins)


def build_admin_app(context: ApiContext, topics: Sequence[Topic] = TOPICS) -> ASGIApp:
    """The application of a listener for admin routes alone. Web pages of other origins are never let in."""
    return Gate(_router(context, admin_routes(context, topics)), ())


def all_routes(context: ApiContext, topics: Sequence[Topic] = TOPICS) -> list[ApiRoute]:
    """Every route that the public listener has."""
    settings = context.settings
    elsewhere = settings.admin_port is not None or settings.admin_uds is not None
    shows_admin = settings.admin and not elsewhere
    return _described(context, [route for route in _found(context, topics) if shows_admin or not route.admin])


def admin_routes(context: ApiContext, topics: Sequence[Topic] = TOPICS) -> list[ApiRoute]:
    """Those of the admin listener: what acts on the whole server, and what tells how it is."""
    return _described(context, [route for route in _found(context, topics) if route.admin or route.monitoring])


def _found(context: ApiContext, topics: Sequence[Topic]) -> list[ApiRoute]:
    own = [route for topic in topics for route in topic(context)]
    check_paths([DESCRIPTION, *(route.path for route in own)], context.endpoint_routes)
    return [*own, *context.endpoint_routes]


def _described(context: ApiContext, routes: list[ApiRoute]) -> list[ApiRoute]:
    needs_key = bool(context.key_digests)
    return with_description(routes, unknown_fields=context.settings.unknown_fields, needs_key=needs_key)


def _router(context: ApiContext, routes: list[ApiRoute]) -> Router:
    paths: list[Route] = []
    for path, group in groupby(sorted(routes, key=lambda route: ("{" in route.path, route.path)), lambda r: r.path):
        endpoints = {route.method: Endpoint(context, route) for route in group}
        paths.append(Route(path, _ByMethod(endpoints)))
    return Router(paths, redirect_slashes=False, default=_not_found)


class _ByMethod:
    """One path's endpoints."""

    def __init__(self, endpoints: dict[str, Endpoint]) -> None:
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        endpoint = self._endpoints.get(method)
        if endpoint is not None:
            await endpoint(scope, receive, send)
            return
        allowed = ", ".join(sorted(self._endpoints))
        error = ApiError(
            f"{scope['path']} takes {allowed}, not {scope['method'][:20]}",
            status=405,
            code="method_not_allowed",
            headers={"allow": allowed},
        )
        await next(iter(self._endpoints.values())).refusal(error)(scope, receive, send)


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    error = ApiError(f"there is no route {scope['path'][:200]!r}", status=404, code="not_found")
    await error_response(error)(scope, receive, send)
