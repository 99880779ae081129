"""The optional operations of a platform against their definitions in float64: routers, experts, packed weights, small ones.

Part of the kit of platforms; an entry that is None is passed over. On the calling thread.
"""

from __future__ import annotations

import torch
from torch import Tensor

from infer.plugins.platform import Ops, Platform, Routing
from infer.testing.kits import expect

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Relative to the largest element: rounding of inputs' dtype, accumulated over the small shapes drawn here."""
UNROUNDED = 1e-3
"""Of results in float32, whatever the inputs' dtype."""
RULES = (
    Routing(top_k=3),
    Routing(top_k=3, renormalize=True, scale=2.5),
    Routing(top_k=2, scoring="top_k_softmax"),
    Routing(top_k=4, scoring="sigmoid", renormalize=True),
    Routing(top_k=3, scoring="sigmoid", num_groups=4, top_groups=2, group_score="top2_sum"),
    Routing(top_k=3, num_groups=4, top_groups=2, group_score="max"),
)


class Draw:
    """Seeded tensors of one dtype on the platform's device."""

    def __init__(self, platform: Platform, dtype: torch.dtype) -> None:
        self.dtype, self.device = dtype, platform.device
        self._generator = torch.Generator().manual_seed(0)

    def floats(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator).to(self.device, self.dtype)

    def close(self, found: Tensor, expected: Tensor, what: str, *, unrounded: bool = False) -> None:
        """`expected` in float64 on CPU. unrounded: the result is float32 and as good as that."""
        dtype = torch.float32 if unrounded else self.dtype
        expect(tuple(found.shape) == tuple(expected.shape), f"{what}: shape {tuple(found.shape)}")
        expect(found.dtype == dtype, f"{what}: dtype {found.dtype}")
        if expected.numel():
            error = ((found.double().cpu() - expected).abs().max() / expected.abs().max().clamp_min(1e-6)).item()
            allowed = UNROUNDED if unrounded else TOLERANCE[dtype]
            expect(error <= allowed, f"{what}: off by {error:.2e} of the largest element")


def double(tensor: Tensor) -> Tensor:
    return tensor.double().cpu()


def _topk_router(ops: Ops, draw: Draw) -> None:
    """Ids descend by the score that chose them, equal scores by id; the bias chooses and does not weigh; a tap gets the ids."""
    if ops.topk_router is None:
        return
    logits = draw.floats(6, 16)
    logits[0] = 1.0  # all equal
    logits[1, ::2] = logits[1, 0]
    for rule in RULES:
        for bias in (
            (None, torch.linspace(-0.4, 0.4, 16, device=draw.device)) if rule.scoring != "top_k_softmax" else (None,)
        ):
            tap = torch.full((8, rule.top_k), 77, dtype=torch.int32, device=draw.device)
            weights, ids = ops.topk_router(logits, rule, bias, tap)
            routed = [_routed(row, rule, None if bias is None else double(bias)) for row in double(logits)]
            wanted = torch.tensor([chosen for chosen, _ in routed])
            said = f"topk_router with {rule}{'' if bias is None else ' and a bias'}"
            expect(ids.dtype == torch.int64, f"{said}: ids of {ids.dtype}")
            expect(torch.equal(ids.cpu(), wanted), f"{said}: ids {ids.tolist()}, not {wanted.tolist()}")
            draw.close(weights, torch.stack([weight for _, weight in routed]), f"{said}: weights", unrounded=True)
            expect(torch.equal(tap[:6].cpu().long(), wanted), f"{said}: the tap does not hold the ids")
            expect(bool((tap[6:] == 77).all()), f"{said}: the tap's other rows changed")


