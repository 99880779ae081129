"""Decides before any inference which fields of the open format a request can have, and how many bytes they may take.

Pure arithmetic; loads no numpy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from infer.artifacts.admission import (
    Admitted,
    GenerationBounds,
    check_contents,
    check_lengths,
    check_true_logprobs,
    refuse_limit,
    refuse_unsupported,
)
from infer.artifacts.request import ArtifactParent, ArtifactRequest
from infer.artifacts.v2.bounds import ArrayBound, BoundV2, FieldBound, bound_v2, field_bound
from infer.artifacts.v2.fields import RULES
from infer.artifacts.v2.limits import DEFAULT_LIMITS
from infer.config.capture import FIELD_NAME, HIDDEN_STATES, MOE_ROUTES, CaptureProfile
from infer.errors import ArtifactRefusedError
from infer.types import SamplingParams

RECORDED = (
    *("token_ids", "sampled_mask", "weight_spans"),
    *("selected_logprobs", "topk_logprobs", "prompt_logprobs", "kept_set", "kept_logmass"),
)
"""Fields that any request may ask for; the others are captured, and only where the operator turned that on."""
LOGPROBS = ("selected_logprobs", "topk_logprobs", "prompt_logprobs")
NUM_TOP = 20
"""Alternatives in topk_logprobs where the request does not say how many it wants for itself."""
WIRE_DTYPES = {
    "uint8": "u8",
    "uint16": "u16",
    "int32": "i32",
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
}
_SHA256 = re.compile(r"[0-9a-f]{64}")


def check_v2(request: ArtifactRequest, bounds: GenerationBounds) -> None:
    """What this engine can fill, field by field. Raises `ArtifactRefusedError`."""
    check_contents(request)
    for name in request.contents:
        if name not in RECORDED and name not in bounds.captured:
            raise _cannot_fill(name, bounds)
    if request.codec != "zstd":
        raise refuse_unsupported("codec must be the string 'zstd'")
    for name in LOGPROBS:
        if name in request.contents:
            check_true_logprobs(name, bounds)
    captured = captured_fields(request.contents, bounds)
    if captured and not 0 <= bounds.route_start <= bounds.prompt_tokens:
        raise _invalid(
            f"routed_experts_prompt_start={bounds.route_start} must not exceed the prompt length "
            f"({bounds.prompt_tokens}) nor be negative"
        )
    if request.parent is not None:
        _check_parent(request, request.parent, bounds)
    known_from = 0 if request.parent is None else request.parent.token_count
    if (
        "weight_spans" in request.contents
        and bounds.weight_version
        and (not captured or bounds.route_start > known_from)
    ):
        raise refuse_unsupported(
            "weight_spans of a prompt, once weights were updated, are known from captured rows alone: ask for "
            "moe_routes, hidden_states or another captured field, too, from the first token on"
        )
    check_lengths(bounds)


def admit_v2(request: ArtifactRequest, bounds: GenerationBounds, max_decoded: int, max_object: int) -> Admitted:
    """Worst case: every token generated, each choice with prompt rows in memory. Raises `ArtifactRefusedError`."""
    fields = _field_bounds(request.contents, bounds)
    prompt = bounds.prompt_tokens - _left_to_parent(request)
    stored = _bound(fields, prompt, bounds, shared=True)
    if stored.raw_bytes > max_decoded:
        longest = _longest(fields, prompt, bounds, max_decoded)
        raise refuse_limit(
            f"the artifact may take {stored.raw_bytes} bytes and exceeds artifacts.v2_max_decoded_bytes={max_decoded}; with "
            f"these contents, this prompt and {bounds.num_choices} choices max_tokens may be at most {longest}"
        )
    if stored.header_bytes > DEFAULT_LIMITS.header_bytes:
        raise refuse_limit(
            f"the header may take {stored.header_bytes} bytes; at most {DEFAULT_LIMITS.header_bytes} are allowed"
        )
    if stored.object_bytes > max_object:
        raise refuse_limit(
            f"the artifact may exceed target max_bytes: up to {stored.object_bytes} bytes for {max_object}"
        )
    held = _bound(fields, prompt, bounds, shared=False).raw_bytes + 8 * bounds.prompt_tokens
    return Admitted(held, stored.object_bytes)


def captured_fields(contents: Sequence[str], bounds: GenerationBounds) -> dict[str, CaptureProfile]:
    """The captured ones among `contents`."""
    return {name: bounds.captured[name] for name in contents if name in bounds.captured}


def first_row(request: ArtifactRequest, bounds: GenerationBounds, asked: int) -> int:
    """Position of the first captured row. A delta begins with the row that its parent lacks, unless some field is to be
    whole; `asked` is routed_experts_prompt_start."""
    parent = request.parent
    if asked or parent is None or _fault(parent) or not all(isinstance(name, str) for name in request.contents):
        return asked  # nothing was checked yet
    captured = captured_fields(request.contents, bounds)
    whole = set(captured) - set(parent_fields(request, bounds))
    return asked if whole or not captured else parent.token_count - 1


def parent_fields(request: ArtifactRequest, bounds: GenerationBounds) -> tuple[str, ...]:
    """Fields whose earlier rows are left to the parent, sorted."""
    if request.parent is None:
        return ()
    if request.parent.fields is not None:
        return tuple(sorted(request.parent.fields))
    return tuple(sorted({"token_ids", *(name for name in request.contents if _on_both(name, bounds))}))


def most_kept(params: SamplingParams, vocab_size: int) -> int:
    """Most tokens that a draw can leave to choose from, when it leaves out any; the whole vocabulary is not listed."""
    if params.temperature == 0:
        return 1
    limits = [vocab_size, *([params.top_k] if params.top_k > 0 else [])]
    if params.allowed_token_ids is not None:
        limits.append(len(params.allowed_token_ids))
    filters = params.top_p < 1 or params.min_p > 0 or params.bad_words or params.min_tokens or params.logit_bias
    return min(limits) if filters or len(limits) > 1 else 1


def _on_both(name: str, bounds: GenerationBounds) -> bool:
    rule = RULES.get(name)
    return name in bounds.captured if rule is None else rule.part == "both"


def _field_bounds(contents: Sequence[str], bounds: GenerationBounds) -> list[FieldBound]:
    fields = []
    for name in contents:
        profile = bounds.captured.get(name)
        if profile is not None:
            fields.append(_captured_bound(name, profile))
        elif name != "token_ids":
            most = {"topk_logprobs": bounds.num_top, "kept_set": bounds.num_kept}
            width = most.get(name, bounds.prompt_logprobs or 0)
            fields.append(field_bound(name, most=width, with_status=False))
    return fields


def _captured_bound(name: str, profile: CaptureProfile) -> FieldBound:
    layers = profile.layer_ids
    if name == MOE_ROUTES:
        counts = (profile.num_experts,) * len(layers)
        return field_bound(name, layer_ids=layers, expert_counts=counts, width=profile.row_shape[1])
    dtype = WIRE_DTYPES[profile.dtype]
    if name == HIDDEN_STATES:
        return field_bound(name, layer_ids=layers, width=profile.row_shape[1], dtype=dtype)
    arrays = {"values": ArrayBound(dtype=dtype, row_shape=profile.row_shape), "status": ArrayBound(dtype="u8")}
    return FieldBound(name=name, arrays=arrays, attributes={"layer_ids": layers} if layers else {})


def _bound(fields: Sequence[FieldBound], prompt: int, bounds: GenerationBounds, *, shared: bool) -> BoundV2:
    return bound_v2(
        fields,
        prompt_tokens=prompt,
        max_tokens=bounds.max_tokens,
        num_choices=bounds.num_choices,
        shared_prompt=shared,
        provenance=bounds.provenance,
        longest_stop=bounds.longest_stop,
    )


def _left_to_parent(request: ArtifactRequest) -> int:
    """Leading tokens of which nothing is stored."""
    parent = request.parent
    # A list of fields, or the prompt's own log-probabilities, may ask for whole rows of some: then all count as whole.
    if parent is None or parent.fields is not None or "prompt_logprobs" in request.contents:
        return 0
    return parent.token_count - 1


def _longest(fields: Sequence[FieldBound], prompt: int, bounds: GenerationBounds, max_decoded: int) -> int:
    """Most tokens that each choice could generate within the limit."""
    low, high = 0, bounds.max_tokens
    while low < high:
        middle = (low + high + 1) // 2
        size = bound_v2(fields, prompt_tokens=prompt, max_tokens=middle, num_choices=bounds.num_choices).raw_bytes
        low, high = (middle, high) if size <= max_decoded else (low, middle - 1)
    return low


def _check_parent(request: ArtifactRequest, parent: ArtifactParent, bounds: GenerationBounds) -> None:
    fault = _fault(parent)
    if fault is not None:
        raise _invalid(fault)
    if parent.token_count > bounds.prompt_tokens:
        raise _invalid(
            f"parent.token_count={parent.token_count} leading tokens are to be the parent's, and the prompt has "
            f"{bounds.prompt_tokens}"
        )
    known = {"token_ids", *(name for name in request.contents if _on_both(name, bounds))}
    given = parent_fields(request, bounds)
    wrong = sorted(set(given) - known)
    if wrong or len(set(given)) != len(given):
        raise _invalid(
            f"parent.fields can name {', '.join(sorted(known))}, each once; not {str(wrong[:1] or given)[:64]}"
        )
    if bounds.route_start > parent.token_count - 1 and set(given) & set(bounds.captured):
        raise _invalid(
            f"routed_experts_prompt_start={bounds.route_start} leaves a gap: the parent's rows end before token "
            f"{parent.token_count - 1}"
        )


def _fault(parent: object) -> str | None:
    """What is wrong with the values themselves: in process nothing was parsed."""
    if not isinstance(parent, ArtifactParent):
        return "parent must be an ArtifactParent"
    for name in ("sha256", "header_sha256"):
        value: object = getattr(parent, name)
        if not isinstance(value, str) or not _SHA256.fullmatch(value):
            return f"parent.{name} must be 64 lower-case hexadecimal digits"
    for name, low in (("token_count", 1), ("choice_index", 0)):
        number: object = getattr(parent, name)
        if type(number) is not int or not low <= number < 2**63:
            return f"parent.{name} must be an integer of {low} or more"
    names: object = parent.fields
    if names is not None and (not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names)):
        return "parent.fields must be an array of strings"
    return None


def _cannot_fill(name: str, bounds: GenerationBounds) -> ArtifactRefusedError:
    shown = repr(name[:64])
    if name == MOE_ROUTES:
        return refuse_unsupported(
            "moe_routes needs capture.routed_experts to be on and a model with mixture-of-experts layers"
        )
    if name == HIDDEN_STATES:
        return refuse_unsupported("hidden_states needs capture.hidden_layers to name the layers")
    if name in RULES:
        likely = "".join(f"; {one} is there" for one in bounds.captured if one.endswith(f".{name}"))
        return refuse_unsupported(f"this engine does not record {name}{likely}")
    known = ", ".join((*RECORDED, *bounds.captured))
    if "." in name and FIELD_NAME.fullmatch(name):
        return refuse_unsupported(
            f"contents entry {shown} is not captured; capture.fields names a plugin's. {known} are there"
        )
    return refuse_unsupported(f"contents entry {shown} is not supported; {known} are")


def _invalid(message: str) -> ArtifactRefusedError:
    return ArtifactRefusedError(message, code="artifact_invalid_request")
