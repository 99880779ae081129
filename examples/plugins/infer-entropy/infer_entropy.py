"""An artifact field: the entropy, in nats, of the distribution that every token was predicted from.

Made and called on the worker thread; owns nothing. torch comes with the tensors: declaring a field must not import it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from infer import ConfigError
from infer.config.capture import CaptureProfile
from infer.plugins import ArtifactFieldSpec, TapFacts, hookimpl, whole_rows

if TYPE_CHECKING:
    from torch import Tensor


class Entropy:
    """Rows of one float32: -sum of p log p over the vocabulary, at temperature 1, before any processor."""

    def __init__(self, facts: TapFacts) -> None:
        if facts.vocab_size < 1:
            raise ConfigError("entropy needs the model's logits, and this model does not give them out")
        self._profile = CaptureProfile(
            name="token_entropy", dtype="float32", row_shape=(1,), model_identity=facts.model_identity
        )

    def profile(self) -> CaptureProfile:
        return self._profile

    def select(self, tap: Tensor, tokens: Tensor, out: Tensor) -> None:
        """tap [1, some tokens, vocabulary] float32, tokens [n] -> out [n, 1]."""
        logits = tap[0].index_select(0, tokens).double()  # each row by itself, whatever is beside it
        logprobs = logits - logits.logsumexp(-1, keepdim=True)
        # A forbidden token has probability 0 and log-probability -inf, and adds nothing.
        out.copy_((-logprobs.exp() * logprobs.clamp_min(-1e4)).sum(-1, keepdim=True))

    def encode(self, rows: bytes, count: int) -> bytes:
        return whole_rows(self._profile, rows, count)

    def decode(self, data: bytes, count: int) -> bytes:
        return whole_rows(self._profile, data, count)


@hookimpl
def infer_artifact_fields() -> list[ArtifactFieldSpec]:
    return [
        ArtifactFieldSpec(
            name="token_entropy",
            api=1,
            factory=f"{__name__}:Entropy",
            coordinate="predicted_token",
            reuse="prefix_block",
            tap="logits",
            encoding="floats",
            example={"vocab_size": 16},
        )
    ]
