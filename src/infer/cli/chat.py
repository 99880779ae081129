"""`infer chat [MODEL]`: a conversation in the terminal. The engine runs in a thread; Ctrl-C here ends an answer only."""

from __future__ import annotations

import contextlib
import sys
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Annotated, Any

import anyio
import typer
from anyio.from_thread import BlockingPortal, start_blocking_portal

from infer.cli.local import LocalModel
from infer.cli.options import with_model, with_options
from infer.cli.progress import ProgressDisplay
from infer.cli.remote import ApiKey, ApiKeyFile, RemoteModel, ServerUrl, server_key
from infer.cli.session import Session
from infer.config.engine import EngineConfig
from infer.errors import EngineClosedError, EngineDeadError, InferError
from infer.types import SamplingParams

_HELP = "/reset forgets the conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer"


@with_options(sampling=True)
def chat(
    session: Session,
    *,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Left out: the small default model.")] = None,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="System message at the beginning.")
    ] = None,
    url: ServerUrl = None,
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
    config: EngineConfig,
    params: SamplingParams,
) -> None:
    """Talk with a model in the terminal."""
    key = server_key(url, api_key, api_key_file)
    with contextlib.ExitStack() as stack:
        portal = stack.enter_context(start_blocking_portal())
        if url is not None:
            remote = portal.call(RemoteModel.find, url, model, key, session.think)
            _converse(session, f"{remote.name} at {url}", _Conversation(portal, remote, params, system))
            return
        config = with_model(config, model)
        with ProgressDisplay(session) as report:
            engine = stack.enter_context(portal.wrap_async_context_manager(session.make_engine(config, report)))
        local = LocalModel(engine, session.think)
        _converse(session, config.model.ref, _Conversation(portal, local, params, system))


@dataclass(slots=True)
class _Conversation:
    portal: BlockingPortal
    model: LocalModel | RemoteModel
    params: SamplingParams
    system: str | None
    turns: list[dict[str, Any]] = field(default_factory=list)

    def messages(self) -> list[dict[str, Any]]:
        return [*([{"role": "system", "content": self.system}] if self.system is not None else []), *self.turns]


def _converse(session: Session, who: str, conversation: _Conversation) -> None:
    interactive = sys.stdin.isatty()
    session.note(f"{who}: {_HELP}" if interactive else who)
    if interactive:
        with contextlib.suppress(ImportError):  # line editing and recall, where Python has it
            import readline  # noqa: F401, PLC0415
    while True:
        try:
            line = input("> ") if interactive else sys.stdin.readline()
        except KeyboardInterrupt:
            session.err.print(f"\n{_HELP}", style="dim")
            continue
        except EOFError:
            session.write("\n")
            return
        if not interactive and not line:
            return
        text = line.strip()
        if text in ("/exit", "/quit", "/bye"):
            return
        if text == "/reset":
            conversation.turns.clear()
            session.note("the conversation is forgotten")
        elif text in ("/help", "/?"):
            session.err.print(_HELP)
        elif text.startswith("/") and " " not in text:
            session.err.print(f"there is no command {text}; {_HELP}")
        elif text:
            _turn(session, conversation, text)


def _turn(session: Session, conversation: _Conversation, text: str) -> None:
    """One question and its answer. What an interrupted answer had so far stays in the conversation."""
    conversation.turns.append({"role": "user", "content": text})
    answer = _Answer(session, conversation)
    future: Future[None] | None = None
    try:
        try:
            future = conversation.portal.start_task_soon(answer.run)
            future.result()
        except KeyboardInterrupt:
            conversation.portal.call(answer.stop)
            if future is not None:
                future.result()
    except (EngineDeadError, EngineClosedError):
        raise
    except InferError as error:
        conversation.turns.pop()
        session.end_thought()
        session.err.print(f"infer: error: {error}", style="red")
        return
    so_far = "".join(answer.pieces)
    session.write("" if so_far.endswith("\n") else "\n")
    session.note(answer.summary or "[stopped]")
    if so_far:
        conversation.turns.append({"role": "assistant", "content": so_far})
    else:
        conversation.turns.pop()


class _Answer:
    """One answer in the engine's thread; `stop` is called there too, possibly before `run` began."""

    def __init__(self, session: Session, conversation: _Conversation) -> None:
        self.pieces: list[str] = []
        self.summary = ""
        """Empty: it was stopped."""
        self._session = session
        self._conversation = conversation
        self._scope: anyio.CancelScope | None = None
        self._stopped = False

    async def run(self) -> None:
        with anyio.CancelScope() as self._scope:
            if self._stopped:
                return
            conversation = self._conversation
            async with conversation.model.stream(conversation.messages(), conversation.params) as stream:
                async for delta in stream:
                    self.pieces.append(delta.text)
                    self._session.write(delta.text)
            self.summary = stream.summary

    def stop(self) -> None:
        self._stopped = True
        if self._scope is not None:
            self._scope.cancel()
