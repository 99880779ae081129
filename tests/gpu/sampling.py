"""Part: the random numbers of the device, bit for bit: Random123's vectors, torch's generator, and the engine's own."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from gpu.checks import Check, Facts, NotHere
from gpu.place import Place
from infer.backends.cuda import philox
from infer.backends.cuda.launch import launch
from infer.engine.sampling import philox as host

THREADS = 256
"""Of a block of torch's random kernels, and their unrolling."""
UNROLL = 4
SEED = 0x0123_4567_89AB_CDEF
ZEROS = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
ONES = (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
"""Philox4x32-10 of a key and counter of zeros and of ones: kat_vectors of Random123."""


def checks(place: Place) -> Iterator[Check]:
    yield Check("Random123's published vectors", lambda: published(place))
    yield Check("uniforms equal the engine's own", lambda: own(place))
    yield Check("torch's CUDA generator, bit for bit", lambda: torchs(place))


def published(place: Place) -> None:
    keys = torch.tensor([0, -1], device=place.device)
    found = philox.words(launch, keys, keys, keys).tolist()
    assert [tuple(row) for row in found] == [ZEROS, ONES], found


def own(place: Place) -> None:
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, 2**64, 300, dtype=np.uint64)
    positions = rng.integers(0, 2**40, 300, dtype=np.uint64)
    given = (torch.from_numpy(one.view(np.int64)).to(place.device) for one in (seeds, positions))
    found = philox.uniforms(launch, *given).cpu().numpy()
    assert np.array_equal(found, host.uniforms(seeds, positions))


def torchs(place: Place) -> Facts:
    """Two calls in a row, each long enough that every thread takes two blocks of four numbers."""
    if place.dry_run:
        expected = expected_uniforms(torch.tensor([0, 1]), torch.tensor([0, 0]))
        assert bool(((expected >= 0) & (expected < 1)).all())
        raise NotHere("torch's CUDA generator needs a GPU")
    found = torch.cuda.get_device_properties(place.device)
    threads = found.multi_processor_count * (found.max_threads_per_multi_processor // THREADS) * THREADS
    count = 2 * UNROLL * threads
    generator = torch.Generator(place.device).manual_seed(SEED)
    for call in range(2):
        drawn = torch.rand(count, device=place.device, generator=generator)
        at = torch.arange(count, device=place.device)
        block = 2 * call + at // (threads * UNROLL)
        words = expected_words(at % threads, block)
        which = at % (threads * UNROLL) // threads
        expected = as_uniform(words.gather(1, which[:, None])[:, 0])
        different = int((drawn != expected).sum())
        assert not different, f"call {call}: {different} of {count} numbers differ, {drawn[:4]} and {expected[:4]}"
    return {"numbers": 2 * count}


def expected_words(threads: Tensor, blocks: Tensor) -> Tensor:
    return philox.words(launch, torch.full_like(threads, SEED), threads, blocks)


def expected_uniforms(threads: Tensor, blocks: Tensor) -> Tensor:
    return as_uniform(expected_words(threads, blocks).flatten())


def as_uniform(words: Tensor) -> Tensor:
    """curand's conversion: (0, 1] in fp32; torch turns the 1 into 0."""
    value = words.float() * 2.0**-32 + 2.0**-33
    return torch.where(value == 1, 0.0, value)
