"""Conformance of a KV connector: what is loaded is what was saved or reported as failed, each transfer once, nobody waits.

On the calling thread, over a small cache of two groups; a random walk compares with a model. Every check closes what it opened.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

from infer.plugins.kv_connector import KVBlock, KVConnectorSpec
from infer.testing.kits import Check, expect
from infer.testing.kits._kv_halves import BLOCK_SIZE, ConnectorStore, Faults, OpenConnector, placed

PATIENCE = 60.0
"""Seconds until a transfer or an answer counts as lost."""
STEPS = 40
"""Actions of a random walk."""
FaultsOf = Callable[[dict[str, Any]], Faults]
"""From a connector's options to its store."""


def checks(
    spec: KVConnectorSpec,
    directory: Path,
    faults: FaultsOf | None = None,
    *,
    patience: float = PATIENCE,
    seeds: int = 3,
) -> Iterator[Check]:
    """`{tmp}` in the example stands for a directory of each check. With `faults` the store also fails, is slow, loses and
    changes values: without them half of the contract is not tried."""
    bodies: list[Callable[[ConnectorStore], None]] = [
        _round_trip,
        _nothing_there,
        _beginning_only,
        _beyond_local,
        _saved_when_reported,
        _close_ends_all,
    ]
    if faults is not None:
        bodies += [_never_waits, _outage, _partial, _damage, _no_write_after_close]
    names = [(body.__name__.strip("_"), body) for body in bodies]
    names += [(f"random_walk[{seed}]", partial(_walk, seed=seed)) for seed in range(seeds)]
    for number, (name, body) in enumerate(names):
        root = directory / str(number)
        yield Check(name, partial(_run, spec, root, faults, patience, body))


def _run(
    spec: KVConnectorSpec, root: Path, faults: FaultsOf | None, patience: float, body: Callable[[ConnectorStore], None]
) -> None:
    options = {k: v.replace("{tmp}", str(root)) if isinstance(v, str) else v for k, v in spec.example.items()}
    body(ConnectorStore(spec, options, None if faults is None else faults(options), patience))


def _save_all(engine: OpenConnector, blocks: Sequence[KVBlock]) -> None:
    for block in blocks:
        engine.fill(block)
    expect(engine.move("save", blocks) == set(), "a save failed though nothing was wrong")


def _load_and_check(engine: OpenConnector, blocks: Sequence[KVBlock]) -> set[int]:
    """-> places that failed; what did not fail must be right."""
    failed = engine.move("load", blocks)
    for place, block in enumerate(blocks):
        expect(
            place in failed or engine.has(block),
            f"block {block.index} of group {block.group} holds other bytes than saved",
        )
    return failed


def _round_trip(store: ConnectorStore) -> None:
    """A second engine loads what a first one saved, into other blocks, and touches no more than these."""
    hashes = store.sequence("a", 5)
    with store.open() as engine:
        _save_all(engine, placed(hashes, 1))
    with store.open() as engine:
        others = placed(store.sequence("b", 5), 1)
        for block in others:
            engine.fill(block)
        expect(engine.ask(hashes).num_tokens == 5 * BLOCK_SIZE, "not all of what was saved is found")
        expect(_load_and_check(engine, placed(hashes, 10)) == set(), "what was saved could not be loaded")
        expect(all(engine.has(block) for block in others), "a block that nobody asked for changed")
        expect(_load_and_check(engine, placed(hashes, 16, groups=(1,))) == set(), "one group alone could not be loaded")


def _nothing_there(store: ConnectorStore) -> None:
    """What was never saved is a miss, and its load fails."""
    hashes = store.sequence("never", 3)
    with store.open() as engine:
        expect(engine.ask(hashes).state == "miss", "what was never saved is a hit")
        expect(engine.ask([]).state == "miss", "a prompt shorter than a block is a hit")
        expect(len(_load_and_check(engine, placed(hashes, 1))) == 6, "a load of nothing did not fail")


