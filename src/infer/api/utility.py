"""Tokens without a model run (`/tokenize`, `/detokenize`), facts of the server, and acts on the whole of it.

Runs in request tasks. What changes or shows the server at large needs api.admin.
"""

from __future__ import annotations

import importlib.metadata
from typing import Annotated, Any

import msgspec
from pydantic import Field
from starlette.responses import Response

from infer.api.context import ApiContext
from infer.api.errors import ApiError
from infer.api.fields import Body, BodyModel, Unsupported
from infer.api.openai.models import check_model
from infer.api.routing import ApiRoute, Call
from infer.config.engine import SECRET_SETTINGS, EngineConfig
from infer.errors import InvalidRequestError
from infer.types import TokenId

PROFILES = "artifacts.storage_profiles"
"""Of these the rest is no secret."""


class TokenizeBody(BodyModel):
    model: str | None = None
    """One of the served names; absent: the model that is served."""
    prompt: str | None = None
    """Text to encode."""
    messages: list[dict[str, Any]] | None = None
    """Or a conversation, written by the chat template."""
    add_special_tokens: bool | None = None
    """Let the tokenizer add its special tokens; absent: to a prompt, not to a conversation (its template writes them)."""
    return_token_strs: bool = False
    """And the text of each token."""
    add_generation_prompt: bool | None = None
    """Open the assistant's turn; absent: unless the last message is the assistant's."""
    continue_final_message: bool | None = None
    """Go on with the last message; absent: if it is the assistant's."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables for the chat template."""
    tools: list[dict[str, Any]] | None = None
    """Tools for the chat template."""


class DetokenizeBody(BodyModel):
    model: str | None = None
    """One of the served names; absent: the model that is served."""
    tokens: list[TokenId]
    """Ids to decode, special tokens included."""


class AbortBody(BodyModel):
    request_ids: Annotated[str, Field(min_length=1)] | list[str] | None = None
    """Requests to end, as replies name them; absent: all."""


class ResetBody(BodyModel):
    reset_running_requests: bool = False
    """Let running requests start over, so that nothing holds cached blocks."""
    reset_external: bool = False
    """Accepted: there is no cache outside."""


TOKENIZE = Body(
    name="/tokenize",
    model=TokenizeBody,
    unsupported={
        "chat_template": Unsupported(note="the operator chooses the template (model.chat_template)"),
        "mm_processor_kwargs": Unsupported(note="infer takes text only"),
    },
)
DETOKENIZE = Body(name="/detokenize", model=DetokenizeBody)
ABORT = Body(name="/abort_requests", model=AbortBody)
RESET = Body(name="/reset_prefix_cache", model=ResetBody)


def routes(context: ApiContext) -> list[ApiRoute]:
    found = [
        ApiRoute(method="POST", path="/tokenize", handler=tokenize, summary="Text to token ids", body=TOKENIZE),
        ApiRoute(method="POST", path="/detokenize", handler=detokenize, summary="Ids to text", body=DETOKENIZE),
        ApiRoute(method="GET", path="/version", handler=version, always=True, monitoring=True, summary="Version"),
        ApiRoute(method="GET", path="/server_info", handler=server_info, admin=True, summary="Settings, no secrets"),
        ApiRoute(method="GET", path="/explain", handler=explain, admin=True, summary="Why a request waited"),
        ApiRoute(
            method="POST",
            path="/reset_prefix_cache",
            handler=reset_prefix_cache,
            admin=True,
            body=RESET,
            optional_body=True,
            summary="Forget cached prompts",
        ),
        ApiRoute(
            method="POST",
            path="/abort_requests",
            handler=abort_requests,
            admin=True,
            always=True,
            body=ABORT,
            optional_body=True,
            summary="End requests with what they have",
        ),
    ]
    if context.settings.tokenizer_info:
        found.append(
            ApiRoute(method="GET", path="/tokenizer_info", handler=tokenizer_info, summary="Facts of the tokenizer")
        )
    return found


