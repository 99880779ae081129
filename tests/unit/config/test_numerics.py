"""The promise about bits: what is asked, what the platform can, what comes of it."""

from __future__ import annotations

import pytest

from infer.config.numerics import Numerics, choose_numerics
from infer.config.platform import PlatformLimits
from infer.errors import ConfigError


def limits(*, invariant: bool) -> PlatformLimits:
    return PlatformLimits(
        name="some", total_memory=1, available_memory=1, dtypes=("float32",), threads=1, invariant=invariant
    )


@pytest.mark.parametrize(
    ("asked", "can", "kept"),
    [
        ("auto", True, "invariant"),
        ("auto", False, "fast"),
        ("invariant", True, "invariant"),
        ("fast", True, "fast"),
        ("fast", False, "fast"),
    ],
)
def test_choice(asked: str, can: bool, kept: Numerics) -> None:
    assert choose_numerics(asked, limits(invariant=can)) == kept  # type: ignore[arg-type]


def test_a_promise_that_cannot_be_kept_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"numerics\.mode=invariant.*'some'.*platform\.name=cpu"):
        choose_numerics("invariant", limits(invariant=False))
