"""A weight table must cover every checkpoint tensor and every parameter row exactly once."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.errors import WeightError
from infer.weights.mapping import WeightTable, decoder_table

PARAMETERS = {"embedding.weight": (10, 4), "qkv.weight": (8, 4), "norm.weight": (4,)}
STORED = {"embed": (10, 4), "q": (4, 4), "k": (2, 4), "v": (2, 4), "norm": (4,)}


def table() -> WeightTable:
    made = WeightTable()
    made.add("embed", "embedding.weight")
    made.add_shards("qkv.weight", [("q", 4), ("k", 2), ("v", 2)])
    made.add("norm", "norm.weight")
    made.ignore(["rotary.inv_freq"])
    return made


def refused(
    stored: dict[str, tuple[int, ...]], message: str, tensor: str | None, made: WeightTable | None = None
) -> None:
    with pytest.raises(WeightError, match=re.escape(message)) as caught:
        (made or table()).check(stored, PARAMETERS)
    assert caught.value.tensor == tensor


def test_a_complete_checkpoint_passes_with_or_without_ignored_tensors() -> None:
    table().check(STORED, PARAMETERS)
    table().check(STORED | {"rotary.inv_freq": (2,)}, PARAMETERS)


@pytest.mark.row("LOAD-SAFETENSORS", "missing tensors stop the load with their names")
def test_missing() -> None:
    refused({k: v for k, v in STORED.items() if k != "k"}, "lacks tensor 'k'", "k")
    refused({"q": (4, 4)}, "lacks 4 tensors: 'embed', 'k', 'v', ...", "embed")
    renamed = {k: v for k, v in STORED.items() if k != "embed"} | {"embedd": (10, 4)}
    refused(renamed, "lacks tensor 'embed'; it has 'embedd', which is not used", "embed")


@pytest.mark.row("LOAD-SAFETENSORS", "extra tensors stop the load with their names")
def test_extra() -> None:
    refused(STORED | {"adapter": (1,)}, "holds tensor 'adapter', which this architecture does not use", "adapter")


def test_wrong_shape_names_both() -> None:
    refused(
        STORED | {"v": (3, 4)}, "'v' has shape (3, 4) in the checkpoint, but the configuration calls for (2, 4)", "v"
    )
    refused(STORED | {"norm": (4, 1)}, "(4, 1) in the checkpoint, but the configuration calls for (4,)", "norm")


def test_a_transposed_tensor_has_the_other_shape() -> None:
    made = WeightTable()
    made.add("q", "weight", rows=(0, 4), transposed=True)
    made.add("k", "weight", rows=(4, 6))
    made.check({"q": (3, 4), "k": (2, 3)}, {"weight": (6, 3)})
    with pytest.raises(WeightError, match=re.escape("'q' has shape (4, 3) in the checkpoint, but the configuration")):
        made.check({"q": (4, 3), "k": (2, 3)}, {"weight": (6, 3)})


def test_a_name_is_mapped_once() -> None:
    made = table()
    with pytest.raises(WeightError, match=r"'q' is mapped twice: to qkv\.weight and norm\.weight"):
        made.add("q", "norm.weight")


def test_every_row_has_one_source() -> None:
    gap = WeightTable()
    gap.add("embed", "embedding.weight")
    gap.add("norm", "norm.weight")
    gap.add("q", "qkv.weight", rows=(0, 4))
    gap.add("v", "qkv.weight", rows=(6, 8))
    without_k = {k: v for k, v in STORED.items() if k != "k"}
    refused(without_k, "qkv.weight has no source for rows 4..6", "v", gap)
    gap.add("k", "qkv.weight", rows=(3, 5))
    refused(STORED, "qkv.weight has two sources for rows 3..4", "k", gap)
    short = WeightTable()
    short.add("embed", "embedding.weight")
    short.add("norm", "norm.weight")
    refused({"embed": (10, 4), "norm": (4,)}, "qkv.weight has no tensor for rows 0..8", None, short)
    short.add("q", "nowhere.weight")
    refused(
        {"embed": (10, 4), "norm": (4,), "q": (4, 4)},
        "goes to nowhere.weight, which the model does not have",
        "q",
        short,
    )


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_any_partition_of_the_rows_passes_and_any_hole_fails(counts: list[int], rng: random.Random) -> None:
    names = [(f"part{i}", count) for i, count in enumerate(counts)]
    made = WeightTable()
    made.add_shards("w", names)
    stored = {name: (count, 3) for name, count in names}
    made.check(stored, {"w": (sum(counts), 3)})
    victim = rng.choice(names)[0]
    holed = WeightTable()
    start = 0
    for name, count in names:
        if name != victim:
            holed.add(name, "w", rows=(start, start + count))
        start += count
    with pytest.raises(WeightError):
        holed.check({k: v for k, v in stored.items() if k != victim}, {"w": (sum(counts), 3)})


def test_decoder_table_names_biases_only_where_they_are() -> None:
    made = decoder_table(num_layers=1, q_rows=4, kv_rows=2, intermediate_size=3, tied=True, norms={}, qkv_bias=True)
    biases = {name for name in made.targets if name.endswith("bias")}
    assert biases == {f"model.layers.0.self_attn.{part}_proj.bias" for part in "qkv"}
    assert "lm_head.weight" in made.ignored and "lm_head.weight" not in made.targets
    assert made.targets["model.layers.0.self_attn.v_proj.bias"].rows == (6, 8)
    assert made.targets["model.layers.0.mlp.up_proj.weight"].rows == (3, 6)
