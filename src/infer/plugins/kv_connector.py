"""Contract of an external KV store (hook `infer_kv_connectors`), in two halves that share no memory.

A store of bytes by key needs none of this: `infer.plugins.kv_store` makes both halves of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

if TYPE_CHECKING:
    from torch import Tensor

API_VERSION = 1


class KVGroupFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One KV group of the model."""

    block_bytes: int
    """Of one block, over all layers of the group."""
    window: int | None = None
    """Sliding window in tokens: of a prefix only the blocks that its window reaches are loaded."""


class KVFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What both halves are told of the engine."""

    namespace: bytes
    """SHA-256 of everything that the bytes of a block depend on beside its tokens: weights, model, kernels, dtype, layout.
    It is hashed into every block hash as well, so that blocks of two models never meet; as a prefix of keys it tells an
    operator which belong together."""
    block_size: int
    """Tokens."""
    groups: tuple[KVGroupFacts, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVConnectorSpec:
    name: str
    api: int
    factory: str
    """"module:attr", called as `factory(options: dict, facts: KVFacts) -> SchedulerConnector` (control plane: no torch)."""
    worker_factory: str
    """"module:attr", called as `worker_factory(options: dict, facts: KVFacts) -> WorkerConnector` (data plane)."""
    example: dict[str, Any]
    """Options for the kit; "{tmp}" in a value stands for a scratch directory."""


@dataclass(frozen=True, slots=True)
class ExternalMatch:
    """Answer to a lookup: `later` asks the scheduler to try again at the next step without losing the request's place."""

    state: Literal["hit", "miss", "later"]
    num_tokens: int = 0
    """Of the sequence from its beginning, those the engine has itself included. Need not end with a block."""
    wait: bool = False
    """Loading is so fast that the step waits for it. False: the request is scheduled when its blocks are there, and others
    run meanwhile."""


class KVBlock(msgspec.Struct, frozen=True):
    """One block of one group on its way."""

    hash: bytes
    """Identity of the tokens up to its end and of the namespace; empty for a last block that is not full."""
    group: int
    block_id: int
    """Where it lies in the group's tensors."""
    index: int
    """Its place in the sequence."""


class KVTransfer(msgspec.Struct, frozen=True):
    """An order to the worker half. Until it is reported, the engine touches none of its blocks, whatever becomes of the
    request."""

    job_id: int
    kind: Literal["load", "save"]
    request_id: str
    blocks: tuple[KVBlock, ...]
    """In order of index."""
    wait: bool = False
    """A step waits for this load."""


class KVReport(msgspec.Struct, frozen=True):
    """A transfer is over: nobody reads or writes its blocks any more."""

    job_id: int
    failed: tuple[int, ...] = ()
    """Places in `KVTransfer.blocks` that were not loaded (what lies there now is nobody's), or not saved."""
    reason: str = ""
    """Why, when the store is at fault; a block that is not there is no fault."""


class KVBlocks(Protocol):
    """The engine's KV cache as the worker half sees it. Every method may be called from any thread."""

    @property
    def tensors(self) -> Mapping[int, tuple[Tensor, Tensor]]:
        """Layer -> keys and values, each [blocks, block_size, heads, head size]; they stay where they are."""
        ...

    def read(self, group: int, block_id: int) -> bytes:
        """A block's bytes over all layers of the group: `KVGroupFacts.block_bytes` of them."""
        ...

    def write(self, group: int, block_id: int, data: bytes) -> None:
        """The reverse. Raises ValueError when the length is another."""
        ...


class SchedulerConnector(Protocol):
    """Runs in the loop task: no tensors, no waiting. What it raises counts as a miss."""

    def match(
        self, request_id: str, block_hashes: Sequence[bytes], num_tokens: int, num_local_tokens: int
    ) -> ExternalMatch:
        """How much of a sequence of `num_tokens` tokens, whose full blocks have these hashes, can be loaded; the engine has
        `num_local_tokens` itself, which may be fewer than it had when the answer was `later`. Asked at every step until the
        answer is definite, and again when the engine has lost some of these before it could load."""
        ...

    def forget(self, request_id: str) -> None:
        """The request asks no more: it was answered and is admitted, or it has ended."""
        ...

    def close(self) -> None:
        """Give everything back; called once, from any thread."""
        ...


class WorkerConnector(Protocol):
    """Runs on the worker thread, which computes nothing meanwhile: `start` and `poll` only hand over."""

    def bind(self, blocks: KVBlocks) -> None:
        """The cache, once, before anything else."""
        ...

    def start(self, transfers: Sequence[KVTransfer]) -> None:
        """Take orders. Raises only when it took none of them."""
        ...

    def poll(self, timeout: float) -> list[KVReport]:
        """What is over since the last call, each transfer once; waits up to `timeout` seconds for the first."""
        ...

    def close(self) -> None:
        """Nothing is read or written when this returns. What was not reported never will be."""
        ...
