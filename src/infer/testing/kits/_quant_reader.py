"""Conformance of a reader of quantised checkpoints: the numbers of a weight that the example stores, in any pieces, and names
for what does not fit.

On the calling thread; part of the kit of quantization methods.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from infer.errors import WeightError
from infer.plugins.checkpoint_format import CheckpointFormat, StoredWeight
from infer.plugins.quant_method import QuantMethodSpec
from infer.plugins.registry import import_reference
from infer.testing.kits import Check, expect, load
from infer.weights.checkpoint import TensorInfo
from infer.weights.gguf_dequant import dequantize
from infer.weights.grouped_blocks import block_type, blocks_of, numbers_of
from infer.weights.safetensors import DTYPES

WEIGHT = "model.layers.0.mlp.up_proj.weight"
PLAIN = "model.norm.weight"
STORED_AS = {dtype: name for name, dtype in DTYPES.items()}
PIECE = 16
ROUNDED = 2.0**-10
"""Of the largest weight: scales and minima of blocks are rounded to fp16."""


def checks(spec: QuantMethodSpec) -> Iterator[Check]:
    """Of a spec with a reader."""
    yield Check("reads_only_what_is_there", partial(_reads_nothing, spec))
    if "stored" in spec.example:
        yield Check("reads_what_is_stored", partial(_reads, spec))
        yield Check("reads_in_pieces", partial(_pieces, spec))
        yield Check("blocks_are_the_same_numbers", partial(_blocks, spec))
        yield Check("names_what_does_not_fit", partial(_damaged, spec))


def _form(spec: QuantMethodSpec) -> CheckpointFormat:
    form: CheckpointFormat = load(spec, "reader")(spec.example["section"])
    return form


def _original(spec: QuantMethodSpec) -> Tensor:
    """Rows of very different sizes, as those of trained weights are."""
    rows, columns = spec.example["shape"]
    drawn = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    return drawn * torch.linspace(0.25, 2, rows)[:, None] * 0.02


def _stored(spec: QuantMethodSpec) -> dict[str, Tensor]:
    made: dict[str, Tensor] = import_reference(spec.example["stored"])(WEIGHT, _original(spec))
    return {PLAIN: torch.ones(spec.example["shape"][1]), **made}


def _headers(tensors: dict[str, Tensor]) -> dict[str, TensorInfo]:
    return {n: TensorInfo(n, tuple(t.shape), STORED_AS[t.dtype], t.nbytes) for n, t in tensors.items()}


def _found(form: CheckpointFormat, tensors: dict[str, Tensor]) -> StoredWeight:
    found = dict(form.weights(_headers(tensors)))
    expect(
        list(found) == [WEIGHT], f"weights() finds {list(found)} among {list(tensors)}, and {WEIGHT!r} is stored there"
    )
    named = {*found[WEIGHT].sources.values(), *found[WEIGHT].unused}
    left = sorted(set(tensors) - named - {PLAIN})
    expect(not left, f"{left} belong to no weight; name them among its sources or as unused")
    return found[WEIGHT]


def _numbers(form: CheckpointFormat, weight: StoredWeight, parts: dict[str, Tensor], start: int, stop: int) -> Tensor:
    rows = form.rows(weight, parts, start, stop)
    return rows if isinstance(rows, Tensor) else numbers_of(rows, weight)


def _parts(weight: StoredWeight, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {part: tensors[name] for part, name in weight.sources.items()}


def _whole(spec: QuantMethodSpec) -> tuple[CheckpointFormat, StoredWeight, dict[str, Tensor], Tensor]:
    form, tensors = _form(spec), _stored(spec)
    weight = _found(form, tensors)
    parts = _parts(weight, tensors)
    return form, weight, parts, _numbers(form, weight, parts, 0, weight.shape[0])


def _reads_nothing(spec: QuantMethodSpec) -> None:
    form = _form(spec)
    plain = {PLAIN: TensorInfo(PLAIN, (32,), "F32", 128)}
    for tensors in ({}, plain):
        found = dict(form.weights(tensors))
        expect(not found, f"weights() finds {list(found)} among {list(tensors)}")


def _reads(spec: QuantMethodSpec) -> None:
    original = _original(spec)
    _, weight, _, numbers = _whole(spec)
    expect(weight.shape == tuple(original.shape), f"weights() says {weight.shape} of a {tuple(original.shape)}")
    expect(tuple(numbers.shape) == weight.shape, f"rows() gives {tuple(numbers.shape)} of {weight.shape}")
    _close("what was stored is read", numbers, original, spec.example["tolerance"])


def _pieces(spec: QuantMethodSpec) -> None:
    """As they are loaded: whole sixteens of rows."""
    form, weight, parts, whole = _whole(spec)
    starts = range(0, weight.shape[0], PIECE)
    made = [_numbers(form, weight, parts, start, min(start + PIECE, weight.shape[0])) for start in starts]
    expect(torch.equal(torch.cat(made), whole), f"rows() in pieces of {PIECE} gives other numbers than at once")


def _blocks(spec: QuantMethodSpec) -> None:
    """What `group_size`, `levels` and `zero` promise of the rows; kernels take it on trust."""
    form, weight, parts, numbers = _whole(spec)
    kind = block_type(weight)
    if kind is None:
        return
    rows = form.rows(weight, parts, 0, weight.shape[0])
    if isinstance(rows, Tensor):
        raise AssertionError(f"rows() gives numbers, and with levels={weight.levels} kernels expect quants")
    packed = blocks_of(rows, weight, WEIGHT)
    _close(f"as {kind} blocks it comes out", dequantize(packed.reshape(-1), kind).view(numbers.shape), numbers, ROUNDED)


def _close(what: str, found: Tensor, expected: Tensor, allowed: float) -> None:
    error = ((found.double() - expected.double()).abs().max() / expected.abs().max()).item()
    allowed += torch.finfo(torch.float32).eps
    expect(error <= allowed, f"{what} off by {error:.2e} of the largest weight, {allowed:.2e} is allowed")


def _damaged(spec: QuantMethodSpec) -> None:
    """Each source in turn is missing, has another shape or another dtype: an error that names it, or no weight."""
    tensors = _stored(spec)
    for source in _found(_form(spec), tensors).sources.values():
        tensor = tensors[source]
        other = torch.float64 if tensor.dtype != torch.float64 else torch.uint8
        for what, wrong in {
            "missing": None,
            "[7, 5, 3]": torch.zeros(7, 5, 3, dtype=tensor.dtype),
            str(other): torch.zeros(tensor.shape, dtype=other),
        }.items():
            broken = {name: t for name, t in (tensors | {source: wrong}).items() if t is not None}
            said = _refusal(spec, broken)
            expect(said is None or source in said, f"{source} is {what}, and the error does not name it: {said}")


def _refusal(spec: QuantMethodSpec, tensors: dict[str, Any]) -> str | None:
    """What the reader says of damaged tensors; None when it finds no weight among them."""
    try:
        found = dict(_form(spec).weights(_headers(tensors)))
    except WeightError as error:
        return str(error)
    expect(not found, f"weights() takes tensors that do not fit: { {n: tuple(t.shape) for n, t in tensors.items()} }")
    return None
