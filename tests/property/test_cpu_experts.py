"""The native experts over plain, packed and block weights: right against fp64 on what the weights stand for, and the same bits
for a token whatever else is in the step. And what else a sparse block computes."""

from __future__ import annotations

import torch
from gguf import GGMLQuantizationType, quants
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gguf_samples import quantized
from infer.backends.cpu.block_formats import BLOCK_FORMATS
from infer.plugins.platform import ExpertStack, Ops, Routing

SEEDS = st.integers(0, 2**31)
FORMS = st.sampled_from(["plain", "packed", *sorted(BLOCK_FORMATS)])


def stack(
    ops: Ops, form: str, experts: int, rows: int, columns: int, dtype: torch.dtype, seed: int
) -> tuple[ExpertStack, Tensor]:
    """(as the kernels take it, the numbers it stands for: float64 [experts, rows, columns])."""
    if form in BLOCK_FORMATS:
        assert ops.blocks is not None
        stored = quantized((experts * rows, columns), form, seed)
        numbers = torch.from_numpy(quants.dequantize(stored, GGMLQuantizationType[form]).copy())
        numbers = numbers.double().view(experts, rows, columns)
        packed = torch.cat(
            [ops.blocks.pack(torch.from_numpy(part.copy()), form) for part in stored.reshape(experts, rows, -1)]
        )
        return ExpertStack(packed, form), numbers
    weight = torch.randn(experts, rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
    if form == "packed":
        assert ops.pack is not None
        return ExpertStack(torch.cat([ops.pack(part) for part in weight]), None), weight.double()
    return ExpertStack(weight, None), weight.double()


def as_bytes(x: Tensor) -> Tensor:
    """x [.., I] as the block kernels see it: int8 with one scale per 32, in float64."""
    blocks = x.float().unflatten(-1, (-1, 32))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    return ((blocks.double() * inverse.double()).round() * scale.double()).flatten(-2)


def run(ops: Ops, x: Tensor, ids: Tensor, weights: Tensor, gate_up: ExpertStack, down: ExpertStack) -> Tensor:
    assert ops.moe is not None and ops.blocks is not None and ops.blocks.moe is not None
    if gate_up.kind is None and down.kind is None:
        return ops.moe(x, ids, weights, gate_up.data, down.data)
    return ops.blocks.moe(x, ids, weights, gate_up, down)


def one_by_one(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: tuple[ExpertStack, Tensor], down: tuple[ExpertStack, Tensor]
) -> Tensor:
    """The definition, choice by choice in float64, rounded to the dtype where the product of a linear layer would be."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        seen = (as_bytes(x[token]) if gate_up[0].kind else x[token].double()).double()
        for weight, expert in zip(weights[token].double(), ids[token].tolist(), strict=True):
            gate, up = (gate_up[1][expert] @ seen).to(x.dtype).double().chunk(2)
            hidden = (gate * gate.sigmoid() * up).to(x.dtype)
            hidden = as_bytes(hidden) if down[0].kind else hidden.double()
            out[token] += weight * (down[1][expert] @ hidden).to(x.dtype).double()
    return out


def from_linears(
    ops: Ops, x: Tensor, ids: Tensor, weights: Tensor, gate_up: ExpertStack, down: ExpertStack, experts: int
) -> Tensor:
    """The same out of the operations of dense layers, whose own tests judge them."""

    def product(stack: ExpertStack, expert: int, rows: Tensor) -> Tensor:
        weight = stack.data.flatten(0, 1) if stack.kind is None and stack.data.dim() == 3 else stack.data
        weight = weight.tensor_split(experts)[expert]
        if stack.kind is None or ops.blocks is None:
            return ops.linear(rows, weight, None)
        return ops.blocks.linear(rows, weight, stack.kind, None, rows.dtype)

    out = torch.zeros(x.shape, dtype=torch.float32)
    for token in range(len(x)):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            both = product(gate_up, expert, x[token : token + 1])
            out[token] = torch.addcmul(out[token], product(down, expert, ops.silu_and_mul(both))[0].float(), weight)
    return out.to(x.dtype)


@given(
    FORMS,
    FORMS,
    st.integers(1, 40),
    st.integers(1, 5),
    st.integers(1, 2),
    st.integers(1, 2),
    st.data(),
    st.booleans(),
    SEEDS,
)
def test_experts(
    tables: dict[int, Ops],
    up_form: str,
    down_form: str,
    t: int,
    experts: int,
    n_blocks: int,
    inner_blocks: int,
    data: st.DataObject,
    half: bool,
    seed: int,
) -> None:
    k = data.draw(st.integers(1, experts))
    dtype = torch.bfloat16 if half else torch.float32
    n, inner = (
        (BLOCK_FORMATS[form].size if form in BLOCK_FORMATS else 48) * count
        for form, count in ((up_form, n_blocks), (down_form, inner_blocks))
    )
    gate_up = stack(tables[1], up_form, experts, 2 * inner, n, dtype, seed)
    down = stack(tables[1], down_form, experts, n, inner, dtype, seed + 1)
    draw = torch.Generator().manual_seed(seed)
    x = (torch.randn(t, n, generator=draw) / n**0.5).to(dtype)
    ids = torch.rand(t, experts, generator=draw).topk(k, dim=-1).indices
    weights = torch.rand(t, k, generator=draw)
    got = run(tables[2], x, ids, weights, gate_up[0], down[0])
    exact = one_by_one(x, ids, weights, gate_up, down)
    # An activation beside the middle between two bytes may fall to the other side: one of 127 steps.
    coarse = 0.02 if down[0].kind or gate_up[0].kind else 0.0
    bound = coarse + 8 * torch.finfo(dtype).eps
    assert ((got.double() - exact).abs() / exact.abs().max().clamp_min(1.0)).max() <= bound
    assert got.dtype == dtype
    if not half:
        composed = from_linears(tables[1], x, ids, weights, gate_up[0], down[0], experts)
        torch.testing.assert_close(got, composed, rtol=1e-6, atol=1e-6 * float(exact.abs().max()))
    alone = [run(tables[1], x[i : i + 1], ids[i : i + 1], weights[i : i + 1], gate_up[0], down[0]) for i in range(t)]
    assert torch.equal(torch.cat(alone), got)
    order = torch.randperm(t, generator=draw)
    assert torch.equal(run(tables[3], x[order], ids[order], weights[order], gate_up[0], down[0]), got[order])


@given(st.integers(1, 40), st.integers(4, 70), st.sampled_from(["softmax", "top_k_softmax", "sigmoid"]), SEEDS)
def test_routes_do_not_depend_on_the_company(
    tables: dict[int, Ops], t: int, experts: int, scoring: str, seed: int
) -> None:
    route, alone = tables[3].topk_router, tables[1].topk_router
    assert route is not None and alone is not None
    logits = torch.randn(t, experts, generator=torch.Generator().manual_seed(seed))
    rule = Routing(top_k=4, scoring=scoring, renormalize=True)  # type: ignore[arg-type]
    weights, ids = route(logits, rule, None, None)
    for token in range(t):
        one, chosen = alone(logits[token : token + 1], rule, None, None)
        assert torch.equal(one[0], weights[token]) and torch.equal(chosen[0], ids[token])


@given(st.integers(0, 9), st.integers(1, 50), st.booleans(), st.booleans(), SEEDS)
def test_the_shared_expert_is_added(tables: dict[int, Ops], t: int, n: int, gated: bool, half: bool, seed: int) -> None:
    """Rounded after each operation, as torch rounds."""
    add, dtype = tables[2].add_shared, torch.bfloat16 if half else torch.float32
    assert add is not None
    draw = torch.Generator().manual_seed(seed)
    x, shared = (torch.randn(t, n, generator=draw).to(dtype) for _ in range(2))
    gate = torch.randn(t, 1, generator=draw).to(dtype) if gated else None
    got = add(x, shared, gate)
    assert got.dtype == dtype
    if (
        half and gate is not None
    ):  # a sigmoid that is off by one in its last bit of fp32 is the same in bf16, or the next one
        sigmoid = gate.double().sigmoid()
        exact = x.double() + shared.double() * sigmoid
        assert ((got.double() - exact).abs() <= 2**-7 * (x.double().abs() + shared.double().abs())).all()
    else:
        expected = x + (shared if gate is None else shared * gate.sigmoid())
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


@given(st.integers(0, 90), SEEDS)
def test_widened_numbers_are_the_same(tables: dict[int, Ops], n: int, seed: int) -> None:
    widen = tables[1].widen
    assert widen is not None
    x = torch.randn(3, n, generator=torch.Generator().manual_seed(seed)).bfloat16()
    assert torch.equal(widen(x), x.float()) and widen(x).dtype == torch.float32
    assert torch.equal(widen(x.float()), x.float())
