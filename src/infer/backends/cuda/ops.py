"""The table of operations on a GPU: kernels where there are some, torch (cuBLAS) and the reference for the rest.

Built once by the platform, called on the worker thread; owns nothing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from infer.backends.cuda import (
    activation,
    attention,
    blocks,
    draw,
    matmul,
    moe,
    norm,
    penalties,
    philox,
    rotary,
    router,
    rows,
)
from infer.backends.cuda.device import DeviceFacts
from infer.backends.cuda.launch import Launch, launch
from infer.backends.reference.platform import OPS
from infer.plugins.platform import BlockOps, Ops


def make_ops(device: DeviceFacts, *, invariant: bool, launch: Launch = launch) -> Ops:
    """`invariant`: no element's bits depend on what else is in the step. Dense products then leave cuBLAS, which chooses
    its order of reduction by the number of rows, and every kernel keeps to one tile for all shapes of a step."""
    ops = replace(
        OPS,
        embedding=partial(rows.embedding, launch),
        rms_norm=partial(norm.rms_norm, launch),
        rotary=partial(rotary.rotary, launch),
        silu_and_mul=partial(activation.silu_and_mul, launch),
        gelu_tanh_and_mul=partial(activation.gelu_tanh_and_mul, launch),
        write_kv=partial(rotary.write_kv, launch),
        rotary_and_write_kv=partial(rotary.rotary_and_write_kv, launch),
        attention=partial(attention.attention, launch, device, invariant),
        gather_rows=partial(rows.gather_rows, launch),
        add_rms_norm=partial(norm.add_rms_norm, launch),
        topk_router=partial(router.topk_router, launch),
        moe=partial(moe.moe, launch, invariant),
        draw=partial(draw.draw, launch),
        uniforms=partial(philox.uniforms, launch),
        penalties=partial(penalties.penalties, launch),
        blocks=BlockOps(
            formats=blocks.BLOCK_FORMATS,
            row_multiple=blocks.ROW_MULTIPLE,
            pack=blocks.pack,
            rows=partial(blocks.rows, launch),
            linear=partial(blocks.linear, launch, invariant),
        ),
    )
    if not invariant:
        return ops
    return replace(
        ops,
        linear=partial(matmul.linear, launch, device),
        head_logits=partial(matmul.head_logits, launch, device),
    )
