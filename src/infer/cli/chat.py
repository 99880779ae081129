"""`infer chat [MODEL]`: a conversation in the terminal. The engine runs in a thread; Ctrl-C here ends an answer only."""

from __future__ import annotations

import contextlib
import sys
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from anyio.from_thread import BlockingPortal, start_blocking_portal

from infer.cli.options import with_model, with_options
from infer.cli.progress import ProgressDisplay
from infer.cli.run import statistics
from infer.cli.session import Session
from infer.config.engine import EngineConfig
from infer.errors import EngineClosedError, EngineDeadError, InferError
from infer.types import Completion, SamplingParams

_HELP = "/reset forgets the conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer"


@with_options(sampling=True)
def chat(
    session: Session,
    *,
    model: Annotated[str | None, typer.Argument(help="Model reference; without it the small default model.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message at the beginning.")] = None,
    config: EngineConfig,
    params: SamplingParams,
) -> None:
    """Talk with a model in the terminal."""
    config = with_model(config, model)
    with contextlib.ExitStack() as stack:
        portal = stack.enter_context(start_blocking_portal())
        with ProgressDisplay(session) as report:
            engine = stack.enter_context(portal.wrap_async_context_manager(session.make_engine(config, report)))
        session.note(f"{config.model.ref}: {_HELP}")
        _converse(session, _Conversation(portal, engine, params, system))


@dataclass(slots=True)
class _Conversation:
    portal: BlockingPortal
    engine: Any
    params: SamplingParams
    system: str | None
    turns: list[dict[str, Any]] = field(default_factory=list)

    def messages(self) -> list[dict[str, Any]]:
        return [*([{"role": "system", "content": self.system}] if self.system is not None else []), *self.turns]


def _converse(session: Session, conversation: _Conversation) -> None:
    interactive = sys.stdin.isatty()
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
    pieces: list[str] = []
    future = conversation.portal.start_task_soon(_answer, session, conversation, pieces)
    try:
        completion = future.result()
    except (KeyboardInterrupt, CancelledError):
        future.cancel()
        session.write("\n")
        session.note("[stopped]")
    except (EngineDeadError, EngineClosedError):
        raise
    except InferError as error:
        conversation.turns.pop()
        session.err.print(f"infer: error: {error}", style="red")
        return
    else:
        session.write("" if "".join(pieces).endswith("\n") else "\n")
        session.note(statistics(completion, conversation.params))
    if pieces:
        conversation.turns.append({"role": "assistant", "content": "".join(pieces)})
    else:
        conversation.turns.pop()


async def _answer(session: Session, conversation: _Conversation, pieces: list[str]) -> Completion:
    """In the engine's thread."""
    async with conversation.engine.stream(conversation.messages(), conversation.params) as stream:
        async for delta in stream:
            pieces.append(delta.text)
            session.write(delta.text)
    completion: Completion = stream.result
    return completion
