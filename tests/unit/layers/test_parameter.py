"""Weight slots and the walk over layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from infer.backends.reference.platform import OPS
from infer.errors import WeightError
from infer.layers import parameter
from infer.layers.embedding import Embedding
from infer.layers.linear import Linear, LMHead
from infer.layers.norm import RMSNorm
from infer.layers.parameter import Layer, Parameter, named_layers, named_parameters
from infer.plugins.model import BuildContext
from infer.quantization.unquantized import UnquantizedMethod


def context(quant: Any = None, dtype: torch.dtype = torch.float32, ops: Any = OPS) -> BuildContext:
    return BuildContext(ops=ops, dtype=dtype, device=torch.device("cpu"), quant=quant or UnquantizedMethod())


def test_rows_are_copied_and_a_large_whole_tensor_is_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    slot = Parameter(torch.empty(6, 2))
    upper, lower = torch.randn(4, 2), torch.randn(2, 2)
    slot.load(lower, (4, 6))
    slot.load(upper, (0, 4))
    assert torch.equal(slot.data, torch.cat((upper, lower)))
    whole = torch.randn(6, 2)
    small = Parameter(torch.empty(6, 2))
    small.load(whole)
    assert small.data is not whole and torch.equal(small.data, whole)
    monkeypatch.setattr(parameter, "ADOPT_BYTES", 48)
    other = Parameter(torch.empty(6, 2))
    other.load(whole)
    assert other.data is whole, "a second copy would double the peak of loading"
    half = Parameter(torch.empty(6, 2, dtype=torch.bfloat16))
    half.load(whole)
    assert half.data.dtype == torch.bfloat16 and torch.equal(half.data, whole.bfloat16())


def test_rows_are_filled_once() -> None:
    slot = Parameter(torch.empty(6, 2))
    slot.load(torch.zeros(4, 2), (0, 4))
    with pytest.raises(WeightError, match=r"rows 3\.\.6 overlap rows 0\.\.4"):
        slot.load(torch.zeros(3, 2), (3, 6))
    with pytest.raises(WeightError, match=r"shape \(3, 2\) does not fit \(2, 2\)"):
        slot.load(torch.zeros(3, 2), (4, 6))


class Pair(Layer):
    def __init__(self) -> None:
        self.embedding = Embedding(context(), 10, 4)
        self.layers = [Linear(context(), 4, 6, bias=True), Linear(context(), 6, 4)]
        self.norm = RMSNorm(context(), 4, 1e-5)
        self.head = LMHead(context(), 10, 4, tied_to=self.embedding)
        self.name = "not a part"


def test_the_walk_gives_dotted_paths_and_shared_parameters_once() -> None:
    pair = Pair()
    assert set(named_parameters(pair)) == {
        "embedding.weight",
        "layers.0.weight",
        "layers.0.bias",
        "layers.1.weight",
        "norm.weight",
    }
    assert [name for name, _ in named_layers(pair)] == ["", "embedding", "layers.0", "layers.1", "norm", "head"]


class Doubling(UnquantizedMethod):
    """A method whose finalize returns other tensors than it was given."""

    def finalize(self, storage: dict[str, Tensor], ops: Any) -> dict[str, Tensor]:
        return {"packed": storage["weight"].double(), "scale": torch.ones(1)}

    def apply(self, storage: dict[str, Tensor], x: Tensor, bias: Tensor | None, ops: Any) -> Tensor:
        y = x @ storage["packed"].to(x.dtype).t()
        return y if bias is None else y + bias


def test_linear_uses_what_the_quantization_method_made() -> None:
    linear = Linear(context(Doubling()), 4, 6, bias=True)
    weight, bias, x = torch.randn(6, 4), torch.randn(6), torch.randn(3, 4)
    named_parameters(linear)["weight"].load(weight)
    named_parameters(linear)["bias"].load(bias)
    linear.finalize()
    torch.testing.assert_close(linear(x), x @ weight.t() + bias)
    assert sum(t.numel() * t.element_size() for t in linear.tensors()) == 24 * 8 + 4 + 6 * 4, "the slot is dropped"


def test_norm_offset_is_added_in_fp32() -> None:
    norm = RMSNorm(context(dtype=torch.bfloat16), 4, 1e-6, offset=1.0)
    weight = torch.tensor([0.0, 1e-3, -1.0, 2**-9])
    norm.weight.load(weight.clone())
    norm.finalize()
    x = torch.tensor([[1.0, -1.0, 1.0, -1.0]], dtype=torch.bfloat16)
    assert torch.equal(norm.weight.data, 1 + weight), "1 + 2**-9 is not a bfloat16"
    torch.testing.assert_close(norm(x), (x.float() * (1 + weight)).bfloat16())


def test_add_norm_takes_the_fused_op_where_there_is_one() -> None:
    import dataclasses

    def fused(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return torch.full_like(x, 7.0), x + residual

    x, residual = torch.randn(3, 4), torch.randn(3, 4)
    composed, plain = (
        RMSNorm(context(), 4, 1e-5),
        RMSNorm(context(ops=dataclasses.replace(OPS, add_rms_norm=fused)), 4, 1e-5),
    )
    for norm in (composed, plain):
        norm.weight.load(torch.ones(4))
    out, summed = composed.add(x, residual)
    expected = (x + residual).double()
    expected = expected / (expected.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(summed, x + residual)
    assert torch.equal(plain.add(x, residual)[0], torch.full((3, 4), 7.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding_scale_is_rounded_as_gemma_does(dtype: torch.dtype) -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    oracle = Gemma3TextScaledWordEmbedding(50, 48, 0, embed_scale=48**0.5).to(dtype)
    ours = Embedding(context(dtype=dtype), 50, 48, scale=48**0.5)
    ours.weight.load(oracle.weight.detach())
    ids = torch.arange(50)
    assert torch.equal(ours(ids), oracle(ids).detach())