def _beginning_only(store: ConnectorStore) -> None:
    """A hit ends at the first gap, and with the sequence that was saved."""
    hashes = store.sequence("a", 5)
    with store.open() as engine:
        _save_all(engine, placed(hashes[:2], 1) + placed(hashes, 3)[6:])
        expect(engine.ask(hashes).num_tokens == 2 * BLOCK_SIZE, "a hit must end where a block is missing")
        other = [*hashes[:1], *store.sequence("b", 3)]
        expect(engine.ask(other).num_tokens == BLOCK_SIZE, "a hit must end where the sequence is another")


def _beyond_local(store: ConnectorStore) -> None:
    """The number of tokens counts from the beginning; what the engine has itself need not be there."""
    hashes = store.sequence("a", 4)
    with store.open() as engine:
        _save_all(engine, [block for block in placed(hashes, 1) if block.index])
        expect(engine.ask(hashes).state == "miss", "a sequence without its beginning is a hit")
        answer = engine.ask(hashes, BLOCK_SIZE)
        expect(
            answer.num_tokens == 4 * BLOCK_SIZE, f"{answer}: 3 blocks behind a local one make {4 * BLOCK_SIZE} tokens"
        )
        expect(engine.ask(hashes, 4 * BLOCK_SIZE).state == "miss", "what the engine has itself is a hit")


def _saved_when_reported(store: ConnectorStore) -> None:
    """After the report the engine uses the block for something else."""
    hashes = store.sequence("a", 8)
    with store.open() as engine:
        blocks = placed(hashes, 1)
        _save_all(engine, blocks)
        for block in blocks:
            engine.blocks.write(block.group, block.block_id, bytes(store.facts.groups[block.group].block_bytes))
        expect(_load_and_check(engine, placed(hashes, 12)) == set(), "what was reported as saved cannot be loaded")


def _close_ends_all(store: ConnectorStore) -> None:
    """With transfers on their way; a second engine goes on."""
    hashes = store.sequence("a", 8)
    with store.open() as engine:
        blocks = placed(hashes, 1)
        _save_all(engine, blocks)
        engine.order("load", placed(hashes, 12))
        engine.order("save", blocks)
        engine.scheduler.match("unanswered", hashes, 99, 0)
    with store.open() as engine:
        expect(
            _load_and_check(engine, placed(hashes, 1)) == set(), "what was saved is gone with the engine that saved it"
        )


