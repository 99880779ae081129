"""Damaged v2 objects: one typed error, no crash, memory bounded; also when somebody puts the digests in order again."""

from __future__ import annotations

import hashlib
import random
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifact_v2_samples import GOLDEN
from infer.artifacts import open_artifact
from infer.artifacts.v2.limits import PRELUDE
from infer.artifacts.v2.writer import encode_v2
from infer.errors import ArtifactCorruptError

WORDS: tuple[Any, ...] = (
    0, 1, 3, 63, 64, 255, 2**31, 2**62, 2**63 - 1, 2**64 - 1, -1, 0.0, float("inf"), True, None, "", "token_ids", "u8", "zstd",
    b"", bytes(32), [], [0], [2**40, 2**40], [[1, bytes(32)]], {}, {"values": {}},
)  # fmt: skip


@pytest.fixture(scope="module")
def samples() -> list[bytes]:
    made = [encode_v2(GOLDEN[name], codec=codec).data for name in ("A", "N", "D") for codec in ("none", "zstd")]
    return [*made, encode_v2(GOLDEN["N"], codec="zstd", chunk_bytes=8).data]


def damaged(data: bytes, chance: random.Random) -> bytes:
    """One of the ways in which stored bytes go wrong."""
    changed = bytearray(data)
    at, kind = chance.randrange(len(changed)), chance.randrange(6)
    if kind == 0:
        changed[at] ^= 1 << chance.randrange(8)
    elif kind == 1:
        del changed[at:]
    elif kind == 2:
        changed[at:at] = chance.randbytes(chance.randrange(1, 9))
    elif kind == 3:
        del changed[at : at + chance.randrange(1, 65)]
    elif kind == 4:
        other = chance.randrange(len(changed))
        changed[at : at + 64], changed[other : other + 64] = changed[other : other + 64], changed[at : at + 64]
    else:
        changed[at : at + 4] = chance.choice((b"\xff" * 4, b"\0" * 4, b"\xdd\x7f\xff\xff", b"\xdf\x7f\xff\xff"))
    return bytes(changed)


def forged(data: bytes, chance: random.Random) -> bytes:
    """A header that says something else, canonical and with its digest: only the rules can refuse it."""
    _, major, minor, length, _, _, _ = PRELUDE.unpack_from(data)
    header = msgspec.msgpack.decode(data[64 : 64 + length])
    for _ in range(chance.choice((1, 1, 2, 3))):
        node: Any = header
        while True:
            keys = list(node) if isinstance(node, dict) else range(len(node))
            key = chance.choice(list(keys)) if keys else None
            inner = None if key is None else node[key]
            if key is None or not isinstance(inner, dict | list) or not inner or chance.random() < 0.15:
                break
            node = inner
        if key is not None:
            kind = chance.randrange(4)
            if kind == 0:
                del node[key]
            elif kind == 1 and isinstance(node, list):
                node.insert(0, node[key])
            elif kind == 2 and isinstance(inner, int):
                node[key] = min(inner + chance.choice((-64, -1, 1, 64)), 2**64 - 1)
            else:
                node[key] = chance.choice(WORDS)
    head = msgspec.msgpack.encode(header, order="deterministic")
    if chance.random() < 0.2:
        head = damaged(head, chance)
    start, before = -(-(64 + len(head)) // 64) * 64, -(-(64 + length) // 64) * 64
    body = data[before:]
    prelude = PRELUDE.pack(data[:8], major, minor, len(head), start + len(body), hashlib.sha256(head).digest(), 0)
    return prelude + head.ljust(start - 64, b"\0") + body


def survive(data: bytes) -> bool:
    """Either `ArtifactCorruptError`, or an object that can be read in every way. Returns whether it was refused."""
    try:
        reader: Any = open_artifact(data)
        reader.verify()
    except ArtifactCorruptError:
        return True
    again = encode_v2(reader.record())
    assert open_artifact(again.data).verify().body_sha256 == again.body_sha256
    return False


def fuzz(samples: list[bytes], count: int) -> tuple[int, int, int]:
    """Peak memory, and how many damaged and forged objects were refused."""
    refused = [0, 0]
    tracemalloc.start()
    for seed in range(count):
        chance = random.Random(seed)
        original = chance.choice(samples)
        way = seed % 2
        made = (damaged, forged)[way](original, chance)
        refused[way] += survive(made) or made == original
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak, refused[0], refused[1]


def test_fuzz(samples: list[bytes]) -> None:
    """Damage is always found. A forger finds little that still makes sense."""
    peak, damaged_refused, forged_refused = fuzz(samples, 3_000)
    assert damaged_refused == 1_500 and forged_refused > 1_200
    assert peak < 2 * 2**20


@pytest.mark.heavy
def test_fuzz_a_hundred_thousand(samples: list[bytes]) -> None:
    peak, damaged_refused, _ = fuzz(samples, 100_000)
    assert damaged_refused == 50_000 and peak < 2 * 2**20


@given(seed=st.integers(0, 2**64), data=st.binary(max_size=300))
def test_noise_behind_a_sound_prelude_is_one_error(samples: list[bytes], seed: int, data: bytes) -> None:
    assert survive(samples[0][: 24 + seed % 41] + data)
    digest = hashlib.sha256(data).digest()
    total = -(-(64 + len(data)) // 64) * 64
    prelude = PRELUDE.pack(b"INFGEN2\0", 2, 0, len(data), total, digest, 0)
    assert survive((prelude + data).ljust(total, b"\0"))
