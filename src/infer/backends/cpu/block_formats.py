"""Block types of a GGUF that the native kernels multiply as they are stored, and the library's number of each.

Plain data.
"""

from __future__ import annotations

from infer.plugins.platform import BlockFormat

BLOCK_FORMATS = {
    "Q8_0": BlockFormat(32, 34),
    "Q4_0": BlockFormat(32, 18),
    "Q4_1": BlockFormat(32, 20),
    "Q5_0": BlockFormat(32, 22),
    "Q5_1": BlockFormat(32, 24),
    "Q4_K": BlockFormat(256, 144),
    "Q5_K": BlockFormat(256, 176),
    "Q6_K": BlockFormat(256, 210),
    "Q2_K": BlockFormat(256, 84),
    "Q3_K": BlockFormat(256, 110),
}
BLOCK_KINDS = {name: number for number, name in enumerate(BLOCK_FORMATS)}
"""The library's number of each, see csrc/block_format.h."""
