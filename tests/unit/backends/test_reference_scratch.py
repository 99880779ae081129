"""The buffer of large tensors: places, their end, and every op with its results in the buffer against the op without."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from infer.backends.reference import scratch as module
from infer.backends.reference.platform import OPS, make_ops
from infer.backends.reference.scratch import ALIGNMENT, LARGE, Scratch
from infer.plugins.platform import AttentionMetadata, Ops, Routing

ROWS = LARGE // 4
"""fp32 elements of the smallest tensor that is placed."""


def reserved(num_bytes: int = 1 << 24) -> Scratch:
    scratch = Scratch()
    scratch.reserve(num_bytes)
    return scratch


def placed(scratch: Scratch, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    tensor = scratch.place(shape, dtype)
    assert tensor is not None and tensor.shape == shape and tensor.dtype == dtype
    return tensor


def test_small_tensors_and_tensors_without_a_reservation_are_torchs() -> None:
    assert Scratch().place((ROWS,), torch.float32) is None
    assert reserved().place((ROWS - 1,), torch.float32) is None
    assert reserved().place((ROWS,), torch.float32) is not None


def test_a_place_is_free_again_when_its_last_view_is_gone() -> None:
    scratch = reserved()
    first, second = placed(scratch, ROWS), placed(scratch, 2, ROWS)
    assert second.data_ptr() - first.data_ptr() == LARGE
    start, view = first.data_ptr(), first[5:10].view(5, 1)
    del first
    other = placed(scratch, ROWS)
    assert other.data_ptr() > second.data_ptr(), "the view still holds the first place"
    view.fill_(3.0)
    del view
    assert placed(scratch, ROWS).data_ptr() == start
    assert scratch.high_water == 4 * LARGE


def test_a_full_buffer_is_not_an_error() -> None:
    scratch = reserved(3 * LARGE)
    held = [placed(scratch, ROWS) for _ in range(3)]
    beyond = placed(scratch, ROWS)
    beyond.fill_(1.0)
    assert scratch.high_water == 3 * LARGE
    assert len({tensor.data_ptr() for tensor in (*held, beyond)}) == 4


def test_tensors_outlive_the_platform() -> None:
    scratch = reserved()
    tensor = placed(scratch, ROWS).fill_(7.0)
    scratch.release()
    del scratch
    gc.collect()
    assert bool((tensor == 7.0).all())


SIZES = st.lists(st.tuples(st.integers(LARGE, 3 * LARGE), st.integers(0, 5)), max_size=30)


@given(SIZES)
def test_living_tensors_never_overlap_and_planning_finds_the_same_places(sizes: list[tuple[int, int]]) -> None:
    real, dry = reserved(1 << 26), Scratch(dry=True)
    held: list[tuple[Tensor, Tensor]] = []
    for size, ended in sizes:
        del held[ended : ended + 1]
        held.append((placed(real, size, dtype=torch.uint8), placed(dry, size, dtype=torch.uint8)))
        spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.numel()) for tensor, _ in held)
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))
        assert all(start % ALIGNMENT == 0 for start, _ in spans)
        assert real.high_water == dry.high_water
    rounded = sum(-(-size // ALIGNMENT) * ALIGNMENT for size, _ in sizes)
    assert real.high_water <= rounded


@pytest.fixture
def in_buffer() -> Iterator[Ops]:
    """Every result is placed, in tiles of a few rows."""
    with mock.patch.multiple(module, LARGE=1, TILE=200):
        yield make_ops(reserved())


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ops_give_the_same_values_in_the_buffer(in_buffer: Ops, dtype: torch.dtype) -> None:
    x, weight, bias = draw(37, 24, dtype=dtype), draw(10, 24, dtype=dtype), draw(10, dtype=dtype)
    heads = draw(37, 6, 8, dtype=dtype)
    angles = draw(37, 3, dtype=torch.float32)
    router = draw(37, 5, dtype=torch.float32)
    assert OPS.topk_router is not None
    weights, ids = OPS.topk_router(router, Routing(top_k=2), None, None)
    calls: dict[str, tuple[Any, ...]] = {
        "embedding": (torch.arange(37) % 10, weight),
        "rms_norm": (x, draw(24, dtype=dtype), 1e-5),
        "add_rms_norm": (x, draw(37, 24, dtype=dtype), draw(24, dtype=dtype), 1e-5),
        "rotary": (heads[:, :4], heads[:, 4:], angles.cos(), angles.sin()),
        "silu_and_mul": (x,),
        "gelu_tanh_and_mul": (x,),
    }
    for name, arguments in calls.items():
        torch.testing.assert_close(getattr(in_buffer, name)(*arguments), getattr(OPS, name)(*arguments), rtol=0, atol=0)
    products: dict[str, tuple[Any, ...]] = {
        "linear": (x, weight, bias),
        "moe": (x, ids, weights, draw(5, 12, 24, dtype=dtype), draw(5, 24, 6, dtype=dtype)),
    }
    for name, arguments in products.items():
        torch.testing.assert_close(getattr(in_buffer, name)(*arguments), getattr(OPS, name)(*arguments))
    torch.testing.assert_close(in_buffer.linear(x, weight, None), OPS.linear(x, weight, None))


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
def test_attention_gives_the_same_values_in_the_buffer(
    in_buffer: Ops, window: int | None, cache_dtype: torch.dtype
) -> None:
    lengths, counts = [9, 4, 30, 12, 5], [1, 1, 11, 12, 3]
    caches = [draw(40, 4, 2, size, dtype=cache_dtype) for size in (8, 6)]
    q = draw(sum(counts), 4, 8, dtype=torch.float32)

    def attend(ops: Ops) -> Tensor:
        metadata = AttentionMetadata(
            query_starts=torch.tensor([0, *counts]).cumsum(0).int(),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_table=torch.arange(5 * 8, dtype=torch.int32).view(5, 8),
            slot_mapping=torch.zeros(sum(counts), dtype=torch.int64),
            query_lens_host=counts,
            seq_lens_host=lengths,
            num_decode_rows=2,
        )
        return ops.attention(q, caches[0], caches[1], metadata, 0.3, window, None)

    torch.testing.assert_close(attend(in_buffer), attend(OPS), rtol=0, atol=0)
