"""A caller's own functions: what cannot be awaited is refused before inference, what they return is told as it is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest.mock import AsyncMock

import pytest

from infer.artifacts import ArtifactChoice, GenerationArtifact
from infer.artifacts.admission import GenerationBounds
from infer.artifacts.pipeline import ArtifactPipeline
from infer.artifacts.request import ArtifactRequest, SinkTarget
from infer.config.artifacts import ArtifactsSection
from infer.config.engine import PluginsSection
from infer.errors import ArtifactRefusedError
from infer.plugins import Registry, build_registry

pytestmark = pytest.mark.anyio
BOUNDS = GenerationBounds(prompt_tokens=2, max_tokens=3, request_id="r-1")
ARTIFACT = GenerationArtifact([ArtifactChoice(0, 2, [1, 2, 3, 4])])


async def plain(data: bytes) -> str:
    return "stored"


async def bound(folder: str, data: bytes) -> str:
    return "stored"


class Method:
    async def keep(self, data: bytes) -> str:
        return "stored"

    def keep_now(self, data: bytes) -> str:
        return "stored"


class Callable_:
    async def __call__(self, data: bytes) -> str:
        return "stored"


class CallableNow:
    def __call__(self, data: bytes) -> str:
        return "stored"


async def generator(data: bytes) -> Any:
    yield "stored"


WORK: list[Any] = [
    *(plain, functools.partial(bound, "folder"), Method().keep, Callable_(), AsyncMock(return_value="stored")),
]
DO_NOT: list[Any] = [
    lambda data: "stored",
    Method().keep_now,
    CallableNow(),
    CallableNow,
    generator,
    bytes,
    len,
    "stored",
    5,
]


@pytest.fixture(scope="module")
def registry() -> Registry:
    return build_registry(PluginsSection(allow=()))


@pytest.mark.parametrize("sink", WORK, ids=lambda sink: type(sink).__name__)
async def test_what_can_be_awaited(registry: Registry, sink: Any) -> None:
    async with ArtifactPipeline(ArtifactsSection(), registry) as pipeline:
        ticket = await pipeline.admit(ArtifactRequest(target=SinkTarget(sink)), BOUNDS)
        receipt = await ticket.finish(ARTIFACT)
        ticket.release()
    assert (receipt.state, receipt.object_id) == ("ready", "stored")


@pytest.mark.parametrize("wrong", DO_NOT, ids=lambda sink: getattr(sink, "__name__", type(sink).__name__))
@pytest.mark.parametrize("role", ["sink", "refresh"])
async def test_what_cannot_be_awaited_is_refused_at_admission(registry: Registry, wrong: Any, role: str) -> None:
    sink = wrong if role == "sink" else plain
    request = ArtifactRequest(target=SinkTarget(sink), refresh=wrong if role == "refresh" else None)
    async with ArtifactPipeline(ArtifactsSection(), registry) as pipeline:
        with pytest.raises(ArtifactRefusedError, match="`async def`") as caught:
            await pipeline.admit(request, BOUNDS)
        assert caught.value.code == "artifact_target_rejected"
        assert pipeline.statistics.reserved_bytes == 0


@pytest.mark.parametrize(("given", "told"), [(None, "sink"), ("", ""), (17, "17")])
async def test_the_id_is_what_the_sink_says(registry: Registry, given: Any, told: str) -> None:
    async def sink(data: bytes) -> Any:
        return given

    wrapped: Callable[[bytes], Any] = sink
    async with ArtifactPipeline(ArtifactsSection(), registry) as pipeline:
        ticket = await pipeline.admit(ArtifactRequest(target=SinkTarget(wrapped)), BOUNDS)
        receipt = await ticket.finish(ARTIFACT)
        ticket.release()
    assert (receipt.state, receipt.object_id) == ("ready", told)
