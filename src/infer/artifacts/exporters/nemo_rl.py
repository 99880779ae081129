"""NeMo-RL: one string `nrlre1:dtype:SxLxK:base64`, signed by the number of experts, missing rows all -1."""

from __future__ import annotations

import numpy as np

from infer.artifacts.exporters.rows import base64_text, largest_expert_count, narrow, on_axis, routes_of
from infer.artifacts.generation import ArtifactChoice

_TYPES = ((127, "i1"), (32_767, "<i2"), (2**31 - 1, "<i4"))


def to_nemo_nrlre1(choice: ArtifactChoice, *, num_hidden_layers: int | None = None) -> str:
    """N - 1 rows from token 0; rows before the captured ones are -1, where the trainer's own router runs."""
    routes = routes_of(choice)
    ids = narrow(on_axis(routes, num_hidden_layers), _TYPES, largest_expert_count(routes) - 1, "NeMo-RL")
    missing = np.full((routes.token_start, *ids.shape[1:]), -1, ids.dtype)
    made = np.concatenate([missing, ids])
    return f"nrlre1:{made.dtype.name}:{'x'.join(map(str, made.shape))}:{base64_text(made)}"
