"""Generation artifacts and routed experts on the wire: the fields that ask for them, and where in a reply they are told.

Runs in request tasks. Values of these fields may be upload grants: nothing here quotes or logs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import anyio.to_thread
from pydantic import BaseModel, ConfigDict, WithJsonSchema

from infer.api.errors import ApiError
from infer.api.fields import BodyModel
from infer.artifacts.receipt import ArtifactReceipt, missing_receipt
from infer.artifacts.request import ArtifactRequest, find_request
from infer.errors import ArtifactRefusedError
from infer.types import CapturedRows, Choice, Completion, Delta

if TYPE_CHECKING:
    from infer.engine.engine import Engine
    from infer.engine.stream import Stream

_LARGE = 1 << 16
"""Bytes of rows that are worth a thread to encode."""
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "description": "Capture the generation and store it; the reply has a receipt. Prompt and completion token ids are "
    "always written, also with contents [] or with routes or log-probabilities alone.",
    "required": ["format", "contents", "delivery"],
    "additionalProperties": False,
    "properties": {
        "format": {"type": "string", "minLength": 1},
        "contents": {"type": "array", "items": {"type": "string", "minLength": 1}, "uniqueItems": True},
        "codec": {"const": "zstd"},
        "parent": {
            "type": "object",
            "required": ["sha256", "header_sha256", "token_count"],
            "additionalProperties": False,
            "properties": {
                "sha256": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
                "header_sha256": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
                "token_count": {"type": "integer", "minimum": 1},
                "choice_index": {"type": "integer", "minimum": 0, "default": 0},
                "fields": {"type": "array", "items": {"type": "string", "minLength": 1}, "uniqueItems": True},
            },
        },
        "delivery": {
            "type": "object",
            "required": ["mode", "target"],
            "additionalProperties": False,
            "properties": {"mode": {"const": "object_store"}, "target": {"type": "object"}},
        },
    },
}
ROUTE_KEYS = (
    *("routed_experts", "routed_experts_prompt_start", "routed_experts_layer_ids", "routed_experts_error"),
    "weight_versions",
)
ArtifactJson = Annotated[Any, WithJsonSchema(_SCHEMA)]


class Nvext(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, strict=True)

    generation_artifact: ArtifactJson = None
    """Deliver the generation to storage; the receipt comes back in nvext, too. Prompt and completion token ids are
    always written. generation_artifact_v1 takes moe_routes and selected_logprobs, generation_artifact_v2 every field that
    the server can fill, and a parent: the artifact of the turn before, whose rows are not stored again."""
    extra_fields: list[Literal["engine_data"]] | None = None
    """engine_data: the receipt once more, as nvext.engine_data.generation_artifact."""


class NativeArtifactFields(BodyModel):
    """Fields of a body that may ask for an artifact in infer's own spelling."""

    generation_artifact: ArtifactJson = None
    """Deliver the generation to storage, prompt and completion token ids always included; the reply has a receipt.
    Formats are generation_artifact_v1 (moe_routes, selected_logprobs) and generation_artifact_v2 (every field that the
    server can fill, and a parent: the artifact of the turn before, whose rows are not stored again)."""
    generation_artifact_strict: bool = False
    """The request fails when its artifact does."""