def _in_background(call: Callable[[], None]) -> Future[None]:
    """In a thread that nobody has to wait for. What the call raises is in the future."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            call()
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _never_waits(store: ConnectorStore) -> None:
    """While the store answers nobody, no call waits for it."""
    hashes = store.sequence("a", 2)
    with store.open() as engine:
        _save_all(engine, placed(hashes, 1))
        answers: list[Any] = []

        def calls() -> None:
            answers.append(engine.scheduler.match("slow", hashes, 99, 0).state)
            transfer = engine.order("load", placed(hashes, 5))
            answers.append([report for report in engine.poll(0) if report.job_id == transfer.job_id])

        with store.faults.delay():
            called = _in_background(calls)
            waits = bool(wait([called], store.patience / 2).not_done)
        # A call that waited goes on now, and must have ended before its connector is closed.
        wait([called], store.patience)
        expect(not waits, "a call waits for the store")
        called.result()
        expect(answers == ["later", []], f"the store was silent, and the connector answered {answers}")
        engine.settle()
        expect(all(engine.has(block) for block in placed(hashes, 5)), "a load that was slow did not come right")


def _outage(store: ConnectorStore) -> None:
    """Lookups are misses and transfers fail, with a reason; nothing hangs and nothing is lost of what was there."""
    hashes = store.sequence("a", 3)
    with store.open() as engine:
        _save_all(engine, placed(hashes, 1))
    with store.open() as engine, store.faults.outage():
        expect(engine.ask(hashes).state == "miss", "a store that is away has a hit")
        loading = engine.order("load", placed(hashes, 5))
        blocks = placed(store.sequence("b", 2), 10)
        for block in blocks:
            engine.fill(block)
        saving = engine.order("save", blocks)
        reports = engine.settle()
        expect(len(reports[loading.job_id].failed) == 6, "a load from a store that is away did not fail")
        expect(len(reports[saving.job_id].failed) == 4, "a save to a store that is away did not fail")
        expect(reports[loading.job_id].reason and reports[saving.job_id].reason, "a failure without a reason")
    with store.open() as engine:
        expect(_load_and_check(engine, placed(hashes, 1)) == set(), "what was saved before the outage is gone")


def _partial(store: ConnectorStore) -> None:
    """Values vanish between the answer and the load: what came is right, and what did not is named."""
    hashes = store.sequence("a", 6)
    with store.open() as engine:
        _save_all(engine, placed(hashes, 1))
        expect(engine.ask(hashes).num_tokens == 6 * BLOCK_SIZE, "not all of what was saved is found")
        store.faults.lose()
        expect(_load_and_check(engine, placed(hashes, 10)), "values are gone, and the load did not fail")


def _damage(store: ConnectorStore) -> None:
    """Changed values are as good as none."""
    hashes = store.sequence("a", 4)
    with store.open() as engine:
        _save_all(engine, placed(hashes, 1))
        store.faults.damage()
        expect(len(_load_and_check(engine, placed(hashes, 10))) == 8, "a damaged value was loaded")


def _no_write_after_close(store: ConnectorStore) -> None:
    """The cache belongs to others once `close` has returned."""
    hashes = store.sequence("a", 3)
    with store.open() as engine:
        _save_all(engine, placed(hashes, 1))
        blocks = placed(hashes, 10)
        with store.faults.delay():
            engine.order("load", blocks)
            closing = _in_background(engine.close)
            time.sleep(0.05)  # it may have to wait for a call of the store
        expect(not wait([closing], store.patience).not_done, "close does not return")
        closing.result()
        before = [engine.blocks.read(block.group, block.block_id) for block in blocks]
        time.sleep(0.3)
        after = [engine.blocks.read(block.group, block.block_id) for block in blocks]
        expect(before == after, "a block was written after close")


def _walk(store: ConnectorStore, *, seed: int) -> None:
    """Saves, loads, lookups, engines that come and go, and what can go wrong, in any order; compared with a dictionary."""
    chance = random.Random(seed)
    sequences = [store.sequence(str(number), 6) for number in range(3)]
    saved: set[tuple[bytes, int]] = set()
    exact = True  # nothing was lost so far
    faulty = ["lose", "damage", "outage"] if store.has_faults else []
    for _ in range(4):
        with store.open() as engine:
            for _ in range(STEPS // 4):
                hashes = chance.choice(sequences)[: chance.randint(1, 6)]
                action = chance.choice(["save", "load", "match", "together", chance.choice(faulty or ["load"])])
                if action == "lose" or (action == "damage" and chance.random() < 0.3):
                    getattr(store.faults, action)()
                    exact = False
                elif action == "outage" and chance.random() < 0.3:
                    with store.faults.outage():
                        _load_and_check(engine, placed(hashes, 1))
                    exact = False
                    break  # the next engine meets a store that works
                elif action == "save":
                    blocks = placed(hashes, 1)
                    for block in blocks:
                        engine.fill(block)
                    failed = engine.move("save", blocks)
                    expect(not failed or not exact, "a save failed though nothing was wrong")
                    saved |= {(block.hash, block.group) for place, block in enumerate(blocks) if place not in failed}
                elif action == "load":
                    _check_load(engine, placed(hashes, 1), saved, exact)
                elif action == "together":
                    for first in (1, 7, 13):
                        engine.order("load", placed(chance.choice(sequences), first))
                    engine.settle()
                else:
                    there = next((i for i, h in enumerate(hashes) if (h, 0) not in saved), len(hashes))
                    found = engine.ask(hashes).num_tokens // BLOCK_SIZE
                    expect(found <= there, f"{found} blocks were found of {there} that were saved")
                    expect(found == there or not exact, f"{found} blocks were found, {there} were saved")


def _check_load(engine: OpenConnector, blocks: Sequence[KVBlock], saved: set[tuple[bytes, int]], exact: bool) -> None:
    failed = _load_and_check(engine, blocks)
    for place, block in enumerate(blocks):
        known = (block.hash, block.group) in saved
        expect(known or place in failed, "a block that was never saved was loaded")
    complete = all((block.hash, block.group) in saved for block in blocks)
    expect(not (complete and exact and failed), "a load failed though nothing was wrong")
