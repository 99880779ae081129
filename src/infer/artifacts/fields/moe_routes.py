"""Artifact field moe_routes: the experts that every router chose for every executed token, in the router's own order.

Made on the worker thread; owns nothing. Source of the row rule: docs/artifacts.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from infer.config.capture import MOE_ROUTES, CaptureProfile
from infer.errors import ConfigError
from infer.plugins.artifact_field import API_VERSION, ArtifactFieldSpec, TapFacts, whole_rows
from infer.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from torch import Tensor

SETTING = "capture.routed_experts"


class MoeRoutes:
    """Rows [routers, experts per token] of logical expert ids, below the expert count."""

    def __init__(self, facts: TapFacts) -> None:
        layers = facts.routed_layers
        if not layers:
            raise ConfigError(
                f"{SETTING}=True: the model has no layer with experts (mixture-of-experts); leave it off, or load another "
                "model",
                fields=(SETTING,),
            )
        shapes = {(layer.num_experts, layer.top_k) for layer in layers}
        num_experts, top_k = layers[0].num_experts, layers[0].top_k
        if len(shapes) > 1 or not 0 < top_k <= num_experts or min(layer.layer_id for layer in layers) < 0:
            found = ", ".join(f"layer {r.layer_id}: {r.top_k} of {r.num_experts}" for r in layers)
            raise ConfigError(
                f"{SETTING}=True: every router must choose the same number, at least 1, of the same number of experts, in "
                f"layers counted from 0; the model has {found}",
                fields=(SETTING,),
            )
        self._profile = CaptureProfile(
            name=MOE_ROUTES,
            dtype=id_dtype(num_experts),
            row_shape=(len(layers), top_k),
            layer_ids=tuple(layer.layer_id for layer in layers),
            num_experts=num_experts,
            model_identity=facts.model_identity,
        )

    def profile(self) -> CaptureProfile:
        return self._profile

    def select(self, tap: Tensor, tokens: Tensor, out: Tensor) -> None:
        out.copy_(tap.index_select(1, tokens).transpose(0, 1))

    def encode(self, rows: bytes, count: int) -> bytes:
        return whole_rows(self._profile, rows, count)

    def decode(self, data: bytes, count: int) -> bytes:
        return whole_rows(self._profile, data, count)


def id_dtype(num_experts: int) -> str:
    """The narrowest type that holds every id of the model, whatever ids a request happens to use."""
    if num_experts <= 2**8:
        return "uint8"
    return "uint16" if num_experts <= 2**16 else "int32"


@hookimpl
def infer_artifact_fields() -> list[ArtifactFieldSpec]:
    return [
        ArtifactFieldSpec(
            name=MOE_ROUTES,
            api=API_VERSION,
            factory="infer.artifacts.fields.moe_routes:MoeRoutes",
            coordinate="executed_token",
            reuse="prefix_block",
            tap="router",
            encoding="ids",
            example={"routed_layers": ((1, 300, 2), (3, 300, 2)), "num_layers": 4, "hidden_size": 8},
        )
    ]
