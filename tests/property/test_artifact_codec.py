"""Artifact codec: whatever is written reads back the same, here and in a reader of its own; damaged bytes are one error."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifact_samples import G1, artifacts, independent_read
from infer.artifacts import GenerationArtifact, decode, encode
from infer.artifacts.v1.encoder import encode_v1
from infer.artifacts.v1.limits import encoded_bound
from infer.errors import ArtifactCorruptError

CODECS = ("none", "zstd")


@given(artifact=artifacts(), codec=st.sampled_from(CODECS))
def test_round_trip(artifact: GenerationArtifact, codec: Any) -> None:
    """T01: equal values, and equal bytes when what was read is written again."""
    data = encode(artifact, codec)
    found = decode(data)
    assert found == artifact
    assert encode(found, codec) == data


@given(artifact=artifacts(), codec=st.sampled_from(CODECS))
def test_an_independent_reader_finds_the_same(artifact: GenerationArtifact, codec: Any) -> None:
    """T113, T21."""
    encoded = encode_v1(artifact, codec)
    manifest = int.from_bytes(encoded.data[14:18], "little")
    payload = int.from_bytes(encoded.data[18:26], "little")
    assert len(encoded.data) <= encoded_bound(manifest, payload)
    for choice, found in zip(artifact.choices, independent_read(encoded.data), strict=True):
        assert (found["index"], found["prompt"]) == (choice.choice_index, choice.prompt_token_count)
        assert found["tokens"] == np.asarray(choice.sequence_token_ids).tolist()
        assert ("moe_routes" in found) == (choice.moe_routes is not None)
        assert ("selected_logprobs" in found) == (choice.selected_logprobs is not None)
        if choice.moe_routes is not None:
            part = found["moe_routes"]
            assert part["expert_ids"] == np.asarray(choice.moe_routes.expert_ids).tolist()
            assert (part["token_start"], part["router_ids"], part["expert_counts"]) == (
                choice.moe_routes.token_start,
                list(choice.moe_routes.router_ids),
                list(choice.moe_routes.expert_counts),
            )
        if choice.selected_logprobs is not None:
            assert found["selected_logprobs"]["logprobs"] == np.asarray(choice.selected_logprobs.logprobs).tolist()


def mutate(data: bytes, chance: random.Random) -> bytes:
    """One of the ways in which stored bytes go wrong."""
    changed = bytearray(data)
    kind = chance.randrange(6)
    at = chance.randrange(len(changed))
    if kind == 0:
        changed[at] ^= 1 << chance.randrange(8)
    elif kind == 1:
        del changed[at:]
    elif kind == 2:
        changed[at:at] = chance.randbytes(chance.randrange(1, 9))
    elif kind == 3:
        del changed[at : at + chance.randrange(1, 9)]
    elif kind == 4:
        other = chance.randrange(len(changed))
        changed[at], changed[other] = changed[other], changed[at]
    else:
        changed[at : at + 4] = chance.choice(
            (b"\xff\xff\xff\xff", b"\0\0\0\0", b"\xdd\x7f\xff\xff", b"\xc1\xc1\xc1\xc1")
        )
    return bytes(changed)


def survive(seed: int, samples: list[bytes]) -> None:
    """Either `ArtifactCorruptError` or an artifact that is sound, never anything else, in bounded memory."""
    chance = random.Random(seed)
    data = mutate(chance.choice(samples), chance)
    try:
        found = decode(data)
    except ArtifactCorruptError:
        return
    assert decode(encode(found)) == found


@pytest.fixture(scope="module")
def samples() -> list[bytes]:
    return [encode(G1, codec) for codec in CODECS]  # type: ignore[arg-type]


@given(artifact=artifacts(), codec=st.sampled_from(CODECS), seed=st.integers(0, 2**32))
@settings(max_examples=200)
def test_damaged_objects_are_one_error(artifact: GenerationArtifact, codec: Any, seed: int) -> None:
    survive(seed, [encode(artifact, codec)])


@given(data=st.binary(max_size=200))
def test_noise_behind_a_sound_prelude_is_one_error(data: bytes) -> None:
    head = encode(G1, "none")[:14]
    with pytest.raises(ArtifactCorruptError):
        decode(head + data)


def fuzz(samples: list[bytes], count: int) -> int:
    tracemalloc.start()
    for seed in range(count):
        survive(seed, samples)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_fuzz(samples: list[bytes]) -> None:
    assert fuzz(samples, 2_000) < 2**20


@pytest.mark.heavy
def test_fuzz_ten_thousand_and_more(samples: list[bytes]) -> None:
    """T112."""
    assert fuzz(samples, 100_000) < 2**20
