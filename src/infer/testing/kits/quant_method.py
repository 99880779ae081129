"""Conformance of a weight quantization method: its storage, its product against its own dequantised weight, its facts. Of one
that makes blocks while weights are loaded: the error of its blocks, and that every row stands by itself.

On the calling thread, in plain torch with the reference operations; owns nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from infer.plugins.platform import Ops
from infer.plugins.quant_method import LoadTimeMethod, QuantMethod, QuantMethodSpec, WeightRole
from infer.plugins.registry import import_reference
from infer.testing.kits import Check, _quant_reader, expect, load
from infer.weights.gguf_dequant import DECODERS, dequantize

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Relative to the largest output: rounding of the activations' dtype."""
ROLES: tuple[WeightRole, ...] = ("linear", "experts", "vocabulary")


def checks(spec: QuantMethodSpec, ops: Ops) -> Iterator[Check]:
    """`ops` are a correct platform's, usually the reference's."""
    if spec.at_load:
        yield Check("matches_no_checkpoint", partial(_matches_none, spec))
        for role in ROLES:
            yield Check(f"blocks[{role}]", partial(_blocks, spec, role))
            yield Check(f"rows_stand_alone[{role}]", partial(_rows_alone, spec, role))
        return
    yield Check("matches_its_own_section", partial(_matches, spec))
    yield Check("creates_nothing_on_meta", partial(_meta, spec))
    if spec.reader is not None:
        yield from _quant_reader.checks(spec)
    for name in spec.dtypes:
        for body in (_shape, _product, _product_with_bias, _no_rows):
            yield Check(f"{body.__name__.strip('_')}[{name}]", partial(_run, body, spec, ops, getattr(torch, name)))
        yield Check(f"keeps_what_was_loaded[{name}]", partial(_keeps, spec, ops, getattr(torch, name)))


Body = Callable[[QuantMethod, dict[str, Tensor], Tensor, Ops], None]


def _run(body: Body, spec: QuantMethodSpec, ops: Ops, dtype: torch.dtype) -> None:
    out_features, in_features = spec.example["shape"]
    method: QuantMethod = load(spec)(spec.example["section"])
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        storage = method.create(out_features, in_features, dtype, torch.device("cpu"))
        for tensor in storage.values():
            _fill(tensor, generator)
        storage = method.finalize(storage, ops)
        body(method, storage, torch.randn(5, in_features, generator=generator).to(dtype), ops)


def _fill(tensor: Tensor, generator: torch.Generator) -> None:
    """Random weights; packed integers take any bits."""
    if tensor.is_floating_point():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    else:
        tensor.copy_(torch.randint(0, 127, tensor.shape, generator=generator))


def _matches(spec: QuantMethodSpec) -> None:
    matches = load(spec, "matches")
    expect(matches(spec.example["section"]) is True, "matches() is not True for the example's section")
    stranger = {"quant_method": "no-such-method"}
    expect(matches(stranger) is False, f"matches({stranger}) is not False")


def _matches_none(spec: QuantMethodSpec) -> None:
    matches = load(spec, "matches")
    for section in (None, spec.example["section"], {"quant_method": spec.name}):
        expect(matches(section) is False, f"matches({section}) is not False, and the method is for plain checkpoints")


def _drawn(spec: QuantMethodSpec, dtype: torch.dtype) -> Tensor:
    return torch.randn(*spec.example["shape"], generator=torch.Generator().manual_seed(0)).to(dtype)


def _blocks(spec: QuantMethodSpec, role: WeightRole) -> None:
    method: LoadTimeMethod = load(spec)(None)
    kind = method.block_type(role)
    if kind is None:
        return
    expect(kind in DECODERS, f"block_type({role!r}) is {kind!r}, which nobody reads")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rows = _drawn(spec, dtype)
        blocks = method.encode(rows, kind)
        expect(
            blocks.dtype == torch.uint8 and len(blocks) == len(rows), f"encode() gives {blocks.dtype} {blocks.shape}"
        )
        numbers = dequantize(blocks.reshape(-1), kind).view(rows.shape).double()
        error = ((numbers - rows.double()).square().mean() / rows.double().square().mean()).sqrt().item()
        expect(error <= spec.example["tolerance"], f"{kind} blocks of {dtype} are off by {error:.2e} of their size")


