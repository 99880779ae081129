"""`infer serve [MODEL]`: the OpenAI API of one model until a signal: the first stops gently, the second at once."""

from __future__ import annotations

import importlib.util
import signal
from contextlib import AsyncExitStack
from functools import partial
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


@with_options(sections=tuple(EngineConfig.model_fields))
def serve(
    session: Session,
    *,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Left out: the small default model.")] = None,
    config: EngineConfig,
) -> None:
    """Serve a model over HTTP with the OpenAI API."""
    try:
        from infer.api import open_listener  # noqa: PLC0415 - only this command needs a server
    except ModuleNotFoundError as error:
        if error.name in ("starlette", "hypercorn"):
            raise ConfigError(
                f"`infer serve` needs {error.name}; install the extra: pip install 'infer-engine[server]'"
            ) from None
        raise
    listener = open_listener(config.api)
    try:
        uvloop = importlib.util.find_spec("uvloop") is not None
        anyio.run(_run, session, with_model(config, model), listener, backend_options={"use_uvloop": uvloop})
    finally:
        listener.close()


async def _run(session: Session, config: EngineConfig, listener: Listener) -> None:
    async with AsyncExitStack() as stack:
        with ProgressDisplay(session) as report:
            engine = await stack.enter_async_context(session.make_engine(config, report))
        await _serve_until_signal(session, engine, listener)


async def _serve_until_signal(session: Session, engine: Engine, listener: Listener) -> None:
    from infer.api import serve as serve_api  # noqa: PLC0415

    stop = anyio.Event()
    async with anyio.create_task_group() as tasks:
        await tasks.start(_stop_on_signal, session, stop, tasks.cancel_scope)
        server = partial(serve_api, engine, stop=stop, listener=listener)

        async def run(*, task_status: anyio.abc.TaskStatus[str]) -> None:
            await server(task_status=task_status)
            tasks.cancel_scope.cancel()

        address = await tasks.start(run)
        session.write(f"serving on {address}\n")
        session.note("Ctrl-C stops; a second one at once")


async def _stop_on_signal(
    session: Session, stop: anyio.Event, scope: anyio.CancelScope, *, task_status: anyio.abc.TaskStatus[None]
) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async for _ in signals:
            if stop.is_set():
                scope.cancel()
                return
            session.note("stopping: running requests may finish")
            stop.set()
