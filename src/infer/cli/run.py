"""`infer run [MODEL] PROMPT`: one question, one streamed answer, and the speed in the last line."""

from __future__ import annotations

import shlex
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

import anyio
import typer

from infer.cli.local import LocalModel, LocalStream
from infer.cli.options import with_model, with_options
from infer.cli.progress import ProgressDisplay
from infer.cli.session import Session
from infer.config.engine import EngineConfig
from infer.errors import ConfigError, ContextLengthError, InvalidRequestError
from infer.types import Prompt, SamplingParams

DEFAULT_MAX_TOKENS = 1024
"""The small default model does not always find an end; the last line says when this cut an answer."""


@with_options(sampling=True)
def run(
    session: Session,
    *,
    first: Annotated[str | None, typer.Argument(metavar="MODEL", help="Left out: the small default model.")] = None,
    second: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The question; - reads standard input.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="System message for the chat template.")
    ] = None,
    config: EngineConfig,
    params: SamplingParams,
) -> None:
    """Ask a model one question and stream the answer."""
    if first is None:
        raise ConfigError('`infer run` needs a prompt: infer run [MODEL] "PROMPT", or - to read standard input')
    if second is None and _names_a_model(first):
        raise ConfigError(
            f'{first} names a model, and there is no prompt: infer run {shlex.quote(first)} "PROMPT"'
            "; if it is the prompt, give it on standard input to `infer run -`"
        )
    model, text = (None, first) if second is None else (first, second)  # one argument is the prompt
    config = with_model(config, model)
    prompt = _prompt(text, raw, system)
    session.note(anyio.run(answer, session, config, prompt, params))


async def answer(session: Session, config: EngineConfig, prompt: Prompt, params: SamplingParams) -> str:
    """Load, write the answer as it comes, and say in a line how it went."""
    async with AsyncExitStack() as stack:
        with ProgressDisplay(session) as report:
            engine = await stack.enter_async_context(session.make_engine(config, report))
        model = LocalModel(engine, session.think)
        if params.max_tokens is not None:
            return await _write(session, model.stream(prompt, params))
        bounded = params.model_copy(update={"max_tokens": max(DEFAULT_MAX_TOKENS, params.min_tokens)})
        try:
            return await _write(session, model.stream(prompt, bounded))
        except ContextLengthError as error:
            if error.parameter != "max_tokens":
                raise
        return await _write(session, model.stream(prompt, params))  # less room than our default: up to the context


async def _write(session: Session, asked: LocalStream) -> str:
    async with asked as stream:
        ended = "\n"
        async for delta in stream:
            session.write(delta.text)
            ended = delta.text[-1:] or ended
    if ended != "\n":
        session.write("\n")
    return stream.summary


def _names_a_model(text: str) -> bool:
    """One word that is a model reference and hardly a question; else a forgotten prompt asks the default model."""
    if any(character.isspace() for character in text):
        return False
    if text.startswith(("pypi:", "hf:")) or text.endswith(".gguf"):
        return True
    return text.startswith(("/", "./", "../", "~/")) and Path(text).expanduser().exists()


def _prompt(text: str, raw: bool, system: str | None) -> Prompt:
    if text == "-":
        text = sys.stdin.read()
    if not text.strip():
        raise InvalidRequestError("the prompt is empty", parameter="prompt", value=text)
    if raw:
        if system is not None:
            raise ConfigError("--system belongs to the chat template, which --raw leaves out; give one of them")
        return text
    turns = [{"role": "system", "content": system}] if system is not None else []
    return [*turns, {"role": "user", "content": text}]
