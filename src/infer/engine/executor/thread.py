"""The executor of one process: a thread that owns the worker and executes plans in order.

Created in the loop task; the worker is built, used and closed on the thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import anyio
from anyio.lowlevel import current_token

from infer.engine.executor.executor import Worker
from infer.engine.step import StepPlan, StepResult
from infer.errors import EngineDeadError

T = TypeVar("T")


CallOnLoop = Callable[[Callable[[], object]], object]


def _loop_caller() -> CallOnLoop:
    """A function that runs a callable on the current event loop from any thread, without waiting for it."""
    native: Any = current_token().native_token
    call: CallOnLoop = getattr(native, "run_sync_soon", None) or native.call_soon_threadsafe  # trio, asyncio
    return call


class _Job(Generic[T]):
    """A call on the thread and its outcome."""

    def __init__(self, call: Callable[[], T], call_on_loop: CallOnLoop) -> None:
        self._call = call
        self._call_on_loop = call_on_loop
        self._done = anyio.Event()
        self._value: T | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, Exception):
                raise  # the thread ends with it
        else:
            self._announce()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._announce()

    def _announce(self) -> None:
        with suppress(RuntimeError):  # the event loop is closed: nobody waits any more
            self._call_on_loop(self._done.set)

    async def wait(self) -> T:
        await self._done.wait()
        if self._error is not None:
            if isinstance(self._error, Exception):
                raise self._error
            raise EngineDeadError(f"the worker thread ended: {self._error!r}") from self._error
        return self._value  # type: ignore[return-value]


class ThreadExecutor:
    """One daemon thread named `infer-worker`. Closed by `aclose`; a dead thread fails everything with `EngineDeadError`."""

    def __init__(self) -> None:
        self._call_on_loop = _loop_caller()
        self._jobs: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        self._worker: Worker | None = None
        self._death: BaseException | None = None
        self._closing = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="infer-worker", daemon=True)
        self._thread.start()

    async def start(self, build: Callable[[], Worker]) -> None:
        """Build the worker on the thread."""

        def keep() -> None:  # also when nobody waits for it any more: `aclose` frees it
            self._worker = build()

        await self.call(keep)

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function on the thread between steps. If the wait is cancelled the function still runs to its end."""
        return await self._post(function).wait()

    def submit(self, plan: StepPlan) -> _Job[StepResult]:
        worker = self._worker
        if worker is None:
            raise EngineDeadError("a step was submitted before the worker was built")
        return self._post(lambda: worker.execute(plan))

    async def aclose(self) -> None:
        """Wait for the running step, drop queued ones, close the worker on its thread and join it. Not cancellable."""
        with anyio.CancelScope(shield=True):
            if self._closing:
                return
            with self._lock:
                self._closing = True
                self._drop_queued(EngineDeadError("the executor is closed"))
            closing = self._post(self._close_worker, even_when_closing=True)
            self._jobs.put(None)
            try:
                with suppress(EngineDeadError):  # a dead thread was told to those who waited for it
                    await closing.wait()
            finally:
                # It has nothing left to do and ends in microseconds; a thread that waits for it would outlive the engine.
                self._thread.join()

    def _close_worker(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def _drop_queued(self, error: BaseException) -> None:
        while not self._jobs.empty():
            job = self._jobs.get_nowait()
            if job is not None:
                job.fail(error)

    def _post(self, function: Callable[[], T], *, even_when_closing: bool = False) -> _Job[T]:
        job = _Job(function, self._call_on_loop)
        with self._lock:
            if self._death is not None:
                job.fail(self._death)
            elif self._closing and not even_when_closing:
                job.fail(EngineDeadError("the executor is closed"))
            else:
                self._jobs.put(job)
        return job

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                job.run()
        except BaseException as error:
            with self._lock:  # a job is either seen here or refused in `_post`
                self._death = error
                self._drop_queued(error)
