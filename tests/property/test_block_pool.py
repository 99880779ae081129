"""The block pool against a naive model that keeps its queue in a list: same hits, same eviction order, same counts."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from infer.engine.kv_cache.block_pool import BlockPool
from infer.errors import EngineError

pytestmark = pytest.mark.row("KV-BLOCK-POOL", "random operations match a naive model")


class NaivePool:
    """The same promises written the slow way: a list of free blocks in order of reuse, and two dictionaries."""

    def __init__(self, num_blocks: int) -> None:
        self.order = list(range(1, num_blocks + 1))
        self.owners: Counter[int] = Counter()
        self.content: dict[int, bytes] = {}

    def find(self, content: bytes) -> int | None:
        return next((block for block, held in self.content.items() if held == content), None)

    def allocate(self, count: int) -> list[int]:
        taken, self.order = self.order[:count], self.order[count:]
        for block in taken:
            self.content.pop(block, None)
            self.owners[block] = 1
        return taken

    def share(self, blocks: list[int]) -> None:
        for block in blocks:
            if not self.owners[block]:
                self.order.remove(block)
            self.owners[block] += 1

    def free(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.owners[block] -= 1
            if not self.owners[block]:
                self.order.insert(len(self.order) if block in self.content else 0, block)

    def register(self, block: int, content: bytes) -> None:
        if block not in self.content and self.find(content) is None:
            self.content[block] = content

    def unregister(self, block: int) -> None:
        if self.content.pop(block, None) is not None and not self.owners[block]:
            self.order.remove(block)
            self.order.insert(0, block)


class Pair:
    """Both pools, driven together; `held` are the sequences that own blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.pool, self.naive, self.num_blocks = BlockPool(num_blocks), NaivePool(num_blocks), num_blocks
        self.held: list[list[int]] = []

    def allocate(self, count: int) -> None:
        if count > len(self.naive.order):
            with pytest.raises(EngineError, match=f"asked for {count} KV blocks with {len(self.naive.order)} free"):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert blocks == self.naive.allocate(count), "another eviction order"
        assert 0 not in blocks
        self.held.append(blocks)

    def free(self, index: int, *, with_nulls: bool = False) -> None:
        blocks = self.held.pop(index)
        self.pool.free([0, *blocks, 0] if with_nulls else blocks)
        self.naive.free(blocks)

    def register(self, index: int, contents: list[int]) -> None:
        blocks = self.held[index]
        hashes = [b"%d" % content for content in contents[: len(blocks)]]
        self.pool.register(blocks[: len(hashes)], hashes)
        for block, content in zip(blocks, hashes, strict=False):
            self.naive.register(block, content)

    def hit(self, content: int) -> None:
        found = self.pool.find(b"%d" % content)
        assert found == self.naive.find(b"%d" % content), "another hit"
        if found is not None:
            assert self.pool.num_idle([found, 0]) == (not self.naive.owners[found])
            self.pool.share([found, 0])
            self.naive.share([found])
            self.held.append([found])

    def unregister(self, block: int) -> None:
        self.pool.unregister([block])
        self.naive.unregister(block)

    def reset(self) -> None:
        assert self.pool.reset() == (not any(self.held))
        if not any(self.held):
            self.naive.content.clear()

    def check(self) -> None:
        order = self.pool.reuse_order()
        assert order == self.naive.order
        assert (self.pool.num_free, self.pool.num_in_use) == (len(order), self.num_blocks - len(order))
        for block in range(self.num_blocks + 1):
            assert self.pool.ref_count(block) == self.naive.owners[block] >= 0


class BlockPoolMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.pair = Pair(num_blocks)

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        self.pair.allocate(count)

    @precondition(lambda self: self.pair.held)
    @rule(data=st.data(), with_nulls=st.booleans())
    def free(self, data: st.DataObject, with_nulls: bool) -> None:
        self.pair.free(data.draw(st.integers(0, len(self.pair.held) - 1)), with_nulls=with_nulls)

    @precondition(lambda self: self.pair.held)
    @rule(data=st.data(), contents=st.lists(st.integers(0, 8), unique=True, max_size=6))
    def register(self, data: st.DataObject, contents: list[int]) -> None:
        self.pair.register(data.draw(st.integers(0, len(self.pair.held) - 1)), contents)

    @rule(content=st.integers(0, 8))
    def hit(self, content: int) -> None:
        self.pair.hit(content)

    @rule(data=st.data())
    def unregister(self, data: st.DataObject) -> None:
        self.pair.unregister(data.draw(st.integers(1, self.pair.num_blocks)))

    @rule()
    def reset(self) -> None:
        self.pair.reset()

    @invariant()
    def same(self) -> None:
        if hasattr(self, "pair"):
            self.pair.check()


BlockPoolMachine.TestCase.settings = settings(parent=settings(), stateful_step_count=40)
TestBlockPool = BlockPoolMachine.TestCase


@pytest.mark.row("KV-BLOCK-POOL", "100,000 seeded operations: same hits, same eviction order, null never handed out")
def test_a_hundred_thousand_operations() -> None:
    chance = random.Random(2)
    pair = Pair(48)
    for number in range(100_000):
        kind = chance.random()
        if kind < 0.3:
            pair.allocate(chance.randint(1, 8))
        elif kind < 0.6 and pair.held:
            pair.free(chance.randrange(len(pair.held)))
        elif kind < 0.8 and pair.held:
            pair.register(chance.randrange(len(pair.held)), [chance.randrange(90) for _ in range(8)])
        elif kind < 0.99:
            pair.hit(chance.randrange(90))
        elif kind < 0.999:
            pair.unregister(chance.randint(1, 48))
        else:
            while pair.held:
                pair.free(chance.randrange(len(pair.held)))
            pair.reset()
        if number % 20 == 0:
            pair.check()
    while pair.held:
        pair.free(0)
    pair.check()
    assert pair.pool.num_free == 48


def test_a_block_freed_too_often_is_refused() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.free(blocks)
    with pytest.raises(EngineError, match="freed more often than it was taken"):
        pool.free(blocks)
