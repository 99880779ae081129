"""Attention over queries and keys that are still to be turned: the same result with the platform's fused operation."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_cases import Case, build
from infer.backends.reference.platform import OPS
from infer.layers.attention import Attention, AttentionFacts
from infer.plugins.platform import UNSCALED, KVScales

CASE = Case([(5, 1), (3, 4)], 2, 2, 8, 8, 4, None, None, torch.float32, 3)


@pytest.mark.parametrize("eight_bits", [False, True])
def test_the_fused_write_gives_the_same_result(eight_bits: bool) -> None:
    calls: list[KVScales] = []

    def fused(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
        scales: KVScales = UNSCALED,
        /,
    ) -> Tensor:
        calls.append(scales)
        turned, keys = OPS.rotary(q, k, cos, sin)
        OPS.write_kv(keys, v, k_cache, v_cache, slots, scales)
        return turned

    results = []
    for ops in (OPS, replace(OPS, rotary_and_write_kv=fused)):
        inputs = build(replace(CASE, scales=(0.5, 2.0)) if eight_bits else CASE)
        table, lengths = inputs.metadata.block_table, CASE.lengths
        positions = [(row, p) for row, (before, _) in enumerate(CASE.rows) for p in range(before, lengths[row])]
        slots = [int(table[row, p // 4]) * 4 + p % 4 for row, p in positions]
        inputs.metadata.slot_mapping = torch.tensor(slots)
        facts = AttentionFacts(hidden_size=32, num_heads=4, num_kv_heads=2, head_size=8, scale=0.3)
        context: Any = SimpleNamespace(ops=ops)
        layer = Attention(context, 0, facts)
        if eight_bits:
            layer.load_scalar("k_scale", 0.5)
            layer.load_scalar("v_scale", 2.0)
        batch: Any = SimpleNamespace(
            kv={0: (inputs.k_cache, inputs.v_cache)}, attention=[inputs.metadata], group_of_layer={0: 0}
        )
        generator = torch.Generator().manual_seed(1)
        new = torch.randn(len(slots), 8, 8, generator=generator)
        angle = torch.randn(len(slots), 4, generator=generator)
        q, k, v = new[:, :4], new[:, 4:6], new[:, 6:]
        results.append(layer.rotated(q, k, v, (angle.cos(), angle.sin()), batch))
    assert torch.equal(*results)
    assert results[0].shape == (5, 32) and not results[0].isnan().any()
    assert calls == [(0.5, 2.0) if eight_bits else UNSCALED]
