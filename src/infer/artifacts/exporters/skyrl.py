"""SkyRL: an object with base64 of raw bytes, signed above 255, padding rows of distinct experts beside a mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from infer.artifacts.exporters.padding import pad_rows
from infer.artifacts.exporters.rows import base64_text, from_the_start, largest_expert_count, narrow, on_axis
from infer.artifacts.generation import ArtifactChoice

_TYPES = ((255, "u1"), (32_767, "<i2"), (2**31 - 1, "<i4"))


@dataclass(frozen=True, slots=True)
class SkyRLRoutes:
    routed_experts: dict[str, Any]
    """`{data, shape, dtype}`."""
    padding_mask: tuple[bool, ...]
    """True for rows that stand for nothing."""


def to_skyrl(choice: ArtifactChoice, *, pad_to: int | None = None, num_hidden_layers: int | None = None) -> SkyRLRoutes:
    """N - 1 rows, or `pad_to` rows: those added hold the experts 0, 1, ... K - 1."""
    routes = from_the_start(choice, "SkyRL")
    ids = on_axis(routes, num_hidden_layers)
    padded = pad_rows(ids, len(ids) if pad_to is None else pad_to, largest_expert_count(routes), spread=False)
    made = narrow(padded.expert_ids, _TYPES, int(padded.expert_ids.max()) if padded.expert_ids.size else 0, "SkyRL")
    body = {"data": base64_text(made), "shape": list(made.shape), "dtype": made.dtype.name}
    return SkyRLRoutes(body, tuple(padded.padding_mask.tolist()))
