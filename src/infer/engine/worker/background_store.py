"""Publication beside the step: a writer thread with a bounded queue in front of a block store.

Its methods are called by the worker thread; owns the writer thread, which starts with the first batch, and the store.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence

from infer.engine.worker.block_store import BlockStore, BlockStoreError


class BackgroundStore:
    """Batches are applied in order. Whoever reads waits for them; nobody else does, unless the queue is full."""

    def __init__(self, store: BlockStore, queue_size: int) -> None:
        self.object_bytes = store.object_bytes
        self.num_objects = store.num_objects
        self._store = store
        self._queue: queue.Queue[Callable[[], list[bytes] | None] | None] = queue.Queue(queue_size)
        self._thread: threading.Thread | None = None
        self._refused: list[bytes] = []
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._closed = False

    def put(
        self, objects: Mapping[bytes, bytes], retain: Sequence[bytes] = (), release: Sequence[bytes] = ()
    ) -> list[bytes]:
        """As `BlockStore.put`, later; what finds no room is told by `take_refused`. The arguments must not change."""
        self._submit(lambda: self._store.put(objects, retain, release))
        return []

    def discard(self, keys: Sequence[bytes]) -> None:
        self._submit(lambda: self._store.discard(keys))

    def read(self, keys: Sequence[bytes]) -> list[bytes]:
        """As `BlockStore.read`, behind everything that was put before."""
        self._check()
        self._queue.join()
        self._check()
        return self._store.read(keys)

    def take_refused(self) -> list[bytes]:
        """Keys that found no room since the last call."""
        with self._lock:
            refused, self._refused = self._refused, []
        return refused

    def close(self) -> None:
        """Finish what was put, then free the memory. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
        self._store.close()

    def _submit(self, batch: Callable[[], list[bytes] | None]) -> None:
        self._check()
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="infer-rows", daemon=True)
            self._thread.start()
        self._queue.put(batch)

    def _check(self) -> None:
        if self._closed:
            raise BlockStoreError("the store of captured rows is closed")
        if self._error is not None:
            raise BlockStoreError(f"the store of captured rows broke: {self._error}") from self._error

    def _write(self) -> None:
        while (batch := self._queue.get()) is not None:
            try:
                # Behind a failure nothing is known for sure, so nothing more is written; but the queue goes on, for
                # nobody may wait for ever.
                refused = batch() if self._error is None else None
                if refused:
                    with self._lock:
                        self._refused += refused
            except Exception as error:  # told to whoever calls next
                self._error = error
            finally:
                self._queue.task_done()
        self._queue.task_done()
