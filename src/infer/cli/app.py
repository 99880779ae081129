"""The command `infer`: commands, errors in one line, exit codes. Importing it imports no torch and reads no environment."""

from __future__ import annotations

import importlib.metadata
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.exceptions import Abort, TyperException

from infer.cli.artifact import build_artifact
from infer.cli.batch import batch
from infer.cli.bench import build_bench
from infer.cli.chat import chat
from infer.cli.complete import complete
from infer.cli.kernels import build_kernels
from infer.cli.plugins import build_plugins
from infer.cli.pull import pull
from infer.cli.run import run
from infer.cli.serve import serve
from infer.cli.session import Session
from infer.cli.steplog import build_steplog
from infer.cli.verify import verify
from infer.config.flags import refusal
from infer.errors import InferError

FAILURE, USAGE, INTERRUPTED = 1, 2, 130
DISTRIBUTION = "infer-engine"


def _version(value: bool) -> None:
    if value:
        sys.stdout.write(f"infer {importlib.metadata.version(DISTRIBUTION)}\n")
        raise typer.Exit


def _root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback with an error.")] = False,
) -> None:
    """An LLM inference engine: run, chat with, fetch and measure models on this machine."""
    session: Session = ctx.obj
    session.debug = session.debug or debug or session.environment.debug


def build_app() -> typer.Typer:
    app = typer.Typer(
        name="infer", no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False, rich_markup_mode=None
    )
    app.callback()(_root)
    for command in (run, complete, chat, serve, batch, pull, verify):
        app.command(command.__name__)(command)
    app.add_typer(build_bench())
    app.add_typer(build_artifact())
    app.add_typer(build_plugins())
    app.add_typer(build_kernels())
    app.add_typer(build_steplog())
    return app


def main(arguments: Sequence[str] | None = None, session: Session | None = None) -> int:
    """Run one command and return its exit code. `session` lets tests bring an engine and an environment of their own."""
    session = session if session is not None else Session()
    given = list(arguments) if arguments is not None else None
    try:
        # typer turns an exit and Ctrl-C into the value of the call; commands return nothing.
        code = build_app()(given, prog_name="infer", obj=session, standalone_mode=False) or 0
        if code == INTERRUPTED:
            session.end_thought()
            session.err.print("interrupted", style="dim")
        return int(code)
    except Abort:
        return INTERRUPTED
    except TyperException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # no command was given: the message is the help
            session.write(error.format_message() + "\n")
            return USAGE
        return _complain(session, _usage(error), error.exit_code or USAGE)
    except InferError as error:
        return _complain(session, str(error), FAILURE)
    except Exception as error:
        text = f"{type(error).__name__}: {error} (this is a defect of infer; --debug shows where)"
        return _complain(session, text, FAILURE)


def _complain(session: Session, text: str, code: int) -> int:
    session.end_thought()
    if session.debug:
        session.err.print(traceback.format_exc().rstrip(), style="dim")
    session.err.print(f"infer: error: {' '.join(text.split())}", style="red")
    return code


def _usage(error: TyperException) -> str:
    name = getattr(error, "option_name", None) if type(error).__name__ == "NoSuchOption" else None
    reason = refusal(name) if isinstance(name, str) else None
    if reason is not None:
        return f"{name} is a flag of vLLM that infer does not take: {reason}"
    context = getattr(error, "ctx", None)
    hint = f"; see `{context.command_path} --help`" if context is not None else ""
    message = error.format_message().rstrip(".")
    takes_text = context is not None and any(parameter.name == "second" for parameter in context.command.params)
    if takes_text and message.startswith("Got unexpected extra argument"):
        message += "; put a prompt of several words in quotes"
    return f"{message}{hint}"
