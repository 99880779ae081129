"""`infer serve [MODEL]`: the OpenAI API of one model until a signal: the first stops gently, the second at once."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from typing import TYPE_CHECKING, Annotated

import anyio
import typer

from infer.cli.options import with_model, with_options
from infer.cli.progress import ProgressDisplay
from infer.cli.session import Session
from infer.config.engine import EngineConfig
from infer.errors import ConfigError

if TYPE_CHECKING:
    from infer.api.listener import Listener
    from infer.engine.engine import Engine

BY_SIGNAL = 128
"""Added to the signal's number: the exit code of a server that was stopped before it served."""


@with_options(sections=tuple(EngineConfig.model_fields))
def serve(
    session: Session,
    *,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Left out: the small default model.")] = None,
    config: EngineConfig,
) -> None:
    """Serve a model over HTTP with the OpenAI API.

    SIGINT or SIGTERM lets running requests finish and exits with 0; while the model is loading it exits with 130 or
    143. A second signal ends everything at once.
    """
    try:
        from infer.api import open_admin_listener, open_listener  # noqa: PLC0415 - only this command needs a server
    except ModuleNotFoundError as error:
        if error.name in ("starlette", "hypercorn"):
            raise ConfigError(
                f"`infer serve` needs {error.name}; install the extra: pip install 'infer-engine[server]'"
            ) from None
        raise
    with ExitStack() as stack:
        listeners = [stack.enter_context(open_listener(config.api))]
        admin_listener = open_admin_listener(config.api)
        if admin_listener is not None:
            listeners.append(stack.enter_context(admin_listener))
        uvloop = importlib.util.find_spec("uvloop") is not None
        arguments = (session, with_model(config, model), listeners, stack.close)
        code = anyio.run(_run, *arguments, backend_options={"use_uvloop": uvloop})
    if code:
        raise typer.Exit(code)


async def _run(
    session: Session, config: EngineConfig, listeners: Sequence[Listener], close_listeners: Callable[[], None]
) -> int:
    """Load, then serve until a signal; returns the exit code."""
    from infer.api.errors import unwrap  # noqa: PLC0415

    life = Life(session, close_listeners)
    try:
        async with anyio.create_task_group() as tasks:
            await tasks.start(life.watch_signals)
            with life.scope:
                async with AsyncExitStack() as stack:
                    with ProgressDisplay(session) as report:
                        engine = await stack.enter_async_context(session.make_engine(config, report))
                    with life.serving_scope:
                        await _serve(life, engine, listeners)
                    life.end_of_serving()
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise unwrap(group) from group
    return 0 if life.serving or life.stopped_by is None else BY_SIGNAL + life.stopped_by


async def _serve(life: Life, engine: Engine, listeners: Sequence[Listener]) -> None:
    from infer.api import serve as serve_api  # noqa: PLC0415

    public, admin = listeners[0], listeners[1] if len(listeners) > 1 else None
    async with anyio.create_task_group() as tasks:

        async def run(*, task_status: anyio.abc.TaskStatus[str]) -> None:
            await serve_api(engine, stop=life.stop, listener=public, admin_listener=admin, task_status=task_status)

        address = await tasks.start(run)
        life.serving = True
        life.session.write(f"serving on {address}\n")
        if admin is not None:
            life.session.write(f"admin routes on {admin.address}\n")
        life.session.note("Ctrl-C stops; a second one at once")


class Life:
    """How far the server has come, and what a signal does there."""

    def __init__(self, session: Session, close_listeners: Callable[[], None]) -> None:
        self.serving = False
        self.stopped_by: int | None = None
        """The first signal."""
        self.stop = anyio.Event()
        self.scope = anyio.CancelScope()
        """Of loading, and of what is left when it has ended to serve."""
        self.serving_scope = anyio.CancelScope()
        """Of serving, inside the engine's life: requests are told that the server stops before the engine does."""
        self.session = session
        self._served = False
        self._close_listeners = close_listeners

    async def watch_signals(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for number in signals:
                if self.stopped_by is None:
                    self.stopped_by = number
                    self._begin_to_stop()
                elif self.serving and not self.serving_scope.cancel_called:
                    self.serving_scope.cancel()
                    if self._served:
                        self.scope.cancel()
                else:
                    self._leave(number)

    def end_of_serving(self) -> None:
        """Requests have ended, and artifacts may still be on their way: they have their time, unless it is to end at once."""
        self._served = True
        if self.serving_scope.cancel_called:
            self.scope.cancel()

    def _begin_to_stop(self) -> None:
        if self.serving:
            self.session.note("stopping: running requests may finish")
            self.stop.set()
        else:
            self.session.note("stopping: the model is not loaded yet")
            self.scope.cancel()

    def _leave(self, number: int) -> None:
        """Whatever still runs: a thread that is stuck in a read cannot be waited for."""
        self._close_listeners()
        self.session.err.show_cursor()
        sys.stdout.flush()
        os._exit(BY_SIGNAL + number)
