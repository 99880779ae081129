"""Connectors over a store of bytes: sealed values, the longest beginning with windows, patience with outages, pieces."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.plugins import kv_store
from infer.plugins.kv_connector import KVBlock, KVFacts, KVGroupFacts, KVTransfer
from infer.plugins.kv_store import PAUSE, StoreDownError, StoreMatcher, StoreTransfer, block_key, seal, unseal

SIZE = 4


def facts(*windows: int | None, block_bytes: int = 8) -> KVFacts:
    groups = tuple(KVGroupFacts(block_bytes=block_bytes, window=window) for window in windows)
    return KVFacts(namespace=bytes(32), block_size=SIZE, groups=groups)


class Values:
    """A store that can be broken, and says what it was asked."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.error: Exception | None = None
        self.calls: list[int] = []

    def contains(self, keys: Sequence[str]) -> list[bool]:
        self._called(keys)
        return [key in self.values for key in keys]

    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        self._called(keys)
        return [self.values.get(key) for key in keys]

    def put(self, values: Mapping[str, bytes]) -> None:
        self._called(list(values))
        self.values |= values

    def close(self) -> None:
        self.calls.append(-1)

    def _called(self, keys: Sequence[str]) -> None:
        self.calls.append(len(keys))
        if self.error is not None:
            raise self.error


class Memory:
    """`KVBlocks` without tensors."""

    tensors: Any = None

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, int], bytes] = {}

    def read(self, group: int, block_id: int) -> bytes:
        return self.blocks[group, block_id]

    def write(self, group: int, block_id: int, data: bytes) -> None:
        self.blocks[group, block_id] = data


@given(data=st.binary(max_size=64), key=st.text(max_size=9), place=st.integers(0), flip=st.integers(1, 255))
def test_no_changed_value_passes_its_seal(data: bytes, key: str, place: int, flip: int) -> None:
    value = seal(key, data)
    assert unseal(key, value, len(data)) == data
    changed = bytearray(value)
    changed[place % len(value)] ^= flip
    for wrong in (bytes(changed), value[:-1], value + b"\0", b"", None):
        assert unseal(key, wrong, len(data)) is None
    assert unseal(key + "x", value, len(data)) is None
    assert unseal(key, value, len(data) + 1) is None


def brute_force(known: KVFacts, there: set[tuple[int, int]], num_blocks: int, first: int) -> int:
    """Longest number of blocks, each group having what a token behind them sees; the engine has those before `first`."""
    for length in range(num_blocks, first, -1):
        needed = [
            (group, index)
            for group, one in enumerate(known.groups)
            for index in range(length)
            if index >= first and (one.window is None or (index + 1) * SIZE > length * SIZE - one.window + 1)
        ]
        if all(block in there for block in needed):
            return length
    return first


@given(
    windows=st.lists(st.sampled_from([None, 1, 5, 9, 30]), min_size=1, max_size=3),
    gone=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 7)), max_size=8),
    first=st.integers(0, 8),
)
def test_the_longest_beginning_equals_a_brute_force(
    windows: list[int | None], gone: set[tuple[int, int]], first: int
) -> None:
    known, store = facts(*windows), Values()
    hashes = [bytes([index]) * 32 for index in range(8)]
    there = {(group, index) for group in range(len(windows)) for index in range(8)} - gone
    store.values = {block_key(known, hashes[index], group): b"" for group, index in there}
    matcher = StoreMatcher(store, known)
    assert matcher._longest(hashes, first) == brute_force(known, there, 8, first)
    matcher.close()


def test_a_store_that_failed_is_left_alone_and_then_used_again() -> None:
    now = 0.0
    known, store = facts(None), Values()
    matcher = StoreMatcher(store, known, clock=lambda: now)
    store.error = ConnectionError("away")
    with pytest.raises(ConnectionError, match="away"):
        ask(matcher, "a")
    store.error = None
    asked = len(store.calls)
    with pytest.raises(StoreDownError, match="failed a moment ago: away"):
        ask(matcher, "a")
    assert len(store.calls) == asked
    now = PAUSE + 1
    assert ask(matcher, "a") == "miss" and len(store.calls) == asked + 1
    matcher.close()
    assert store.calls[-1] == -1


