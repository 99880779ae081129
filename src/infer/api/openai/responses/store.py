"""Where answered responses are kept for `previous_response_id` and retrieval: the contract, and the default in memory.

Used in request tasks; the default owns the bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from infer.errors import StorageError


class ResponseStore(Protocol):
    """Keeps records until it forgets them; a record is opaque bytes. Any method may raise: the caller then fails with a
    typed error. `owner` tells the API key apart ("" where there are none): a record is there for its owner only."""

    async def put(self, owner: str, response_id: str, record: bytes) -> None:
        """Keep it. Ids are never used twice."""
        ...

    async def get(self, owner: str, response_id: str) -> bytes | None:
        """None: unknown, forgotten, or another owner's."""
        ...

    async def delete(self, owner: str, response_id: str) -> bool:
        """False where there was none."""
        ...


class MemoryResponseStore:
    """At most so many records and bytes, the least recently used one goes first; gone when the server ends."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._records: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    async def put(self, owner: str, response_id: str, record: bytes) -> None:
        """Raises `StorageError` for a record that is larger than the whole store."""
        if len(record) > self._max_bytes or self._max_count < 1:
            raise StorageError(
                f"the response takes {len(record)} bytes and api.responses_max_bytes={self._max_bytes}; ask with "
                "store=false, or raise the setting",
                code="response_too_large",
            )
        key = (owner, response_id)
        self._forget(key)
        self._records[key] = record
        self.num_bytes += len(record)
        while self.num_bytes > self._max_bytes or len(self._records) > self._max_count:
            self._forget(next(iter(self._records)))

    async def get(self, owner: str, response_id: str) -> bytes | None:
        record = self._records.get((owner, response_id))
        if record is not None:
            self._records.move_to_end((owner, response_id))
        return record

    async def delete(self, owner: str, response_id: str) -> bool:
        return self._forget((owner, response_id))

    def _forget(self, key: tuple[str, str]) -> bool:
        record = self._records.pop(key, None)
        self.num_bytes -= len(record or b"")
        return record is not None