class ArtifactFields(NativeArtifactFields):
    """In both spellings."""

    nvext: Nvext | None = None
    """NVIDIA's spelling: nvext.generation_artifact; the receipt comes back in nvext."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a call wants delivered, and how it is told of it."""

    request: ArtifactRequest | None = None
    spelling: Literal["nvext", "native"] = "native"
    engine_data: bool = False

    def keys(self, done: Completion) -> dict[str, Any]:
        """What the reply, or the last chunk, says of the artifact."""
        if self.request is None:
            return {}
        return self.placed(self.receipt(done).to_json())

    def placed(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """A receipt where the caller looks for it."""
        if self.spelling == "native":
            return {"generation_artifact": told}
        more = {"engine_data": {"generation_artifact": told}} if self.engine_data else {}
        return {"nvext": {"generation_artifact": told, **more}}

    def chunk_keys(self, stream: Stream, delta: Delta) -> dict[str, Any]:
        """The same for a stream: with the chunk that ends it, and nowhere else."""
        return self.keys(stream.result) if delta.finish_reason is not None and stream.has_result else {}

    def receipt(self, done: Completion) -> ArtifactReceipt:
        if done.artifact is not None or self.request is None:
            return done.artifact or missing_receipt("", ())
        return missing_receipt(self.request.format, self.request.contents)


def wanted(data: Mapping[str, Any], num_prompts: int = 1, *, refused: Mapping[str, bool] | None = None) -> Wanted:
    """From a whole body whose fields were checked. Raises `ArtifactRefusedError`.

    refused: what the body asks for beside it that has no place in one artifact, by name.
    """
    found = find_request(data)
    if found is None:
        return Wanted()
    request, spelling = found
    if num_prompts != 1:
        raise _invalid(f"an artifact holds one prompt; this request has {num_prompts}")
    for name, is_asked in (refused or {}).items():
        if is_asked:
            raise _invalid(f"an artifact cannot be combined with {name}")
    extra = (data.get("nvext") or {}).get("extra_fields") or ()
    return Wanted(request=request, spelling=spelling, engine_data="engine_data" in extra)


def carried(data: Mapping[str, Any], num_prompts: int = 1, **refused: bool) -> dict[str, Any]:
    """The fields of a body that ask for an artifact, as they are, for a body that is made of it."""
    wanted(data, num_prompts, refused=refused)
    names = ("nvext", "generation_artifact", "generation_artifact_strict")
    return {name: data[name] for name in names if data.get(name) is not None}


def handed_on(reply: dict[str, Any], answered: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """The reply to the body `asked`, with what `/inference/v1/generate` answered of artifact and routes."""
    for choice, source in zip(reply["choices"], answered["choices"], strict=True):
        choice |= {name: source[name] for name in ROUTE_KEYS if name in source}
    place = wanted(asked)
    receipt = answered.get("generation_artifact")
    if receipt is None:
        if place.request is None:
            return reply
        receipt = missing_receipt(place.request.format, place.request.contents).to_json()
    return reply | place.placed(receipt)


def refuse_cancelled(receipt: ArtifactReceipt | None) -> None:
    """Where a cancelled artifact is an error response (`/inference/v1/generate`)."""
    if receipt is not None and receipt.error_code == "artifact_cancelled":
        raise ApiError(str(receipt.error), status=409, code="artifact_cancelled", parameter="generation_artifact")


# -- routed experts --------------------------------------------------------------------------------------------------


async def vllm_routes(engine: Engine, prompt_token_ids: tuple[int, ...], choice: Choice) -> dict[str, Any]:
    """Keys of a choice as vLLM's clients read them; none when routes were not asked for.

    The array counts all hidden layers. `routed_experts_layer_ids` says which of them mean something; the others hold
    0, 1, ... A choice without its rows says null and why.
    """
    rows = choice.routed_experts
    if rows is None:
        return {}
    told: dict[str, Any] = {
        "routed_experts": None,
        "routed_experts_prompt_start": rows.start,
        "routed_experts_layer_ids": rows.layer_ids,
        "weight_versions": choice.weight_versions,
    }
    if rows.error is not None:
        return told | {"routed_experts_error": rows.error}
    told["routed_experts"] = await _encoded(rows, _vllm, prompt_token_ids, choice, num_hidden_layers(engine, rows))
    return told


async def sglang_routes(engine: Engine, prompt_token_ids: tuple[int, ...], choice: Choice) -> dict[str, Any]:
    """Keys of `meta_info` as SGLang's clients read them."""
    rows = choice.routed_experts
    if rows is None:
        return {}
    if rows.error is not None:
        told = {"routed_experts": None, "routed_experts_error": rows.error, "routed_experts_start_len": rows.start}
    else:
        told = await _encoded(rows, _sglang, prompt_token_ids, choice, num_hidden_layers(engine, rows))
    return told


def num_hidden_layers(engine: Engine, rows: CapturedRows) -> int:
    """As config.json says it; at least up to the last layer that has rows."""
    raw = engine.model_config.raw
    stated = raw.get("num_hidden_layers") or raw.get("n_layer") or 0
    return max(int(stated), *(layer + 1 for layer in rows.layer_ids))


async def _encoded(rows: CapturedRows, encode: Any, *arguments: Any) -> Any:
    if len(rows.data) < _LARGE:
        return encode(*arguments)
    return await anyio.to_thread.run_sync(encode, *arguments)


def _vllm(prompt_token_ids: tuple[int, ...], choice: Choice, num_layers: int) -> str:
    from infer.artifacts.assembly import artifact_choice  # noqa: PLC0415  numpy, with the first rows only
    from infer.artifacts.exporters import to_vllm_npy  # noqa: PLC0415

    return to_vllm_npy(artifact_choice(choice, prompt_token_ids), num_hidden_layers=num_layers).routed_experts


def _sglang(prompt_token_ids: tuple[int, ...], choice: Choice, num_layers: int) -> dict[str, Any]:
    from infer.artifacts.assembly import artifact_choice  # noqa: PLC0415
    from infer.artifacts.exporters import to_sglang_int32  # noqa: PLC0415

    return to_sglang_int32(artifact_choice(choice, prompt_token_ids), num_hidden_layers=num_layers)


async def all_vllm_routes(engine: Engine, done: Sequence[Completion]) -> list[dict[int, dict[str, Any]]]:
    """Per completion: choice index -> its keys."""
    return [
        {choice.index: await vllm_routes(engine, one.prompt_token_ids, choice) for choice in one.choices}
        for one in done
    ]


def _invalid(message: str) -> ArtifactRefusedError:
    return ArtifactRefusedError(message, code="artifact_invalid_request")
