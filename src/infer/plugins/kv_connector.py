"""Contract of an external KV store (hook `infer_kv_connectors`), in two halves that share no memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

API_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KVConnectorSpec:
    name: str
    api: int
    factory: str
    """"module:attr", called as `factory(config: dict) -> SchedulerConnector` (control plane)."""
    worker_factory: str
    """"module:attr", called as `worker_factory(config: dict) -> WorkerConnector` (data plane)."""
    example: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ExternalMatch:
    """Answer to a lookup: `later` asks the scheduler to try again at the next step without losing the request's place."""

    state: Literal["hit", "miss", "later"]
    num_tokens: int = 0


class SchedulerConnector(Protocol):
    """Runs in the loop task: no tensors, no waiting."""

    def match(self, request_id: str, block_hashes: Sequence[bytes], num_local_tokens: int) -> ExternalMatch: ...

    def plan(self, request_id: str, block_ids: Sequence[int], num_tokens: int) -> Any:
        """What the worker half has to load or save for this request in this step."""
        ...

    def finished(self, request_id: str, block_ids: Sequence[int]) -> bool:
        """True when the blocks must be held until the worker half reports the save done."""
        ...


class WorkerConnector(Protocol):
    """Runs on the worker thread."""

    def bind(self, kv: dict[int, tuple[Tensor, Tensor]]) -> None: ...

    def start(self, plan: Any) -> None: ...

    def wait_layer(self, layer_id: int) -> None: ...

    def save_layer(self, layer_id: int) -> None: ...

    def poll(self) -> tuple[list[str], list[str], list[str]]:
        """(request ids loaded, saved, failed) since the last call."""
        ...
