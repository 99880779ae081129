"""What `/v1/chat/completions` and `/v1/completions` accept: every documented field and what becomes of it.

Plain data; the checks are `api.fields`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from infer.api.artifacts import ArtifactFields
from infer.api.fields import Body, Unsupported
from infer.options import MAX_BEAM_WIDTH
from infer.types import TokenId

MAX_PRIORITY = 2**31 - 1


class StreamOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationBody(ArtifactFields):
    """Fields that both endpoints have, besides sampling."""

    model: str | None = None
    """One of the served names; absent: the model that is served."""
    stream: bool = False
    """Send tokens as server-sent events."""
    stream_options: StreamOptions | None = None
    """include_usage: token counts in a last chunk; continuous_usage_stats: and in every chunk."""
    return_token_ids: bool = False
    """Token ids of the prompt and of each choice."""
    return_tokens_as_token_ids: bool = False
    """Write tokens in log-probabilities as "token_id:N"."""
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    """Smaller runs first, with scheduler.policy=priority."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Only requests with the same salt share prefix-cache blocks."""
    deadline: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Seconds after which the request ends with what it has."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    """Keep this many tokens of the prompt; -1: as many as fit the context."""
    truncation_side: Literal["left", "right"] = "left"
    """Where tokens are cut off."""
    response_format: dict[str, Any] | None = None
    """Form of the answer: {"type": "text", "json_object", "json_schema" or "structural_tag"}. Schemas are kept, strict or not."""
    structured_outputs: dict[str, Any] | None = None
    """Form of the answer in vLLM's words: one of json, json_object, regex, choice, grammar, structural_tag."""
    return_progress: bool = False
    """Send prefill progress as chunks with empty choices and `prompt_progress`."""
    use_beam_search: bool = False
    """Search the likeliest answers instead of sampling; the n best are returned. Cannot be streamed."""
    beam_width: Annotated[int, Field(ge=1, le=MAX_BEAM_WIDTH)] | None = None
    """Answers kept at every token; absent: n."""
    length_penalty: Annotated[float, Field(ge=-10, le=10)] = 1.0
    """With use_beam_search: answers are compared by their log-probability / length ** length_penalty."""
    return_metrics: bool = False
    """The request's times, in milliseconds, as `metrics`; in a stream in its last chunk."""


class ChatBody(GenerationBody):
    messages: list[dict[str, Any]]
    """The conversation; a last message of the assistant's is continued."""
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """At most this many output tokens; absent: up to the context."""
    logprobs: bool = False
    """Log-probabilities of the output tokens."""
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    """Alternatives per token; needs logprobs."""
    add_generation_prompt: bool | None = None
    """Open the assistant's turn; absent: unless the last message is the assistant's."""
    continue_final_message: bool | None = None
    """Go on with the last message; absent: if it is the assistant's."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables for the chat template."""
    reasoning_effort: str | None = None
    """Handed to the chat template; one that does not know it ignores it."""
    tools: list[dict[str, Any]] | None = None
    """Functions that the model may call: {"type": "function", "function": {"name", "description", "parameters", "strict"}}."""
    tool_choice: str | dict[str, Any] | None = None
    """"none", "auto", "required", or the function that must be called; absent: auto where there are tools."""
    parallel_tool_calls: bool | None = None
    """false: at most one call."""
    include_reasoning: bool = True
    """Return the reasoning; false: it is thought, and counted, but not shown."""
    documents: list[dict[str, Any]] | None = None
    """Documents for the chat template."""


class CompletionBody(GenerationBody):
    prompt: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[list[TokenId]], Field(min_length=1)]
    )
    """Text, token ids, or a list of either: one or several prompts."""
    max_tokens: Annotated[int, Field(ge=0)] = 16
    """At most this many output tokens; 0 with echo or prompt_logprobs."""
    echo: bool = False
    """Begin each choice with its prompt, log-probabilities included if asked for."""
    best_of: Annotated[int, Field(ge=1)] | None = None
    """Generate this many choices and return the n likeliest (by summed log-probability)."""
    logprobs: Annotated[int, Field(ge=0)] | None = None
    """Log-probabilities of the output tokens, and so many alternatives."""
    add_special_tokens: bool = True
    """Let the tokenizer add its special tokens to a text prompt."""


