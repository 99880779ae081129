"""Random numbers, penalties and draws: equal to the engine's own transforms, which transformers and Random123 vouch for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from infer.backends.cuda import draw as module
from infer.backends.cuda.draw import draw
from infer.backends.cuda.launch import launch
from infer.backends.cuda.penalties import penalties
from infer.backends.cuda.philox import uniforms, words
from infer.engine.sampling import philox
from triton_kernels.drawn import SEEDS, floats, inside_nan

UINT64 = st.integers(0, 2**64 - 1)


def signed(values: list[int]) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.uint64).view(np.int64))


@given(st.lists(st.tuples(UINT64, st.integers(0, 2**62)), max_size=5))
def test_numbers_are_the_engines(pairs: list[tuple[int, int]]) -> None:
    seeds, positions = [seed for seed, _ in pairs], [position for _, position in pairs]
    right = philox.uniforms(np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.uint64))
    assert uniforms(launch, signed(seeds), signed(positions)).tolist() == right.tolist()


@pytest.mark.parametrize(
    ("counter", "key", "right"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_words_are_those_of_random123(counter: tuple[int, ...], key: tuple[int, ...], right: tuple[int, ...]) -> None:
    """The known answers that the generator's authors publish for philox4x32 of ten rounds."""
    seed, offset, sequence = (low | high << 32 for low, high in (key, counter[:2], counter[2:]))
    assert words(launch, signed([seed]), signed([sequence]), signed([offset])).tolist() == [list(right)]


@given(st.integers(1, 4), st.integers(1, 30), SEEDS, st.data())
def test_penalties(m: int, v: int, seed: int, data: st.DataObject) -> None:
    logits = floats(seed, m, v, scale=5.0)
    places = data.draw(st.lists(st.integers(0, m * v - 1), unique=True, max_size=20))
    counts = [float(data.draw(st.integers(0, 4))) for _ in places]
    settings = [data.draw(st.tuples(st.floats(0.1, 3), st.floats(-2, 2), st.floats(-2, 2))) for _ in range(m)]
    expected = logits.double().clone()
    for place, count in zip(places, counts, strict=True):
        repetition, frequency, presence = settings[place // v]
        value = expected[place // v, place % v].item()
        value = value / repetition if value > 0 else value * repetition
        expected[place // v, place % v] = value - count * frequency - (presence if count else 0.0)
    flat = torch.tensor(places, dtype=torch.int64)
    columns = torch.tensor(settings, dtype=torch.float32).unbind(1)
    penalties(launch, logits, flat, torch.tensor(counts), flat // v, *columns)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)


def test_penalties_need_dense_logits() -> None:
    none = torch.zeros(0)
    with pytest.raises(ValueError, match="dense"):
        penalties(launch, torch.zeros(4, 3).t(), none.long(), none, none.long(), none, none, none)


def kept(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> list[tuple[int, float]]:
    """(id, weight) of a row in fp64, in the order of ids, by sorting."""
    scaled = (logits.double() - logits.double().max()) / temperature
    order = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    order = order[:top_k] if top_k else order
    weights = {i: math.exp(float(scaled[i])) for i in order}
    total, before, chosen = sum(weights.values()), 0.0, []
    for i in order:
        if chosen and before >= top_p * total and top_p < 1:
            break
        chosen.append(i)
        before += weights[i]
    return [(i, weights[i]) for i in sorted(chosen) if weights[i] >= min_p]


def near(found: int, row: Tensor, settings: tuple[float, int, float, float], number: float) -> bool:
    """Whether the id is right for this number, or for settings a rounding away from these."""
    temperature, top_k, top_p, min_p = settings
    for p in (top_p, top_p * (1 - 1e-6), min(1.0, top_p * (1 + 1e-6))):
        for least in (min_p, min_p * (1 - 1e-6), min_p * (1 + 1e-6)):
            for u in (number, max(0.0, number - 1e-6), number + 1e-6):
                pairs = kept(row, temperature, top_k, p, least)
                target, total = u * sum(weight for _, weight in pairs), 0.0
                for token, weight in pairs:
                    total += weight
                    if total > target:
                        if token == found:
                            return True
                        break
    return False


SETTINGS = st.tuples(
    st.sampled_from([0.05, 0.7, 1.0, 5.0]),
    st.sampled_from([0, 1, 2, 5, 1000]),
    st.sampled_from([1.0, 0.9, 0.5, 1e-9]),
    st.sampled_from([0.0, 0.0, 0.1, 1.0]),
)


@given(
    st.integers(1, 60),
    st.lists(st.tuples(SETTINGS, st.floats(0, 1, exclude_max=True)), max_size=4),
    st.booleans(),
    SEEDS,
)
def test_draws(v: int, draws: list[tuple[tuple[float, int, float, float], float]], tied: bool, seed: int) -> None:
    """Each setting alone and together, with ties, excluded tokens, and several blocks in a row."""
    logits = floats(seed, 3, v, scale=3.0)
    logits = inside_nan(logits.round() if tied else logits)
    logits[1, 1:] = -math.inf
    logits[2, : v // 2] = -math.inf
    before = logits.clone()
    rows = [(seed + i) % 3 for i in range(len(draws))]
    columns = list(zip(*[(*settings, number) for settings, number in draws], strict=True)) or [()] * 5
    dtypes = (torch.float32, torch.int64, torch.float64, torch.float32, torch.float64)
    given_ = [torch.tensor(column, dtype=dtype) for column, dtype in zip(columns, dtypes, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SMALL_BLOCK", 16)
        patch.setattr(module, "BLOCK", 16)
        ids = draw(launch, logits, torch.tensor(rows, dtype=torch.int64), *given_).tolist()
    assert torch.equal(logits, before)
    for row, (settings, number), found in zip(rows, draws, ids, strict=True):
        assert near(found, logits[row], settings, number), (row, settings, number, found)


def test_a_vocabulary_too_large_is_named() -> None:
    none = torch.zeros(0)
    with pytest.raises(ValueError, match="524289 tokens"):
        draw(launch, torch.zeros(1, 2**19 + 1), none.long(), none, none.long(), none.double(), none, none.double())
