"""Prefix hits and admission against independent computations: shared lengths, a radix tree, a naive capacity model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.config.engine import EngineConfig
from infer.engine.kv_cache.manager import KVCacheManager
from infer.engine.kv_cache.prefix import block_hash, extend_chain, first_block_extra, root_hash
from infer.engine.request import Request
from infer.engine.scheduler.scheduler import Scheduler
from infer.errors import ConfigError
from step_driver import (
    StepDriver,
    cache_config,
    expected_tokens,
    full_group,
    new_request,
    output,
    scheduler_config,
    sliding_group,
)

tokens = st.integers(0, 2)
block_sizes = st.sampled_from([1, 2, 4, 16])
"""Three ids and short prompts: prefixes are shared often."""


def shared_length(first: Sequence[int], second: Sequence[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def family(draw: st.DrawFn, count: int) -> list[list[int]]:
    """Prompts grown from each other, so that long prefixes are common."""
    prompts: list[list[int]] = []
    for _ in range(count):
        base: list[int] = draw(st.sampled_from(prompts)) if prompts and draw(st.booleans()) else []
        base = base[: draw(st.integers(0, len(base)))]
        prompts.append(base + draw(st.lists(tokens, min_size=1, max_size=40)))
    return prompts


prompt_sets = st.composite(lambda draw: family(draw, draw(st.integers(2, 7))))()


class RadixTree:
    """What SGLang's cache would share: the longest common beginning with anything inserted, token by token."""

    def __init__(self) -> None:
        self.root: dict[int, dict] = {}  # type: ignore[type-arg]

    def insert(self, ids: Sequence[int]) -> None:
        node = self.root
        for token in ids:
            node = node.setdefault(token, {})

    def match(self, ids: Sequence[int]) -> int:
        node = self.root
        for length, token in enumerate(ids):
            if token not in node:
                return length
            node = node[token]
        return len(ids)


@pytest.mark.row("KV-PREFIX-CACHE", "reported hit tokens equal the block-aligned shared length, salts share 0")
@given(prompts=prompt_sets, block_size=block_sizes, salts=st.lists(st.sampled_from([None, "a", "b"]), min_size=7))
def test_hits_equal_the_block_aligned_shared_length(
    prompts: list[list[int]], block_size: int, salts: list[str | None]
) -> None:
    driver = StepDriver(cache_config(full_group(2000), block_size=block_size))
    computed: list[tuple[str | None, list[int]]] = []
    for prompt, salt in zip(prompts, salts, strict=False):
        request = driver.add(prompt, 3, salt=salt)
        driver.run()
        longest = max((shared_length(known, prompt) for by, known in computed if by == salt), default=0)
        assert request.num_cached_tokens == min(longest, len(prompt) - 1) // block_size * block_size
        computed.append((salt, request.token_ids[:-1]))
        assert output(request) == expected_tokens(request, driver.next_token)
    stats = driver.kv.stats
    assert stats.queried == sum(map(len, prompts[: len(driver.requests)]))
    assert stats.hit == sum(request.num_cached_tokens or 0 for request in driver.requests)


@pytest.mark.row("KV-SGLANG-RADIX-CACHE", "hit tokens at least a radix-tree oracle's minus (block-1) per request")
@given(prompts=prompt_sets, block_size=block_sizes)
def test_hits_are_close_to_a_radix_tree(prompts: list[list[int]], block_size: int) -> None:
    driver = StepDriver(cache_config(full_group(2000), block_size=block_size))
    tree = RadixTree()
    for prompt in prompts:
        request = driver.add(prompt, 2)
        driver.run()
        oracle = min(tree.match(prompt), len(prompt) - 1)
        assert oracle - (block_size - 1) <= (request.num_cached_tokens or 0) <= oracle
        tree.insert(request.token_ids[:-1])


@pytest.mark.row("KV-SGLANG-RADIX-CACHE", "the alias flag equals the prefix-cache flag")
@pytest.mark.parametrize("value", [True, False])
def test_the_alias_is_the_same_flag(value: bool) -> None:
    assert EngineConfig(cache={"radix_cache": value}).cache.prefix_caching is value
    with pytest.raises(ConfigError, match="name the same thing"):
        EngineConfig(cache={"radix_cache": value, "prefix_caching": not value})