_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "n": "n",
    "stop": "stop",
    "seed": "seed",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "min_tokens": "min_tokens",
    "stop_token_ids": "stop_token_ids",
    "include_stop_str_in_output": "include_stop",
    "skip_special_tokens": "skip_special_tokens",
    "ignore_eos": "ignore_eos",
    "repetition_detection": "repetition_detection",
    "allowed_token_ids": "allowed_token_ids",
    "bad_words": "bad_words",
    "logits_processors": "logits_processors",
    "prompt_logprobs": "prompt_logprobs",
    "logprobs_mode": "logprobs_mode",
    "logprob_token_ids": "logprob_token_ids",
    "return_kept_set": "return_kept_set",
    "forced_token_ids": "forced_token_ids",
    "return_routed_experts": "return_routed_experts",
    "routed_experts_prompt_start": "routed_experts_prompt_start",
    "thinking_token_budget": "thinking_budget",
}


def _is(*values: Any) -> Any:
    """Values that ask for what happens anyway."""
    return lambda value: any(value == known and type(value) is type(known) for known in values)


_FUNCTIONS = "OpenAI gave it up for tools and tool_choice"
_GUIDED = 'vLLM gave it up for structured_outputs={{"{}": ...}}'
_LATER = "not there yet"
_NO_EFFECT = "has no effect here"

_BOTH: dict[str, Unsupported] = {
    "metadata": Unsupported(note="nothing is stored", refused=False),
    "user": Unsupported(note=_NO_EFFECT, refused=False),
    "service_tier": Unsupported(note=_NO_EFFECT, refused=False, harmless=_is("auto", "default")),
    "spaces_between_special_tokens": Unsupported(note=_NO_EFFECT, refused=False, harmless=_is(True, False)),
    "captured_as": Unsupported(note="captured rows are sent as bytes", harmless=_is("rows")),
    "guided_json": Unsupported(note=_GUIDED.format("json")),
    "guided_regex": Unsupported(note=_GUIDED.format("regex")),
    "guided_choice": Unsupported(note=_GUIDED.format("choice")),
    "guided_grammar": Unsupported(note=_GUIDED.format("grammar")),
    "guided_whitespace_pattern": Unsupported(note=_GUIDED.format("whitespace_pattern")),
    "guided_decoding_backend": Unsupported(note="the operator chooses it (structured_output.backend)"),
    "kv_transfer_params": Unsupported(note=_LATER),
    "vllm_xargs": Unsupported(note="it belongs to vLLM's plugins"),
    "prompt_embeds": Unsupported(note=_LATER),
    "request_id": Unsupported(note="send it as the header X-Request-Id"),
}

_CHAT: dict[str, Unsupported] = {
    **_BOTH,
    "store": Unsupported(note="nothing is stored", refused=False),
    "safety_identifier": Unsupported(note=_NO_EFFECT, refused=False),
    "prompt_cache_key": Unsupported(note="prefix caching needs no key; see cache_salt", refused=False),
    "prompt_cache_retention": Unsupported(note=_NO_EFFECT, refused=False),
    "prompt_cache_options": Unsupported(note=_NO_EFFECT, refused=False),
    "prediction": Unsupported(note="predicted output is not used", refused=False),
    "verbosity": Unsupported(note=_NO_EFFECT, refused=False, harmless=_is("medium")),
    "modalities": Unsupported(note="infer writes text only", harmless=lambda value: value == ["text"]),
    "audio": Unsupported(note="infer writes text only"),
    "moderation": Unsupported(note="there is no moderation here"),
    "web_search_options": Unsupported(note="there is no web search here"),
    "functions": Unsupported(note=_FUNCTIONS),
    "function_call": Unsupported(note=_FUNCTIONS, harmless=_is("none", "auto")),
    "chat_template": Unsupported(note="the operator chooses the template (model.chat_template)"),
    "echo": Unsupported(note="only /v1/completions has it"),
    "best_of": Unsupported(note="only /v1/completions has it", harmless=_is(1)),
    "add_special_tokens": Unsupported(note="the chat template writes special tokens itself"),
    "mm_processor_kwargs": Unsupported(note="infer takes text only"),
}

_COMPLETION: dict[str, Unsupported] = {
    **_BOTH,
    "suffix": Unsupported(note="no served model fills in the middle yet"),
}

CHAT = Body(
    name="/v1/chat/completions",
    model=ChatBody,
    sampling={"max_tokens": "max_tokens", **_SAMPLING},
    unsupported=_CHAT,
)
COMPLETION = Body(
    name="/v1/completions",
    model=CompletionBody,
    sampling=_SAMPLING,
    unsupported=_COMPLETION,
)
