"""A model behind any OpenAI-style server, streamed as a local one is: what `infer chat` and `infer complete` use with --url.

Runs in the command's event loop; a stream owns its connection until it is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Self

import typer

from infer.cli.bench_serve import stated_key
from infer.cli.load_client import LoadClient, LoadError, Reply
from infer.cli.session import calls_shown, visible
from infer.errors import ConfigError
from infer.types import Delta, Prompt, SamplingParams

ServerUrl = Annotated[
    str | None, typer.Option("--url", metavar="URL", help="Ask this OpenAI-style server; MODEL is its name there.")
]
ApiKey = Annotated[
    str | None, typer.Option("--api-key", metavar="KEY", help="Others on this machine can read it; see --api-key-file.")
]
ApiKeyFile = Annotated[
    Path | None, typer.Option("--api-key-file", metavar="FILE", help="File whose first line is the server's key.")
]


def server_key(url: str | None, api_key: str | None, api_key_file: Path | None) -> str | None:
    """The key that the three options state. Raises `ConfigError` for one without a server."""
    if url is None and (api_key is not None or api_key_file is not None):
        raise ConfigError("--api-key and --api-key-file belong to --url")
    return stated_key(api_key, api_key_file)


class RemoteModel:
    """One served model. `on_reasoning` is told what the model thinks before it answers."""

    def __init__(
        self, url: str, name: str, api_key: str | None = None, on_reasoning: Callable[[str], None] = lambda text: None
    ) -> None:
        self.url = url
        self.name = name
        self._api_key = api_key
        self._on_reasoning = on_reasoning

    @classmethod
    async def find(
        cls,
        url: str,
        name: str | None,
        api_key: str | None = None,
        on_reasoning: Callable[[str], None] = lambda text: None,
    ) -> RemoteModel:
        """`name` None takes the first that the server lists. Raises `LoadError` or `ConfigError`."""
        if name is None:
            async with LoadClient(url, api_key) as client:
                listed = await client.get("/v1/models")
            data = listed.get("data") if isinstance(listed, dict) else None
            names = [card["id"] for card in data or () if isinstance(card, dict) and isinstance(card.get("id"), str)]
            if not names:
                raise ConfigError(f"{url} lists no model; name one: infer chat MODEL --url {url}")
            name = names[0]
        return cls(url, name, api_key, on_reasoning)

    def stream(self, prompt: Prompt, params: SamplingParams) -> RemoteStream:
        """Chat messages ask /v1/chat/completions, text /v1/completions."""
        given = {field: getattr(params, field) for field in params.model_fields_set}
        body: dict[str, Any] = {"model": self.name, "stream": True, "stream_options": {"include_usage": True}, **given}
        if isinstance(prompt, str):
            return self._stream("/v1/completions", body | {"prompt": prompt})
        return self._stream("/v1/chat/completions", body | {"messages": list(prompt)})

    def _stream(self, path: str, body: dict[str, Any]) -> RemoteStream:
        return RemoteStream(self.url, self._api_key, path, body, self._on_reasoning)


class RemoteStream:
    """One answer while it comes. Leaving it early closes the connection, which ends the answer at the server."""

    def __init__(
        self, url: str, api_key: str | None, path: str, body: dict[str, Any], on_reasoning: Callable[[str], None]
    ) -> None:
        self._client = LoadClient(url, api_key)
        self._path = path
        self._body = body
        self._on_reasoning = on_reasoning
        self._stack = AsyncExitStack()
        self._reply: Reply | None = None
        self._pending: list[Delta] = []
        self._usage: dict[str, Any] = {}
        self._calls: dict[int, list[str]] = {}
        self._model = str(body["model"])
        self._finish: str | None = None
        self._began = self._first = 0.0

    async def __aenter__(self) -> Self:
        self._began = time.monotonic()
        await self._stack.enter_async_context(self._client)
        try:
            self._reply = await self._stack.enter_async_context(self._client.request("POST", self._path, self._body))
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._stack.__aexit__(kind, error, trace)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if self._reply is None:
            raise LoadError("the stream was not entered")
        while not self._pending:
            events = await self._reply.events()
            if events is None:
                raise StopAsyncIteration
            for event in events:
                self._take(event)
        return self._pending.pop(0)

    @property
    def summary(self) -> str:
        """Counts, speed, the model that answered, and why it ended, in one line."""
        seconds = time.monotonic() - self._began
        parts = []
        tokens = self._usage.get("completion_tokens")
        if isinstance(tokens, int):
            parts.append(f"{tokens} tokens")
            decode = seconds - (self._first or seconds)
            if tokens > 1 and decode > 0:
                parts.append(f"{(tokens - 1) / decode:.1f} tokens/s")
        if self._first:
            parts.append(f"first after {self._first:.2f} s")
        if self._finish not in (None, "stop"):
            parts.append(f"ended by {self._finish}")
        parts.append(self._model)
        return visible("[" + ", ".join(parts) + "]") + calls_shown(self._calls.values())

    def _take(self, event: Any) -> None:
        """Of what another's server says, only what is of the right kind counts."""
        event = _fields(event)
        self._model = _text(event.get("model")) or self._model
        self._usage = _fields(event.get("usage")) or self._usage
        for choice in map(_fields, _items(event.get("choices"))):
            delta = _fields(choice.get("delta"))
            self._finish = _text(choice.get("finish_reason")) or self._finish
            self._take_calls(_items(delta.get("tool_calls")))
            thought = _text(delta.get("reasoning_content")) or _text(delta.get("reasoning"))
            text = _text(delta.get("content")) or _text(choice.get("text"))
            if (thought or text) and not self._first:
                self._first = time.monotonic() - self._began
            if thought:
                self._on_reasoning(thought)
            if text:
                self._pending.append(Delta(0, text, ()))

    def _take_calls(self, calls: Sequence[Any]) -> None:
        for call in map(_fields, calls):
            function, index = _fields(call.get("function")), call.get("index", 0)
            name, arguments = _text(function.get("name")), _text(function.get("arguments"))
            if isinstance(index, int) and (name or arguments):
                told = self._calls.setdefault(index, ["", ""])
                told[0] += name
                told[1] += arguments


def _fields(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
