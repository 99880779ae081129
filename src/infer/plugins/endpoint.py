"""Contract of HTTP routes (hook `infer_endpoints`): what a plugin adds to the server once `api.endpoints` names it.

The factory runs when the server starts, handlers in request tasks. Keys, limits, draining, errors and metrics are the server's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from infer.engine.engine import Engine

API_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSpec:
    name: str
    """What `api.endpoints` calls it."""
    api: int
    factory: str
    """"module:attr", called as `factory(server: EndpointServer) -> Sequence[EndpointRoute]`, once per server."""
    example: dict[str, Any]
    """{"calls": [{"method": "POST", "path": "/x/1?y=2", "data": JSON object, "status": 200, "reply": JSON, "events": n}, ...],
    "options": given to it over the defaults}. The kit makes the calls of a server whose model answers every prompt with
    "hello". status is 200 unless given, reply the whole JSON reply, events the number of events of a stream; what is left out is
    not looked at."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options that `api.endpoint_options` may give it, each with its default, as JSON has them. Values given have the default's
    type; a default of None takes any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointServer:
    """What an endpoint may use."""

    engine: Engine
    """Open as long as the server runs. Its public methods and properties are the contract, nothing behind them."""
    model_names: tuple[str, ...]
    """Names that requests may use for the model, the first in replies."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """All that the spec declares: the operator's value or the default. A factory raises `ConfigError` for a value that it
    cannot take."""


class EndpointEvents(Protocol):
    """A stream of server-sent events that has begun; keep-alives are the server's."""

    async def send(self, event: Any) -> None:
        """One event, as JSON. Waits while the client reads slowly."""
        ...


class EndpointCall(Protocol):
    """One HTTP request. Its task is cancelled when the client goes away or the server stops."""

    request_id: str
    """Unique among running calls: take it as the `request_id` of what is asked of the engine."""
    path: Mapping[str, str]
    """Values of the {placeholders} of the route's path."""
    query: Mapping[str, str]
    headers: Mapping[str, str]
    """Names in lower case."""
    data: Mapping[str, Any]
    """The JSON object of a POST; {} otherwise."""
    body: bytes
    """Of a route with raw_body; b"" otherwise."""

    async def open_events(self) -> EndpointEvents:
        """Answer with a stream. The handler then returns None, which ends it; an error raised later becomes its last event."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointReply:
    """A whole reply."""

    data: Any = None
    """Sent as JSON, unless there is a body."""
    body: bytes | None = None
    media_type: str = "application/json"
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


EndpointHandler = Callable[[EndpointCall], Awaitable[EndpointReply | None]]
"""Raises the errors of `infer` for what it refuses: `InvalidRequestError` is status 400, those of the engine have theirs.
Whatever else it raises is a defect: status 500, and the plugin's name in the log. It must let cancellation through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointRoute:
    """One method and path. There must be no such path yet, with whatever names for its placeholders."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    """"/name/{placeholder}/...": letters, digits and "._~-" between the slashes. A placeholder stands for one whole segment."""
    handler: EndpointHandler
    summary: str = ""
    """For /openapi.json."""
    optional_body: bool = False
    """A POST without a body counts as {}."""
    raw_body: bool = False
    """The body is not JSON; the handler finds it in `call.body`."""
