"""The two methods that keep weights in floating point: what they match, and their product against fp64."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from infer.backends.reference.platform import OPS
from infer.quantization import gguf, unquantized


@pytest.mark.parametrize(
    ("section", "chosen"),
    [
        (None, "unquantized"),
        ({"quant_method": "gguf"}, "gguf"),
        ({"quant_method": "gptq", "bits": 4}, None),
        ({}, None),
        ({"quant_method": None}, None),
    ],
)
def test_a_section_has_at_most_one_method(section: dict[str, object] | None, chosen: str | None) -> None:
    found = [module.__name__.rpartition(".")[2] for module in (unquantized, gguf) if module.matches(section)]
    assert found == ([] if chosen is None else [chosen])


@pytest.mark.parametrize("module", [unquantized, gguf], ids=lambda module: module.__name__.rpartition(".")[2])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_the_example_is_applied_exactly(module: ModuleType, dtype: torch.dtype, tolerance: float) -> None:
    (spec,) = module.infer_quant_methods()
    rows, columns = spec.example["shape"]
    method = module.create(spec.example["section"])
    original = torch.randn(rows, columns)
    storage = method.create(rows, columns, dtype, torch.device("cpu"))
    assert {name: (tuple(t.shape), t.dtype) for name, t in storage.items()} == {"weight": ((rows, columns), dtype)}
    storage["weight"].copy_(original)
    storage = method.finalize(storage, OPS)
    assert torch.equal(method.dequantize(storage), original.to(dtype)), "the spec states no loss"
    x, bias = torch.randn(5, columns).to(dtype), torch.randn(rows).to(dtype)
    exact = x.double() @ original.to(dtype).double().t()
    torch.testing.assert_close(method.apply(storage, x, None, OPS).double(), exact, rtol=tolerance, atol=10 * tolerance)
    with_bias = method.apply(storage, x, bias, OPS).double()
    torch.testing.assert_close(with_bias, exact + bias.double(), rtol=tolerance, atol=10 * tolerance)
