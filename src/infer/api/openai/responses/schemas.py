"""What `/v1/responses` accepts: every documented field and what becomes of it.

Plain data; the checks are `api.fields`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from infer.api.fields import Body, BodyModel, Unsupported
from infer.api.openai.schemas import MAX_PRIORITY

MAX_METADATA = 16


class StreamOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    include_obfuscation: bool | None = None


class Reasoning(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesBody(BodyModel):
    input: str | list[dict[str, Any]]
    """Text of the user, or items: messages, function_call, function_call_output, reasoning."""
    model: str | None = None
    """One of the served names; absent: the model that is served."""
    instructions: str | None = None
    """A system message before everything else; those of a previous response are not carried over."""
    previous_response_id: Annotated[str, Field(min_length=1)] | None = None
    """Go on from that stored response."""
    store: bool | None = None
    """Keep the response for previous_response_id and retrieval; absent: true where the server keeps any."""
    stream: bool = False
    """Send events as the response is made."""
    stream_options: StreamOptions | None = None
    """include_obfuscation is accepted; events are not padded."""
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    """At most this many output tokens, reasoning included; absent: up to the context."""
    tools: list[dict[str, Any]] | None = None
    """Functions that the model may call: {"type": "function", "name", "description", "parameters", "strict"}; strict only
    where it is asked for."""
    tool_choice: str | dict[str, Any] | None = None
    """"none", "auto", "required", {"type": "function", "name"} or {"type": "allowed_tools", "mode", "tools"}; absent: auto
    where there are tools."""
    parallel_tool_calls: bool | None = None
    """false: at most one call."""
    text: TextOptions | None = None
    """format: {"type": "text", "json_object" or "json_schema"}. Schemas are kept, strict or not."""
    reasoning: Reasoning | None = None
    """effort is handed to the chat template; of a summary the header says that there is none: the reasoning itself is told."""
    include: list[str] | None = None
    """"message.output_text.logprobs" for log-probabilities of the text."""
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    """Alternatives per token; asks for log-probabilities when above 0."""
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=MAX_METADATA),
        ]
        | None
    ) = None
    """Kept and shown."""
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    """Smaller runs first, with scheduler.policy=priority."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Only requests with the same salt share prefix-cache blocks."""
    deadline: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Seconds after which the request ends with what it has."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables for the chat template."""


_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "seed": "seed",
    "stop": "stop",
    "top_k": "top_k",
    "min_p": "min_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "logit_bias": "logit_bias",
    "min_tokens": "min_tokens",
    "ignore_eos": "ignore_eos",
    "thinking_token_budget": "thinking_budget",
}


def _is(*values: Any) -> Any:
    """Values that ask for what happens anyway."""
    return lambda value: any(value == known and type(value) is type(known) for known in values)


_NO_EFFECT = "has no effect here"

_UNSUPPORTED: dict[str, Unsupported] = {
    "background": Unsupported(note="a response runs as long as its request; stream it, or use /v1/batches"),
    "background_options": Unsupported(note="nothing runs in the background"),
    "truncation": Unsupported(
        note="an input that is longer than the context is refused, never cut", harmless=_is("disabled")
    ),
    "conversation": Unsupported(note="there are no conversation objects; use previous_response_id"),
    "context_management": Unsupported(note="nothing is compacted"),
    "prompt": Unsupported(note="there are no stored prompts"),
    "moderation": Unsupported(note="there is no moderation here"),
    "image": Unsupported(note="infer takes text only"),
    "access_programs": Unsupported(note="there are none here"),
    "n": Unsupported(note="a response has one answer", harmless=_is(1)),
    "max_tokens": Unsupported(note="its name here is max_output_tokens"),
    "messages": Unsupported(note="its name here is input"),
    "response_format": Unsupported(note="its name here is text.format"),
    "max_tool_calls": Unsupported(note="there are no built-in tools", refused=False),
    "service_tier": Unsupported(note=_NO_EFFECT, refused=False, harmless=_is("auto", "default")),
    "user": Unsupported(note=_NO_EFFECT, refused=False),
    "safety_identifier": Unsupported(note=_NO_EFFECT, refused=False),
    "prompt_cache_key": Unsupported(note="prefix caching needs no key; see cache_salt", refused=False),
    "prompt_cache_retention": Unsupported(note=_NO_EFFECT, refused=False),
    "prompt_cache_options": Unsupported(note=_NO_EFFECT, refused=False),
}

RESPONSES = Body(name="/v1/responses", model=ResponsesBody, sampling=_SAMPLING, unsupported=_UNSUPPORTED)
