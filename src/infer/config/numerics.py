"""Which promise about bits is kept: decided from what was asked and what the platform can. Pure."""

from __future__ import annotations

from typing import Literal

from infer.config.platform import PlatformLimits
from infer.errors import ConfigError

Numerics = Literal["fast", "invariant"]
"""What holds, see `NumericsSection.mode`."""


def choose_numerics(asked: Literal["auto", "fast", "invariant"], limits: PlatformLimits) -> Numerics:
    """Raises `ConfigError` when "invariant" is asked of a platform that cannot keep it."""
    if asked == "invariant" and not limits.invariant:
        raise ConfigError(
            f"numerics.mode=invariant: on platform {limits.name!r} the last bits change with the batch; choose "
            "platform.name=cpu (native kernels) or numerics.mode=fast",
            fields=("numerics.mode", "platform.name"),
        )
    return "invariant" if limits.invariant and asked != "fast" else "fast"
