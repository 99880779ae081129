"""Conformance of a platform: an honest probe, limits that make sense, and every operation against its definition.

The definitions are written here once more, row by row in float64, from the documented shapes. On the calling thread.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from infer.plugins.platform import (
    AttentionMetadata,
    Ops,
    Platform,
    PlatformSpec,
    Probe,
    SupportsGraphs,
    SupportsWorkspace,
)
from infer.testing.kits import Check, expect, load
from infer.testing.kits._platform_choices import CHOICES
from infer.testing.kits._platform_ops import OPTIONAL, Draw, double
from infer.testing.kits._platform_sampling import check_penalties, check_uniforms
from infer.testing.kits._platform_staging import check_staging

BLOCK_SIZE = 4


def checks(spec: PlatformSpec) -> Iterator[Check]:
    """Only the probe where the platform is not available."""
    probe: Probe = load(spec, "probe")()
    yield Check("probe", partial(_probe, probe))
    if not probe.available:
        return
    platform: Platform = load(spec)(**spec.example)
    yield Check("limits", partial(_limits, spec, platform))
    yield Check("step_context_restores_what_it_changes", partial(_step_context, platform))
    yield Check("workspace", partial(_workspace, platform))
    yield Check("graphs", partial(_graphs, platform))
    for name, choice in CHOICES.items():
        yield Check(name, partial(choice, platform))
    yield Check("staging", partial(check_staging, platform))
    yield Check("uniforms", partial(check_uniforms, platform))
    yield Check("penalties", partial(check_penalties, platform))
    for name in platform.limits().dtypes:
        for body in (
            _embedding,
            _linear,
            _rms_norm,
            _add_rms_norm,
            _rotary,
            _gated,
            _gather,
            _write_kv,
            _attention,
            *OPTIONAL,
        ):
            yield Check(f"{body.__name__.strip('_')}[{name}]", partial(_run, body, platform, getattr(torch, name)))
        if "fp8_e4m3" in platform.limits().cache_dtypes:
            yield Check(f"fp8_cache[{name}]", partial(_run, _fp8_cache, platform, getattr(torch, name)))


def _run(body: Callable[[Ops, Draw], None], platform: Platform, dtype: torch.dtype) -> None:
    with platform.step_context():
        body(platform.ops, Draw(platform, dtype))
        platform.synchronize()


def _probe(probe: Probe) -> None:
    expect(isinstance(probe, Probe), f"the probe returns {type(probe).__name__}, not Probe")
    expect(probe.available or probe.reason, "not available, and the reason is empty")


def _limits(spec: PlatformSpec, platform: Platform) -> None:
    limits = platform.limits()
    expect(platform.name == limits.name == spec.name, f"three names: {platform.name}, {limits.name}, {spec.name}")
    expect(
        0 < limits.available_memory <= limits.total_memory, f"memory {limits.available_memory}/{limits.total_memory}"
    )
    expect(limits.threads >= 1, f"threads={limits.threads}")
    known = {"bfloat16", "float16", "float32"}
    expect(limits.dtypes and set(limits.dtypes) <= known, f"dtypes {limits.dtypes}")
    expect(platform.memory_in_use() > 0, "memory_in_use() is not positive")


def _step_context(platform: Platform) -> None:
    """Also when the step raises."""
    before = (torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype(), torch.random.initial_seed())
    try:
        with platform.step_context():
            expect(not torch.is_grad_enabled(), "gradients are recorded inside a step")
            raise KeyError("a failed step")
    except KeyError:
        pass
    after = (torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype(), torch.random.initial_seed())
    expect(after == before, f"threads, gradients, default dtype, seed: {before} before a step, {after} after it")


def _workspace(platform: Platform) -> None:
    """Planning computes nothing and says what the buffer must hold; steps run right in a buffer of that size, after a
    trim, and in one that is too small."""
    if not isinstance(platform, SupportsWorkspace):
        return
    tokens, inner, outer = 256, 64, 1024
    planned, most = platform.planning_ops()
    shaped = planned.linear(torch.zeros(tokens, inner), torch.empty(outer, inner, device="meta"), None)
    expect(tuple(shaped.shape) == (tokens, outer), f"planned linear: shape {tuple(shaped.shape)}")
    size = most()
    del shaped
    with platform.step_context():
        draw = Draw(platform, getattr(torch, platform.limits().dtypes[0]))
        x, weight = draw.floats(tokens, inner), draw.floats(outer, inner)
        for num_bytes in (size, 1):
            platform.reserve_workspace(num_bytes)
            for _ in range(2):
                draw.close(platform.ops.linear(x, weight, None), double(x) @ double(weight).T, "linear in the buffer")
                platform.trim()


def _graphs(platform: Platform) -> None:
    """A replay computes from what its input holds now, with all that was recorded; work of which a part would be left out
    gives no graph."""
    if not isinstance(platform, SupportsGraphs):
        return
    ops = platform.ops
    with platform.step_context():
        draw = Draw(platform, getattr(torch, platform.limits().dtypes[0]))
        x, weight, norm = draw.floats(3, 32), draw.floats(64, 32), draw.floats(32)

        def several() -> tuple[Tensor, ...]:
            return ops.rms_norm(x, norm, 1e-5), own()

        def own() -> Tensor:
            return ops.silu_and_mul(ops.linear(ops.rms_norm(x, norm, 1e-5), weight, None))

        def foreign() -> Tensor:
            return ops.silu_and_mul(ops.linear(x * 2, weight, None))

        for work in (own, foreign):
            first = work().clone()
            result, graph = platform.record(work)
            expect(torch.equal(result, first), "recording changes the result")
            for factor in (3.0, 1.0) if graph is not None else ():
                x.mul_(factor)
                expected = work().clone()
                expect(
                    graph is not None and torch.equal(graph.replay(), expected),
                    f"a replay of {work.__name__} work differs",
                )
        right = tuple(tensor.clone() for tensor in several())
        for _, both in (platform.record(several), platform.record(several)):
            if both is not None:
                expect(all(map(torch.equal, both.replay(), right)), "a replay of work with several results differs")


def _embedding(ops: Ops, draw: Draw) -> None:
    weight, ids = draw.floats(11, 6), torch.tensor([10, 0, 3, 3], device=draw.device)
    draw.close(ops.embedding(ids, weight), double(weight)[ids.cpu()], "embedding")


def _linear(ops: Ops, draw: Draw) -> None:
    weight, bias = draw.floats(24, 40), draw.floats(24)
    for rows in (0, 1, 7):
        x = draw.floats(rows, 40)
        product = double(x) @ double(weight).T
        draw.close(ops.linear(x, weight, None), product, f"linear of {rows} rows")
        draw.close(ops.linear(x, weight, bias), product + double(bias), f"linear of {rows} rows with bias")


def _rms_norm(ops: Ops, draw: Draw) -> None:
    for shape in ((5, 32), (5, 3, 16)):  # also per head
        x, weight = draw.floats(*shape) * 100, draw.floats(shape[-1])
        draw.close(ops.rms_norm(x, weight, 1e-5), _normed(double(x), double(weight), 1e-5), f"rms_norm of {shape}")
    tiny = torch.full((1, 8), 1e-4, device=draw.device, dtype=draw.dtype)
    weight = draw.floats(8)
    expected = _normed(double(tiny), double(weight), 1e-2)
    draw.close(ops.rms_norm(tiny, weight, 1e-2), expected, "rms_norm where eps rules")


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _add_rms_norm(ops: Ops, draw: Draw) -> None:
    if ops.add_rms_norm is None:
        return
    x, residual, weight = draw.floats(5, 32), draw.floats(5, 32), draw.floats(32)
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    draw.close(total, double(x) + double(residual), "add_rms_norm: sum")
    draw.close(normed, _normed(double(x) + double(residual), double(weight), 1e-5), "add_rms_norm: norm")


def _rotary(ops: Ops, draw: Draw) -> None:
    """Partial rotary too: the last D - 2R features pass unchanged."""
    for half in (4, 3):
        q, k = draw.floats(5, 4, 8), draw.floats(5, 2, 8)
        angle = torch.arange(5 * half, device=draw.device).reshape(5, half) / 3
        cos, sin = angle.cos().to(draw.dtype), angle.sin().to(draw.dtype)
        for found, x in zip(ops.rotary(q, k, cos, sin), (q, k), strict=True):
            draw.close(found, _rotated(double(x), double(cos), double(sin)), f"rotary over 2 x {half} of 8")


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out, half = x.clone(), cos.shape[-1]
    for j in range(half):
        c, s = cos[:, None, j], sin[:, None, j]
        out[..., j] = x[..., j] * c - x[..., j + half] * s
        out[..., j + half] = x[..., j + half] * c + x[..., j] * s
    return out


def _gated(ops: Ops, draw: Draw) -> None:
    x = draw.floats(5, 24) * 3
    gate, up = double(x).chunk(2, dim=-1)
    draw.close(ops.silu_and_mul(x), gate / (1 + (-gate).exp()) * up, "silu_and_mul")
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    draw.close(ops.gelu_tanh_and_mul(x), 0.5 * gate * (1 + inner.tanh()) * up, "gelu_tanh_and_mul")


def _gather(ops: Ops, draw: Draw) -> None:
    x, rows = draw.floats(6, 5), torch.tensor([5, 0, 5], device=draw.device)
    draw.close(ops.gather_rows(x, rows), double(x)[rows.cpu()], "gather_rows")


def _write_kv(ops: Ops, draw: Draw) -> None:
    for value_size in (8, 6):
        k, v = draw.floats(3, 2, 8), draw.floats(3, 2, value_size)
        caches = [torch.full((4, BLOCK_SIZE, *x.shape[1:]), 7.0, device=draw.device, dtype=draw.dtype) for x in (k, v)]
        ops.write_kv(k, v, caches[0], caches[1], torch.tensor([9, 4, 15], device=draw.device))
        for found, new in zip(caches, (k, v), strict=True):
            expected = torch.full((4 * BLOCK_SIZE, *new.shape[1:]), 7.0, dtype=torch.float64)
            expected[[9, 4, 15]] = double(new)
            draw.close(found, expected.reshape(4, BLOCK_SIZE, *new.shape[1:]), "write_kv")


def _fp8_cache(ops: Ops, draw: Draw) -> None:
    """Three tokens of one row with scales: the bytes that lie in the cache, and what attention makes of them."""
    scales, slots = (0.5, 3.0), torch.tensor([4, 5, 6], device=draw.device)
    new = draw.floats(3, 2, 8), draw.floats(3, 2, 6)
    caches = [torch.zeros(2, BLOCK_SIZE, *x.shape[1:], device=draw.device).to(torch.float8_e4m3fn) for x in new]
    ops.write_kv(*new, caches[0], caches[1], slots, scales)
    held = []
    for cache, x, scale, what in zip(caches, new, scales, ("keys", "values"), strict=True):
        stored = (x.float().cpu() / scale).to(torch.float8_e4m3fn)
        found = cache.cpu().view(torch.uint8).flatten(0, 1)
        expect(
            torch.equal(found[4:7], stored.view(torch.uint8)), f"write_kv: {what} are not x / scale as torch rounds it"
        )
        expect(not found[:4].any() and not found[7:].any(), f"write_kv: {what} of other slots changed")
        held.append(stored.double() * scale)
    metadata = AttentionMetadata(
        query_starts=torch.tensor([0, 3], dtype=torch.int32, device=draw.device),
        seq_lens=torch.tensor([3], dtype=torch.int32, device=draw.device),
        block_table=torch.tensor([[1]], dtype=torch.int32, device=draw.device),
        slot_mapping=slots,
        query_lens_host=[3],
        seq_lens_host=[3],
        num_decode_rows=0,
    )
    q = draw.floats(3, 4, 8)
    found = ops.attention(q, caches[0], caches[1], metadata, 0.3, None, None, scales)
    draw.close(found, _attended(double(q), held[0], held[1], 0.3, None, None), "attention over an fp8 cache")


def _attention(ops: Ops, draw: Draw) -> None:
    """Also with values narrower than keys, as latent attention has them."""
    for value_size in (8, 6):
        _attention_over(ops, draw, value_size)


def _attention_over(ops: Ops, draw: Draw, value_size: int) -> None:
    """Decode rows and chunks over scattered blocks; what no query may see is NaN."""
    contexts, queries, heads, kv_heads, size = [9, 4, 7, 13], [1, 1, 7, 5], 4, 2, 8
    num_blocks, width = 24, 4
    free = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(1)).tolist()
    table = [[free.pop() + 1 if b * BLOCK_SIZE < n else 0 for b in range(width)] for n in contexts]
    slots = [
        row[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
        for row, n, count in zip(table, contexts, queries, strict=True)
        for p in range(n - count, n)
    ]
    starts = [sum(queries[:i]) for i in range(len(queries) + 1)]
    sizes = (size, value_size)
    k_cache, v_cache = (torch.full((num_blocks * BLOCK_SIZE, kv_heads, n), torch.nan) for n in sizes)
    keys, values = ([draw.floats(n, kv_heads, width) for n in contexts] for width in sizes)
    for row, n, key, value in zip(table, contexts, keys, values, strict=True):
        where = [row[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(n)]
        k_cache[where], v_cache[where] = key.float().cpu(), value.float().cpu()
    q = draw.floats(sum(queries), heads, size)
    shape = (num_blocks, BLOCK_SIZE, kv_heads, -1)
    k_cache, v_cache = (cache.reshape(shape).to(draw.device, draw.dtype) for cache in (k_cache, v_cache))
    for window, softcap in ((None, None), (3, None), (None, 2.0), (5, 2.0)):
        metadata = AttentionMetadata(
            query_starts=torch.tensor(starts, dtype=torch.int32, device=draw.device),
            seq_lens=torch.tensor(contexts, dtype=torch.int32, device=draw.device),
            block_table=torch.tensor(table, dtype=torch.int32, device=draw.device),
            slot_mapping=torch.tensor(slots, device=draw.device),
            query_lens_host=queries,
            seq_lens_host=contexts,
            num_decode_rows=2,
        )
        found = ops.attention(q, k_cache, v_cache, metadata, 0.3, window, softcap)
        rows = [double(q[a:b]) for a, b in itertools.pairwise(starts)]
        expected = [
            _attended(row, double(key), double(value), 0.3, window, softcap)
            for row, key, value in zip(rows, keys, values, strict=True)
        ]
        what = f"attention with window {window}, softcap {softcap}, values of {value_size}"
        draw.close(found, torch.cat(expected), what)


def _attended(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
    out = q.new_zeros(*q.shape[:2], v.shape[-1])
    for i in range(q.shape[0]):
        last = k.shape[0] - q.shape[0] + i
        first = 0 if window is None else max(0, last - window + 1)
        for head in range(q.shape[1]):
            group = head // (q.shape[1] // k.shape[1])
            scores = k[first : last + 1, group] @ q[i, head] * scale
            if softcap is not None:
                scores = (scores / softcap).tanh() * softcap
            out[i, head] = scores.softmax(0) @ v[first : last + 1, group]
    return out