def _routed(logits: Tensor, rule: Routing, bias: Tensor | None) -> tuple[list[int], Tensor]:
    """One token: the ids in order, and their weights."""
    scores = logits.sigmoid() if rule.scoring == "sigmoid" else logits.softmax(0)
    ranking = (scores if bias is None else scores + bias).tolist()
    size = len(ranking) // rule.num_groups
    groups = [sorted(ranking[g * size : (g + 1) * size], reverse=True) for g in range(rule.num_groups)]
    value = [sum(group[:2]) if rule.group_score == "top2_sum" else group[0] for group in groups]
    best = sorted(range(rule.num_groups), key=lambda g: (-value[g], g))[: rule.top_groups]
    allowed = [e for e in range(len(ranking)) if rule.num_groups == 1 or e // size in best]
    ids = sorted(allowed, key=lambda e: (-ranking[e], e))[: rule.top_k]
    weights = logits[ids].softmax(0) if rule.scoring == "top_k_softmax" else scores[ids]
    return ids, (weights / weights.sum() if rule.renormalize else weights) * rule.scale


def _moe(ops: Ops, draw: Draw) -> None:
    """Experts that nobody chose hold NaN: they are not read."""
    if ops.moe is None:
        return
    gate_up, down = draw.floats(6, 32, 24) / 5, draw.floats(6, 24, 16) / 5
    gate_up[4], down[4] = torch.nan, torch.nan
    for ids in ([[5, 0], [1, 2], [0, 5], [3, 3], [2, 0]], [[1, 5]], []):
        rows = len(ids)
        x, weights = draw.floats(rows, 24), draw.floats(rows, 2).float().abs()
        chosen = torch.tensor(ids, dtype=torch.int64, device=draw.device).reshape(rows, 2)
        expected = torch.zeros(rows, 24, dtype=torch.float64)
        for row in range(rows):
            for k, expert in enumerate(ids[row]):
                gate, up = (double(gate_up[expert]) @ double(x[row])).chunk(2)
                expected[row] += double(weights)[row, k] * (double(down[expert]) @ (gate * gate.sigmoid() * up))
        draw.close(ops.moe(x, chosen, weights, gate_up, down), expected, f"moe of {rows} rows")


def _packed(ops: Ops, draw: Draw) -> None:
    """Packing changes the place of numbers and nothing else; who takes the weight takes it packed."""
    if ops.pack is None:
        return
    if ops.unpack is None:
        raise AssertionError("there is a pack without an unpack")
    weight, x, ids = draw.floats(48, 64), draw.floats(5, 64), torch.tensor([47, 0, 3], device=draw.device)
    packed = ops.pack(weight.clone())
    expect(torch.equal(ops.unpack(packed), weight), "unpack(pack(weight)) is not the weight")
    draw.close(ops.linear(x, packed, None), double(x) @ double(weight).T, "linear with a packed weight")
    draw.close(ops.embedding(ids, packed), double(weight)[ids.cpu()], "embedding with a packed weight")
    if ops.head_logits is not None:
        product = double(x) @ double(weight).T
        draw.close(ops.head_logits(x, packed), product, "head_logits with a packed weight", unrounded=True)


def _head_logits(ops: Ops, draw: Draw) -> None:
    if ops.head_logits is not None:
        weight, hidden = draw.floats(48, 64), draw.floats(3, 64)
        draw.close(ops.head_logits(hidden, weight), double(hidden) @ double(weight).T, "head_logits", unrounded=True)


def _rotary_angles(ops: Ops, draw: Draw) -> None:
    if ops.rotary_angles is None:
        return
    positions = torch.tensor([0, 1, 7, 4095], device=draw.device)
    frequencies = 10000.0 ** (-torch.arange(0, 8, device=draw.device, dtype=torch.float32) / 8)
    angles = double(positions[:, None].float() * frequencies)
    for factor in (1.0, 1.25):
        for found, wanted in zip(
            ops.rotary_angles(positions, frequencies, factor), (angles.cos(), angles.sin()), strict=True
        ):
            draw.close(found, wanted * factor, f"rotary_angles with factor {factor}", unrounded=True)


def _small(ops: Ops, draw: Draw) -> None:
    x, shared, gate = draw.floats(5, 24), draw.floats(5, 24), draw.floats(5, 1)
    if ops.scale is not None:
        draw.close(ops.scale(x, 1.7), double(x) * 1.7, "scale")
    if ops.sigmoid is not None:
        draw.close(ops.sigmoid(x), double(x).sigmoid(), "sigmoid")
    if ops.tanh is not None:
        draw.close(ops.tanh(x), double(x).tanh(), "tanh")
    if ops.widen is not None:
        draw.close(ops.widen(x), double(x), "widen", unrounded=True)
    if ops.add_shared is not None:
        draw.close(ops.add_shared(x, shared, None), double(x) + double(shared), "add_shared")
        gated = double(x) + double(shared) * double(gate).sigmoid()
        draw.close(ops.add_shared(x, shared, gate), gated, "add_shared with a gate")


def _rotary_and_write(ops: Ops, draw: Draw) -> None:
    """What rotary and write_kv do one after the other, bit for bit."""
    if ops.rotary_and_write_kv is None:
        return
    q, k, v = draw.floats(3, 4, 8), draw.floats(3, 2, 8), draw.floats(3, 2, 6)
    angle, slots = draw.floats(3, 4).float(), torch.tensor([9, 4, 15], device=draw.device)
    cos, sin = angle.cos(), angle.sin()
    apart, together = (
        [torch.full((4, 4, *x.shape[1:]), 7.0, device=draw.device, dtype=draw.dtype) for x in (k, v)] for _ in range(2)
    )
    turned, turned_k = ops.rotary(q, k, cos, sin)
    ops.write_kv(turned_k, v, apart[0], apart[1], slots)
    found = ops.rotary_and_write_kv(q, k, v, cos, sin, together[0], together[1], slots)
    for what, one, other in zip(("q", "keys", "values"), (turned, *apart), (found, *together), strict=True):
        expect(torch.equal(one, other), f"rotary_and_write_kv: {what} differ from rotary, then write_kv")


def _beside(ops: Ops, draw: Draw) -> None:
    """What each piece gives by itself, in a small step and in a large one, whatever was freed meanwhile; and an error of a piece
    is the call's."""
    if ops.beside is None:
        return
    weight, wide, norm = draw.floats(32, 24), draw.floats(64, 24), draw.floats(24)
    for tokens in (1, 5, 300):
        x = draw.floats(tokens, 24)

        def work(x: Tensor = x) -> Tensor:
            return ops.linear(ops.rms_norm(x, norm, 1e-5), weight, None)

        def other(x: Tensor = x) -> Tensor:
            return ops.silu_and_mul(ops.linear(x, wide, None))

        right = work().clone(), other().clone()
        for _ in range(5):
            found = ops.beside(tokens, work, other)
            for what, one, expected in zip(("one", "the other"), found, right, strict=True):
                expect(
                    torch.equal(one, expected), f"beside: {what} of {tokens} tokens differs from what it gives alone"
                )
    try:
        ops.beside(1, work, _raises)
    except ZeroDivisionError:
        pass
    else:
        raise AssertionError("beside: an error of a piece of work is lost")
    expect(torch.equal(ops.beside(1, work, other)[0], right[0]), "beside: after an error results differ")


def _raises() -> Tensor:
    raise ZeroDivisionError


OPTIONAL = (_beside, _rotary_and_write, _topk_router, _moe, _packed, _head_logits, _rotary_angles, _small)
