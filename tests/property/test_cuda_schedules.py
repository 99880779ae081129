"""Steps on the platform "cuda" in any order of beginning and finishing, with results that come late as they like: nothing is
read before it is there, nothing is used again while somebody is still at it, and every step sees its own input."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.decode_driver import MOST_ROWS, DecodeDriver

ROWS = st.lists(st.integers(1, 31), min_size=1, max_size=MOST_ROWS, unique=True)


@pytest.mark.row("ENG-CUDAGRAPH", "for every batch size 1..max including padded sizes")
@given(
    st.lists(st.one_of(ROWS, st.none()), min_size=1, max_size=14), st.lists(st.booleans(), max_size=20), st.booleans()
)
def test_any_schedule(schedule: list[list[int] | None], late: list[bool], cut: bool) -> None:
    """Rows begin a step, None finishes the oldest. `late` says of the device whether it is behind when it is looked at."""
    coins = iter(late)
    driver = DecodeDriver(lambda: next(coins, False))
    for slots in schedule:
        if slots is not None:
            driver.step(slots)
        elif driver.flying:
            driver.finish()
    while driver.flying and not cut:
        driver.finish()
    driver.close()
