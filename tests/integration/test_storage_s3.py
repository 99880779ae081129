"""Delivery to a real S3 server: signatures, expiry, racing writers, a server that dies, stalls or is full. Heavy."""

from __future__ import annotations

import datetime
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from artifact_samples import G1
from infer.artifacts import ArtifactChoice, GenerationArtifact, RoutedExperts, decode, open_artifact
from infer.artifacts.admission import GenerationBounds
from infer.artifacts.pipeline import ArtifactPipeline
from infer.artifacts.receipt import ArtifactReceipt
from infer.artifacts.request import ArtifactRequest, ManagedTarget, PresignedTarget
from infer.artifacts.router_layout import RouterLayout
from infer.config.artifacts import ArtifactsSection
from infer.config.engine import PluginsSection
from infer.plugins import build_registry
from infer.testing.s3_server import BUCKET, S3Server, s3_server
from put_server import put_server, stalled

pytestmark = [pytest.mark.anyio, pytest.mark.heavy]
TYPE = "application/octet-stream"
WRITERS = 16


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as started:
        yield started


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    backend: str = request.param
    return backend


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    """A place of its own for every test."""
    return urllib.parse.quote(request.node.name, safe="").replace("%", "_")


def section(server: S3Server, **changes: Any) -> ArtifactsSection:
    profile = {
        "url": f"s3://{BUCKET}/base",
        "storage_options": server.storage_options,
        "allowed_prefixes": ["runs"],
        "create_only": True,
    }
    settings: dict[str, Any] = {
        "allow_insecure_http": True,
        "insecure_http_hosts": (f"127.0.0.1:{server.port}",),
        "enable_managed_fsspec": True,
        "storage_profiles": {"s3": profile},
        "pipeline_concurrency": WRITERS,
    }
    return ArtifactsSection(**(settings | changes))


def grant(url: str, *, seconds: float = 300, headers: dict[str, str] | None = None) -> ArtifactRequest:
    moment = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)
    target = PresignedTarget(
        url=url,
        expires_at=moment.isoformat(),
        max_bytes=2**26,
        object_id="opaque",
        required_headers={"if-none-match": "*", **(headers or {})},
    )
    return ArtifactRequest(target=target)


async def deliver(
    settings: ArtifactsSection, *requests: ArtifactRequest, artifact: GenerationArtifact = G1
) -> list[ArtifactReceipt]:
    """All at the same time through one pipeline."""
    receipts: list[ArtifactReceipt] = []
    layout = RouterLayout((3, 7), 4, 2)
    bounds = GenerationBounds(prompt_tokens=2, max_tokens=2, router_layout=layout)

    async with ArtifactPipeline(settings, build_registry(PluginsSection(allow=()))) as pipeline:

        async def one(request: ArtifactRequest) -> None:
            ticket = await pipeline.admit(request, bounds)
            receipts.append(await ticket.finish(artifact))
            ticket.release()

        async with anyio.create_task_group() as tasks:
            for request in requests:
                tasks.start_soon(one, request)
        assert pipeline.statistics.reserved_bytes == 0
    return receipts


def stored(server: S3Server, key: str) -> bytes:
    content: bytes = server.client().get_object(Bucket=BUCKET, Key=key)["Body"].read()
    return content


async def test_presigned_upload_and_no_second_one(server: S3Server, prefix: str) -> None:
    """T47: the client library's own URL, with a signed content type and escapes in the key."""
    key = f"{prefix}/a b/c+d%e"
    request = grant(server.presign(key, ContentType=TYPE), headers={"content-type": TYPE})
    (first,) = await deliver(section(server), request)
    assert first.state == "ready"
    assert decode(stored(server, key), sha256=first.sha256) == G1
    other = GenerationArtifact([ArtifactChoice(0, 1, [1, 2])])
    (second,) = await deliver(section(server), request, artifact=other)
    assert second.error_code == "artifact_conflict"
    assert decode(stored(server, key)) == G1


async def test_managed_write_and_no_second_one(server: S3Server, prefix: str) -> None:
    """T46; and the reader opens it from there, by ranges."""
    key = f"runs/{prefix}"
    request = ArtifactRequest(target=ManagedTarget("s3", key))
    (first,) = await deliver(section(server), request)
    assert (first.state, first.object_id) == ("ready", f"s3:{key}")
    assert decode(stored(server, f"base/{key}"), sha256=first.sha256) == G1
    (second,) = await deliver(section(server), request)
    assert second.error_code == "artifact_conflict"
    reader = open_artifact(f"s3://{BUCKET}/base/{key}", storage_options=server.storage_options)
    assert reader.verify(sha256=first.sha256).body_sha256 == first.body_sha256
    assert reader.tokens().tolist() == [101, 102, 201, 202]


@pytest.mark.parametrize("kind", ["presigned", "managed"])
async def test_of_sixteen_writers_one_wins(server: S3Server, prefix: str, kind: str) -> None:
    if kind == "presigned":
        requests = [grant(server.presign(prefix)) for _ in range(WRITERS)]
    else:
        requests = [ArtifactRequest(target=ManagedTarget("s3", f"runs/{prefix}"))] * WRITERS
    receipts = await deliver(section(server), *requests)
    outcomes = sorted(receipt.error_code or receipt.state for receipt in receipts)
    assert outcomes.count("ready") == 1
    assert outcomes.count("artifact_conflict") + outcomes.count("artifact_upload_rejected") == WRITERS - 1


