"""Launches of every GPU kernel as models make them, recorded with tensors that have shapes and no memory.

A case calls a wrapper of `infer.backends.cuda`, so what is compiled is what the wrapper would launch. Owns nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

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
    quantize,
    rotary,
    router,
    rows,
    scaled_matmul,
)
from infer.backends.cuda.device import DeviceFacts
from infer.plugins.platform import AttentionMetadata, Routing

BF16, FP16, FP32, FP8, INT64 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int64
NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32", FP8: "fp8"}


@dataclass(slots=True)
class Launched:
    """One launch, for the compiler."""

    case: str
    kernel: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int


@dataclass(slots=True)
class Recorder:
    """Stands in for `launch` and starts nothing."""

    case: str = ""
    launches: list[Launched] = field(default_factory=list)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def __call__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        *arguments: Any,
        num_warps: int = 4,
        num_stages: int = 2,
        **constants: Any,
    ) -> None:
        if all(grid):
            number = self.counts[kernel.fn.__name__, self.case] = 1 + self.counts[kernel.fn.__name__, self.case]
            case = self.case if number == 1 else f"{self.case} ({number})"
            self.launches.append(Launched(case, kernel, arguments, constants, num_warps, num_stages))


Case = Callable[[Recorder, DeviceFacts], object]


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def record(device: DeviceFacts) -> list[Launched]:
    """All launches of all cases on one GPU."""
    recorder = Recorder()
    for name, run in all_cases():
        recorder.case = name
        run(recorder, device)
    return recorder.launches


def all_cases() -> Iterator[tuple[str, Case]]:
    yield from row_cases()
    yield from attention_cases()
    yield from moe_cases()
    yield from product_cases()
    yield from sampling_cases()


def call(operation: Callable[..., object], *arguments: Any) -> Case:
    """A wrapper that takes `launch` and its arguments."""
    return lambda launch, _: operation(launch, *arguments)


def row_cases() -> Iterator[tuple[str, Case]]:
    for dtype in (BF16, FP16, FP32):
        name = NAMES[dtype]
        for width in (128, 896, 4096, 16384, 32768):
            x, weight = meta(64, width, dtype=dtype), meta(width, dtype=dtype)
            yield f"{name} N{width}", call(norm.rms_norm, x, weight, 1e-5)
            yield f"{name} N{width} add", call(norm.add_rms_norm, x, x, weight, 1e-5)
        x = meta(64, 2 * 11008, dtype=dtype)
        yield name, call(activation.silu_and_mul, x)
        yield f"{name} gelu", call(activation.gelu_tanh_and_mul, x)
        for size, half in ((64, 32), (128, 64), (128, 32), (192, 32), (256, 128)):
            q, k = meta(64, 32, size, dtype=dtype), meta(64, 8, size, dtype=dtype)
            angle, slots = meta(64, half, dtype=FP32), meta(64, dtype=INT64)
            shape = f"{name} D{size}/{2 * half}"
            yield shape, call(rotary.rotary, q, k, angle, angle)
            for stored in (dtype, FP8):
                cache = meta(512, 16, 8, size, dtype=stored)
                arguments = (q, k, k, angle, angle, cache, cache, slots, (0.5, 0.5))
                yield f"{shape} to {NAMES[stored]}", call(rotary.rotary_and_write_kv, *arguments)
    chosen = meta(32, dtype=INT64)
    for dtype in (BF16, FP32):
        yield NAMES[dtype], call(rows.gather_rows, meta(64, 4096, dtype=dtype), chosen)
    for narrow in (torch.uint8, torch.int16, torch.int32):
        yield f"int64 to {narrow}", call(rows.pack_rows, meta(64, 48, 8, dtype=INT64), chosen, narrow)


def metadata(queries: list[int], context: int) -> AttentionMetadata:
    return AttentionMetadata(
        query_starts=meta(len(queries) + 1, dtype=torch.int32),
        seq_lens=meta(len(queries), dtype=torch.int32),
        block_table=meta(len(queries), 512, dtype=torch.int32),
        slot_mapping=meta(sum(queries), dtype=INT64),
        query_lens_host=queries,
        seq_lens_host=[context] * len(queries),
        num_decode_rows=0,
    )


def attention_cases() -> Iterator[tuple[str, Case]]:
    """Head sizes of real models (64 and 128 Llama and Qwen, 80 Phi, 96 Phi-3, 256 Gemma, 192/128 DeepSeek)."""
    shapes = [(64, 64, 8), (80, 80, 1), (96, 96, 1), (128, 128, 4), (128, 128, 7), (256, 256, 2), (192, 128, 1)]
    for size, value_size, group in shapes:
        for dtype in (BF16, FP16, FP32):
            if (dtype == FP16 and (size, group) != (128, 4)) or (dtype == FP32 and size not in (64, 256)):
                continue
            for stored in (dtype, FP8):
                for what, queries in (("decode", [1] * 16), ("prefill", [512, 1])):
                    for invariant in (False, True):
                        name = f"{NAMES[dtype]} {NAMES[stored]} D{size}/{value_size} G{group} {what}"
                        yield (
                            name + (" invariant" if invariant else ""),
                            _attention(dtype, stored, size, value_size, group, queries, None, None, invariant),
                        )
    for window, softcap in ((4096, None), (None, 30.0), (4096, 30.0)):
        for what, queries in (("decode", [1] * 16), ("prefill", [512, 1])):
            name = f"bf16 D256/256 G2 {what} window {window} softcap {softcap}"
            yield name, _attention(BF16, BF16, 256, 256, 2, queries, window, softcap, False)


def _attention(
    dtype: torch.dtype,
    stored: torch.dtype,
    size: int,
    value_size: int,
    group: int,
    queries: list[int],
    window: int | None,
    softcap: float | None,
    invariant: bool,
) -> Case:
    heads = 8
    q = meta(sum(queries), heads * group, size, dtype=dtype)
    k, v = meta(512, 16, heads, size, dtype=stored), meta(512, 16, heads, value_size, dtype=stored)

    def run(launch: Recorder, device: DeviceFacts) -> object:
        return attention.attention(
            launch, device, invariant, q, k, v, metadata(queries, 4096), 0.1, window, softcap, (0.5, 0.5)
        )

    return run


def moe_cases() -> Iterator[tuple[str, Case]]:
    """Mixtral, Qwen3-MoE, OLMoE and DeepSeek-V3 routers; experts for a decode step, a small and a large chunk."""
    rules = {
        "softmax 2 of 8": (8, Routing(top_k=2, scoring="top_k_softmax")),
        "softmax 8 of 128": (128, Routing(top_k=8, renormalize=True)),
        "sigmoid 8 of 256 in 8 groups": (
            256,
            Routing(top_k=8, scoring="sigmoid", renormalize=True, num_groups=8, top_groups=4, group_score="top2_sum"),
        ),
        "softmax 6 of 160 in 8 groups": (160, Routing(top_k=6, num_groups=8, top_groups=3, scale=16.0)),
    }
    for name, (experts, rule) in rules.items():
        bias = meta(experts, dtype=FP32) if rule.scoring == "sigmoid" else None
        logits, tap = meta(64, experts, dtype=FP32), meta(64, rule.top_k, dtype=torch.uint8)
        yield name, call(router.topk_router, logits, rule, bias, tap)
    for dtype in (BF16, FP16, FP32):
        gate_up, down = meta(128, 2 * 768, 2048, dtype=dtype), meta(128, 2048, 768, dtype=dtype)
        for tokens in (64, 512, 8192):
            x, weights, ids = meta(tokens, 2048, dtype=dtype), meta(tokens, 8, dtype=FP32), meta(tokens, 8, dtype=INT64)
            for invariant in (False, True):
                name = f"{NAMES[dtype]} {tokens} tokens" + (" invariant" if invariant else "")
                yield name, call(moe.moe, invariant, x, ids, weights, gate_up, down)


def call_on(operation: Callable[..., object], *arguments: Any) -> Case:
    """A wrapper that takes `launch`, the GPU's facts and its arguments."""
    return lambda launch, device: operation(launch, device, *arguments)


