"""prime-rl: an object with base64 of raw bytes, the width chosen by the largest id in the payload."""

from __future__ import annotations

from typing import Any

from infer.artifacts.exporters.rows import base64_text, narrow, on_axis, routes_of
from infer.artifacts.generation import ArtifactChoice

_TYPES = ((255, "u1"), (65_535, "<u2"))


def to_prime_rl(choice: ArtifactChoice, *, num_hidden_layers: int | None = None) -> dict[str, Any]:
    """`{data, shape, start, dtype}` with N - 1 - start rows; the client repeats the last row by itself."""
    routes = routes_of(choice)
    ids = on_axis(routes, num_hidden_layers)
    made = narrow(ids, _TYPES, int(ids.max()) if ids.size else 0, "prime-rl")
    return {
        "data": base64_text(made),
        "shape": list(made.shape),
        "start": routes.token_start,
        "dtype": made.dtype.name,
    }
