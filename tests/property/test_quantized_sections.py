"""Hostile quantization sections and headers: refused by the errors that say so, never by another exception."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.errors import UnsupportedModelError, WeightError
from infer.quantization import awq, compressed_tensors, fp8, gptq
from infer.weights.checkpoint import TensorInfo

READERS = {"gptq": gptq, "awq": awq, "compressed-tensors": compressed_tensors, "fp8": fp8}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 300) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=4), children, max_size=3),
    max_leaves=5,
)
KNOWN: dict[str, st.SearchStrategy[Any]] = {
    "bits": st.sampled_from([4, 8, 4.0, True]),
    "group_size": st.sampled_from([-1, 32, 16, 7, 128.0]),
    "desc_act": st.booleans(),
    "sym": st.booleans(),
    "version": st.sampled_from(["gemm", "GEMM", None]),
    "weight_block_size": st.sampled_from([None, [128, 128], [1, 3]]),
    "format": st.sampled_from(["pack-quantized", "int-quantized", "float-quantized", "naive-quantized"]),
    "config_groups": st.fixed_dictionaries(
        {
            "group_0": st.fixed_dictionaries(
                {
                    "weights": st.fixed_dictionaries(
                        {
                            "num_bits": st.sampled_from([4, 8, 4.0]) | JSON,
                            "type": st.sampled_from(["int", "float"]),
                            "strategy": st.sampled_from(["tensor", "channel", "group", "block"]),
                            "group_size": st.sampled_from([32, 0, None]) | JSON,
                            "block_structure": st.sampled_from([[32, 48], None]) | JSON,
                            "symmetric": st.booleans(),
                        }
                    )
                }
            )
        }
    ),
}
SECTIONS = st.fixed_dictionaries({}, optional={key: known | JSON for key, known in KNOWN.items()})
SUFFIXES = ("qweight", "qzeros", "scales", "g_idx", "weight", "weight_scale", "weight_scale_inv", "weight_packed",
            "weight_zero_point", "weight_shape", "weight_g_idx", "input_scale")  # fmt: skip
TENSORS = st.dictionaries(
    st.sampled_from([f"{prefix}.{suffix}" for prefix in ("up", "down") for suffix in SUFFIXES]),
    st.tuples(
        st.lists(st.sampled_from([0, 1, 4, 8, 32, 64]), max_size=3),
        st.sampled_from(["I32", "I64", "I8", "F16", "BF16", "F8_E4M3", "F32"]),
    ),
    max_size=10,
)


@pytest.mark.parametrize("method", sorted(READERS))
@given(section=SECTIONS, tensors=TENSORS)
def test_only_our_own_errors(method: str, section: dict[str, Any], tensors: dict[str, tuple[list[int], str]]) -> None:
    try:
        form = READERS[method].read({"quant_method": method, **section})
    except UnsupportedModelError:
        return
    infos = {name: TensorInfo(name, tuple(shape), dtype, 0) for name, (shape, dtype) in tensors.items()}
    try:
        found = form.weights(infos)
    except WeightError as error:
        assert error.tensor is not None
        return
    for weight in found.values():
        assert all(type(size) is int and size > 0 for size in weight.shape)
        assert set(weight.sources.values()) <= infos.keys() and set(weight.unused) <= infos.keys()
