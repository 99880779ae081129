"""The well-known fields: what their arrays are and which rows they must have. Pure data, no numpy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Part = Literal["both", "prompt", "output"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRule:
    """A well-known field of the sequence."""

    dtypes: tuple[str, ...]
    """Of `values`."""
    rank: int = 1
    part: Part = "both"
    executed: bool = False
    extra: Mapping[str, str] = field(default_factory=dict)
    """Name -> dtype of the arrays that may lie beside the values, with their shape."""
    ragged: bool = False
    attributes: tuple[str, ...] = ()


RULES: Mapping[str, FieldRule] = {
    "token_ids": FieldRule(dtypes=("i64",)),
    "sampled_mask": FieldRule(dtypes=("u8",)),
    "weight_spans": FieldRule(dtypes=("u32",), attributes=("versions",)),
    "selected_logprobs": FieldRule(dtypes=("f32",), part="output"),
    "topk_logprobs": FieldRule(dtypes=("f32",), rank=2, part="output", extra={"token_ids": "i32"}),
    "prompt_logprobs": FieldRule(dtypes=("f32",), rank=2, part="prompt", extra={"token_ids": "i32"}),
    "entropy": FieldRule(dtypes=("f32",), part="output"),
    "kept_logmass": FieldRule(dtypes=("f32",), part="output"),
    "kept_set": FieldRule(dtypes=("i32",), part="output", ragged=True),
    "moe_routes": FieldRule(
        dtypes=("u8", "u16", "i32", "i64"), rank=3, executed=True, attributes=("expert_counts", "layer_ids")
    ),
    "hidden_states": FieldRule(dtypes=("f16", "bf16", "f32"), rank=3, executed=True, attributes=("layer_ids",)),
    "indexer_topk": FieldRule(dtypes=("i32",), rank=3, executed=True, attributes=("layer_ids",)),
}
REQUIRED_EXTRA = {"topk_logprobs": "token_ids"}
ALWAYS = "token_ids"
"""Always present: what everything else is aligned to."""
ARRAY_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


def route_dtype(num_experts: int) -> str:
    """By the number of experts, never by the ids that happen to occur."""
    if num_experts <= 2**8:
        return "u8"
    if num_experts <= 2**16:
        return "u16"
    return "i32" if num_experts <= 2**31 else "i64"
