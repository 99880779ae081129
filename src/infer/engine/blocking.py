"""The engine for code without an event loop: the same object behind anyio's blocking portal.

Lives in the caller's thread; the engine runs in the portal's thread and ends with the `with` block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from anyio.from_thread import BlockingPortal, start_blocking_portal

from infer.errors import EngineClosedError
from infer.types import Completion, Delta, Prompt, SamplingParams

if TYPE_CHECKING:
    from infer.engine.engine import Engine


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
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if self._stack is None:
            raise EngineClosedError("this engine was never entered")
        self._state = "closed"
        return self._stack.__exit__(kind, error, trace)

    @property
    def engine(self) -> Engine:
        """The asynchronous engine, for its facts (`resolved`, `tokenizer`, `statistics()`)."""
        self._open_portal()
        return self._engine

    def _open_portal(self) -> BlockingPortal:
        if self._state != "open":
            raise EngineClosedError(f"the engine is {self._state}; use it inside `with Engine.blocking(...)`")
        return self._portal

    def generate(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Completion:
        """As `Engine.generate`."""
        return self._open_portal().call(lambda: self._engine.generate(prompt, params, **options))

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        **options: Any,
    ) -> list[Completion]:
        """As `Engine.generate_many`."""
        return self._open_portal().call(lambda: self._engine.generate_many(prompts, params, **options))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Iterator[Delta]:
        """Deltas of one request; leaving the iteration early aborts it."""
        portal = self._open_portal()
        stream = self._engine.stream(prompt, params, **options)
        with portal.wrap_async_context_manager(stream):
            while True:
                try:
                    delta = portal.call(stream.__anext__)
                except StopAsyncIteration:
                    return
                yield delta

    def abort(self, request_id: str) -> bool:
        """As `Engine.abort`."""
        return self._open_portal().call(self._engine.abort, request_id)
