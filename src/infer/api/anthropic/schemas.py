"""What `/v1/messages` and its parts accept: every documented field and what becomes of it.

Plain data; the checks are `api.fields`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from infer.api.fields import Body, BodyModel, Unsupported


class Markable(BodyModel):
    cache_control: dict[str, Any] | None = None
    """Accepted, and needless: every prompt is cached by its beginning."""


class ConversationBody(Markable):
    """What the model reads, which is also what is counted."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    """The conversation; a last message of the assistant's is continued."""
    model: str | None = None
    """One of the served names; absent: the model that is served."""
    system: str | list[dict[str, Any]] | None = None
    """System message: text, or text blocks."""
    tools: list[dict[str, Any]] | None = None
    """Functions that the model may call."""
    tool_choice: dict[str, Any] | None = None
    """{"type": "auto", "any", "none", or "tool" with a "name"}; disable_parallel_tool_use: at most one call."""
    thinking: dict[str, Any] | None = None
    """Absent: as the model does by itself. Else a `type`: see thinking."""
    output_config: dict[str, Any] | None = None
    """Form of the answer and effort: see output_config."""


class MessagesBody(ConversationBody):
    max_tokens: Annotated[int, Field(ge=1)]
    """At most this many output tokens, reasoning included; more than the context has room for is up to its end."""
    stream: bool = False
    """Send events as the answer grows."""


class TextBlock(Markable):
    type: Literal["text"]
    """"text"."""
    text: str
    """The text."""


class ThinkingBlock(Markable):
    type: Literal["thinking"]
    """"thinking"."""
    thinking: str
    """What the model thought; the chat template decides whether it is shown again."""
    signature: str = ""
    """Taken as it is: nothing is encrypted here."""


class RedactedThinkingBlock(Markable):
    type: Literal["redacted_thinking"]
    """"redacted_thinking"."""
    data: str = ""
    """Cannot be read here: the block is left out of the prompt, with a notice."""


class ToolUseBlock(Markable):
    type: Literal["tool_use"]
    """"tool_use"."""
    id: Annotated[str, Field(min_length=1)]
    """The call's id."""
    name: Annotated[str, Field(min_length=1)]
    """The function's name."""
    input: dict[str, Any]
    """Its arguments."""


class ToolResultBlock(Markable):
    type: Literal["tool_result"]
    """"tool_result"."""
    tool_use_id: Annotated[str, Field(min_length=1)]
    """The call that this answers."""
    content: str | list[dict[str, Any]] | None = None
    """What the function gave: text, or text blocks."""
    is_error: bool = False
    """The function failed: the model reads "Error: " before the content."""


class Tool(Markable):
    name: str
    """What the model calls it by."""
    input_schema: dict[str, Any]
    """JSON schema of its arguments."""
    description: str | None = None
    """What it is for."""
    strict: bool | None = None
    """Arguments fit the schema with tool_choice auto, too."""
    type: Literal["custom"] | None = None
    """"custom", or absent. Tools of Anthropic's own have no schema, and are refused."""
    eager_input_streaming: bool | None = None
    """Accepted: arguments are always streamed as they are written."""


class ToolChoice(BodyModel):
    type: Literal["auto", "any", "tool", "none"]
    """auto: the model decides; any: a call or more; tool: the named one; none: no calls."""
    name: str | None = None
    """With type tool: the function that must be called."""
    disable_parallel_tool_use: bool = False
    """At most one call."""


class Thinking(BodyModel):
    type: Literal["enabled", "adaptive", "disabled"]
    """enabled, adaptive: the chat template gets `enable_thinking`; disabled: gets it as false, and reasoning is not shown."""
    budget_tokens: Annotated[int, Field(ge=0)] | None = None
    """With type enabled: reasoning is closed after so many tokens; less than max_tokens."""
    display: Literal["summarized", "omitted"] | None = None
    """omitted: blocks say that there was reasoning, not which. summarized, or absent: all of it is shown."""


class OutputConfig(BodyModel):
    format: dict[str, Any] | None = None
    """{"type": "json_schema", "schema": ...}: the answer fits it."""
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """Handed to the chat template as `reasoning_effort`; one that does not know it ignores it."""


def _is(*known: Any) -> Any:
    """Values that ask for what happens anyway."""
    return lambda value: value in known


_CITATIONS = {"citations": Unsupported(note="infer cites nothing", harmless=_is(None, [], {"enabled": False}))}
_CALLER = {
    "caller": Unsupported(note="only the model calls", harmless=_is({"type": "direct"})),
    "toolset_name": Unsupported(note="there are no toolsets here"),
}

_CONVERSATION = {
    "speed": Unsupported(note="there is one speed", harmless=_is("standard")),
    "context_management": Unsupported(note="nothing is taken out of the conversation", refused=False),
    "thread": Unsupported(note="send the whole conversation; the prefix cache finds what is known"),
    "mcp_servers": Unsupported(note="the server calls no tools"),
    "output_format": Unsupported(note="send it as output_config.format"),
    "user_profile_id": Unsupported(note="nothing is stored", refused=False),
    "workspace_id": Unsupported(note="there are no workspaces here", refused=False),
}
MESSAGES = Body(
    name="/v1/messages",
    model=MessagesBody,
    sampling={"stop_sequences": "stop", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k"},
    unsupported={
        **_CONVERSATION,
        "metadata": Unsupported(note="nothing is stored", refused=False),
        "service_tier": Unsupported(note="has no effect here", refused=False, harmless=_is("auto", "standard_only")),
        "container": Unsupported(note="the server runs no code"),
        "diagnostics": Unsupported(note="see cache_read_input_tokens in the usage"),
        "inference_geo": Unsupported(note="the server knows of one place, its own"),
    },
)
COUNT_TOKENS = Body(name="/v1/messages/count_tokens", model=ConversationBody, unsupported=_CONVERSATION)

BLOCKS = {
    "text": Body(name="/v1/messages: content text", model=TextBlock, unsupported=_CITATIONS),
    "thinking": Body(name="/v1/messages: content thinking", model=ThinkingBlock),
    "redacted_thinking": Body(name="/v1/messages: content redacted_thinking", model=RedactedThinkingBlock),
    "tool_use": Body(name="/v1/messages: content tool_use", model=ToolUseBlock, unsupported=_CALLER),
    "tool_result": Body(name="/v1/messages: content tool_result", model=ToolResultBlock, unsupported=_CALLER),
}
"""Blocks of a message's content by their type."""
TOOL = Body(
    name="/v1/messages: tools",
    model=Tool,
    unsupported={
        "allowed_callers": Unsupported(note="only the model calls", harmless=_is([], ["direct"])),
        "defer_loading": Unsupported(note="the model sees all tools"),
        "input_examples": Unsupported(note="write them in the description"),
    },
)
TOOL_CHOICE = Body(name="/v1/messages: tool_choice", model=ToolChoice)
THINKING = Body(name="/v1/messages: thinking", model=Thinking)
OUTPUT_CONFIG = Body(
    name="/v1/messages: output_config",
    model=OutputConfig,
    unsupported={"task_budget": Unsupported(note="max_tokens and thinking.budget_tokens bound a request")},
)
