"""The native operations: checks shapes and layouts, allocates results, calls the library.

Called on the worker thread. Every result is independent of what else is in the step, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infer.backends.cpu.block_formats import BLOCK_FORMATS, BLOCK_KINDS
from infer.backends.cpu.experts import NativeExperts
from infer.backends.cpu.kernels import Kernels
from infer.backends.cpu.library import AttentionArgs, Library
from infer.backends.cpu.tensors import (
    FP8,
    LANES,
    PACKED_DIM,
    cache_number,
    dtype_number,
    side_by_side,
    with_dense_rows,
)
from infer.backends.cpu.weights import NativeWeights
from infer.backends.reference.scratch import Scratch
from infer.plugins.platform import UNSCALED, AttentionMetadata, BlockOps, KVScales, Ops


def make_kernels(library: Library, scratch: Scratch | None = None) -> tuple[NativeOps, NativeExperts, NativeWeights]:
    """Over one library and its threads; large results lie in `scratch`."""
    scratch = scratch or Scratch()
    return NativeOps(library, scratch), NativeExperts(library, scratch), NativeWeights(library, scratch)


def make_ops(native: NativeOps, experts: NativeExperts, weights: NativeWeights) -> Ops:
    """The table of their operations as layers call them."""
    return Ops(
        embedding=native.embedding,
        linear=native.linear,
        rms_norm=native.rms_norm,
        rotary=native.rotary,
        silu_and_mul=native.silu_and_mul,
        gelu_tanh_and_mul=native.gelu_tanh_and_mul,
        write_kv=native.write_kv,
        attention=native.attention,
        gather_rows=native.gather_rows,
        add_rms_norm=native.add_rms_norm,
        topk_router=experts.route,
        moe=experts.moe,
        pack=weights.pack,
        unpack=weights.unpack,
        head_logits=native.head_logits,
        rotary_angles=native.rotary_angles,
        sigmoid=native.sigmoid,
        tanh=native.tanh,
        draw=native.draw,
        draw_allowed=native.draw_allowed,
        best=native.best,
        scale=native.scale,
        widen=experts.widen,
        add_shared=experts.add_shared,
        blocks=BlockOps(
            formats=BLOCK_FORMATS,
            row_multiple=LANES,
            pack=weights.pack_blocks,
            rows=native.block_rows,
            linear=native.block_linear,
            linear_parts=native.block_linear_parts,
            moe=experts.block_moe,
            encoders=weights.encoders(),
        ),
    )


class NativeOps(Kernels):
    """Shapes and meanings as `plugins.platform.Ops` documents them."""

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        if weight.dim() != PACKED_DIM:
            return self.gather_rows(weight, ids)
        ids, inner = ids.contiguous(), weight.shape[1] * weight.shape[3]
        out = self._new(weight.dtype, len(ids), inner)
        if not self._dry:
            self._call.infer_packed_rows(
                dtype_number(weight), weight.data_ptr(), ids.data_ptr(), out.data_ptr(), len(ids), inner
            )
        return out

    def gather_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        rows = rows.contiguous()
        out = self._new(x.dtype, len(rows), x.shape[1])
        if not self._dry:
            x = x.contiguous()
            self._call.infer_gather_rows(
                x.data_ptr(), rows.data_ptr(), out.data_ptr(), len(rows), x.shape[1] * x.element_size()
            )
        return out

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._linear(x, weight, bias, x.dtype)

    def head_logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return self._linear(hidden, weight, None, torch.float32)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        x = self._dense(x)
        packed = weight.dim() == PACKED_DIM
        weight = weight if packed else weight.contiguous()
        tokens, inner = x.shape
        outer = weight.shape[0] * LANES if packed else weight.shape[0]
        if bias is not None:
            bias = bias.to(x.dtype).contiguous()
        out = self._new(out_dtype, tokens, outer)
        if self._dry:
            return out
        self._call.infer_linear(
            self._library.pool,
            dtype_number(x, weight),
            packed,
            out_dtype == torch.float32,
            x.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            tokens,
            outer,
            inner,
        )
        return out

    def block_rows(self, ids: Tensor, packed: Tensor, kind: str, inner: int, dtype: torch.dtype) -> Tensor:
        ids = ids.contiguous()
        out = self._new(dtype, ids.shape[0], inner)
        if self._dry:
            return out
        self._call.infer_block_rows(
            dtype_number(out), BLOCK_KINDS[kind], packed.data_ptr(), ids.data_ptr(), out.data_ptr(), ids.shape[0], inner
        )
        return out

    def block_linear(self, x: Tensor, packed: Tensor, kind: str, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        x = self._dense(x)
        (tokens, inner), outer = x.shape, packed.shape[0] * LANES
        if bias is not None:
            bias = bias.to(x.dtype).contiguous()
        out = self._new(dtype, tokens, outer)
        work = self._new(torch.uint8, self._call.infer_block_work(self._library.pool, tokens, inner))
        if self._dry:
            return out
        self._call.infer_block_linear(
            self._library.pool,
            dtype_number(x),
            dtype == torch.float32,
            BLOCK_KINDS[kind],
            x.data_ptr(),
            packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            work.data_ptr(),
            tokens,
            outer,
            inner,
        )
        return out

    def block_linear_parts(
        self, x: Tensor, parts: Sequence[tuple[Tensor, str]], bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        x = self._dense(x)
        tokens, counts = len(x), [len(packed) * LANES for packed, _ in parts]
        out, row = self._new(dtype, tokens, sum(counts)), 0
        for (packed, kind), count in zip(parts, counts, strict=True):
            made = self.block_linear(x, packed, kind, None if bias is None else bias[row : row + count], dtype)
            if not self._dry:
                size = dtype.itemsize
                place = out.data_ptr() + row * size
                self._call.infer_place_rows(made.data_ptr(), place, tokens, count * size, out.shape[1] * size)
            row += count
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, None, weight, eps)[0]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._norm(x, residual, weight, eps)

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x = self._dense(x)
        out = self._new(x.dtype, *x.shape)
        total = x if residual is None else self._new(x.dtype, *x.shape)
        if self._dry:
            return out, total
        width = x.shape[-1]
        weight = (weight.float() if x.dtype == torch.float32 else weight).contiguous()
        residual = None if residual is None else residual.contiguous()
        self._call.infer_rms_norm(
            self._library.pool,
            dtype_number(x),
            dtype_number(weight),
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            total.data_ptr(),
            x.numel() // width if width else 0,
            width,
            eps,
        )
        return out, total

    def rotary_angles(self, positions: Tensor, frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        positions, frequencies = positions.contiguous(), frequencies.contiguous()
        shape = positions.shape[0], frequencies.shape[0]
        cos, sin = self._new(torch.float32, *shape), self._new(torch.float32, *shape)
        if self._dry:
            return cos, sin
        self._call.infer_angles(
            positions.data_ptr(), frequencies.data_ptr(), factor, cos.data_ptr(), sin.data_ptr(), *shape
        )
        return cos, sin

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.float().contiguous(), sin.float().contiguous()
        both = side_by_side(q, k)
        if both is None:
            return self._rotate(q, cos, sin), self._rotate(k, cos, sin)
        rotated = self._rotate(both, cos, sin)
        return rotated[:, : q.shape[1]], rotated[:, q.shape[1] :]

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        tokens, heads, size = x.shape
        x = with_dense_rows(x)
        out = self._new(x.dtype, tokens, heads, size)
        if self._dry:
            return out
        self._call.infer_rotary(
            self._library.pool,
            dtype_number(x),
            x.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            out.data_ptr(),
            tokens,
            heads,
            size,
            cos.shape[-1],
            x.stride(0),
        )
        return out

    def draw(self, logits: Tensor, *columns: Tensor) -> Tensor:
        return self._draw(logits, columns, None)

    def draw_allowed(self, logits: Tensor, *columns: Tensor) -> Tensor:
        *columns_of_draw, masks = columns
        needed = len(columns[0]), -(-logits.shape[1] // 32) * 4
        if masks.dtype != torch.uint8 or masks.shape != needed:
            raise ValueError(f"masks are {masks.dtype} {tuple(masks.shape)}; uint8 {needed} is needed")
        return self._draw(logits, columns_of_draw, masks.contiguous())

    def _draw(self, logits: Tensor, columns: Sequence[Tensor], masks: Tensor | None) -> Tensor:
        count, width = len(columns[0]), logits.shape[1]
        ids = self._new(torch.int64, count)
        work = self._new(torch.uint8, self._call.infer_draw_work(self._library.pool, masks is not None, width))
        if self._dry:
            return ids
        given = [tensor.contiguous() for tensor in (logits, *columns)]
        self._call.infer_draw(
            self._library.pool,
            *[tensor.data_ptr() for tensor in given],
            None if masks is None else masks.data_ptr(),
            ids.data_ptr(),
            work.data_ptr(),
            count,
            width,
        )
        return ids

    def best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        logits = self._dense(logits)
        count, width = logits.shape
        ids, values = self._new(torch.int64, count), self._new(torch.float32, count)
        if not self._dry:
            self._call.infer_best(
                self._library.pool, logits.data_ptr(), ids.data_ptr(), values.data_ptr(), count, width
            )
        return ids, values

    def scale(self, x: Tensor, factor: float) -> Tensor:
        x = self._dense(x)
        out = self._new(x.dtype, *x.shape)
        if not self._dry:
            self._call.infer_scale(dtype_number(x), x.data_ptr(), out.data_ptr(), x.numel(), factor)
        return out

    def sigmoid(self, x: Tensor) -> Tensor:
        return self._unary(x, 0)

    def tanh(self, x: Tensor) -> Tensor:
        return self._unary(x, 1)

    def _unary(self, x: Tensor, kind: int) -> Tensor:
        x = self._dense(x)
        out = self._new(x.dtype, *x.shape)
        if not self._dry:
            self._call.infer_unary(dtype_number(x), kind, x.data_ptr(), out.data_ptr(), x.numel())
        return out

    def silu_and_mul(self, x: Tensor) -> Tensor:
        return self._gate(x, 0)

    def gelu_tanh_and_mul(self, x: Tensor) -> Tensor:
        return self._gate(x, 1)

    def _gate(self, x: Tensor, kind: int) -> Tensor:
        x = self._dense(x)
        rows, width = x.shape
        out = self._new(x.dtype, rows, width // 2)
        if self._dry:
            return out
        self._call.infer_gate(self._library.pool, dtype_number(x), kind, x.data_ptr(), out.data_ptr(), rows, width // 2)
        return out

    def write_kv(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        scales: KVScales = UNSCALED,
    ) -> None:
        if self._dry:
            return
        slots = slot_mapping.contiguous()
        k, v = with_dense_rows(k), with_dense_rows(v)
        self._call.infer_write_kv(
            dtype_number(k, v),
            cache_number(k_cache, v_cache),
            k.data_ptr(),
            v.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            slots.data_ptr(),
            k.shape[0],
            k.shape[1] * k.shape[2],
            v.shape[1] * v.shape[2],
            k.stride(0),
            v.stride(0),
            *scales,
        )

    def attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
        softcap: float | None,
        scales: KVScales = UNSCALED,
    ) -> Tensor:
        tokens, heads, head_size = q.shape
        dtype, cache_dtype = q.dtype, cache_number(k_cache, v_cache)
        q = with_dense_rows(q if cache_dtype == FP8 else q.to(k_cache.dtype))
        out = self._new(q.dtype, tokens, heads, v_cache.shape[3])
        if self._dry:
            return out.to(dtype)
        table = metadata.block_table.contiguous()
        args = AttentionArgs(
            q=q.data_ptr(),
            k_cache=k_cache.data_ptr(),
            v_cache=v_cache.data_ptr(),
            out=out.data_ptr(),
            query_starts=metadata.query_starts.data_ptr(),
            seq_lens=metadata.seq_lens.data_ptr(),
            block_table=table.data_ptr(),
            rows=len(metadata.seq_lens_host),
            table_width=table.shape[1],
            block_size=k_cache.shape[1],
            heads=heads,
            kv_heads=k_cache.shape[2],
            head_size=head_size,
            value_size=v_cache.shape[3],
            q_stride=q.stride(0),
            scale=scale * scales[0],
            softcap=softcap or 0.0,
            window=window or 0,
            cache_dtype=cache_dtype,
            out_scale=scales[1],
        )
        self._call.infer_attention(self._library.pool, dtype_number(q), args)
        return out.to(dtype)
