"""The native operations of sparse blocks: the choice of experts, their products, the sum with the shared expert.

Called on the worker thread. Every token's result is independent of what else is in the step, bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from infer.backends.cpu.block_formats import BLOCK_KINDS
from infer.backends.cpu.kernels import Kernels
from infer.backends.cpu.tensors import LANES, PACKED_DIM, dtype_number
from infer.plugins.platform import ExpertStack, Routing

PACKED, PLAIN = -1, -2
"""Forms of a stack that is not in blocks, see csrc/api.h."""
SCORING = {"softmax": 0, "top_k_softmax": 1, "sigmoid": 2}
GROUP_SCORE = {"max": 0, "top2_sum": 1}


class NativeExperts(Kernels):
    """Shapes and meanings as `plugins.platform.Ops` documents them."""

    def route(self, logits: Tensor, rule: Routing, bias: Tensor | None, tap: Tensor | None) -> tuple[Tensor, Tensor]:
        (tokens, experts), top_k = logits.shape, rule.top_k
        weights, ids = self._new(torch.float32, tokens, top_k), self._new(torch.int64, tokens, top_k)
        if self._dry:
            return weights, ids
        logits = logits.contiguous()
        bias = None if bias is None else bias.float().contiguous()
        direct = tap is not None and tap.stride(1) == 1 and len(tap) >= tokens
        place = tap if direct else None
        self._call.infer_route(
            self._library.pool,
            dtype_number(logits),
            logits.data_ptr(),
            None if bias is None else bias.data_ptr(),
            weights.data_ptr(),
            ids.data_ptr(),
            None if place is None else place.data_ptr(),
            0 if place is None else place.itemsize,
            0 if place is None else place.stride(0) * place.itemsize,
            tokens,
            experts,
            top_k,
            SCORING[rule.scoring],
            rule.renormalize,
            rule.num_groups,
            rule.top_groups,
            GROUP_SCORE[rule.group_score],
            rule.scale,
        )
        if tap is not None and not direct:
            tap[:tokens].copy_(ids)
        return weights, ids

    def moe(self, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return self.block_moe(x, ids, weights, ExpertStack(gate_up, None), ExpertStack(down, None))

    def block_moe(self, x: Tensor, ids: Tensor, weights: Tensor, gate_up: ExpertStack, down: ExpertStack) -> Tensor:
        x, ids, weights = self._dense(x), ids.contiguous(), weights.float().contiguous()
        (tokens, top_k), size = ids.shape, x.shape[1]
        experts = _rows(down) // size
        inner = _rows(gate_up) // (2 * experts)
        up_data, down_data = gate_up.data.contiguous(), down.data.contiguous()
        up_form, down_form = _form(gate_up), _form(down)
        floats = [stack.data for stack in (gate_up, down) if stack.kind is None]
        dtype = dtype_number(x, *floats)
        out = self._new(x.dtype, tokens, size)
        num_bytes = self._call.infer_moe_work(self._library.pool, dtype, up_form, down_form, tokens, top_k, size, inner)
        work = self._new(torch.uint8, num_bytes)
        if self._dry:
            return out
        self._call.infer_moe(
            self._library.pool,
            dtype,
            x.data_ptr(),
            ids.data_ptr(),
            weights.data_ptr(),
            up_data.data_ptr(),
            up_form,
            down_data.data_ptr(),
            down_form,
            out.data_ptr(),
            work.data_ptr(),
            tokens,
            top_k,
            experts,
            size,
            inner,
        )
        return out

    def widen(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return x
        x = self._dense(x)
        out = self._new(torch.float32, *x.shape)
        if not self._dry:
            dtype_number(x)
            self._call.infer_widen(x.data_ptr(), out.data_ptr(), x.numel())
        return out

    def add_shared(self, x: Tensor, shared: Tensor, gate: Tensor | None) -> Tensor:
        x, shared = self._dense(x), self._dense(shared)
        out = self._new(x.dtype, *x.shape)
        if self._dry:
            return out
        self._call.infer_add_shared(
            dtype_number(x, shared) if gate is None else dtype_number(x, shared, gate),
            x.data_ptr(),
            shared.data_ptr(),
            None if gate is None else gate.contiguous().data_ptr(),
            out.data_ptr(),
            *x.shape,
        )
        return out


def _form(stack: ExpertStack) -> int:
    if stack.kind is not None:
        return BLOCK_KINDS[stack.kind]
    return PACKED if stack.data.dim() == PACKED_DIM else PLAIN


def _rows(stack: ExpertStack) -> int:
    """Of all experts together."""
    data = stack.data
    if _form(stack) != PLAIN:
        return data.shape[0] * LANES
    return data.shape[0] if data.dim() == 2 else data.shape[0] * data.shape[1]
