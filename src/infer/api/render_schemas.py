"""What render's inverse accepts: a reply of `/inference/v1/generate`, and what belongs to it.

Plain data.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from infer.api.fields import Body, BodyModel, Unsupported
from infer.types import TokenId


class _Reply(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class LogprobEntry(_Reply):
    token_id: TokenId
    logprob: float
    rank: int | None
    """None of a candidate that was asked for by its id."""
    top_logprobs: list[LogprobEntry] = Field(default_factory=list)
    kept_ids: list[TokenId] | None = None
    kept_logmass: float | None = None


class LogprobContent(_Reply):
    content: list[LogprobEntry]


class ReplyChoice(_Reply):
    """A choice of `/inference/v1/generate`."""

    index: Annotated[int, Field(ge=0, lt=1024)] = 0
    token_ids: list[TokenId] = Field(default_factory=list)
    text: str | None = None
    finish_reason: Literal["stop", "length", "repetition", "abort", "deadline"] = "stop"
    stop_reason: int | str | None = None
    logprobs: LogprobContent | None = None
    seed: int | None = None


class PromptLogprob(_Reply):
    logprob: float
    rank: int | None


class ReplyUsage(_Reply):
    prompt_tokens: Annotated[int, Field(ge=0)] = 0
    prompt_tokens_details: dict[str, Any] | None = None


class GenerateReply(_Reply):
    """A reply of `/inference/v1/generate`; fields that say nothing to a chat's reader are passed over."""

    request_id: Annotated[str, Field(max_length=256)]
    created: int | None = None
    choices: Annotated[list[ReplyChoice], Field(min_length=1, max_length=1024)]
    usage: ReplyUsage | None = None
    prompt_token_ids: list[TokenId] | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    metrics: dict[str, Any] | None = None
    sampling_defaults: dict[str, Any] | None = None


class DerenderBody(BodyModel):
    generate_response: dict[str, Any]
    """The whole reply of /inference/v1/generate; a choice's text is used where it has one, else its token ids."""
    chat_request: dict[str, Any] | None = None
    """The body that was rendered: it says what the reply shows and where its text stops."""
    model: str | None = None
    """One of the served names; absent: the model that is served."""
    prompt_token_ids: list[TokenId] | None = None
    """What render gave; text is decoded as a continuation of it."""
    prompt_tokens: Annotated[int, Field(ge=0)] | None = None
    """Their count, where the ids are not at hand."""


DERENDER = Body(
    name="/v1/chat/completions/derender",
    model=DerenderBody,
    unsupported={
        "stream": Unsupported(note="send the whole reply"),
        "generate_chunk": Unsupported(note="send the whole reply as generate_response"),
        "stream_state": Unsupported(note="send the whole reply"),
    },
)
