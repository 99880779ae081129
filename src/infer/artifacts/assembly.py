"""From captured bytes to an encoded object, without copying them. Runs on a worker thread; loads numpy, unlike `capture`."""

from __future__ import annotations

from typing import Any

import numpy as np

from infer.artifacts.capture import Capture, CapturedChoice
from infer.artifacts.generation import ArtifactChoice, GenerationArtifact, RoutedExperts, SelectedLogprobs
from infer.artifacts.v1.encoder import Encoded, encode_v1
from infer.artifacts.v2.assembly import encode_open as encode_open
from infer.config.capture import MOE_ROUTES
from infer.errors import ArtifactError, ArtifactFieldMissingError
from infer.types import CapturedRows, Choice

_DTYPES = {"uint8": "u1", "uint16": "<u2", "int32": "<i4"}


def encode_source(source: Capture | GenerationArtifact, max_payload: int) -> Encoded:
    """The object to deliver. Raises `ArtifactError`."""
    artifact = assemble(source) if isinstance(source, Capture) else source
    return encode_v1(artifact, "zstd", max_payload)


def assemble(capture: Capture) -> GenerationArtifact:
    """An artifact over the captured bytes. Raises `ArtifactError` when something is missing."""
    return GenerationArtifact([_choice(choice) for choice in capture.choices()])


def routed_experts(rows: CapturedRows) -> RoutedExperts:
    """Captured route rows as arrays over the same bytes."""
    ids: Any = np.frombuffer(rows.data, _DTYPES[rows.dtype])
    counts = (rows.num_experts,) * len(rows.layer_ids)
    return RoutedExperts(rows.start, ids.reshape(rows.count, *rows.row_shape), rows.layer_ids, counts)


def artifact_choice(choice: Choice, prompt_token_ids: tuple[int, ...]) -> ArtifactChoice:
    """A finished choice with its routes, as the exporters take it. Raises `ArtifactError` when they are not there."""
    rows = choice.captured.get(MOE_ROUTES)
    if rows is None:
        raise ArtifactFieldMissingError(f"choice {choice.index} has no routes: ask with return_routed_experts=True")
    if rows.error is not None:
        raise ArtifactError(rows.error, code="artifact_capture_failed")
    ids = np.array([*prompt_token_ids, *choice.token_ids], np.int64)
    return ArtifactChoice(choice.index, len(prompt_token_ids), ids, routed_experts(rows))


def _choice(held: CapturedChoice) -> ArtifactChoice:
    routes = None if held.routes is None else routed_experts(held.routes)
    logprobs = None
    if held.logprobs is not None:
        logprobs = SelectedLogprobs(held.num_prompt, np.frombuffer(held.logprobs, "<f4"))
    return ArtifactChoice(held.index, held.num_prompt, np.frombuffer(held.tokens, "<i8"), routes, logprobs)
