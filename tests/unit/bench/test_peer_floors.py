"""Floors: sizes against transformers' own parameters, attention against a sum over positions, and which bound is the higher."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.peers.floors import (
    Cost,
    Rates,
    Shape,
    best_value,
    decode_step,
    floor_seconds,
    prefill,
    steps_of,
)
from bench.peers.timing import Workload

SMOLLM2 = {
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
}
RATES = Rates(linear=400.0, attention=400.0)


def shape(tmp_path: Path, **changes: Any) -> Shape:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMOLLM2 | changes))
    return Shape.read(path)


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 9}, {"head_dim": 32, "num_hidden_layers": 3}])
def test_weights_are_those_of_the_model(tmp_path: Path, changes: dict[str, Any]) -> None:
    import transformers

    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SMOLLM2 | changes)))
    linear = {name: p.numel() for name, p in model.named_parameters() if p.dim() == 2}
    found = shape(tmp_path, **changes)
    assert found.head_weights == linear.pop("lm_head.weight") == linear.pop("model.embed_tokens.weight")
    assert found.layer_weights == sum(linear.values())


def test_experts_are_those_of_the_model_and_only_what_is_chosen_is_read(tmp_path: Path) -> None:
    import transformers

    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 64}
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**(SMOLLM2 | sizes)))
    linear = {name: p.numel() for name, p in model.named_parameters() if p.dim() > 1}
    whole = sum(linear.values()) - linear.pop("model.embed_tokens.weight")
    experts = sum(count for name, count in linear.items() if ".experts." in name)
    found = shape(tmp_path, **sizes)
    assert found.layer_weights + found.head_weights == whole - experts * 6 // 8  # a token meets two of the eight
    one, all_of_them = found.share_read(1) * whole, found.share_read(10_000) * whole
    assert one == pytest.approx(whole - experts * 6 // 8) and all_of_them == pytest.approx(whole)
    assert one < found.share_read(2) * whole < 2 * one
    assert decode_step(found, 1e9, 1, 0).nbytes == pytest.approx(1e9 * one / whole)
    renamed = {"num_local_experts" if name == "num_experts" else name: size for name, size in sizes.items()}
    assert shape(tmp_path, **renamed) == found, "transformers writes this name"
    assert shape(tmp_path).share_read(1) == 1


def test_keys_and_values_of_the_small_model(tmp_path: Path) -> None:
    assert shape(tmp_path).kv_bytes == 2 * 30 * 192 * 2  # keys and values, layers, 3 heads of 64, two bytes


@given(tokens=st.integers(1, 300), before=st.integers(0, 300), prompts=st.integers(1, 4))
def test_causal_attention_is_counted_position_by_position(tokens: int, before: int, prompts: int) -> None:
    sizes = Shape(layers=2, hidden=8, heads=4, kv_heads=2, head_dim=2, intermediate=16, vocabulary=32)
    seen = sum(before + i for i in range(1, tokens + 1))
    a_key = 2 * 2 * 4 * 2 * 2  # a multiplication and an addition, for score and sum, heads, head size, layers
    assert prefill(sizes, 0.0, tokens, before, prompts).attention_ops == pytest.approx(prompts * seen * a_key)


def test_a_step_is_bound_by_what_takes_longer() -> None:
    light, heavy = Cost(50e9, 1e9, 0.0), Cost(1e9, 300e9, 100e9)
    assert floor_seconds([light], 50.0, RATES) == pytest.approx(1.0)
    assert floor_seconds([heavy], 50.0, RATES) == pytest.approx(1.0)
    assert floor_seconds([light, heavy], 50.0, RATES) == pytest.approx(2.0)
    assert floor_seconds([heavy], 50.0, Rates(linear=None, attention=None)) == pytest.approx(0.02)


def test_decode_reads_the_weights_once_and_every_context(tmp_path: Path) -> None:
    sizes = shape(tmp_path)
    one, eight = decode_step(sizes, 1e8, 1, 160), decode_step(sizes, 1e8, 8, 160)
    assert one.nbytes == 1e8 + 160 * 23040
    assert eight.nbytes == 1e8 + 8 * 160 * 23040
    assert eight.linear_ops == 8 * one.linear_ops


def test_a_shared_prefix_is_computed_once(tmp_path: Path) -> None:
    work, sizes = Workload(), shape(tmp_path)
    [first] = steps_of("prefix_first_s", work, sizes, 1e8)
    alone = prefill(sizes, 1e8, work.shared)
    assert first.linear_ops > alone.linear_ops
    assert first.linear_ops < 1.5 * alone.linear_ops
    whole = steps_of("prefix_wall_s", work, sizes, 1e8)
    assert len(whole) == work.shared_output


def test_floors_come_in_the_unit_of_the_samples() -> None:
    work = Workload()
    assert best_value("decode_8", work, 0.01) == pytest.approx(800)
    assert best_value("prefill", work, 0.5) == pytest.approx(1024)
    assert best_value("prefix_wall_s", work, 0.5) == 0.5


def test_work_without_a_floor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="first_token_s"):
        steps_of("first_token_s", Workload(), shape(tmp_path), 1.0)
