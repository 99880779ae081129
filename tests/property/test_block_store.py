"""The store of captured rows against a naive model: time stamps, a linear search, and one rule of eviction per line."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from infer.engine.worker.background_store import BackgroundStore
from infer.engine.worker.block_store import BlockStoreError, MissingBlockError, SlotStore, private_store, shared_store
from infer.engine.worker.directory_store import directory_store

KEYS = st.sampled_from([bytes([i]) for i in range(5)])
VALUES = st.integers(0, 255)


class Model:
    """What is there, who holds it, and when it was last wanted."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.data: dict[bytes, bytes] = {}
        self.references: dict[bytes, int] = {}
        self.wanted: dict[bytes, int] = {}
        self.clock = 0

    def tick(self, key: bytes) -> None:
        self.clock += 1
        self.wanted[key] = self.clock

    def put(self, objects: dict[bytes, bytes], retain: list[bytes], release: list[bytes]) -> list[bytes]:
        frozen = {key for key in objects if self.references.get(key) and key in self.data}
        for key in retain:
            self.references[key] = self.references.get(key, 0) + 1
        let_go = set()
        for key in release:
            self.references[key] -= 1
            if not self.references[key]:
                let_go.add(key)
                self.tick(key)
        refused = []
        waiting = {key for key in objects if key not in frozen and key not in self.data}
        written = set(objects) - frozen
        # What is retained comes first, and may take the place of what this call would only replace.
        for key, value in sorted(objects.items(), key=lambda item: not self.references.get(item[0])):
            if key in frozen:
                continue
            if key in self.data or len(self.data) < self.capacity:
                # Free slots go to the objects in their order, whoever is older.
                if key not in self.data and key not in waiting:
                    refused.append(key)
                    continue
                waiting.discard(key)
                self.data[key] = value
                continue
            if key not in waiting:
                refused.append(key)
                continue
            waiting.discard(key)
            candidates = [
                other
                for other in {*self.data, *waiting, key}
                if not self.references.get(other)
                and (other not in written or other in let_go or (self.references.get(key) and other in self.data))
            ]
            stored = False
            for due in sorted(candidates, key=lambda other: self.wanted.get(other, 0)):
                if due == key:
                    break
                if due in waiting:
                    waiting.discard(due)
                    continue
                del self.data[due]
                self.data[key] = value
                stored = True
                break
            if not stored:
                refused.append(key)
        for key in objects:
            if key in written and key not in let_go and key in self.data and not self.references.get(key):
                self.tick(key)
        return refused

    def read(self, keys: list[bytes]) -> list[bytes] | bytes:
        """The rows, or the first missing key."""
        for key in keys:
            if key not in self.data:
                return key
        for key in reversed(keys):
            self.tick(key)
        return [self.data[key] for key in keys]

    def discard(self, keys: list[bytes]) -> None:
        for key in keys:
            self.data.pop(key, None)


class Machine(RuleBasedStateMachine):
    """Private and shared memory, a directory and the writer thread do the same things at the same time."""

    @initialize(capacity=st.integers(1, 4))
    def start(self, capacity: int) -> None:
        self.model = Model(capacity)
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name) / "store"
        self.stores: list[SlotStore] = [
            private_store(3, capacity),
            shared_store(3, capacity, 2**20),
            directory_store(self.path, 3, capacity),
        ]
        self.background = BackgroundStore(private_store(3, capacity), 4)
        self.refused: list[bytes] = []

    @rule(
        objects=st.dictionaries(KEYS, VALUES, max_size=4),
        retain=st.lists(KEYS, max_size=3),
        draw=st.data(),
    )
    def put(self, objects: dict[bytes, int], retain: list[bytes], draw: Any) -> None:
        held = [key for key, count in self.model.references.items() for _ in range(count)] + retain
        order = draw.draw(st.permutations(sorted(held)))
        release = order[: draw.draw(st.integers(0, min(4, len(order))))]
        values = {key: bytes([value]) * 3 for key, value in objects.items()}
        expected = self.model.put(values, retain, release)
        for store in self.stores:
            assert store.put(values, retain, release) == expected
        self.background.put(values, retain, release)
        self.refused += expected

    @rule(draw=st.data(), missing=st.none() | KEYS)
    def read(self, draw: Any, missing: bytes | None) -> None:
        keys = draw.draw(st.permutations(sorted(self.model.data)))[: draw.draw(st.integers(0, 3))]
        if missing is not None and draw.draw(st.integers(0, 3)) == 0:
            keys = [*keys, missing]
        expected = self.model.read(keys)
        for store in (*self.stores, self.background):
            try:
                found: list[bytes] | bytes = store.read(keys)
            except MissingBlockError as error:
                found = error.key
            assert found == expected

    @rule(keys=st.lists(KEYS, max_size=2))
    def discard(self, keys: list[bytes]) -> None:
        self.model.discard(keys)
        for store in (*self.stores, self.background):
            store.discard(keys)

    @rule(key=KEYS)
    def wrong_batches_change_nothing(self, key: bytes) -> None:
        count = self.model.references.get(key, 0)
        for store in self.stores:
            for objects, release in (({key: b"long, long"}, []), ({key: b"abc"}, [key] * (count + 1))):
                try:
                    store.put(objects, [], release)
                except BlockStoreError:
                    continue
                raise AssertionError("a wrong batch was accepted")

    @invariant()
    def never_more_than_the_cap(self) -> None:
        for store in getattr(self, "stores", ()):
            assert len(store._slots) <= self.model.capacity
            assert set(store._slots) == set(self.model.data)
            assert {key: n for key, n in self.model.references.items() if n} == store._references
            assert set(store._idle) == {key for key in store._slots if key not in store._references}
            used = sorted([*store._slots.values(), *store._free])
            assert used == list(range(store._num_touched)), "every slot is used or free, once"
        if hasattr(self, "stores"):
            files = {path.name: path.read_bytes() for path in self.path.iterdir() if path.name != "lock"}
            assert files == {f"{key.hex()}.rows": data for key, data in self.model.data.items()}

    def teardown(self) -> None:
        if hasattr(self, "stores"):
            self.background.read([])
            assert self.background.take_refused() == self.refused
            for store in (*self.stores, self.background):
                store.close()
            self.directory.cleanup()


TestBlockStore = Machine.TestCase