async def test_an_expired_signature(server: S3Server, prefix: str) -> None:
    url = server.presign(prefix, seconds=1)
    await anyio.sleep(2.2)
    (receipt,) = await deliver(section(server), grant(url))
    assert receipt.error_code == "artifact_upload_rejected"


@pytest.mark.parametrize("change", ["key", "signature", "header", "unsigned"])
async def test_tampering(server: S3Server, prefix: str, change: str) -> None:
    url = server.presign(prefix, ContentType=TYPE)
    headers = {"content-type": TYPE}
    if change == "key":
        url = url.replace(prefix, prefix + "x", 1)
    elif change == "signature":
        head, _, signature = url.partition("X-Amz-Signature=")
        url = f"{head}X-Amz-Signature={'0' if signature[0] != '0' else '1'}{signature[1:]}"
    elif change == "header":
        headers = {"content-type": "text/plain"}
    else:
        url = url.partition("?")[0]
    (receipt,) = await deliver(section(server), grant(url, headers=headers))
    assert receipt.error_code == "artifact_upload_rejected"


async def test_two_overlapping_uploads(server: S3Server, prefix: str) -> None:
    """BR-01, with clients of both kinds at the same time."""
    requests = [ArtifactRequest(target=ManagedTarget("s3", f"runs/{prefix}-{n}")) for n in range(4)]
    requests += [grant(server.presign(f"{prefix}-{n}")) for n in range(4)]
    receipts = await deliver(section(server), *requests)
    assert [receipt.state for receipt in receipts] == ["ready"] * 8


def large() -> GenerationArtifact:
    ids = np.random.default_rng(7).integers(0, 4, (300_000, 2, 2)).astype(np.uint8)
    return GenerationArtifact([ArtifactChoice(0, 2, np.arange(300_001), RoutedExperts(0, ids, (3, 7), (4, 4)))])


@pytest.mark.parametrize("kind", ["presigned", "managed"])
async def test_a_server_killed_while_it_is_written_to(tmp_path: Path, kind: str) -> None:
    """Whatever the receipt says, it never says ready."""
    with s3_server(tmp_path / "s3") as server:
        settings = section(server, managed_timeout_seconds=20, presigned_timeout_seconds=20)
        url = server.presign("k")
        request = grant(url) if kind == "presigned" else ArtifactRequest(target=ManagedTarget("s3", "runs/k"))
        receipts: list[ArtifactReceipt] = []

        async def write() -> None:
            receipts.extend(await deliver(settings, request, artifact=large()))

        server.process.send_signal(19)  # it stops, so that the write hangs in the middle
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(write)
            await anyio.sleep(1.5)
            server.kill()
        (receipt,) = receipts
    assert receipt.error_code in ("artifact_outcome_unknown", "artifact_delivery_failed", "artifact_upload_timeout")


@pytest.mark.parametrize("kind", ["presigned", "managed"])
async def test_a_server_that_does_not_read(server: S3Server, prefix: str, kind: str) -> None:
    with put_server(*[stalled] * 4, read_body=False) as slow:
        settings = section(server, presigned_timeout_seconds=1, managed_timeout_seconds=1)
        profile = settings.storage_profiles["s3"]
        options = profile.storage_options | {"endpoint_url": f"http://{slow.authority}"}
        settings = settings.model_copy(
            update={
                "insecure_http_hosts": (slow.authority,),
                "storage_profiles": {"s3": profile.model_copy(update={"storage_options": options})},
            }
        )
        request = grant(slow.url()) if kind == "presigned" else ArtifactRequest(target=ManagedTarget("s3", "runs/k"))
        (receipt,) = await deliver(settings, request, artifact=large())
    assert receipt.error_code in ("artifact_upload_timeout", "artifact_outcome_unknown")
    assert receipt.sha256 is not None


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("kind", ["presigned", "managed"])
async def test_a_full_server(tmp_path: Path, kind: str, anyio_backend: str) -> None:
    """One volume of one mebibyte: sooner or later a write is refused, and nothing of it is there."""
    with s3_server(tmp_path / "s3", volumes=1, volume_mebibytes=1) as server:
        settings = section(server, managed_timeout_seconds=20, presigned_timeout_seconds=20)
        for number in range(12):
            key = f"runs/{number}"
            url = server.presign(f"base/{key}")
            request = grant(url) if kind == "presigned" else ArtifactRequest(target=ManagedTarget("s3", key))
            (receipt,) = await deliver(settings, request, artifact=large())
            if receipt.state == "failed":
                break
        assert receipt.error_code in ("artifact_upload_rejected", "artifact_upload_timeout", "artifact_outcome_unknown")
        listed = server.client().list_objects_v2(Bucket=BUCKET, Prefix=f"base/{key}")
        if receipt.error_code == "artifact_upload_rejected":
            assert listed["KeyCount"] == 0
