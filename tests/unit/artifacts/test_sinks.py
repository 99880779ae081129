"""A caller's own functions: what cannot be awaited is refused before inference, what they return is told as it is."""

from __future__ import annotations

import datetime
import functools
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import AsyncMock

import anyio
import pytest

from infer.artifacts import ArtifactChoice, GenerationArtifact
from infer.artifacts.admission import GenerationBounds
from infer.artifacts.pipeline import ArtifactPipeline
from infer.artifacts.receipt import ArtifactReceipt
from infer.artifacts.request import ArtifactRequest, PresignedTarget, SinkTarget
from infer.config.artifacts import ArtifactsSection
from infer.config.engine import PluginsSection
from infer.errors import ArtifactRefusedError
from infer.plugins import Registry, build_registry

pytestmark = pytest.mark.anyio
BOUNDS = GenerationBounds(prompt_tokens=2, max_tokens=3, request_id="r-1")
NOW = time.time()
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


async def test_a_sink_that_hangs_gives_its_place_back(registry: Registry) -> None:
    async def hang(data: bytes) -> str:
        await anyio.sleep_forever()
        return "never"

    section = ArtifactsSection(sink_timeout_seconds=1, pipeline_concurrency=1, queue_timeout_seconds=30)
    async with ArtifactPipeline(section, registry) as pipeline:
        receipts: list[ArtifactReceipt] = []

        async def deliver(sink: Any) -> None:
            ticket = await pipeline.admit(ArtifactRequest(target=SinkTarget(sink)), BOUNDS)
            receipts.append(await ticket.finish(ARTIFACT))
            ticket.release()

        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(deliver, hang)
                await anyio.wait_all_tasks_blocked()
                tasks.start_soon(deliver, plain)
        assert [receipt.error_code for receipt in receipts] == ["artifact_outcome_unknown", None]
        assert pipeline.statistics.reserved_bytes == 0 and not pipeline.statistics.running


async def test_a_refresh_that_hangs_is_given_up(registry: Registry) -> None:
    async def hang() -> PresignedTarget:
        await anyio.sleep_forever()
        raise AssertionError

    grant = PresignedTarget(
        url="http://127.0.0.1:9/x",
        expires_at=datetime.datetime.fromtimestamp(NOW + 900, datetime.UTC).isoformat(),
        max_bytes=10_000,
        object_id="x",
        required_headers={"if-none-match": "*"},
    )
    section = ArtifactsSection(
        presigned_timeout_seconds=1, allow_insecure_http=True, insecure_http_hosts=("127.0.0.1:9",)
    )
    later = iter([*[NOW + 1000] * 9])
    async with ArtifactPipeline(section, registry, clock=lambda: next(later)) as pipeline:
        with anyio.fail_after(30):
            ticket = await pipeline.admit(ArtifactRequest(target=grant, refresh=hang), BOUNDS)
            receipt = await ticket.finish(ARTIFACT)
        ticket.release()
    assert receipt.error_code == "artifact_target_expired"


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
