"""The command line in process, over an engine that answers from a script."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import anyio
import anyio.lowlevel
import pytest
from rich.console import Console

from infer.cli.app import main
from infer.cli.session import Session
from infer.config.engine import EngineConfig
from infer.config.env import read_environment
from infer.errors import ContextLengthError
from infer.plugins.manager import build_registry
from infer.plugins.model_source import Progress, ProgressCallback
from infer.testing.fake_engine import ByteTokenizer
from infer.types import Choice, Completion, Delta, RequestTimings, SamplingParams, Usage


class FakeStream:
    def __init__(self, engine: FakeEngine, params: SamplingParams) -> None:
        self._engine = engine
        self._params = params
        self.result: Any = None

    async def __aenter__(self) -> Self:
        if self._engine.fails is not None:
            raise self._engine.fails
        if self._params.max_tokens is not None and self._params.max_tokens > self._engine.context:
            raise ContextLengthError("max_tokens is more than the context holds", parameter="max_tokens")
        self._pieces = iter(self._engine.answer)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.left.append(kind)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        await anyio.lowlevel.checkpoint()
        piece = next(self._pieces, None)
        if piece is None:
            reason: Any = self._engine.finish
            choice = Choice(0, "".join(self._engine.answer), (1, 2, 3), reason, seed=self._params.seed or 77)
            timings = RequestTimings(0.0, 0.5, 1.5)
            self.result = Completion("r", (1,), (choice,), Usage(11, 3, 4), self._params, timings=timings)
            raise StopAsyncIteration
        if self._engine.on_piece is not None:
            await self._engine.on_piece(piece)
        return Delta(0, piece, (1,))


@dataclass
class FakeEngine:
    """Records what it was asked."""

    answer: tuple[str, ...] = ("Par", "is", ".")
    finish: str = "stop"
    fails: Exception | None = None
    context: int = 8192
    on_piece: Callable[[str], Any] | None = None
    reports: tuple[Progress, ...] = ()
    configs: list[EngineConfig] = field(default_factory=list)
    asked: list[Any] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    left: list[Any] = field(default_factory=list)
    closed: int = 0
    config: EngineConfig = field(default_factory=EngineConfig)
    registry: Any = field(default_factory=lambda: build_registry(EngineConfig().plugins))
    prompts: Any = field(default_factory=lambda: SimpleNamespace(template_source=""))
    tokenizer: Any = field(default_factory=ByteTokenizer)

    def make(self, config: EngineConfig, on_progress: ProgressCallback) -> FakeEngine:
        self.configs.append(config)
        self.on_progress = on_progress
        return self

    async def __aenter__(self) -> Self:
        for report in self.reports:
            self.on_progress(report)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.closed += 1

    def stream(self, prompt: Any, params: SamplingParams) -> FakeStream:
        self.asked.append(prompt)
        self.params.append(params)
        return FakeStream(self, params)


@dataclass
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def infer(engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """infer("run", "hi", INFER_X__Y="1") -> exit code, stdout, stderr. Keywords are the whole environment."""

    def call(*arguments: str, terminal: bool = False, **variables: str) -> Outcome:
        err = io.StringIO()
        console = Console(
            file=err,
            force_terminal=terminal,
            markup=False,
            highlight=False,
            soft_wrap=True,
            width=200,
            color_system=None,
        )
        environment = read_environment({"INFER_CACHE_DIR": str(tmp_path / "cache"), **variables})
        session = Session(make_engine=engine.make, stated_environment=environment, err=console)
        code = main(arguments, session)
        return Outcome(code, capsys.readouterr().out, err.getvalue())

    return call
