"""A KV connector: blocks in one SQLite file, shared by the engines of a machine, kept over restarts.

A store of bytes by key; infer makes both halves of the connector of it and calls the store on threads of its own.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infer import ConfigError
from infer.plugins import KVConnectorSpec, KVFacts, StoreMatcher, StoreTransfer, hookimpl

MOST_BLOCKS = 100_000
SECONDS = 5.0
"""How long another writer is waited for; an error counts as a miss, or as blocks that were not saved."""


class SqliteStore:
    """One connection under a lock. The blocks that were stored first go first."""

    def __init__(self, path: str, most_blocks: int) -> None:
        self._most, self._lock = most_blocks, threading.Lock()
        self._database = sqlite3.connect(path, timeout=SECONDS, check_same_thread=False, isolation_level=None)
        self._database.execute("pragma journal_mode=wal")
        self._database.execute("pragma synchronous=off")  # a block that a crash loses is computed again
        self._database.execute(
            "create table if not exists blocks (at integer primary key, key text unique, value blob)"
        )

    def contains(self, keys: Sequence[str]) -> list[bool]:
        return [self._find("select 1", key) is not None for key in keys]

    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        rows = [self._find("select value", key) for key in keys]
        return [None if row is None else bytes(row[0]) for row in rows]

    def put(self, values: Mapping[str, bytes]) -> None:
        with self._lock:
            for key, value in values.items():
                self._database.execute("insert or replace into blocks (key, value) values (?, ?)", (key, value))
            kept = "select at from blocks order by at desc limit 1 offset ?"
            self._database.execute(f"delete from blocks where at <= ({kept})", (self._most,))

    def close(self) -> None:
        with self._lock, contextlib.suppress(sqlite3.Error):
            self._database.close()

    def _find(self, what: str, key: str) -> tuple[Any, ...] | None:
        with self._lock:
            row: tuple[Any, ...] | None = self._database.execute(f"{what} from blocks where key = ?", (key,)).fetchone()
        return row


def open_store(options: Mapping[str, Any]) -> SqliteStore:
    """`path`, an absolute file name, and `most_blocks`. Raises `ConfigError`."""
    path, most = options.get("path"), options.get("most_blocks", MOST_BLOCKS)
    unknown = sorted(set(options) - {"path", "most_blocks"})
    fields = ("kv_connector.options",)
    if unknown or not isinstance(path, str) or not Path(path).is_absolute():
        raise ConfigError("kv_connector.options of my-name are path, an absolute file, and most_blocks", fields=fields)
    if type(most) is not int or most < 1:
        raise ConfigError(f"kv_connector.options: most_blocks={most!r} is not a positive integer", fields=fields)
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return SqliteStore(path, most)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"kv_connector.options: path={path!r}: {error}", fields=fields) from error


def scheduler_half(options: dict[str, Any], facts: KVFacts) -> StoreMatcher:
    return StoreMatcher(open_store(options), facts)


def worker_half(options: dict[str, Any], facts: KVFacts) -> StoreTransfer:
    return StoreTransfer(open_store(options), facts)


@hookimpl
def infer_kv_connectors() -> list[KVConnectorSpec]:
    return [
        KVConnectorSpec(
            name="my-name",
            api=1,
            factory=f"{__name__}:scheduler_half",
            worker_factory=f"{__name__}:worker_half",
            example={"path": "{tmp}/blocks.sqlite"},
        )
    ]