def ask(matcher: StoreMatcher, name: str) -> str:
    deadline = time.monotonic() + 60
    while (answer := matcher.match(name, [bytes(32)], 9, 0)).state == "later":
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return answer.state


def test_blocks_that_the_engine_lost_meanwhile_are_looked_up() -> None:
    """Found by the combinations: in a small pool another request takes the blocks that were counted on when this one asked. The
    answer was a hit for blocks that nobody has."""
    known, store = facts(None), Values()
    hashes = [bytes([index]) * 32 for index in range(3)]
    matcher = StoreMatcher(store, known)

    def answer(first: int, then: int) -> tuple[str, int]:
        found = matcher.match("r", hashes, 13, first * SIZE)
        deadline = time.monotonic() + 60
        while found.state == "later":
            assert time.monotonic() < deadline
            time.sleep(0.001)
            found = matcher.match("r", hashes, 13, then * SIZE)
        return found.state, found.num_tokens

    assert answer(2, 0) == answer(2, 1) == ("miss", 0)
    store.values = {block_key(known, hashes[2], 0): b""}
    assert answer(2, 2) == ("hit", 3 * SIZE)
    assert answer(2, 1) == ("miss", 0)
    store.values[block_key(known, hashes[1], 0)] = b""
    assert answer(2, 1) == ("hit", 3 * SIZE)
    matcher.close()


def test_transfers_rest_after_an_outage_too_and_say_why() -> None:
    now = 0.0
    known, store, memory = facts(None), Values(), Memory()
    transfer = StoreTransfer(store, known, clock=lambda: now)
    transfer.bind(memory)
    memory.blocks[0, 1] = b"12345678"
    order = KVTransfer(1, "save", "r", (KVBlock(bytes(32), 0, 1, 0),))
    store.error = OSError("full")
    transfer.start([order])
    (first,) = transfer.poll(60)
    assert first.failed == (0,) and first.reason == "OSError: full"
    transfer.start([order])
    (second,) = transfer.poll(60)
    assert second.failed == (0,) and "it failed a moment ago: full" in second.reason
    store.error, now = None, PAUSE + 1
    transfer.start([order])
    (third,) = transfer.poll(60)
    assert third.failed == () and len(store.values) == 1
    transfer.close()


def test_a_large_transfer_moves_in_pieces_and_ends_at_the_first_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_store, "MAX_PIECE", 24)
    known, store, memory = facts(None), Values(), Memory()
    transfer = StoreTransfer(store, known)
    transfer.bind(memory)
    blocks = tuple(KVBlock(bytes([index]) * 32, 0, index + 1, index) for index in range(10))
    memory.blocks = {(0, block.block_id): bytes([block.index]) * 8 for block in blocks}
    transfer.start([KVTransfer(1, "save", "r", blocks)])
    assert [report.failed for report in transfer.poll(60)] == [()]
    assert store.calls == [3, 3, 3, 3, 3, 3, 1, 1]
    del store.values[block_key(known, blocks[4].hash, 0)]
    memory.blocks, store.calls = {}, []
    transfer.start([KVTransfer(2, "load", "r", blocks)])
    (report,) = transfer.poll(60)
    assert report.failed == (4, 5, 6, 7, 8, 9) and store.calls == [3, 3]
    assert memory.blocks == {(0, index + 1): bytes([index]) * 8 for index in range(4)}
    transfer.close()


def test_abandoned_lookups_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_store, "MAX_ANSWERS", 3)
    matcher = StoreMatcher(Values(), facts(None))
    for number in range(10):
        matcher.match(str(number), [bytes(32)], 9, 0)
    assert list(matcher._answers) == ["7", "8", "9"]
    matcher.forget("8")
    assert list(matcher._answers) == ["7", "9"]
    matcher.close()


def test_close_ends_the_threads() -> None:
    before = threading.active_count()
    matcher, transfer = StoreMatcher(Values(), facts(None)), StoreTransfer(Values(), facts(None))
    transfer.bind(Memory())
    ask(matcher, "a")
    transfer.start([KVTransfer(1, "load", "r", (KVBlock(bytes(32), 0, 1, 0),))])
    transfer.poll(60)
    assert threading.active_count() > before
    matcher.close()
    transfer.close()
    assert threading.active_count() == before
