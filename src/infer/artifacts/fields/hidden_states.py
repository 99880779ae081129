"""Artifact field hidden_states: what chosen decoder layers gave on for every executed token, in the compute dtype.

Made on the worker thread; owns nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from infer.config.capture import HIDDEN_STATES, ITEM_SIZES, CaptureProfile
from infer.errors import ConfigError
from infer.plugins.artifact_field import API_VERSION, ArtifactFieldSpec, TapFacts, whole_rows
from infer.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from torch import Tensor

SETTING = "capture.hidden_layers"


class HiddenStates:
    """Rows [layers, hidden size]: the residual stream behind each layer, before the model's last norm."""

    def __init__(self, facts: TapFacts) -> None:
        if not facts.hidden_layers:
            raise ConfigError(
                f"hidden_states are captured of the layers in {SETTING}, which is empty", fields=(SETTING,)
            )
        if facts.hidden_size < 1:
            raise ConfigError(
                f"{SETTING}={list(facts.hidden_layers)}: the model does not give out the hidden states of its layers",
                fields=(SETTING,),
            )
        wrong = [layer for layer in facts.hidden_layers if not 0 <= layer < facts.num_layers]
        if wrong or facts.dtype not in ITEM_SIZES:
            reason = f"there is no layer {wrong[0]}" if wrong else f"rows of {facts.dtype} cannot be captured"
            raise ConfigError(
                f"{SETTING}={list(facts.hidden_layers)}: {reason}; the model has layers 0 to {facts.num_layers - 1} and "
                f"computes in {facts.dtype}",
                fields=(SETTING,),
            )
        self._profile = CaptureProfile(
            name=HIDDEN_STATES,
            dtype=facts.dtype,
            row_shape=(len(facts.hidden_layers), facts.hidden_size),
            layer_ids=facts.hidden_layers,
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


@hookimpl
def infer_artifact_fields() -> list[ArtifactFieldSpec]:
    return [
        ArtifactFieldSpec(
            name=HIDDEN_STATES,
            api=API_VERSION,
            factory="infer.artifacts.fields.hidden_states:HiddenStates",
            coordinate="executed_token",
            reuse="prefix_block",
            tap="hidden",
            encoding="floats",
            example={"hidden_layers": (0, 2), "num_layers": 4, "hidden_size": 8},
        )
    ]
