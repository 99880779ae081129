"""Files and batches of `/v1/files` and `/v1/batches`: kept in memory, within a bound, until deleted or the server ends.

Used in request tasks and by the batches that run; owns the bytes.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from infer.api.errors import ApiError

MAX_BYTES = 512 * 2**20
"""Of all files together."""
MAX_ENTRIES = 10_000
"""Files; and as many batches."""
DAY = 86_400
T = TypeVar("T")
Status = Literal["validating", "in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled"]


@dataclass(slots=True, kw_only=True)
class StoredFile:
    name: str
    purpose: str
    data: bytearray
    id: str = field(default_factory=lambda: f"file-{uuid.uuid4().hex}")
    created_at: int = field(default_factory=lambda: int(time.time()))

    def describe(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": len(self.data),
            "created_at": self.created_at,
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
        }


@dataclass(slots=True, kw_only=True)
class StoredBatch:
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[str, str] | None
    id: str = field(default_factory=lambda: f"batch_{uuid.uuid4().hex}")
    created_at: int = field(default_factory=lambda: int(time.time()))
    status: Status = "validating"
    output: StoredFile | None = None
    errors: StoredFile | None = None
    failure: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    times: dict[str, int] = field(default_factory=dict)
    """Status -> when it was reached."""

    def enter(self, status: Status) -> None:
        self.status = status
        self.times[status] = int(time.time())

    @property
    def is_over(self) -> bool:
        return self.status in ("completed", "failed", "cancelled")

    def describe(self) -> dict[str, Any]:
        failure = {"code": "batch_failed", "message": self.failure, "param": None, "line": None}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": None if self.failure is None else {"object": "list", "data": [failure]},
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output.id if self.is_over and self.output is not None else None,
            "error_file_id": self.errors.id if self.is_over and self.errors is not None else None,
            "created_at": self.created_at,
            "expires_at": self.created_at + DAY,
            "expired_at": None,
            **{f"{name}_at": self.times.get(name) for name in ("in_progress", "finalizing", "completed", "failed")},
            **{f"{name}_at": self.times.get(name) for name in ("cancelling", "cancelled")},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }


class BatchStore:
    """Oldest first, as lists show them from the end."""

    def __init__(self) -> None:
        self.files: dict[str, StoredFile] = {}
        self.batches: dict[str, StoredBatch] = {}

    def add_file(self, name: str, purpose: str, data: bytes) -> StoredFile:
        """Raises `ApiError` when there is no room."""
        self.check_room(len(data))
        if len(self.files) >= MAX_ENTRIES:
            raise ApiError(f"{MAX_ENTRIES} files are stored; delete some", status=413, code="storage_full")
        stored = StoredFile(name=name, purpose=purpose, data=bytearray(data))
        self.files[stored.id] = stored
        return stored

    def add_batch(self, batch: StoredBatch) -> None:
        if len(self.batches) >= MAX_ENTRIES:
            done = next((one.id for one in self.batches.values() if one.is_over), None)
            if done is None:
                raise ApiError(f"{MAX_ENTRIES} batches are running", status=429, code="too_many_batches")
            del self.batches[done]  # its files stay
        self.batches[batch.id] = batch

    def append(self, stored: StoredFile, row: bytes) -> None:
        self.check_room(len(row))
        stored.data += row

    def check_room(self, more: int) -> None:
        used = sum(len(stored.data) for stored in self.files.values())
        if used + more > MAX_BYTES:
            raise ApiError(
                f"the stored files hold {used} bytes and at most {MAX_BYTES} are kept; delete some",
                status=413,
                code="storage_full",
            )

    def file(self, file_id: str) -> StoredFile:
        return _found(self.files, file_id, "file")

    def batch(self, batch_id: str) -> StoredBatch:
        return _found(self.batches, batch_id, "batch")


def _found(kept: dict[str, T], key: str, kind: str) -> T:
    if key not in kept:
        raise ApiError(f"there is no {kind} {key[:100]!r}", status=404, code="not_found", parameter=f"{kind}_id")
    return kept[key]
