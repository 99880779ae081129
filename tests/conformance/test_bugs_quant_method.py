"""Planted bugs: the kit of quantization methods names the promise that a wrong one breaks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from infer.errors import WeightError
from infer.plugins import GroupedRows, QuantMethodSpec, Registry, StoredWeight, check_tensor
from infer.testing.kits import quant_method
from planted_bugs import PlantBug, failures, plant_bug, registry

__all__ = ["plant_bug", "registry"]


@pytest.mark.row("X-PLUGIN-KIT", "the kit fails six planted plugin bugs")
@pytest.mark.parametrize(
    ("method", "bug", "broken"),
    [
        ("apply", lambda original, storage, x, bias, ops: original(storage, x, None, ops), {"product_with_bias"}),
        ("apply", lambda original, storage, x, bias, ops: original(storage, x, bias, ops).float(), {"shape"}),
        (
            "dequantize",
            lambda original, storage: original(storage) * 1.01,
            {"product", "product_with_bias", "keeps_what_was_loaded"},
        ),
        (
            "apply",
            lambda original, storage, x, bias, ops: original(storage, x[:4], bias, ops),
            {"shape", "product", "product_with_bias"},
        ),
        (
            "apply",
            lambda original, storage, x, bias, ops: original(storage, x - (x.mean() if len(x) else 0), bias, ops),
            {"product", "product_with_bias"},
        ),
        (
            "apply",
            lambda original, storage, x, bias, ops: (
                original(storage, x / x.abs().max(), None, ops) * x.abs().max() + bias
                if bias is not None
                else original(storage, x / x.abs().max(), None, ops) * x.abs().max()
            ),
            {"no_rows"},
        ),
        (
            "finalize",
            lambda original, storage, ops: {k: v.flip(0) for k, v in original(storage, ops).items()},
            {"keeps_what_was_loaded"},
        ),
        (
            "finalize",
            lambda original, storage, ops: original({"weight": storage["weight"] / 2}, ops),
            {"keeps_what_was_loaded"},
        ),
        (
            "create",
            lambda original, n, i, dtype, device: original(n, i, dtype, torch.device("cpu")),
            {"creates_nothing_on_meta"},
        ),
    ],
)
def test_quant_method(plant_bug: PlantBug, registry: Registry, method: str, bug: Any, broken: set[str]) -> None:
    def make(section: Any) -> Any:
        made = registry.create("quant_method", "unquantized", section)
        original = getattr(made, method)
        setattr(made, method, lambda *arguments: bug(original, *arguments))
        return made

    spec = dataclasses.replace(registry.get("quant_method", "unquantized"), factory=plant_bug(make))
    ops = registry.create("platform", "reference", threads=1).ops
    assert failures(quant_method.checks(spec, ops)) == broken


@pytest.mark.parametrize(
    ("bug", "broken"),
    [
        (lambda blocks, rows: blocks.float(), "blocks"),
        (lambda blocks, rows: blocks.roll(1, 1), "blocks"),
        (lambda blocks, rows: blocks ^ (rows.shape[0] > 1), "rows_stand_alone"),
    ],
)
def test_load_time_method(plant_bug: PlantBug, registry: Registry, bug: Any, broken: str) -> None:
    def make(section: Any) -> Any:
        made = registry.create("quant_method", "int8", section)
        original = made.encode
        made.encode = lambda rows, block_type: bug(original(rows, block_type), rows)
        return made

    ops = registry.create("platform", "reference", threads=1).ops
    spec = dataclasses.replace(registry.get("quant_method", "int8"), factory=plant_bug(make))
    assert broken in failures(quant_method.checks(spec, ops))
    spec = dataclasses.replace(registry.get("quant_method", "int8"), matches=plant_bug(lambda section: section is None))
    assert failures(quant_method.checks(spec, ops)) == {"matches_no_checkpoint"}


class Claims:
    """A format that takes every tensor for a quantised weight."""

    def weights(self, tensors: Any) -> dict[str, StoredWeight]:
        return {name: StoredWeight(shape=(1, 1), sources={"weight": name}) for name in tensors}


@pytest.mark.parametrize("name", ["awq", "compressed-tensors", "fp8", "gptq"])
def test_a_reader_that_takes_plain_tensors(plant_bug: PlantBug, registry: Registry, name: str) -> None:
    ops = registry.create("platform", "reference", threads=1).ops
    spec = registry.get("quant_method", name)
    assert failures(quant_method.checks(spec, ops)) == set()
    spec = dataclasses.replace(spec, reader=plant_bug(lambda section: Claims()))
    assert failures(quant_method.checks(spec, ops)) == {"reads_only_what_is_there"}


class Bytes:
    """A correct format with a scale for each row; each bug is one method of its own."""

    zero = 128

    def weights(self, tensors: Any) -> dict[str, StoredWeight]:
        found = {}
        for name, tensor in tensors.items():
            if tensor.stored_dtype == "I8" and len(tensor.shape) == 2:
                rows, columns = tensor.shape
                check_tensor(tensors, f"{name}_scale", (rows,), ("F16",))
                sources = {"quants": name, "scales": f"{name}_scale"}
                found[name] = StoredWeight(
                    shape=(rows, columns), sources=sources, group_size=columns, levels=256, zero=self.zero
                )
        return found

    def rows(self, weight: StoredWeight, parts: Any, start: int, stop: int) -> GroupedRows | Tensor:
        scales = parts["scales"][start:stop, None].float()
        quants = parts["quants"][start:stop].view(torch.uint8) ^ 0x80
        return GroupedRows(quants=quants, scales=scales, zeros=torch.full_like(scales, 128))


def bytes_as_stored(name: str, weight: Tensor) -> dict[str, Tensor]:
    scales = (weight.abs().amax(1) / 127).half()
    return {name: (weight / scales[:, None]).round().to(torch.int8), f"{name}_scale": scales}


class ForgetsTheMiddle(Bytes):
    def rows(self, weight: StoredWeight, parts: Any, start: int, stop: int) -> GroupedRows:
        scales = parts["scales"][start:stop, None].float()
        return GroupedRows(
            quants=parts["quants"][start:stop].view(torch.uint8), scales=scales, zeros=torch.full_like(scales, 128)
        )


class ScalesOfTheBeginning(Bytes):
    def rows(self, weight: StoredWeight, parts: Any, start: int, stop: int) -> GroupedRows:
        quants = parts["quants"][start:stop].view(torch.uint8) ^ 0x80
        scales = parts["scales"][: stop - start, None].float()
        return GroupedRows(quants=quants, scales=scales, zeros=torch.full_like(scales, 128))


class SaysAnotherGroup(Bytes):
    """The numbers are right where they are expanded: only blocks are cut by the group size."""

    def weights(self, tensors: Any) -> dict[str, StoredWeight]:
        return {n: dataclasses.replace(w, group_size=32) for n, w in super().weights(tensors).items()}

    def rows(self, weight: StoredWeight, parts: Any, start: int, stop: int) -> GroupedRows:
        whole = super().rows(weight, parts, start, stop)
        assert isinstance(whole, GroupedRows)
        twice = torch.cat((whole.scales, whole.scales * 2), dim=1)
        order = torch.zeros(weight.shape[1], dtype=torch.int64)
        return dataclasses.replace(whole, scales=twice, zeros=torch.full_like(twice, 128), groups=order)


class PromisesQuantsAndGivesNumbers(Bytes):
    def rows(self, weight: StoredWeight, parts: Any, start: int, stop: int) -> Tensor:
        return parts["quants"][start:stop].float() * parts["scales"][start:stop, None].float()  # type: ignore[no-any-return]


class TrustsEveryShape(Bytes):
    def weights(self, tensors: Any) -> dict[str, StoredWeight]:
        return {
            name: StoredWeight(
                shape=(48, 64),
                sources={"quants": name, "scales": f"{name}_scale"},
                group_size=64,
                levels=256,
                zero=128,
            )
            for name in tensors
            if name.endswith("_proj.weight")
        }


class LeavesItsScalesBehind(Bytes):
    def weights(self, tensors: Any) -> dict[str, StoredWeight]:
        found = super().weights(tensors)
        return {n: dataclasses.replace(w, sources={"quants": n}) for n, w in found.items()}


class NamesNoTensor(Bytes):
    def weights(self, tensors: Any) -> dict[str, StoredWeight]:
        try:
            return super().weights(tensors)
        except WeightError:
            raise WeightError("this checkpoint is broken") from None


@pytest.mark.parametrize(
    ("reader", "broken"),
    [
        (Bytes, set()),
        (ForgetsTheMiddle, {"reads_what_is_stored"}),
        (ScalesOfTheBeginning, {"reads_in_pieces"}),
        (SaysAnotherGroup, {"blocks_are_the_same_numbers"}),
        (PromisesQuantsAndGivesNumbers, {"blocks_are_the_same_numbers"}),
        (TrustsEveryShape, {"names_what_does_not_fit"}),
        (NamesNoTensor, {"names_what_does_not_fit"}),
    ],
)
def test_a_reader_is_checked_from_what_its_example_stores(
    plant_bug: PlantBug, registry: Registry, reader: type[Bytes], broken: set[str]
) -> None:
    example = {"section": None, "shape": [48, 64], "tolerance": 0.005, "stored": plant_bug(bytes_as_stored, "stored")}
    spec = dataclasses.replace(
        registry.get("quant_method", "unquantized"), reader=plant_bug(lambda section: reader()), example=example
    )
    ops = registry.create("platform", "reference", threads=1).ops
    assert failures(quant_method.checks(spec, ops)) == broken


def test_a_tensor_that_belongs_to_no_weight_is_named(plant_bug: PlantBug, registry: Registry) -> None:
    example = {"section": None, "shape": [48, 64], "tolerance": 0.005, "stored": plant_bug(bytes_as_stored, "stored")}
    spec = dataclasses.replace(
        registry.get("quant_method", "unquantized"),
        reader=plant_bug(lambda section: LeavesItsScalesBehind()),
        example=example,
    )
    ops = registry.create("platform", "reference", threads=1).ops
    [check] = [check for check in quant_method.checks(spec, ops) if check.name == "reads_what_is_stored"]
    with pytest.raises(AssertionError, match=r"up_proj\.weight_scale'\] belong to no weight"):
        check.run()


class PerRow:
    """A correct method with eight bits and a scale per row; `encode` is what its checkpoints hold."""

    name = "per-row"

    def __init__(self, section: Any) -> None:
        self.section = section

    def create(self, n: int, i: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        self.dtype = dtype
        return {
            "codes": torch.empty(n, i, dtype=torch.int8, device=device),
            "scales": torch.empty(n, dtype=torch.float32, device=device),
        }

    def finalize(self, storage: dict[str, Tensor], ops: Any) -> dict[str, Tensor]:
        return storage

    def apply(self, storage: dict[str, Tensor], x: Tensor, bias: Tensor | None, ops: Any) -> Tensor:
        return ops.linear(x.float(), self.dequantize(storage), None if bias is None else bias.float()).to(x.dtype)  # type: ignore[no-any-return]

    def dequantize(self, storage: dict[str, Tensor]) -> Tensor:
        return storage["codes"].float() * storage["scales"][:, None]


def per_row(original: Tensor) -> dict[str, Tensor]:
    scales = original.abs().amax(1) / 127
    return {"codes": (original / scales[:, None]).round().to(torch.int8), "scales": scales}


@pytest.mark.parametrize(
    ("encode", "said"),
    [
        (per_row, ""),
        (None, 'the example has no "encode"'),
        (lambda original: {**per_row(original), "zeros": original}, "encode gives 'zeros'"),
        (lambda original: {"codes": per_row(original)["codes"]}, "encode gives no .'scales'."),
        (lambda original: {**per_row(original), "scales": torch.ones(1)}, "scales: encode gives"),
        (lambda original: {**per_row(original), "scales": per_row(original)["scales"] * 1.1}, "comes back off by"),
    ],
    ids=["correct", "none", "a stranger", "one missing", "another shape", "another scale"],
)
def test_a_method_with_packed_weights_is_checked_from_its_checkpoint(
    plant_bug: PlantBug, registry: Registry, encode: Any, said: str
) -> None:
    example: dict[str, Any] = {"section": {"quant_method": "per-row"}, "shape": [48, 32], "tolerance": 0.01}
    if encode is not None:
        example["encode"] = plant_bug(encode, "encode")
    matches = plant_bug(lambda section: section == example["section"], "matches")
    spec = QuantMethodSpec(
        name="per-row", api=1, factory=plant_bug(PerRow), matches=matches, dtypes=("float32",), example=example
    )
    ops = registry.create("platform", "reference", threads=1).ops
    assert failures(quant_method.checks(spec, ops)) == ({"keeps_what_was_loaded"} if said else set())
    if said:
        [check] = [check for check in quant_method.checks(spec, ops) if check.name.startswith("keeps")]
        with pytest.raises(AssertionError, match=said):
            check.run()
