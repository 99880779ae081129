"""Conformance of a platform's staging: what crosses between host and device is what was handed over.

Called by the kit of platforms, on the calling thread; owns nothing.
"""

from __future__ import annotations

import numpy as np
import torch

from infer.plugins.platform import Platform, SupportsStaging
from infer.testing.kits import expect

COUNT = 1 << 12


def check_staging(platform: Platform) -> None:
    """What is uploaded is there for the next operation, whatever becomes of the array; what is fetched is what was there,
    whatever comes next."""
    if not isinstance(platform, SupportsStaging):
        return
    with platform.step_context():
        kept = []
        for turn in range(6):
            numbers = np.arange(COUNT, dtype=np.int64) + turn
            uploaded, small, empty = platform.upload(
                [numbers, np.arange(3, dtype=np.float32), np.empty((0, 2), dtype=np.int32)]
            )
            numbers.fill(-1)
            expect(tuple(empty.shape) == (0, 2) and empty.dtype == torch.int32, "an empty array changes on its way")
            made = uploaded * 3
            kept.append((platform.fetch([made, small[1], small > 1, empty]), turn))
            made.fill_(-1)
            uploaded.fill_(-1)
        for fetch, turn in reversed(kept):
            found, scalar, truth, nothing = fetch.wait()
            expect(fetch.ready(), "a result that was waited for is not ready")
            expect(
                found.device.type == "cpu" and found.dtype == torch.int64, f"fetched {found.dtype} on {found.device}"
            )
            expect(torch.equal(found, (torch.arange(COUNT) + turn) * 3), "a result is not what was fetched")
            expect(scalar.shape == () and float(scalar) == 1.0, "a single number changes on its way")
            expect(truth.tolist() == [False, False, True], "truth values change on their way")
            expect(tuple(nothing.shape) == (0, 2), "an empty result changes on its way")
            found.fill_(0)
