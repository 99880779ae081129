"""Weights of a CPU model share one mapping that asks for large pages, and what cannot stay there is left where it was."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import cast

import torch

from infer.layers.parameter import ADOPT_BYTES, Layer, Parameter
from infer.plugins.model import CausalLM
from infer.weights.large_pages import LARGE_PAGE, LINE, place_together


class Weights(Layer):
    """What a model is to the loader: parameters by name."""

    def __init__(self, **parameters: Parameter) -> None:
        self.__dict__.update(parameters)


def place(**parameters: Parameter) -> None:
    place_together(cast(CausalLM, Weights(**parameters)))


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Parameter:
    return Parameter(torch.empty(shape, dtype=dtype))


def flags_at(address: int) -> str | None:
    """The VmFlags of the mapping that holds the address; None if there is none."""
    held = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            held = int(found[1], 16) <= address < int(found[2], 16)
        elif held and line.startswith("VmFlags:"):
            return line
    return None


def test_weights_lie_behind_each_other_in_memory_that_asks_for_large_pages() -> None:
    matrix, vector, half = empty(1024, 1024), empty(100), empty(64, 7, dtype=torch.bfloat16)
    blocks, integers = empty(32, 256), empty(8, 8, dtype=torch.int32)
    blocks.keep_blocks("Q8_0", 272)
    before = integers.data.data_ptr()
    place(matrix=matrix, vector=vector, tied=matrix, half=half, blocks=blocks, integers=integers)
    start = matrix.data.data_ptr()
    assert start % LARGE_PAGE == 0
    end = start
    for parameter in (matrix, vector, half, blocks):
        assert end <= parameter.data.data_ptr() < end + LINE and parameter.data.data_ptr() % LINE == 0
        end = parameter.data.data_ptr() + parameter.data.nbytes
        assert " hg" in (flags_at(end - 1) or "")
        assert parameter.data.untyped_storage().nbytes() == parameter.data.nbytes
    assert tuple(matrix.data.shape) == (1024, 1024) and blocks.data.shape == (32, 272)
    assert half.data.dtype == torch.bfloat16 and blocks.data.dtype == torch.uint8
    assert integers.data.data_ptr() == before  # becomes something else when it is loaded


def test_a_large_tensor_is_copied_there_and_the_mapping_ends_with_the_last_weight() -> None:
    large = empty(ADOPT_BYTES // 4096, 1024)
    vector = empty(16)
    place(large=large, vector=vector)
    address = large.data.data_ptr()
    read = torch.arange(large.data.numel(), dtype=torch.float32).view(large.data.shape)
    large.load(read)
    assert large.data.data_ptr() == address and torch.equal(large.data, read)
    del large
    gc.collect()
    assert flags_at(address) is not None
    del vector
    gc.collect()
    assert flags_at(address) is None


def test_small_models_are_left_alone() -> None:
    small = empty(16, 16)
    before = small.data.data_ptr()
    place(small=small)
    assert small.data.data_ptr() == before and not small.placed
