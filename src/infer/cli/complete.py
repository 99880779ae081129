"""`infer complete [MODEL] TEXT`: goes on with a text as it is, here or on a server."""

from __future__ import annotations

import sys
from typing import Annotated

import anyio
import typer

from infer.cli.options import with_model, with_options
from infer.cli.remote import ApiKey, ApiKeyFile, RemoteModel, ServerUrl, server_key
from infer.cli.run import answer
from infer.cli.session import Session
from infer.config.engine import EngineConfig
from infer.errors import ConfigError, InvalidRequestError
from infer.types import SamplingParams


@with_options(sampling=True)
def complete(
    session: Session,
    *,
    first: Annotated[str | None, typer.Argument(metavar="MODEL", help="Left out: the default model.")] = None,
    second: Annotated[str | None, typer.Argument(metavar="TEXT", help="The beginning; - reads standard input.")] = None,
    url: ServerUrl = None,
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
    config: EngineConfig,
    params: SamplingParams,
) -> None:
    """Continue a text, without the chat template."""
    model, text = (None, first) if second is None else (first, second)
    if text is None:
        raise ConfigError('`infer complete` needs a text: infer complete [MODEL] "TEXT", or - to read standard input')
    key = server_key(url, api_key, api_key_file)
    if text == "-":
        text = sys.stdin.read()
    if not text:
        raise InvalidRequestError("the text is empty", parameter="prompt", value=text)
    if url is None:
        session.note(anyio.run(answer, session, with_model(config, model), text, params))
    else:
        session.note(anyio.run(_remote, session, url, model, key, text, params))


async def _remote(
    session: Session, url: str, model: str | None, api_key: str | None, text: str, params: SamplingParams
) -> str:
    found = await RemoteModel.find(url, model, api_key)
    ended = "\n"
    async with found.stream(text, params) as stream:
        async for delta in stream:
            session.write(delta.text)
            ended = delta.text[-1:]
    if ended != "\n":
        session.write("\n")
    return stream.summary
