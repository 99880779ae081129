"""The model of an engine in this process, with what it thinks and calls told from its answer, as a server does it.

Runs in the command's event loop; a stream owns its request until it is left.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from infer.cli.session import calls_shown
from infer.engine.structured_admission import reasoning_parser
from infer.text.output_parsing import open_parser, prompt_tail
from infer.text.special_filter import SpecialTokenFilter
from infer.types import Completion, Delta, Prompt, SamplingParams

if TYPE_CHECKING:
    from infer.engine.engine import Engine
    from infer.engine.stream import Stream
    from infer.plugins.parser import Parser, ParserEvent, ParserSpec


class LocalModel:
    """`on_reasoning` is told what the model thinks."""

    def __init__(self, engine: Engine, on_reasoning: Callable[[str], None]) -> None:
        self._engine = engine
        self._on_reasoning = on_reasoning
        name = engine.config.structured_output.reasoning_parser
        self._format = reasoning_parser(engine.registry, name, engine.prompts.template_source)

    def stream(self, prompt: Prompt, params: SamplingParams) -> LocalStream:
        """Chat messages are answered; text is continued as it is, and nothing is read out of that."""
        return LocalStream(
            self._engine, None if isinstance(prompt, str) else self._format, prompt, params, self._on_reasoning
        )


class LocalStream:
    """One answer while it comes. Deltas have the answer's text alone."""

    def __init__(
        self,
        engine: Engine,
        format: ParserSpec | None,
        prompt: Prompt,
        params: SamplingParams,
        on_reasoning: Callable[[str], None],
    ) -> None:
        self.calls: list[list[str]] = []
        """[name, arguments] of each call, as far as it came."""
        self._engine = engine
        self._format = format
        self._hides_special = params.skip_special_tokens
        if format is not None:  # most marks are special tokens
            params = params.model_copy(update={"skip_special_tokens": False})
        self._stream: Stream = engine.stream(prompt, params)
        self._on_reasoning = on_reasoning
        self._parser: Parser | None = None

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        if self._format is not None:
            tokenizer = self._engine.tokenizer
            tail = prompt_tail(self._stream.prompt_token_ids, tokenizer)
            self._parser = open_parser(self._engine.registry, self._format, [], tail)
            hidden = getattr(tokenizer, "special_token_ids", ()) if self._hides_special else ()
            self._filter = SpecialTokenFilter(hidden, lambda i: tokenizer.decode([i], skip_special_tokens=False))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stream.__aexit__(kind, error, trace)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while True:
            delta = await self._stream.__anext__()
            if self._parser is None:
                return delta
            text = self._read(self._parser, delta)
            if text:
                return Delta(0, text, ())

    @property
    def summary(self) -> str:
        """Counts, speed and why it ended in one line, then the calls."""
        return statistics(self._stream.result) + calls_shown(self.calls)

    def _read(self, parser: Parser, delta: Delta) -> str:
        """What the delta adds to the answer."""
        self._filter.see(delta.token_ids)
        events = parser.feed(delta.text, delta.token_ids) if delta.text else []
        is_last = delta.finish_reason is not None
        if is_last:
            events += parser.finish()
        text = "".join(map(self._taken, events))
        return text + self._filter.clean("text", "", last=True) if is_last else text

    def _taken(self, event: ParserEvent) -> str:
        if event.kind == "text":
            return self._filter.clean("text", event.text)
        if event.kind == "reasoning":
            self._on_reasoning(self._filter.clean("reasoning", event.text))
        elif event.kind == "tool_start":
            self.calls.append([event.text, ""])
        elif event.kind == "tool_args":
            self.calls[event.call_index][1] += event.text
        return ""


def statistics(completion: Completion) -> str:
    """Speed, counts and why it ended, in one line."""
    usage, timings = completion.usage, completion.timings
    parts = [f"{usage.output_tokens} tokens"]
    if timings is not None and timings.first_token is not None:
        decode = timings.total - timings.first_token
        if usage.output_tokens > 1 and decode > 0:
            parts.append(f"{(usage.output_tokens - 1) / decode:.1f} tokens/s")
        parts.append(f"first after {timings.first_token:.2f} s")
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    parts.append(f"{usage.prompt_tokens} prompt tokens{cached}")
    if completion.finish_reason == "length":
        bound = completion.sampling.max_tokens
        parts.append(
            "cut at the context length" if bound is None else f"cut at --max-tokens {bound} or the context length"
        )
    elif completion.finish_reason != "stop":
        parts.append(f"ended by {completion.finish_reason}")
    parts.append(f"seed {completion.seed}")
    return "[" + ", ".join(parts) + "]"
