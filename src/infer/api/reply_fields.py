"""What replies hold beyond the shape that the route imitates (OpenAI's, vLLM's, SGLang's): the list, for docs and tests.

Plain data. A field that a writer adds and this table lacks fails a test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Place = Literal["reply", "choice", "first chunk", "last chunk", "meta_info"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyField:
    """One field; `places` are where it stands in a whole reply, or in a stream."""

    name: str
    places: tuple[Place, ...]
    note: str
    asked_by: str | None = None
    """The request field that asks for it; None: it is always there."""


_SEED = "The seed in force, drawn where the request had none; choice i of a prompt has the prompt's seed + i."
_DEFAULTS = "Sampling fields that the request left out and the model's generation_config.json gave, with their values."

_SHARED = (
    ReplyField(name="seed", places=("choice",), note=f"{_SEED} In a stream with the choice's first chunk."),
    ReplyField(name="sampling_defaults", places=("reply", "first chunk"), note=_DEFAULTS),
    ReplyField(
        name="stop_reason",
        places=("choice",),
        note="The stop string or id that matched; `deadline` where the request ran out of time. vLLM's.",
    ),
    ReplyField(name="token_ids", places=("choice",), note="The choice's token ids.", asked_by="return_token_ids"),
    ReplyField(
        name="prompt_logprobs",
        places=("reply", "choice", "first chunk"),
        note="Per prompt token, id to logprob, rank and text; null for the first. In completions with each choice.",
        asked_by="prompt_logprobs",
    ),
    ReplyField(
        name="prompt_token_ids",
        places=("reply", "choice", "first chunk"),
        note="The prompt's token ids. In completions with each choice.",
        asked_by="return_token_ids",
    ),
    ReplyField(
        name="metrics",
        places=("reply", "last chunk"),
        note="Milliseconds queued, to the first token, generating and in all; preemptions. One for each prompt.",
        asked_by="return_metrics",
    ),
    ReplyField(
        name="prompt_progress",
        places=("first chunk",),
        note="`total` and `processed` prompt tokens, in chunks of their own.",
        asked_by="return_progress",
    ),
)

_ROUTES = "return_routed_experts"
_VLLM_ROUTES = (
    ReplyField(
        name="routed_experts",
        places=("choice",),
        note="Base64 of a .npy file [tokens - 1 - start, all layers, top k]; null where the rows are not complete. In a "
        "stream with the chunk that ends the choice.",
        asked_by=_ROUTES,
    ),
    ReplyField(
        name="routed_experts_prompt_start",
        places=("choice",),
        note="Token of the first row, as it was asked for.",
        asked_by=_ROUTES,
    ),
    ReplyField(
        name="routed_experts_layer_ids",
        places=("choice",),
        note="Layers that have a router; the others' cells hold 0, 1, ... and mean nothing.",
        asked_by=_ROUTES,
    ),
    ReplyField(
        name="routed_experts_error",
        places=("choice",),
        note="Why routed_experts is null; else absent.",
        asked_by=_ROUTES,
    ),
    ReplyField(
        name="weight_versions",
        places=("choice",),
        note="[first output token, end, version of the weights] spans over the output.",
        asked_by=_ROUTES,
    ),
)
_RECEIPT = ReplyField(
    name="generation_artifact",
    places=("reply", "last chunk"),
    note="The artifact's receipt: see artifacts.md. In a stream with the chunk that ends the last choice.",
    asked_by="generation_artifact",
)
_NVEXT = ReplyField(
    name="nvext",
    places=("reply", "last chunk"),
    note="The receipt as nvext.generation_artifact, for requests that asked in nvext.",
    asked_by="nvext",
)
_ARTIFACTS = (*_VLLM_ROUTES, _RECEIPT, _NVEXT)

REPLY_FIELDS: dict[str, tuple[ReplyField, ...]] = {
    "/v1/chat/completions": (*_SHARED, *_ARTIFACTS),
    "/v1/completions": (*_SHARED, *_ARTIFACTS),
    "/v1/responses": (
        ReplyField(name="seed", places=("reply",), note="The seed in force, drawn where the request had none."),
        ReplyField(name="sampling_defaults", places=("reply",), note=_DEFAULTS),
        ReplyField(
            name="store", places=("reply",), note="Whether it is kept. OpenAI sends it, and does not document it."
        ),
        ReplyField(
            name="stop_reason",
            places=("reply",),
            note="The stop string or id that matched; `deadline` where the request ran out of time; null before the end.",
        ),
    ),
    "/inference/v1/generate": (
        ReplyField(name="seed", places=("choice",), note=f"{_SEED} In a stream with the choice's first chunk."),
        ReplyField(name="sampling_defaults", places=("reply", "first chunk"), note=_DEFAULTS),
        ReplyField(name="metrics", places=("reply", "last chunk"), note="As in chat; in a stream with the usage."),
        *_VLLM_ROUTES,
        _RECEIPT,
    ),
    "/generate": (
        ReplyField(name="sampling_seed", places=("meta_info",), note=_SEED),
        ReplyField(name="sampling_defaults", places=("meta_info",), note=f"{_DEFAULTS} Under SGLang's names."),
        ReplyField(
            name="routed_experts",
            places=("meta_info",),
            note="Base64 of int32 [tokens - 1 - start, all layers, top k]; null, with routed_experts_error, where the rows "
            "are not complete.",
            asked_by=_ROUTES,
        ),
        ReplyField(
            name="routed_experts_start_len",
            places=("meta_info",),
            note="Token of the first row, as it was asked for.",
            asked_by=_ROUTES,
        ),
        ReplyField(
            name="routed_experts_error",
            places=("meta_info",),
            note="Why routed_experts is null; else absent.",
            asked_by=_ROUTES,
        ),
        _RECEIPT,
    ),
}
