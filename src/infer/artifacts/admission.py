"""Decides before any inference whether an artifact can be captured and how many bytes it can take. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from infer.artifacts.record import Provenance
from infer.artifacts.request import ArtifactRequest
from infer.artifacts.router_layout import RouterLayout
from infer.artifacts.v1.limits import FORMAT, MAX_MANIFEST_BYTES, align64, encoded_bound, id_width
from infer.config.capture import CaptureProfile
from infer.errors import ArtifactRefusedError

KNOWN_CONTENTS = ("moe_routes", "selected_logprobs")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationBounds:
    """What is known of a request before it runs."""

    prompt_tokens: int
    max_tokens: int
    """Most tokens that each choice may generate."""
    num_choices: int = 1
    router_layout: RouterLayout | None = None
    """None: routes are not captured, by setting or because the model has no router."""
    route_start: int = 0
    """First token whose routes are wanted."""
    has_token_ids: bool = True
    """False for a prompt of embeddings."""
    explicit_logprob_ids: bool = False
    """The request asks for log-probabilities of tokens it names."""
    logprobs_mode: str | None = None
    excludes_forced: str | None = None
    """Name of a setting that may leave a forced token without a probability."""
    expected_seconds: float = 0.0
    """Estimate of queueing and generation."""
    request_id: str = ""
    captured: Mapping[str, CaptureProfile] = field(default_factory=dict)
    """What can be captured here, by field name. This and the following matter to the open format alone."""
    predicted: frozenset[str] = frozenset()
    """Of these: fields whose row belongs to the position behind the token that was fed."""
    num_top: int = 0
    """Alternatives in topk_logprobs."""
    prompt_logprobs: int | None = None
    """Alternatives in prompt_logprobs."""
    num_kept: int = 1
    """Most tokens of a kept set."""
    num_forced: int = 0
    """Leading output tokens that are not sampled."""
    longest_stop: int = 0
    """Bytes of the longest stop string."""
    weight_version: int = 0
    """In force at admission."""
    provenance: Provenance = field(default_factory=Provenance)

    @property
    def num_tokens(self) -> int:
        """Longest sequence of a choice."""
        return self.prompt_tokens + self.max_tokens


@dataclass(frozen=True, slots=True)
class Admitted:
    """Worst-case bytes of one request, all choices together."""

    payload_bytes: int
    encoded_bytes: int

    @property
    def reserved_bytes(self) -> int:
        """Captured state and the encoded copy exist side by side while the artifact is delivered."""
        return self.payload_bytes + self.encoded_bytes


def check_request(request: ArtifactRequest, bounds: GenerationBounds) -> None:
    """What this engine can capture. Raises `ArtifactRefusedError`."""
    if request.format != FORMAT:
        raise refuse_unsupported(f"only {FORMAT} and generation_artifact_v2 are supported")
    check_contents(request)
    if request.parent is not None:
        raise refuse_unsupported(f"{FORMAT} knows no parent; generation_artifact_v2 does")
    unknown = sorted(set(request.contents) - set(KNOWN_CONTENTS))
    if unknown:
        raise refuse_unsupported(
            f"contents entry {unknown[0][:64]!r} is not supported; {', '.join(KNOWN_CONTENTS)} are"
        )
    if request.codec != "zstd":
        raise refuse_unsupported("codec must be the string 'zstd'")
    if "moe_routes" in request.contents:
        if bounds.router_layout is None:
            raise refuse_unsupported(
                "moe_routes needs capture.routed_experts to be on and a model with mixture-of-experts layers"
            )
        if not 0 <= bounds.route_start <= bounds.prompt_tokens:
            raise ArtifactRefusedError(
                f"routed_experts_prompt_start={bounds.route_start} must not exceed the prompt length "
                f"({bounds.prompt_tokens}) nor be negative",
                code="artifact_invalid_request",
            )
    if "selected_logprobs" in request.contents:
        check_true_logprobs("selected_logprobs", bounds)
    check_lengths(bounds)


def check_contents(request: ArtifactRequest) -> None:
    """Names, each once. Raises `ArtifactRefusedError`."""
    contents: object = request.contents  # of an in-process caller: nothing was parsed
    if not isinstance(contents, tuple | list) or not all(isinstance(entry, str) for entry in contents):
        raise ArtifactRefusedError("contents must be an array of strings", code="artifact_invalid_request")
    if len(set(request.contents)) != len(request.contents):
        raise ArtifactRefusedError("contents must not contain duplicates", code="artifact_invalid_request")


def check_true_logprobs(name: str, bounds: GenerationBounds) -> None:
    """A field of log-probabilities can hold nothing else, and of the output's own tokens only finite ones. Raises
    `ArtifactRefusedError`."""
    if bounds.explicit_logprob_ids:
        raise refuse_unsupported(f"{name} cannot be combined with logprob_token_ids")
    if bounds.logprobs_mode in ("raw_logits", "processed_logits"):
        raise refuse_unsupported(f"{name} are log-probabilities; logprobs_mode={bounds.logprobs_mode!r} gives logits")
    if name == "selected_logprobs" and bounds.logprobs_mode == "processed" and bounds.excludes_forced is not None:
        raise refuse_unsupported(
            f"selected_logprobs of forced_token_ids may be -inf with logprobs_mode='processed' and "
            f"{bounds.excludes_forced}: leave {bounds.excludes_forced} out, or ask for logprobs_mode='raw'"
        )


def check_lengths(bounds: GenerationBounds) -> None:
    """Raises `ArtifactRefusedError`."""
    if not bounds.has_token_ids or bounds.prompt_tokens < 1:
        raise refuse_unsupported("generation artifacts require token ids")
    if bounds.max_tokens < 1 or bounds.num_choices < 1:
        raise refuse_unsupported("a generation artifact needs at least one choice of at least one token")


def admit(request: ArtifactRequest, bounds: GenerationBounds, max_decoded: int, max_object: int) -> Admitted:
    """Worst case: routes from the first token on, every token generated. Raises `ArtifactRefusedError`."""
    layout = bounds.router_layout if "moe_routes" in request.contents else None
    payload = payload_bytes(request.contents, bounds.prompt_tokens, bounds.max_tokens, layout) * bounds.num_choices
    if payload > max_decoded:
        longest = longest_sequence(request.contents, bounds, max_decoded)
        raise refuse_limit(
            f"the artifact may take {payload} bytes and exceeds the decoded byte limit of {max_decoded}; with these "
            f"contents and {bounds.num_choices} choices a sequence may have at most {longest} tokens"
        )
    manifest = (4096 + 24 * (layout.num_routers if layout else 0)) * bounds.num_choices
    if manifest > MAX_MANIFEST_BYTES:
        raise refuse_limit(f"the manifest may take {manifest} bytes; at most {MAX_MANIFEST_BYTES} are allowed")
    encoded = encoded_bound(manifest, payload)
    if encoded > max_object:
        raise refuse_limit(f"the artifact may exceed target max_bytes: up to {encoded} bytes for {max_object}")
    return Admitted(payload, encoded)


def payload_bytes(contents: tuple[str, ...], prompt: int, generated: int, layout: RouterLayout | None) -> int:
    """Most payload bytes of one choice."""
    size = 8 * (prompt + generated)
    if "selected_logprobs" in contents:
        size += 4 * generated
    if layout is not None:
        size += (prompt + generated - 1) * row_bytes(layout)
    return size


def row_bytes(layout: RouterLayout) -> int:
    """Bytes of one token's routes as they are captured: the width follows the number of experts."""
    return layout.num_routers * layout.top_k * id_width(layout.num_experts - 1)


def longest_sequence(contents: tuple[str, ...], bounds: GenerationBounds, max_decoded: int) -> int:
    """Tokens of the longest admissible sequence, prompt included, for the same prompt and number of choices."""
    layout = bounds.router_layout if "moe_routes" in contents else None
    per_choice = max_decoded // bounds.num_choices
    per_token = 8 + (row_bytes(layout) if layout else 0)
    fixed = -row_bytes(layout) if layout else 0
    if "selected_logprobs" in contents:
        per_token, fixed = per_token + 4, fixed - 4 * bounds.prompt_tokens
    return max(0, (per_choice - fixed) // per_token)


def smallest_target() -> int:
    """A target below this many bytes admits nothing."""
    return encoded_bound(align64(4096), 16)


def refuse_unsupported(message: str) -> ArtifactRefusedError:
    return ArtifactRefusedError(message, code="artifact_unsupported")


def refuse_limit(message: str) -> ArtifactRefusedError:
    return ArtifactRefusedError(message, code="artifact_limit_exceeded")
