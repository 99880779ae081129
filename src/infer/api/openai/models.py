"""`/v1/models`: the names that requests may use. Runs in request tasks."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.responses import Response

from infer.api.context import ApiContext
from infer.api.errors import ApiError
from infer.api.routing import ApiRoute, Call


def routes(context: ApiContext) -> list[ApiRoute]:
    return [
        ApiRoute(method="GET", path="/v1/models", handler=list_models, summary="Names of the model", always=True),
        ApiRoute(method="GET", path="/v1/models/{model:path}", handler=retrieve_model, summary="One name", always=True),
    ]


async def list_models(call: Call) -> Response:
    context = call.context
    names = context.model_names
    page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}  # Anthropic's; there is one
    return call.json({"object": "list", "data": [_card(context, name) for name in names], **page})


async def retrieve_model(call: Call) -> Response:
    check_model(call.context, call.path["model"])
    return call.json(_card(call.context, call.path["model"]))


def check_model(context: ApiContext, name: str | None) -> str:
    """The name to reply with. Raises `ApiError` 404 for a name nobody serves; None is the only model there is."""
    if name is None:
        return context.model_name
    if name not in context.model_names:
        served = ", ".join(repr(known) for known in context.model_names)
        raise ApiError(
            f"the model {name[:200]!r} is not served here; served: {served}",
            status=404,
            code="model_not_found",
            parameter="model",
        )
    return name


def _card(context: ApiContext, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "infer",
        "root": context.engine.config.model.ref,
        "parent": None,
        "max_model_len": context.engine.max_model_len,
        **_for_anthropic(context, name),
    }


def _for_anthropic(context: ApiContext, name: str) -> dict[str, Any]:
    """What the client of the Messages API reads beside."""
    created = datetime.fromtimestamp(context.created, UTC).isoformat().replace("+00:00", "Z")
    return {
        "type": "model",
        "display_name": name,
        "created_at": created,
        "lifecycle": "active",
        "max_input_tokens": context.engine.max_model_len,
        "max_tokens": context.engine.max_model_len,
    }
