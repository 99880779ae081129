"""vLLM and vime: base64 of a NumPy file, all decoder layers, the width chosen by the number of experts."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

import numpy as np

from infer.artifacts.exporters.rows import largest_expert_count, narrow, on_axis, routes_of
from infer.artifacts.generation import ArtifactChoice

_TYPES = ((255, "u1"), (65_535, "<u2"), (2**31 - 1, "<i4"))


@dataclass(frozen=True, slots=True)
class VllmRoutes:
    routed_experts: str
    """Base64 of the .npy file, shape [N - 1 - start, layers, K]."""
    routed_experts_prompt_start: int
    layer_ids: tuple[int, ...]
    """Layers whose cells mean something; vLLM's format itself does not say."""


def to_vllm_npy(choice: ArtifactChoice, *, num_hidden_layers: int | None = None) -> VllmRoutes:
    """vLLM's own layer axis counts every decoder layer: give `num_hidden_layers` for that, None for MoE layers only."""
    routes = routes_of(choice)
    ids = narrow(on_axis(routes, num_hidden_layers), _TYPES, largest_expert_count(routes) - 1, "vLLM")
    file = io.BytesIO()
    np.save(file, ids, allow_pickle=False)
    text = base64.b64encode(file.getvalue()).decode("ascii")
    return VllmRoutes(text, routes.token_start, tuple(routes.router_ids))
