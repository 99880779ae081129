"""Routes of endpoint plugins behind the server's own door: key, limits, draining, errors, metrics.

Made once per server; calls run in request tasks. Owns the counts of what became of them.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from infer.api.auth import KEY_HEADERS
from infer.api.routing import ApiRoute, Call
from infer.api.sse import EventStream
from infer.errors import InferError, PluginConflictError, PluginContractError
from infer.plugins.endpoint import EndpointReply, EndpointRoute, EndpointServer
from infer.plugins.options import options_of
from infer.plugins.registry import Origin, Registry

logger = logging.getLogger(__name__)

_PATH = re.compile(r"(/([A-Za-z0-9._~-]+|\{[a-z_][a-z0-9_]*\}))+")
_METHODS = ("GET", "POST", "DELETE")


def open_endpoints(
    registry: Registry,
    names: Iterable[str],
    server: EndpointServer,
    outcomes: Counter[tuple[str, str]],
    options: Mapping[str, Mapping[str, Any]],
) -> list[ApiRoute]:
    """The routes of the named endpoints, each with its options; `outcomes` counts what becomes of their calls. Raises
    `PluginError`, or `ConfigError` for options."""
    found: list[ApiRoute] = []
    for name in dict.fromkeys(names):
        origin = registry.origin("endpoint", name)
        own = options_of(registry, "endpoint", name, options)
        made = registry.create("endpoint", name, dataclasses.replace(server, options=own))
        problem = routes_problem(made)
        if problem:
            raise PluginContractError(f"endpoint {name!r} of {origin}: {problem}", plugin=name)
        found += [_api_route(route, name, origin, outcomes) for route in made]
    return found


def routes_problem(made: Any) -> str:
    """What is wrong with a factory's result; "" when nothing is."""
    if not isinstance(made, list | tuple) or not made or not all(isinstance(route, EndpointRoute) for route in made):
        return f"its factory returned {made!r:.80}; it must return a list of EndpointRoute"
    for route in made:
        if route.method not in _METHODS:
            return f"method {route.method!r} of {route.path} is not one of {', '.join(_METHODS)}"
        if not isinstance(route.path, str) or not _PATH.fullmatch(route.path):
            return f"path {route.path!r} is not of the form /name/{{placeholder}}"
        names = re.findall(r"\{(\w+)\}", route.path)
        if len(names) != len(set(names)):
            return f"path {route.path} has two placeholders of one name"
        if not callable(route.handler):
            return f"the handler of {route.method} {route.path} cannot be called"
        if route.raw_body and route.method != "POST":
            return f"{route.method} {route.path} has raw_body, which only a POST may have"
    return ""


def check_paths(taken: Sequence[str], added: Sequence[ApiRoute]) -> None:
    """No request may have two owners. Raises `PluginConflictError`."""
    for number, route in enumerate(added):
        others = [(path, "the server") for path in taken if overlap(route.path, path)]
        others += [(other.path, f"endpoint {other.endpoint!r}") for other in added[:number] if _compete(route, other)]
        for path, owner in others:
            raise PluginConflictError(
                f"endpoint {route.endpoint!r} adds {route.method} {route.path}, but {path} is a path of {owner}; take "
                f"{route.endpoint!r} out of api.endpoints",
                plugin=route.endpoint,
            )


def _compete(one: ApiRoute, other: ApiRoute) -> bool:
    """An endpoint may have /x/all beside /x/{id}: the fixed one comes first."""
    if one.endpoint != other.endpoint:
        return overlap(one.path, other.path)
    bare = [re.sub(r"\{\w+\}", "{}", route.path) for route in (one, other)]
    return bare[0] == bare[1] and (one.path != other.path or one.method == other.method)


def overlap(one: str, other: str) -> bool:
    """Whether some request's path fits both patterns."""
    first, second = one.split("/")[1:], other.split("/")[1:]
    for a, b in zip(first, second, strict=False):
        if ":path}" in a or ":path}" in b:
            return True
        if a != b and "{" not in a and "{" not in b:
            return False
    return len(first) == len(second)


def _api_route(route: EndpointRoute, name: str, origin: Origin, outcomes: Counter[tuple[str, str]]) -> ApiRoute:
    async def handle(call: Call) -> Response | None:
        outcome = "cut_off"
        try:
            reply = await route.handler(PluginCall(call))
            response = await _finish(call, reply)
            outcome = "answered" if response is None or response.status_code < 500 else "failed"
            return response
        except InferError as error:
            outcome = "failed" if isinstance(error, PluginContractError) else "refused"
            raise
        except Exception as error:
            outcome = "failed"
            logger.error("endpoint %r of %s: %s %s raised %r", name, origin, route.method, route.path, error)
            raise
        finally:
            outcomes[name, outcome] += 1

    async def _finish(call: Call, reply: Any) -> Response | None:
        if call.stream is not None:
            if reply is not None:
                raise _wrong(f"returned {type(reply).__name__} after it opened its events; it must return None")
            await call.stream.finish()
            return None
        if not isinstance(reply, EndpointReply):
            raise _wrong(
                f"returned {type(reply).__name__}; it must return an EndpointReply, or None after open_events()"
            )
        return _response(call, reply)

    def _wrong(what: str) -> PluginContractError:
        message = f"endpoint {name!r} of {origin}: the handler of {route.method} {route.path} {what}"
        logger.error("%s", message)
        return PluginContractError(message, plugin=name)

    return ApiRoute(
        method=route.method,
        path=route.path,
        handler=handle,
        summary=route.summary,
        optional_body=route.optional_body,
        raw_body=route.raw_body,
        endpoint=name,
    )


def _response(call: Call, reply: EndpointReply) -> Response:
    if reply.body is None and reply.media_type == "application/json":
        response = call.json(reply.data, status=reply.status)
    else:
        content = msgspec.json.encode(reply.data) if reply.body is None else reply.body
        response = Response(content, status_code=reply.status, media_type=reply.media_type)
    response.headers.update(reply.headers)
    return response


class PluginEvents:
    """An `EndpointEvents`."""

    def __init__(self, stream: EventStream) -> None:
        self._stream = stream

    async def send(self, event: Any) -> None:
        await self._stream.send(event)


class PluginCall:
    """An `EndpointCall`: what a plugin sees of a call. The server's keys are not its business."""

    def __init__(self, call: Call) -> None:
        self.request_id: str = call.unique_id
        self.path: Mapping[str, str] = dict(call.path)
        self.query: Mapping[str, str] = dict(call.query)
        self.headers: Mapping[str, str] = {name: call.headers[name] for name in call.headers if name not in KEY_HEADERS}
        self.data: Mapping[str, Any] = call.data
        self.body: bytes = call.raw
        self._call = call

    async def open_events(self) -> PluginEvents:
        if self._call.stream is not None:
            raise RuntimeError("open_events() was called twice for one call; keep the stream that it returned")
        return PluginEvents(await self._call.open_events())
