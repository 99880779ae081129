"""Philox4x32-10 on the device: the numbers of `engine.sampling.philox`, and the raw words as torch's CUDA generator has them.

Called on the worker thread; pure. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from infer.backends.cuda.launch import Launch, ceil_div

BLOCK = 128


@triton.jit
def words_of(seed: tl.tensor, low_pair: tl.tensor, high_pair: tl.tensor) -> tl.tuple:
    """Four uint32 of a counter whose words are those of two int64, lowest first."""
    return tl.philox(
        seed,
        low_pair.to(tl.uint32),
        (low_pair >> 32).to(tl.uint32),
        high_pair.to(tl.uint32),
        (high_pair >> 32).to(tl.uint32),
    )


@triton.jit
def uniforms_kernel(seeds: tl.tensor, positions: tl.tensor, out: tl.tensor, count: int, BLOCK: tl.constexpr) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    position = tl.load(positions + at, mask=mask, other=0)
    high, low, _, _ = words_of(tl.load(seeds + at, mask=mask, other=0), position, tl.zeros_like(position))
    bits = (high.to(tl.int64) << 21) | (low >> 11).to(tl.int64)
    tl.store(out + at, bits.to(tl.float64) * 1.1102230246251565e-16, mask=mask)


@triton.jit
def words_kernel(
    seeds: tl.tensor,
    sequences: tl.tensor,
    offsets: tl.tensor,
    out: tl.tensor,
    count: int,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    offset = tl.load(offsets + at, mask=mask, other=0)
    sequence = tl.load(sequences + at, mask=mask, other=0)
    first, second, third, fourth = words_of(tl.load(seeds + at, mask=mask, other=0), offset, sequence)
    tl.store(out + at * 4, first.to(tl.int64), mask=mask)
    tl.store(out + at * 4 + 1, second.to(tl.int64), mask=mask)
    tl.store(out + at * 4 + 2, third.to(tl.int64), mask=mask)
    tl.store(out + at * 4 + 3, fourth.to(tl.int64), mask=mask)


def uniforms(launch: Launch, seeds: Tensor, positions: Tensor) -> Tensor:
    """(seeds [D] int64, the bits of uint64; output positions [D] int64) -> [D] fp64 in [0, 1), 53 random bits each."""
    seeds, positions = seeds.contiguous(), positions.contiguous()
    out = torch.empty(len(seeds), dtype=torch.float64, device=seeds.device)
    grid = (ceil_div(len(seeds), BLOCK),)
    launch(uniforms_kernel, grid, seeds, positions, out, len(seeds), BLOCK=BLOCK, num_warps=4, num_stages=1)
    return out


def words(launch: Launch, seeds: Tensor, sequences: Tensor, offsets: Tensor) -> Tensor:
    """(seeds, sequences, offsets [D] int64) -> [D, 4] int64 below 2**32: block `offset` of stream `sequence` of a seed.

    A thread of torch's CUDA generator is a stream, and its Philox offset of 4 n is block n.
    """
    seeds, sequences, offsets = seeds.contiguous(), sequences.contiguous(), offsets.contiguous()
    out = torch.empty((len(seeds), 4), dtype=torch.int64, device=seeds.device)
    grid = (ceil_div(len(seeds), BLOCK),)
    launch(words_kernel, grid, seeds, sequences, offsets, out, len(seeds), BLOCK=BLOCK, num_warps=4, num_stages=1)
    return out
