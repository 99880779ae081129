"""Artifacts of a real engine at every kind of target: memory, a local directory, a presigned PUT, and an S3 server (heavy)."""

from __future__ import annotations

import datetime
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from artifact_samples import independent_read
from infer import Completion, Engine, SamplingParams
from infer.artifacts import ArtifactRequest, ManagedTarget, PresignedTarget, open_artifact
from infer.config.artifacts import ArtifactsSection
from infer.testing.s3_server import BUCKET, S3Server, s3_server
from integration.engine_support import engine_config, prompt, write_checkpoint
from integration.test_route_scenarios import MOE, capturing, rows_of, sequence
from put_server import put_server

pytestmark = pytest.mark.anyio
EVERYTHING = ("moe_routes", "selected_logprobs")
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=0, return_routed_experts=True, seed=3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("targets") / "moe", MOE)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    backend: str = request.param
    return backend


@asynccontextmanager
async def engine_at(path: Path, **artifacts: Any) -> AsyncIterator[Engine]:
    async with Engine(engine_config(path, **capturing(artifacts=artifacts))) as engine:
        yield engine
        assert engine.artifact_statistics.reserved_bytes == 0


def profile(url: str, **options: Any) -> dict[str, Any]:
    one = {"url": url, "storage_options": options, "allowed_prefixes": ["runs"], "create_only": True}
    return {"enable_managed_fsspec": True, "storage_profiles": {"here": one}}


def grant(url: str) -> PresignedTarget:
    expires = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=300)
    return PresignedTarget(
        url=url,
        expires_at=expires.isoformat(),
        max_bytes=2**26,
        object_id="opaque",
        required_headers={"if-none-match": "*"},
    )


def check(data: bytes, done: Completion) -> None:
    """Read after the format's description alone: what the caller was given is what was stored."""
    [choice] = independent_read(data)
    assert (choice["index"], choice["prompt"], choice["tokens"]) == (0, len(done.prompt_token_ids), sequence(done))
    rows = rows_of(done.choices[0])
    routes = choice["moe_routes"]
    assert (routes["token_start"], routes["router_ids"], routes["expert_counts"]) == (0, [1, 2], [8, 8])
    assert np.asarray(routes["expert_ids"], np.uint8).tobytes() == bytes(rows.data)
    values = [np.float32(entry.logprob) for entry in done.logprobs or ()]
    assert choice["selected_logprobs"]["logprobs"] == values


async def rollouts(engine: Engine, target: Any, count: int = 4) -> list[Completion]:
    """At the same time, each to its own object."""
    done: dict[int, Completion] = {}

    async def one(index: int) -> None:
        request = ArtifactRequest(target=target(index), contents=EVERYTHING)
        done[index] = await engine.generate(prompt(20 + index, seed=index), PARAMS, artifact=request)

    async with anyio.create_task_group() as tasks:
        for index in range(count):
            tasks.start_soon(one, index)
    return [done[index] for index in range(count)]


async def test_a_local_directory(checkpoint: Path, tmp_path: Path) -> None:
    """T113, BR-13: four objects; a second rollout for the same key keeps its tokens and leaves the object alone."""
    async with engine_at(checkpoint, **profile(f"file://{tmp_path}/root")) as engine:
        found = await rollouts(engine, lambda index: ManagedTarget("here", f"runs/{index}.dynexp"))
        request = ArtifactRequest(target=ManagedTarget("here", "runs/0.dynexp"), contents=EVERYTHING)
        again = await engine.generate(prompt(9), PARAMS, artifact=request)
    assert len(again.token_ids) == 12 and again.artifact is not None
    assert again.artifact.error_code == "artifact_conflict"
    for index, done in enumerate(found):
        path = tmp_path / "root" / "runs" / f"{index}.dynexp"
        assert done.artifact is not None and done.artifact.object_id == f"here:runs/{index}.dynexp"
        assert open_artifact(path).verify(sha256=done.artifact.sha256).body_sha256 == done.artifact.body_sha256
        check(path.read_bytes(), done)


async def test_memory(checkpoint: Path, request: pytest.FixtureRequest) -> None:
    name = f"targets-{request.node.name}".replace("[", "-").rstrip("]")
    async with engine_at(checkpoint, **profile(f"memory://{name}")) as engine:
        [done] = await rollouts(engine, lambda index: ManagedTarget("here", "runs/a"), 1)
    reader = open_artifact(f"memory://{name}/runs/a")
    assert reader.tokens().tolist() == sequence(done)
    assert np.asarray(reader.routes(layers=[2]).expert_ids).shape == (31, 1, 2)


async def test_a_presigned_put(checkpoint: Path) -> None:
    with put_server() as server:
        section = {"allow_insecure_http": True, "insecure_http_hosts": (server.authority,)}
        async with engine_at(checkpoint, **section) as engine:
            found = await rollouts(engine, lambda index: grant(server.url(f"/{index}?X-Signature=a%2Fb")))
        stored = dict(server.objects)
    assert sorted(stored) == [f"/{index}?X-Signature=a%2Fb" for index in range(4)]
    for index, done in enumerate(found):
        assert done.artifact is not None and (done.artifact.state, done.artifact.object_id) == ("ready", "opaque")
        check(stored[f"/{index}?X-Signature=a%2Fb"], done)


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as started:
        yield started


@pytest.mark.heavy
@pytest.mark.row("SAMPLE-ROUTED-EXPERTS", "routes and log-probabilities reach object storage with receipts")
@pytest.mark.parametrize("kind", ["managed", "presigned"])
async def test_s3(checkpoint: Path, s3: S3Server, kind: str, anyio_backend: str) -> None:
    """BR-26: sixteen rollouts into a real S3 server, read back from there by ranges."""
    section = profile(f"s3://{BUCKET}/base", **s3.storage_options) | {
        "allow_insecure_http": True,
        "insecure_http_hosts": (f"127.0.0.1:{s3.port}",),
        "pipeline_concurrency": 4,
    }
    ArtifactsSection(**section)
    prefix = f"runs/{kind}-{anyio_backend}"

    def target(index: int) -> Any:
        if kind == "managed":
            return ManagedTarget("here", f"{prefix}/{index}")
        return grant(s3.presign(f"base/{prefix}/{index}"))

    async with engine_at(checkpoint, **section) as engine:
        found = await rollouts(engine, target, 16)
    for index, done in enumerate(found):
        assert done.artifact is not None and done.artifact.state == "ready", done.artifact
        data = s3.client().get_object(Bucket=BUCKET, Key=f"base/{prefix}/{index}")["Body"].read()
        check(data, done)
        reader = open_artifact(f"s3://{BUCKET}/base/{prefix}/{index}", storage_options=s3.storage_options)
        assert reader.verify(sha256=done.artifact.sha256).body_sha256 == done.artifact.body_sha256
