"""The executor of one process: a thread that owns the worker and executes plans in order.

Created in the loop task; the worker is built, used and closed on the thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import anyio
from anyio.lowlevel import current_token

from infer.engine.executor.executor import OverlappingWorker, RunningStep, Worker
from infer.engine.step import StepPlan, StepResult
from infer.errors import EngineDeadError

T = TypeVar("T")
LOOK_AGAIN = 50e-6
"""Seconds between looks at a device that is not done with a step, while the next step may come any moment."""

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
        """The first reason counts."""
        self._error = self._error or error
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


class _StepJob(_Job[StepResult]):
    """A step of an overlapping worker: `run` begins it, `finish` has its outcome."""

    def __init__(self, begin: Callable[[], RunningStep], call_on_loop: CallOnLoop) -> None:
        super().__init__(self._finish, call_on_loop)
        self._begin = begin
        self._step: RunningStep | None = None

    def run(self) -> None:
        try:
            self._step = self._begin()
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, Exception):
                raise

    def ready(self) -> bool:
        try:
            return self._step is None or self._step.ready()
        except Exception:  # the device is broken: `finish` says how
            return True

    def finish(self) -> None:
        if self._step is not None:
            super().run()

    def _finish(self) -> StepResult:
        if self._step is None:
            raise EngineDeadError("a step was finished before it was begun")
        return self._step.finish()


class ThreadExecutor:
    """One daemon thread named `infer-worker`. Closed by `aclose`; a dead thread fails everything with `EngineDeadError`."""

    def __init__(self) -> None:
        self._call_on_loop = _loop_caller()
        self._jobs: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        self._worker: Worker | OverlappingWorker | None = None
        self._begun: deque[_StepJob] = deque()
        """The thread's own: steps that the device works on, oldest first."""
        self._submit: Callable[[StepPlan], _Job[StepResult]] | None = None
        self._death: BaseException | None = None
        self._closing = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="infer-worker", daemon=True)
        self._thread.start()

    async def start(self, build: Callable[[], Worker | OverlappingWorker]) -> None:
        """Build the worker on the thread."""

        def keep() -> None:  # also when nobody waits for it any more: `aclose` frees it
            self._worker = build()
            self._submit = self._way_of(self._worker)

        await self.call(keep)

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function on the thread between steps. If the wait is cancelled the function still runs to its end."""
        return await self._post(function).wait()

    def submit(self, plan: StepPlan) -> _Job[StepResult]:
        if self._submit is None:
            raise EngineDeadError("a step was submitted before the worker was built")
        return self._submit(plan)

    def _way_of(self, worker: Worker | OverlappingWorker) -> Callable[[StepPlan], _Job[StepResult]]:
        """How plans get to it. Asked once: whether an object follows a protocol takes microseconds."""
        if isinstance(worker, OverlappingWorker):
            return lambda plan: self._put(_StepJob(lambda: worker.begin(plan), self._call_on_loop))
        return lambda plan: self._post(lambda: worker.execute(plan))

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
        return self._put(_Job(function, self._call_on_loop), even_when_closing=even_when_closing)

    def _put(self, job: _Job[T], *, even_when_closing: bool = False) -> _Job[T]:
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
            while (job := self._next()) is not None:
                if isinstance(job, _StepJob):
                    self._begun.append(job)
                    job.run()
                else:
                    self._run_behind_begun(job)
            self._finish_begun()
        except BaseException as error:
            with self._lock:  # a job is either seen here or refused in `_put`
                self._death = error
                for begun in self._begun:
                    begun.fail(error)
                self._drop_queued(error)

    def _next(self) -> _Job[Any] | None:
        """The next job. Until it comes, what is ready is finished: its reader does not wait for the step behind it."""
        while self._begun:
            if self._begun[0].ready():
                self._finish_oldest()
                continue
            with suppress(Empty):
                return self._jobs.get(timeout=LOOK_AGAIN)
        return self._jobs.get()

    def _run_behind_begun(self, job: _Job[Any]) -> None:
        """A call sees no step on its way. It is in no queue meanwhile: what ends the thread is told to it here."""
        try:
            self._finish_begun()
        except BaseException as error:
            job.fail(error)
            raise
        job.run()

    def _finish_begun(self) -> None:
        while self._begun:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        self._begun[0].finish()  # in the queue until it is done: an error that ends the thread reaches it
        self._begun.popleft()