@pytest.mark.row("KV-PREFIX-CACHE", "cache-on tokens equal cache-off tokens on a repeated-prefix corpus")
@given(prompts=prompt_sets, block_size=block_sizes)
def test_tokens_are_equal_with_the_cache_on_and_off(prompts: list[list[int]], block_size: int) -> None:
    answers = []
    for cached in (True, False):
        cache = cache_config(full_group(-(-120 * 3 // block_size)), block_size=block_size, prefix_caching=cached)
        driver = StepDriver(cache, max_num_batched_tokens=20)
        for prompt in prompts:
            driver.add(prompt, 6)
        driver.run(2)
        assert cached or driver.kv.stats.hit == driver.kv.stats.queried == 0
        answers.append([output(request) for request in driver.requests])
    assert answers[0] == answers[1]


@pytest.mark.row("KV-SLIDING-WINDOW-SPEC", "prefix hits only when the last window of blocks is present")
@given(
    length=st.integers(1, 60),
    window=st.integers(1, 40),
    block_size=st.sampled_from([1, 4, 16]),
    present=st.lists(st.booleans(), min_size=60, max_size=60),
    in_full=st.integers(0, 60),
)
def test_window_hits_need_the_last_window_of_blocks(
    length: int, window: int, block_size: int, present: list[bool], in_full: int
) -> None:
    """Blocks are planted group by group; the oracle tries every boundary from the top."""
    kv = KVCacheManager(cache_config(full_group(100), sliding_group(100, window), block_size=block_size), "m")
    prompt = list(range(length))
    hashes: list[bytes] = []
    extend_chain(hashes, prompt, block_size, root_hash("m", "float32"))
    for pool, wanted in ((kv.pools[0], [index < in_full for index in range(60)]), (kv.pools[1], present)):
        for index, block in enumerate(pool.allocate(len(hashes))):
            if wanted[index]:
                pool.register([block], [hashes[index]])
    hit = kv.match(new_request(prompt))

    def is_hit(blocks: int) -> bool:
        """The next token at `blocks * block_size` sees the window - 1 positions before it."""
        seen = range(max(0, blocks * block_size - window + 1), blocks * block_size)
        return blocks <= in_full and all(present[position // block_size] for position in seen)

    expected = max(blocks for blocks in range((length - 1) // block_size + 1) if is_hit(blocks))
    assert hit.num_tokens == expected * block_size
    if expected:
        assert [len(table) for table in hit.tables] == [expected, expected]
        first_seen = max(0, expected * block_size - window + 1) // block_size
        assert [bool(block) for block in hit.tables[1]] == [index >= first_seen for index in range(expected)]


@pytest.mark.row("KV-PREFIX-CACHE", "equal hashes exactly for equal content: tokens, parent, salt, adapter")
@given(
    first=st.tuples(st.lists(tokens, max_size=8), st.sampled_from([None, "a", "b"]), st.sampled_from([None, "a", "b"])),
    second=st.tuples(
        st.lists(tokens, max_size=8), st.sampled_from([None, "a", "b"]), st.sampled_from([None, "a", "b"])
    ),
)
def test_chains_are_equal_exactly_as_far_as_the_contents_are(
    first: tuple[list[int], str | None, str | None], second: tuple[list[int], str | None, str | None]
) -> None:
    chains: list[list[bytes]] = [[], []]
    for chain, (ids, salt, adapter) in zip(chains, (first, second), strict=True):
        extend_chain(chain, ids, 2, root_hash("m", "float32"), first_block_extra(salt, adapter))
    shared = shared_length(first[0], second[0]) // 2 if first[1:] == second[1:] else 0
    assert [a == b for a, b in zip(*chains, strict=False)] == [index < shared for index in range(min(map(len, chains)))]


def test_a_hash_does_not_depend_on_how_the_tokens_are_held() -> None:
    parent = root_hash("m", "float32")
    assert block_hash(parent, [1, 2]) == block_hash(parent, (1, 2)) != block_hash(parent, [12])


class NaiveCapacity:
    """Admission by counting alone, for a model without prefix sharing: how many blocks each running request holds."""

    def __init__(self, num_blocks: int, watermark: float, block_size: int) -> None:
        self.num_blocks, self.reserve, self.block_size = num_blocks, int(watermark * num_blocks), block_size
        self.held: dict[str, int] = {}

    def blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def admits(self, num_tokens: int) -> bool:
        return sum(self.held.values()) + self.blocks(num_tokens) <= self.num_blocks - self.reserve


@pytest.mark.row("KV-MANAGER-ALLOC", "admit or refuse equals the naive model; in use stays under the watermark")
@given(
    num_blocks=st.integers(4, 40),
    watermark=st.sampled_from([0.0, 0.1, 0.3]),
    block_size=st.sampled_from([1, 4, 16]),
    actions=st.lists(
        st.tuples(
            st.sampled_from(["admit", "admit", "grow", "grow", "release"]), st.integers(1, 200), st.integers(0, 50)
        ),
        max_size=60,
    ),
)
def test_admission_equals_the_naive_model(
    num_blocks: int, watermark: float, block_size: int, actions: list[tuple[str, int, int]]
) -> None:
    kv = KVCacheManager(cache_config(full_group(num_blocks), block_size=block_size, watermark=watermark), "m")
    naive = NaiveCapacity(num_blocks, watermark, block_size)
    running: list[Request] = []
    for number, (kind, size, pick) in enumerate(actions):
        if kind == "admit":
            request = new_request([number * 1000 + i for i in range(size)], name=str(number))
            admitted = kv.admit(request, kv.match(request), size)
            assert admitted == naive.admits(size)
            if admitted:
                naive.held[request.request_id] = naive.blocks(size)
                running.append(request)
                assert kv.pools[0].num_in_use <= num_blocks - naive.reserve
        elif running:
            request = running[pick % len(running)]
            if kind == "release":
                kv.release(request)
                running.remove(request)
                del naive.held[request.request_id]
            else:
                need = max(0, naive.blocks(size) - naive.held[request.request_id])
                fits = sum(naive.held.values()) + need <= num_blocks
                new = kv.grow(request, size)
                assert (new is not None) == fits
                naive.held[request.request_id] += need if fits else 0
        assert kv.pools[0].num_in_use == sum(naive.held.values())
        assert kv.usage() == pytest.approx(sum(naive.held.values()) / num_blocks)
    for request in running:
        kv.release(request)
    assert kv.pools[0].num_free == num_blocks


@pytest.mark.row("KV-MANAGER-ALLOC", "an idle engine admits every request that may ever fit")
@given(
    block_size=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([1, 16, 33, 64]),
    budget=st.sampled_from([8, 32, 64]),
    watermark=st.sampled_from([0.0, 0.01, 0.1, 0.6]),
    max_num_seqs=st.integers(1, 3),
    shared=st.integers(0, 250),
    length=st.integers(1, 250),
)
def test_nothing_that_fits_waits_for_ever(
    block_size: int, window: int, budget: int, watermark: float, max_num_seqs: int, shared: int, length: int
) -> None:
    """Sliding pools are sized as `config.kv_sizing` does; a second request hits what the first one left."""
    most = max_num_seqs * (-(-(window + budget) // block_size) + 1)
    capacity = 512 // block_size
    groups = (full_group(capacity), sliding_group(min(capacity, most), window))
    driver = StepDriver(
        cache_config(*groups, block_size=block_size, watermark=watermark),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
    )
    limit = driver.kv.max_request_tokens()
    assert limit == (capacity - int(watermark * capacity)) * block_size
    for prompt in ([1] * shared, [1] * min(shared, length) + [2] * max(0, length - shared)):
        if prompt and len(prompt) + 4 <= limit:
            request = driver.add(prompt, 4)
            driver.run(2, limit=2000)
            assert output(request) == expected_tokens(request, driver.next_token)


def test_equal_states_give_equal_plans() -> None:
    """`schedule` is a function of state: two schedulers fed alike plan alike, hash order and clock notwithstanding."""
    ticks = itertools.count()
    plans = []
    for clock in (lambda: 0.0, lambda: float(next(ticks))):
        kv = KVCacheManager(cache_config(full_group(30)), "m")
        scheduler = Scheduler(scheduler_config(max_num_batched_tokens=50), kv, clock=clock)
        for arrival in range(6):
            scheduler.add(new_request([arrival, *range(30)], arrival=arrival))
        step = scheduler.schedule()
        assert step is not None
        plans.append(step.plan)
    assert plans[0] == plans[1]
