"""Eight-bit floats (e4m3fn) by their bits: GPUs before 8.9 have no such type, and rounding is to be the same everywhere.

Called inside kernels; pure.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def encode_e4m3(x: tl.tensor) -> tl.tensor:
    """fp32 -> uint8, rounded to nearest even; beyond +-448 the largest number, and a NaN stays a NaN.

    Normal numbers: the mantissa is rounded in place and the exponent rebiased. Below 2**-6 the step is 2**-9: adding
    2**14, whose unit in the last place that is, rounds to it and leaves the count of steps in the low bits.
    """
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    absolute = size.to(tl.float32, bitcast=True)
    rounded = size + 0x7FFFF + ((size >> 20) & 1)
    normal = (rounded >> 20) - ((127 - 7) << 3)
    steps = (absolute + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, steps, tl.minimum(normal, 0x7E))
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | sign).to(tl.uint8)


@triton.jit
def decode_e4m3(code: tl.tensor) -> tl.tensor:
    """uint8 -> fp16, exactly: the same bits under fp16's exponent are 2**8 too small, for subnormals too."""
    bits = code.to(tl.int16)
    moved = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    value = moved.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)
