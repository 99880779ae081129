"""SGLang's encoding, as slime, miles, AReaL and SGLang's OpenAI route read it: base64 of flat int32."""

from __future__ import annotations

from typing import Any

from infer.artifacts.exporters.rows import base64_text, from_the_start, narrow, on_axis, routes_of
from infer.artifacts.generation import ArtifactChoice

_TYPES = ((2**31 - 1, "<i4"),)


def to_sglang_int32(choice: ArtifactChoice, *, num_hidden_layers: int | None = None) -> dict[str, Any]:
    """Keys of `meta_info`: exactly (N - 1 - start) x layers x K values, and the start."""
    routes = routes_of(choice)
    ids = on_axis(routes, num_hidden_layers)
    made = narrow(ids, _TYPES, int(ids.max()) if ids.size else 0, "SGLang")
    return {"routed_experts": base64_text(made), "routed_experts_start_len": routes.token_start}


def to_miles(choice: ArtifactChoice, *, num_hidden_layers: int | None = None) -> dict[str, Any]:
    """As above with N - 1 rows, which miles takes for the whole sequence."""
    from_the_start(choice, "miles")
    return to_sglang_int32(choice, num_hidden_layers=num_hidden_layers)