def _rows_alone(spec: QuantMethodSpec, role: WeightRole) -> None:
    method: LoadTimeMethod = load(spec)(None)
    kind = method.block_type(role)
    if kind is None:
        return
    rows = _drawn(spec, torch.float32)
    alone = torch.cat([method.encode(row[None], kind) for row in rows])
    expect(torch.equal(alone, method.encode(rows, kind)), "the blocks of a row depend on the rows beside it")


def _meta(spec: QuantMethodSpec) -> None:
    method: QuantMethod = load(spec)(spec.example["section"])
    out_features, in_features = spec.example["shape"]
    storage = method.create(out_features, in_features, torch.float32, torch.device("meta"))
    expect(storage, "create() returned no tensors")
    expect(all(tensor.device.type == "meta" for tensor in storage.values()), "create() on meta allocates memory")


def _keeps(spec: QuantMethodSpec, ops: Ops, dtype: torch.dtype) -> None:
    """From the original through a checkpoint's tensors, `create` and `finalize` to `dequantize`: the same weight again."""
    method: QuantMethod = load(spec)(spec.example["section"])
    original = _drawn(spec, torch.float32) * torch.linspace(0.5, 2, spec.example["shape"][0])[:, None]
    with torch.inference_mode():
        out_features, in_features = spec.example["shape"]
        storage = method.create(out_features, in_features, dtype, torch.device("cpu"))
        for name, tensor in _encoded(spec, storage, original).items():
            storage[name].copy_(tensor)
        found = method.dequantize(method.finalize(storage, ops)).double()
    expect(found.shape == original.shape, f"dequantize() gives {tuple(found.shape)} of {tuple(original.shape)}")
    error = ((found - original.double()).abs().max() / original.abs().max()).item()
    allowed = spec.example["tolerance"] + torch.finfo(dtype).eps
    expect(
        error <= allowed,
        f"what was loaded comes back off by {error:.2e} of the largest weight, {allowed:.2e} is allowed",
    )


def _encoded(spec: QuantMethodSpec, storage: dict[str, Tensor], original: Tensor) -> dict[str, Tensor]:
    """The tensors that a checkpoint would have."""
    plain = storage.get("weight")
    if "encode" not in spec.example and plain is not None and plain.is_floating_point() and len(storage) == 1:
        return {"weight": original}
    expect("encode" in spec.example, 'the example has no "encode", which makes a checkpoint\'s tensors of a weight')
    made: dict[str, Tensor] = import_reference(spec.example["encode"])(original)
    for name, tensor in made.items():
        expect(name in storage, f"encode gives {name!r}, create() has {sorted(storage)}")
        expect(tensor.shape == storage[name].shape, f"{name}: encode gives {tuple(tensor.shape)}, create() has another")
    missing = sorted(set(storage) - set(made))
    expect(not missing, f"encode gives no {missing}, which create() has")
    return made


def _shape(method: QuantMethod, storage: dict[str, Tensor], x: Tensor, ops: Ops) -> None:
    out = method.apply(storage, x, None, ops)
    weight = method.dequantize(storage)
    expect(weight.shape[1] == x.shape[1], f"dequantize() gives {tuple(weight.shape)} for inputs of {x.shape[1]}")
    expect(tuple(out.shape) == (x.shape[0], weight.shape[0]), f"apply() gives {tuple(out.shape)}")
    expect(out.dtype == x.dtype, f"apply() of {x.dtype} gives {out.dtype}")


def _product(method: QuantMethod, storage: dict[str, Tensor], x: Tensor, ops: Ops) -> None:
    _compare(method, storage, x, None, ops)


def _product_with_bias(method: QuantMethod, storage: dict[str, Tensor], x: Tensor, ops: Ops) -> None:
    bias = torch.linspace(-3, 3, method.dequantize(storage).shape[0]).to(x.dtype)
    _compare(method, storage, x, bias, ops)


def _no_rows(method: QuantMethod, storage: dict[str, Tensor], x: Tensor, ops: Ops) -> None:
    out = method.apply(storage, x[:0], None, ops)
    expect(out.shape[0] == 0, f"apply() of no rows gives {tuple(out.shape)}")


def _compare(method: QuantMethod, storage: dict[str, Tensor], x: Tensor, bias: Tensor | None, ops: Ops) -> None:
    out = method.apply(storage, x, bias, ops).double()
    expected = x.double() @ method.dequantize(storage).double().T + (0 if bias is None else bias.double())
    error = ((out - expected).abs().max() / expected.abs().max()).item()
    expect(error <= TOLERANCE[x.dtype], f"apply() differs from x @ dequantize().T by {error:.2e} of the largest output")
