"""Weights on their way into the kernels: into the order they are read in, and from plain numbers into blocks.

Called on the worker thread while a model is loaded, with all threads of the platform.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from infer.backends.cpu.block_formats import BLOCK_FORMATS, BLOCK_KINDS
from infer.backends.cpu.kernels import Kernels
from infer.backends.cpu.tensors import DTYPES, LANES, PACKED_DIM

PLAIN = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 3}
"""The library's number of what blocks are made of."""
ENCODERS = (("Q8_0", "nearest to 127 steps"), ("Q4_1", "best fit of 3"))
"""Block types that the library makes, and how it rounds (csrc/encode.cpp)."""
WORD = 4
"""Bytes of a row that lie beside those of the other rows in a packed weight."""


class NativeWeights(Kernels):
    """Entries of `plugins.platform.Ops` and `BlockOps` that are called once per weight."""

    def pack(self, weight: Tensor) -> Tensor:
        """[N, I] -> [N / 16, I / P, 16, P], a copy; the weight itself where the shape does not divide."""
        pair = 2 if weight.dtype == torch.bfloat16 else 1
        rows, inner = weight.shape
        if weight.dtype not in DTYPES or rows % LANES or inner % pair or not weight.numel():
            return weight
        shape = (rows // LANES, inner // pair, LANES, pair)
        if weight.is_meta:
            return weight.new_empty(shape)
        weight = weight.contiguous()
        packed = torch.empty(shape, dtype=weight.dtype)
        self._call.infer_pack_words(
            self._library.pool, weight.data_ptr(), packed.data_ptr(), rows, inner * weight.itemsize // WORD
        )
        return packed

    @staticmethod
    def unpack(weight: Tensor) -> Tensor:
        """What `pack` was given."""
        if weight.dim() != PACKED_DIM:
            return weight
        return weight.transpose(1, 2).reshape(weight.shape[0] * LANES, -1)

    def pack_blocks(self, stored: Tensor, kind: str) -> Tensor:
        """Rows of blocks -> tiles of sixteen rows, [N / 16, 16 * bytes of a row]."""
        stored = stored.contiguous()
        rows, row_bytes = stored.shape
        if self._dry:
            return stored.new_empty(rows // LANES, LANES * row_bytes)
        form = BLOCK_FORMATS[kind]
        packed = torch.empty(rows // LANES, LANES * row_bytes, dtype=torch.uint8)
        inner = row_bytes // form.num_bytes * form.size
        self._call.infer_pack_blocks(
            self._library.pool, BLOCK_KINDS[kind], stored.data_ptr(), packed.data_ptr(), rows, inner
        )
        return packed

    def encoders(self) -> dict[tuple[str, str], partial[bool]]:
        """`BlockOps.encoders`."""
        return {(kind, rounding): partial(self._encode, kind) for kind, rounding in ENCODERS}

    def _encode(self, kind: str, rows: Tensor, out: Tensor) -> bool:
        if rows.dtype not in PLAIN or not out.is_contiguous():
            return False
        rows, blocks = rows.contiguous(), rows.numel() // BLOCK_FORMATS[kind].size
        return bool(
            self._call.infer_encode_blocks(
                self._library.pool, PLAIN[rows.dtype], BLOCK_KINDS[kind], rows.data_ptr(), blocks, out.data_ptr()
            )
        )
