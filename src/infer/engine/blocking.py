"""The engine for code without an event loop: the same object behind anyio's blocking portal.

Lives in the caller's thread; the engine runs in the portal's thread and ends with the `with` block.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

from infer.engine.home import check_process
from infer.errors import EngineClosedError
from infer.types import Completion, Delta, Prompt, SamplingParams

if TYPE_CHECKING:
    from infer.engine.engine import Engine
    from infer.engine.explanation import Explanation
    from infer.engine.stream import Stream

T = TypeVar("T")


class BlockingStream:
    """`for delta in engine.stream(...)`; then `stream.result` is what `generate` returns, the artifact's receipt included.

    Leaving it early aborts the request: `close` it, leave its `with`, or let go of it.
    """

    def __init__(self, stream: Stream, deltas: Generator[Delta, None, None]) -> None:
        self._stream = stream
        self._deltas = deltas  # knows nothing of this object, so that it ends when nobody holds it any more

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        return next(self._deltas)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the request if it still runs."""
        self._deltas.close()

    @property
    def request_id(self) -> str:
        """Known from the first delta on."""
        return self._stream.request_id

    @property
    def result(self) -> Completion:
        """The completion; raises `EngineError` while the stream has not been read to its end."""
        return self._stream.result


class BlockingEngine:
    """`with Engine.blocking(...) as engine: engine.generate(...)`. Methods mirror `Engine`; safe to share between threads."""

    def __init__(self, make: Callable[[], Engine]) -> None:
        self._make = make
        self._stack: ExitStack | None = None
        self._state = "new"

    def __enter__(self) -> Self:
        if self._state != "new":
            raise EngineClosedError(f"this engine is {self._state}; make a new one to start again")
        with ExitStack() as stack:
            self._portal: BlockingPortal = stack.enter_context(start_blocking_portal())
            self._engine = stack.enter_context(self._portal.wrap_async_context_manager(self._make()))
            self._stack = stack.pop_all()
        self._state = "open"
        self._pid = os.getpid()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if self._stack is None:
            raise EngineClosedError("this engine was never entered")
        self._state = "closed"
        if os.getpid() != self._pid:
            return None  # the engine's thread stayed in the process that was forked
        return self._stack.__exit__(kind, error, trace)

    @property
    def engine(self) -> Engine:
        """The asynchronous engine, for its facts (`resolved`, `tokenizer`, `statistics()`)."""
        self._open_portal()
        return self._engine

    def _open_portal(self) -> BlockingPortal:
        if self._state != "open":
            raise EngineClosedError(f"the engine is {self._state}; use it inside `with Engine.blocking(...)`")
        check_process(self._pid)
        return self._portal

    def _call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Run it on the engine's loop. A wait that is interrupted (Ctrl-C) cancels it."""
        future = self._open_portal().start_task_soon(function)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def generate(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Completion:
        """As `Engine.generate`."""
        return self._call(lambda: self._engine.generate(prompt, params, **options))

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        **options: Any,
    ) -> list[Completion]:
        """As `Engine.generate_many`."""
        return self._call(lambda: self._engine.generate_many(prompts, params, **options))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> BlockingStream:
        """Deltas of one request, begun with the first one that is asked for; arguments as for `Engine.stream`."""
        self._open_portal()
        stream = self._engine.stream(prompt, params, **options)
        return BlockingStream(stream, self._deltas(stream))

    def _deltas(self, stream: Stream) -> Generator[Delta, None, None]:
        try:
            self._call(stream.__aenter__)
            while True:
                try:
                    delta = self._call(stream.__anext__)
                except StopAsyncIteration:
                    return
                yield delta
        finally:
            if self._state == "open" and os.getpid() == self._pid:  # else there is nobody to tell
                self._call(lambda: stream.__aexit__(None, None, None))

    def abort(self, request_id: str) -> bool:
        """As `Engine.abort`."""
        return self._open_portal().call(self._engine.abort, request_id)

    def explain(self, request_id: str) -> Explanation:
        """As `Engine.explain`."""
        return self._open_portal().call(self._engine.explain, request_id)