async def tokenize(call: Call) -> Response:
    context = call.context
    body, _ = TOKENIZE.parse(call.data, unknown=context.settings.unknown_fields, notices=call.notices)
    check_model(context, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("give either prompt or messages", parameter="prompt")
    prompts = context.engine.prompts
    if body.messages is None:
        ids = await prompts.encode_text(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    else:
        text = prompts.render(
            body.messages,
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            variables=body.chat_template_kwargs,
        )
        ids = await prompts.encode_text(text, add_special_tokens=bool(body.add_special_tokens))
    strings = [context.token_text(token_id) for token_id in ids] if body.return_token_strs else None
    return call.json(
        {"count": len(ids), "max_model_len": context.engine.max_model_len, "tokens": ids, "token_strs": strings}
    )


async def detokenize(call: Call) -> Response:
    context = call.context
    body, _ = DETOKENIZE.parse(call.data, unknown=context.settings.unknown_fields, notices=call.notices)
    check_model(context, body.model)
    size = context.engine.model_config.vocab_size
    if wrong := next((token_id for token_id in body.tokens if token_id >= size), None):
        raise InvalidRequestError(
            f"tokens holds id {wrong}; the vocabulary has {size} ids", parameter="tokens", value=wrong
        )
    return call.json({"prompt": context.engine.tokenizer.decode(body.tokens, skip_special_tokens=False)})


async def tokenizer_info(call: Call) -> Response:
    tokenizer = call.context.engine.tokenizer
    return call.json(
        {
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": tokenizer.vocab_size,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_ids": tokenizer.eos_token_ids,
            "model_max_length": call.context.engine.max_model_len,
            "chat_template": call.context.engine.config.model.chat_template or tokenizer.chat_template,
            **tokenizer.special_tokens(),
        }
    )


async def version(call: Call) -> Response:
    return call.json({"version": importlib.metadata.version("infer-engine")})


async def server_info(call: Call) -> Response:
    engine = call.context.engine
    return call.json(
        {
            "version": importlib.metadata.version("infer-engine"),
            "config": public_config(engine.config),
            "resolved": msgspec.to_builtins(engine.resolved),
            "artifacts": engine.artifact_limits(),
        }
    )


def public_config(config: EngineConfig) -> dict[str, Any]:
    """`EngineConfig(**public_config(config))` is the same configuration without its secrets."""
    left_out: dict[str, Any] = {"artifacts": {"storage_profiles": {"__all__": {"storage_options"}}}}
    for setting in SECRET_SETTINGS:
        if setting != PROFILES:
            section, name = setting.split(".")
            left_out.setdefault(section, {})[name] = True
    return config.model_dump(mode="json", exclude=left_out)


async def explain(call: Call) -> Response:
    request_id = call.query.get("request_id")
    if request_id is None:
        raise InvalidRequestError("name the request: /explain?request_id=ID", parameter="request_id")
    explanation = call.context.engine.explain(request_id)
    return call.json({**msgspec.to_builtins(explanation), "text": str(explanation)})


async def reset_prefix_cache(call: Call) -> Response:
    body, _ = RESET.parse(call.data, unknown=call.context.settings.unknown_fields, notices=call.notices)
    restart = body.reset_running_requests or call.query.get("reset_running_requests", "").lower() in ("true", "1")
    if not await call.context.engine.reset_prefix_cache(restart_running=restart):
        raise ApiError(
            "running requests hold cached blocks; retry when they are done, or let them start over with "
            "reset_running_requests=true",
            status=409,
            code="cache_in_use",
        )
    return call.json({"success": True})


async def abort_requests(call: Call) -> Response:
    engine = call.context.engine
    body, _ = ABORT.parse(call.data, unknown=call.context.settings.unknown_fields, notices=call.notices)
    asked = [body.request_ids] if isinstance(body.request_ids, str) else body.request_ids
    aborted = [
        name
        for name in engine.request_ids
        # The prompts of one call are numbered behind the call's own id.
        if (asked is None or any(name == one or name.startswith((f"{one}-", f"{one}_")) for one in asked))
        and engine.abort(name)
    ]
    return call.json({"aborted": len(aborted), "request_ids": aborted})
