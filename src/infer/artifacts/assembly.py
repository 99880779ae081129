"""From captured bytes to an encoded object, without copying them. Runs on a worker thread; loads numpy, unlike `capture`."""

from __future__ import annotations

import numpy as np

from infer.artifacts.capture import Capture, CapturedChoice
from infer.artifacts.generation import ArtifactChoice, GenerationArtifact, RoutedExperts, SelectedLogprobs
from infer.artifacts.v1.encoder import Encoded, encode_v1

_ROUTE_DTYPES = {1: "u1", 2: "<u2", 4: "<i4", 8: "<i8"}


def encode_source(source: Capture | GenerationArtifact, max_payload: int) -> Encoded:
    """The object to deliver. Raises `ArtifactError`."""
    artifact = assemble(source) if isinstance(source, Capture) else source
    return encode_v1(artifact, "zstd", max_payload)


def assemble(capture: Capture) -> GenerationArtifact:
    """An artifact over the captured bytes. Raises `ArtifactError` when something is missing."""
    return GenerationArtifact([_choice(choice) for choice in capture.choices()])


def _choice(held: CapturedChoice) -> ArtifactChoice:
    routes = logprobs = None
    if held.routes is not None and held.layout is not None:
        ids = np.frombuffer(held.routes, _ROUTE_DTYPES[held.route_width])
        shape = (-1 if len(ids) else 0, held.layout.num_routers, held.layout.top_k)
        routes = RoutedExperts(held.route_start, ids.reshape(shape), held.layout.router_ids, held.layout.expert_counts)
    if held.logprobs is not None:
        logprobs = SelectedLogprobs(held.num_prompt, np.frombuffer(held.logprobs, "<f4"))
    return ArtifactChoice(held.index, held.num_prompt, np.frombuffer(held.tokens, "<i8"), routes, logprobs)
