"""What an engine does with a KV connector, without an engine: both halves over a small cache of two groups.

Used by the conformance kit; `OpenConnector` owns the halves until it is closed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from infer.config.model import KVGroup, KVLayer, KVLayout
from infer.engine.worker.kv_blocks import TensorKVBlocks
from infer.plugins.kv_connector import (
    ExternalMatch,
    KVBlock,
    KVConnectorSpec,
    KVFacts,
    KVGroupFacts,
    KVReport,
    KVTransfer,
    SchedulerConnector,
    WorkerConnector,
)
from infer.testing.kits import expect, load

BLOCK_SIZE = 4
WINDOW = 6
NUM_BLOCKS = 24
LAYOUT = KVLayout(
    groups=(KVGroup(name="full", layer_ids=(0, 2)), KVGroup(name="sliding", layer_ids=(1,), window=WINDOW)),
    layers=(
        KVLayer(layer_id=0, num_kv_heads=2, head_size=4),
        KVLayer(layer_id=1, num_kv_heads=1, head_size=6, value_head_size=2),
        KVLayer(layer_id=2, num_kv_heads=2, head_size=4),
    ),
)


class Faults(Protocol):
    """What a test can do to the store behind the connector's options."""

    def outage(self) -> AbstractContextManager[None]:
        """The store cannot be reached."""
        ...

    def delay(self) -> AbstractContextManager[None]:
        """The store answers nobody until the end of the block, and everybody after it."""
        ...

    def lose(self) -> None:
        """Every other value is gone."""
        ...

    def damage(self) -> None:
        """Every value has a byte changed or is cut off."""
        ...


class ConnectorStore:
    """The store behind the options, as one namespace that no other check has."""

    def __init__(self, spec: KVConnectorSpec, options: dict[str, Any], faults: Faults | None, patience: float) -> None:
        self._spec = spec
        self._options = options
        self._faults = faults
        self.patience = patience
        groups = (
            KVGroupFacts(block_bytes=4 * BLOCK_SIZE * 2 * 4 * 4),
            KVGroupFacts(block_bytes=BLOCK_SIZE * (6 + 2) * 4, window=WINDOW),
        )
        self.facts = KVFacts(namespace=random.randbytes(32), block_size=BLOCK_SIZE, groups=groups)

    @property
    def has_faults(self) -> bool:
        return self._faults is not None

    @property
    def faults(self) -> Faults:
        if self._faults is None:
            raise AssertionError("this check needs faults")
        return self._faults

    @contextmanager
    def open(self) -> Iterator[OpenConnector]:
        """Both halves over a cache of their own."""
        engine = OpenConnector(self._spec, dict(self._options), self.facts, self.patience)
        try:
            yield engine
        finally:
            engine.close()

    def sequence(self, name: str, length: int) -> list[bytes]:
        """Hashes of the blocks of a sequence."""
        return [random.Random(repr((self.facts.namespace, name, index))).randbytes(32) for index in range(length)]


@dataclass
class OpenConnector:
    """What an engine does with a connector, without an engine."""

    spec: KVConnectorSpec
    options: dict[str, Any]
    facts: KVFacts
    patience: float

    def __post_init__(self) -> None:
        tensors = {}
        for layer in LAYOUT.layers:
            shape = (NUM_BLOCKS + 1, BLOCK_SIZE, layer.num_kv_heads)
            keys, values = (torch.zeros((*shape, size)) for size in layer.head_sizes)
            tensors[layer.layer_id] = (keys, values)
        self.blocks = TensorKVBlocks(tensors, LAYOUT, lambda: None)
        self.scheduler: SchedulerConnector = load(self.spec)(dict(self.options), self.facts)
        self.worker: WorkerConnector = load(self.spec, "worker_factory")(dict(self.options), self.facts)
        self.worker.bind(self.blocks)
        self.running: dict[int, KVTransfer] = {}
        self.next_id = 1
        self._closed = False

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.worker.close()
            self.scheduler.close()

    def fill(self, block: KVBlock) -> None:
        """The content that belongs to its hash."""
        self.blocks.write(block.group, block.block_id, content(self.facts, block))

    def has(self, block: KVBlock) -> bool:
        return self.blocks.read(block.group, block.block_id) == content(self.facts, block)

    def order(self, kind: Any, blocks: Sequence[KVBlock]) -> KVTransfer:
        transfer = KVTransfer(self.next_id, kind, f"request {self.next_id}", tuple(blocks))
        self.next_id += 1
        self.running[transfer.job_id] = transfer
        self.worker.start([transfer])
        return transfer

    def poll(self, timeout: float) -> list[KVReport]:
        found = self.worker.poll(timeout)
        for report in found:
            transfer = self.running.pop(report.job_id, None)
            if transfer is None:
                raise AssertionError(f"transfer {report.job_id} was reported twice, or never ordered")
            places = range(len(transfer.blocks))
            expect(all(place in places for place in report.failed), f"{report} names blocks that are none of its own")
        return found

    def settle(self) -> dict[int, KVReport]:
        """Until nothing is on its way."""
        found: dict[int, KVReport] = {}
        deadline = time.monotonic() + self.patience
        while self.running:
            expect(time.monotonic() < deadline, f"transfers {sorted(self.running)} were never reported")
            found |= {report.job_id: report for report in self.poll(0.05)}
        return found

    def move(self, kind: Any, blocks: Sequence[KVBlock]) -> set[int]:
        """-> places that failed."""
        transfer = self.order(kind, blocks)
        return set(self.settle()[transfer.job_id].failed)

    def ask(self, hashes: Sequence[bytes], num_local: int = 0) -> ExternalMatch:
        """The definite answer."""
        name = f"lookup {self.next_id}"
        self.next_id += 1
        deadline = time.monotonic() + self.patience
        while True:
            try:
                answer = self.scheduler.match(name, hashes, len(hashes) * BLOCK_SIZE + 1, num_local)
            except Exception:  # as the engine takes it
                answer = ExternalMatch("miss")
            if answer.state != "later":
                self.scheduler.forget(name)
                if answer.state == "miss":
                    return answer
                expect(0 < answer.num_tokens <= len(hashes) * BLOCK_SIZE, f"{answer} of {len(hashes)} blocks")
                return answer
            expect(time.monotonic() < deadline, "the answer stayed `later`")
            time.sleep(0.002)


def content(facts: KVFacts, block: KVBlock) -> bytes:
    return random.Random(repr((block.hash, block.group))).randbytes(facts.groups[block.group].block_bytes)


def placed(hashes: Sequence[bytes], first_id: int, groups: Sequence[int] = (0, 1)) -> list[KVBlock]:
    """The blocks of a sequence, from a block id on."""
    return [KVBlock(h, group, first_id + index, index) for index, h in enumerate(hashes) for group in groups]
