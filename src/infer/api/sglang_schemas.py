"""What SGLang's `/generate` accepts: every documented field and what becomes of it.

Plain data; the checks are `api.fields`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from infer.api.artifacts import NativeArtifactFields
from infer.api.fields import Body, BodyModel, Unsupported
from infer.api.openai.schemas import MAX_PRIORITY
from infer.types import TokenId

MAX_NEW_TOKENS = 128
"""SGLang's default."""

Rid = Annotated[str, Field(min_length=1, max_length=256)]


class GenerateBody(NativeArtifactFields):
    text: str | list[str] | None = None
    """The prompt as text, or several."""
    input_ids: list[TokenId] | list[list[TokenId]] | None = None
    """The prompt as token ids, or several."""
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    """SGLang's sampling parameters, for all prompts or one set for each; max_new_tokens absent: 128, null: up to the
    context."""
    return_logprob: bool | list[bool] = False
    """Log-probabilities of the output tokens in meta_info."""
    logprob_start_len: int | list[int] | None = None
    """With return_logprob, those of the prompt from this position on; -1: none."""
    top_logprobs_num: Annotated[int, Field(ge=0)] | list[int] | None = None
    """With return_logprob, alternatives per token."""
    token_ids_logprob: list[TokenId] | list[list[TokenId]] | None = None
    """With return_logprob, these ids are scored at every position that has a log-probability."""
    return_routed_experts: bool | list[bool] = False
    """The experts that each token was routed to, in meta_info: base64 of int32, [tokens - 1 - start, all layers, top k]."""
    routed_experts_start_len: Annotated[int, Field(ge=0)] | list[int] = 0
    """First token whose experts are sent; told again in meta_info."""
    return_text_in_logprobs: bool = False
    """The third member of each log-probability is the token's text."""
    stream: bool = False
    """Send server-sent events; each holds the whole output so far."""
    rid: Rid | list[Rid] | None = None
    """Name of the request, for the reply and for aborting it; numbered in a batch unless a list."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Only requests with the same salt share prefix-cache blocks."""
    extra_key: str | list[str] | None = None
    """A further salt."""
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    """Smaller runs first, with scheduler.policy=priority."""


def _any(value: Any) -> bool:
    return True


_LATER = "not there yet"
_TEXT_ONLY = "infer takes text only"
_ROUTING = Unsupported(note="there is one worker here", refused=False)
_NO_EFFECT = Unsupported(note="has no effect here", refused=False)

# fmt: off
_SAME_NAMES = (
    "n", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "skip_special_tokens", "ignore_eos",
    "logit_bias", "frequency_penalty", "presence_penalty", "repetition_penalty",
)
# fmt: on

GENERATE = Body(
    name="/generate",
    model=GenerateBody,
    unsupported={
        "input_embeds": Unsupported(note=_LATER),
        "image_data": Unsupported(note=_TEXT_ONLY),
        "video_data": Unsupported(note=_TEXT_ONLY),
        "audio_data": Unsupported(note=_TEXT_ONLY),
        "modalities": Unsupported(note=_TEXT_ONLY),
        "return_hidden_states": Unsupported(note=_LATER),
        "return_indexer_topk": Unsupported(note=_LATER),
        "return_sampling_mask": Unsupported(note=_LATER),
        "return_entropy": Unsupported(note=_LATER),
        "return_flat_raw_top_logprobs": Unsupported(note=_LATER),
        "session_params": Unsupported(note="send the whole prompt; the prefix cache finds what is known"),
        "lora_path": Unsupported(note=_LATER),
        "lora_id": Unsupported(note=_LATER),
        "custom_logit_processor": Unsupported(note=_LATER),
        "bootstrap_host": Unsupported(note=_LATER),
        "bootstrap_port": Unsupported(note=_LATER),
        "bootstrap_room": Unsupported(note=_LATER),
        "max_thinking_tokens": Unsupported(note=_LATER),
        "background": Unsupported(note=_LATER),
        "session_id": _ROUTING,
        "conversation_id": _ROUTING,
        "routing_key": _ROUTING,
        "routed_dp_rank": _ROUTING,
        "data_parallel_rank": _ROUTING,
        "log_metrics": Unsupported(
            note="all requests are counted", refused=False, harmless=lambda value: value is True
        ),
        "no_logs": Unsupported(note="prompts are never logged", harmless=_any),
        "custom_labels": _NO_EFFECT,
        "external_trace_header": _NO_EFFECT,
    },
)


class SamplingBody(BodyModel):
    """Form of the answer: one of them."""

    json_schema: str | None = None
    """A JSON schema, as text."""
    regex: str | None = None
    """An expression that the whole answer matches."""
    ebnf: str | None = None
    """A grammar in EBNF or Lark."""
    structural_tag: str | None = None
    """Structural tags, as JSON text."""


SAMPLING = Body(
    name="/generate sampling_params",
    model=SamplingBody,
    sampling={
        **{name: name for name in _SAME_NAMES},
        "max_new_tokens": "max_tokens",
        "min_new_tokens": "min_tokens",
        "sampling_seed": "seed",
        "no_stop_trim": "include_stop",
    },
    unsupported={
        "stop_regex": Unsupported(note=_LATER),
        "custom_params": Unsupported(note="custom logit processors are not there yet"),
        "spaces_between_special_tokens": Unsupported(note="has no effect here", harmless=_any),
        "stream_interval": Unsupported(note="the operator chooses it (scheduler.stream_interval)", refused=False),
    },
)