def product_cases() -> Iterator[tuple[str, Case]]:
    """A projection and a head, of Llama's and of a width that is no multiple of 16."""
    for dtype in (BF16, FP16, FP32):
        x, weight, bias = meta(64, 4096, dtype=dtype), meta(6144, 4096, dtype=dtype), meta(6144, dtype=dtype)
        yield NAMES[dtype], call_on(matmul.linear, x, weight, None)
        yield f"{NAMES[dtype]} bias", call_on(matmul.linear, x, weight, bias)
        yield f"{NAMES[dtype]} head", call_on(matmul.head_logits, x, meta(50257, 4096, dtype=dtype))
        for tokens in (1, 64):
            x = meta(tokens, 4096, dtype=dtype)
            for kind, form in blocks.BLOCK_FORMATS.items():
                packed = meta(6144, 4096 // form.size * form.num_bytes, dtype=torch.uint8)
                arguments = (False, x, packed, kind, None, dtype)
                yield f"{NAMES[dtype]} {kind} {tokens} tokens", call(blocks.linear, *arguments)
    ids = meta(64, dtype=INT64)
    for kind, form in blocks.BLOCK_FORMATS.items():
        packed = meta(32000, 4096 // form.size * form.num_bytes, dtype=torch.uint8)
        yield f"bf16 {kind}", call(blocks.rows, ids, packed, kind, 4096, BF16)
    for narrow in (torch.int8, FP8):
        for width in (4096, 28672):
            yield f"bf16 N{width} to {narrow}", call(quantize.quantize_rows, meta(64, width), narrow)
        weight, weight_scales = meta(6144, 4096, dtype=narrow), meta(6144, dtype=FP32)
        for tokens in (16, 256, 2048):
            x, scales = meta(tokens, 4096, dtype=narrow), meta(tokens, dtype=FP32)
            yield (
                f"{narrow} {tokens} tokens",
                call_on(scaled_matmul.scaled_matmul, x, scales, weight, weight_scales, None, BF16),
            )


def sampling_cases() -> Iterator[tuple[str, Case]]:
    count = 64
    whole, single, double = (meta(count, dtype=dtype) for dtype in (INT64, FP32, torch.float64))
    yield "numbers", call(philox.uniforms, whole, whole)
    yield "words", call(philox.words, whole, whole, whole)
    yield (
        "fp32",
        call(penalties.penalties, meta(count, 32000, dtype=FP32), whole, single, whole, single, single, single),
    )
    for width in (100, 151936):
        logits = meta(count, width, dtype=FP32)
        yield f"V{width}", call(draw.draw, logits, whole, single, whole, double, single, double)
