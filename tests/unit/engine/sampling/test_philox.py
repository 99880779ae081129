"""Philox4x32-10 against the known answers of Random123 (its kat_vectors file) and a reading in plain integers."""

from __future__ import annotations

import numpy as np
import pytest

from infer.engine.sampling.philox import philox4x32, uniforms

KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def plain(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b % 2**32, a >> 32 ^ c[3] ^ k[1], a % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return tuple(c)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    c = [np.array([word], dtype=np.uint64) for word in counter]
    k = [np.array([word], dtype=np.uint64) for word in key]
    assert tuple(int(word[0]) for word in philox4x32((c[0], c[1], c[2], c[3]), (k[0], k[1]))) == words


def test_a_uniform_is_53_bits_of_the_first_two_words() -> None:
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, 2**63, 200, dtype=np.uint64)
    positions = rng.integers(0, 2**40, 200, dtype=np.uint64)
    expected = []
    for seed, position in zip(seeds.tolist(), positions.tolist(), strict=True):
        words = plain((position % 2**32, position >> 32, 0, 0), (seed % 2**32, seed >> 32))
        expected.append((((words[0] << 32) | words[1]) >> 11) / 2**53)
    assert uniforms(seeds, positions).tolist() == expected


def test_uniforms_fill_the_unit_interval() -> None:
    positions = np.arange(40_000, dtype=np.uint64)
    numbers = uniforms(np.full(40_000, 5, dtype=np.uint64), positions)
    assert numbers.min() >= 0 and numbers.max() < 1
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert float(((counts - 2000) ** 2 / 2000).sum()) < 19 + 4 * (2 * 19) ** 0.5
