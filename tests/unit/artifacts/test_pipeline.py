"""From admission to receipt: every code, cancellation at every point, the order of delivery, budget, shutdown."""

from __future__ import annotations

import datetime
import hashlib
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import infer.artifacts.assembly
from infer.artifacts import ArtifactChoice, GenerationArtifact, decode
from infer.artifacts.admission import GenerationBounds
from infer.artifacts.destination import check_targets
from infer.artifacts.pipeline import ArtifactPipeline
from infer.artifacts.receipt import SENTENCES, ArtifactReceipt, missing_receipt
from infer.artifacts.request import ArtifactRequest, ManagedTarget, PresignedTarget, SinkTarget
from infer.config.artifacts import ArtifactsSection
from infer.config.engine import PluginsSection
from infer.errors import ArtifactError, ArtifactRefusedError, ConfigError, StorageError
from infer.plugins import Registry, build_registry
from put_server import PutServer, put_server

pytestmark = pytest.mark.anyio
BOUNDS = GenerationBounds(prompt_tokens=2, max_tokens=3, request_id="r-1")
ARTIFACT = GenerationArtifact([ArtifactChoice(0, 2, [1, 2, 3, 4])])
Sink = Callable[[bytes], Awaitable[str]]


@pytest.fixture(scope="module")
def registry() -> Registry:
    return build_registry(PluginsSection(allow=()))


def settings(**changes: Any) -> ArtifactsSection:
    profile = {"url": "memory://pipeline", "allowed_prefixes": ["runs"], "create_only": True}
    return ArtifactsSection(enable_managed_fsspec=True, storage_profiles={"runs": profile}, **changes)


def managed(key: str, *contents: str, **changes: Any) -> ArtifactRequest:
    return ArtifactRequest(target=ManagedTarget("runs", key), contents=contents, **changes)


def sinking(sink: Sink, **changes: Any) -> ArtifactRequest:
    return ArtifactRequest(target=SinkTarget(sink), **changes)


async def accept(data: bytes) -> str:
    return "stored"


async def finish(
    pipeline: ArtifactPipeline, request: ArtifactRequest, bounds: GenerationBounds = BOUNDS
) -> ArtifactReceipt:
    ticket = await pipeline.admit(request, bounds)
    try:
        return await ticket.finish(ARTIFACT)
    finally:
        ticket.release()


def grant(server: PutServer, seconds: float, path: str = "/k") -> PresignedTarget:
    moment = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)
    return PresignedTarget(
        url=server.url(path),
        expires_at=moment.isoformat(),
        max_bytes=10_000,
        object_id=f"id{path}",
        required_headers={"if-none-match": "*"},
    )


def insecure(server: PutServer, **changes: Any) -> ArtifactsSection:
    return ArtifactsSection(allow_insecure_http=True, insecure_http_hosts=(server.authority,), **changes)


class TestReceipts:
    async def test_ready(self, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
        """T48, T54, BR-27."""
        stored: list[bytes] = []

        async def keep(data: bytes) -> str:
            stored.append(data)
            return "mine"

        async with ArtifactPipeline(settings(), registry) as pipeline:
            ticket = await pipeline.admit(sinking(keep, contents=("selected_logprobs",)), BOUNDS)
            ticket.record(0, prompt_token_ids=[1, 2], token_ids=[3], logprobs=[-0.5])
            ticket.record(0, token_ids=[4], logprobs=[-1.5])
            receipt = await ticket.finish()
            ticket.release()
        (data,) = stored
        assert receipt.to_json() == {
            "format": "generation_artifact_v1",
            "contents": ["selected_logprobs"],
            "state": "ready",
            "actual_bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            "object_id": "mine",
            "body_sha256": receipt.body_sha256,
            "completion_token_count": 2,
        }
        assert list(decode(data, sha256=receipt.sha256).choices[0].sequence_token_ids) == [1, 2, 3, 4]
        receipt.raise_if_failed()

    async def test_managed_and_then_a_conflict(self, registry: Registry) -> None:
        async with ArtifactPipeline(settings(), registry) as pipeline:
            first = await finish(pipeline, managed("runs/one"))
            second = await finish(pipeline, managed("runs/one"))
        assert (first.state, first.object_id) == ("ready", "runs:runs/one")
        assert second.to_json() == {
            "format": "generation_artifact_v1",
            "contents": [],
            "state": "failed",
            "error_code": "artifact_conflict",
            "error": SENTENCES["artifact_conflict"],
            "actual_bytes": first.actual_bytes,
            "sha256": first.sha256,
            "body_sha256": first.body_sha256,
            "object_id": "runs:runs/one",
            "completion_token_count": 2,
        }
        target = registry.create("storage_target", "managed_fsspec", "memory://pipeline/runs/one", {})
        assert decode(await target.get()) == ARTIFACT
        await target.delete()

    async def test_presigned(self, registry: Registry) -> None:
        with put_server() as server:
            async with ArtifactPipeline(insecure(server), registry) as pipeline:
                receipt = await finish(pipeline, ArtifactRequest(target=grant(server, 100)))
            assert receipt.object_id == "id/k"
            assert decode(server.objects["/k"], sha256=receipt.sha256) == ARTIFACT

    @pytest.mark.parametrize(
        "code",
        [
            *("artifact_target_expired", "artifact_address_refused", "artifact_conflict", "artifact_upload_rejected"),
            *("artifact_upload_timeout", "artifact_outcome_unknown", "artifact_delivery_failed", "artifact_too_large"),
        ],
    )
    async def test_what_a_target_says(self, registry: Registry, code: str, caplog: pytest.LogCaptureFixture) -> None:
        """BR-04, T34, T77."""

        async def refuse(data: bytes) -> str:
            raise StorageError("SECRET provider text", code=code)

        caplog.set_level(logging.DEBUG)
        async with ArtifactPipeline(settings(), registry) as pipeline:
            receipt = await finish(pipeline, sinking(refuse))
        assert (receipt.state, receipt.error_code, receipt.error) == ("failed", code, SENTENCES[code])
        assert receipt.sha256 is not None
        assert "SECRET" not in caplog.text and caplog.text.count("r-1") == 1
        assert f"{receipt.error_code} (StorageError)" in caplog.text
        with pytest.raises(ArtifactError) as caught:
            receipt.raise_if_failed()
        assert caught.value.code == code

    @pytest.mark.parametrize("error", [RuntimeError("SECRET"), StorageError("x", code="unheard_of"), OSError("SECRET")])
    async def test_anything_else_is_a_failed_delivery(self, registry: Registry, error: Exception) -> None:
        async def break_(data: bytes) -> str:
            raise error

        async with ArtifactPipeline(settings(), registry) as pipeline:
            assert (await finish(pipeline, sinking(break_))).error_code == "artifact_delivery_failed"

    async def test_a_capture_error_never_disturbs(self, registry: Registry) -> None:
        """BR-03: recording goes on without a word, and the receipt says so."""
        async with ArtifactPipeline(settings(), registry) as pipeline:
            ticket = await pipeline.admit(managed("runs/x"), BOUNDS)
            ticket.record(0, prompt_token_ids=[1])
            ticket.record(0, token_ids=[5])
            ticket.record(99, nonsense=True)
            receipt = await ticket.finish()
            ticket.release()
            assert (receipt.error_code, receipt.sha256) == ("artifact_capture_failed", None)
            nothing = await pipeline.admit(managed("runs/x"), BOUNDS)
            assert (await nothing.finish()).error_code == "artifact_capture_failed"
            nothing.release()
            wrong = await pipeline.admit(managed("runs/x"), BOUNDS)
            bad = GenerationArtifact([ArtifactChoice(0, 9, [1])])
            assert (await wrong.finish(bad)).error_code == "artifact_capture_failed"
            wrong.release()

    async def test_a_real_object_above_its_limit(self, registry: Registry) -> None:
        async with ArtifactPipeline(settings(max_decoded_bytes=64), registry) as pipeline:
            ticket = await pipeline.admit(managed("runs/x"), BOUNDS)
            large = GenerationArtifact([ArtifactChoice(0, 0, list(range(9)))])
            assert (await ticket.finish(large)).error_code == "artifact_too_large"
            ticket.release()
        async with ArtifactPipeline(settings(), registry) as pipeline:
            request = ArtifactRequest(target=SinkTarget(accept, max_bytes=4300))
            ticket = await pipeline.admit(request, BOUNDS)
            noise = [(number * 7919) ** 3 % 2**62 for number in range(2000)]
            receipt = await ticket.finish(GenerationArtifact([ArtifactChoice(0, 0, noise)]))
            assert receipt.error_code == "artifact_too_large"
            assert receipt.actual_bytes is not None and receipt.actual_bytes > 4300
            ticket.release()

    def test_missing(self) -> None:
        """T74."""
        assert missing_receipt("generation_artifact_v1", ["b", "a"]).to_json() == {
            "format": "generation_artifact_v1",
            "contents": ["b", "a"],
            "state": "failed",
            "error_code": "artifact_receipt_missing",
            "error": SENTENCES["artifact_receipt_missing"],
        }

    def test_every_code_has_a_sentence_of_its_own(self) -> None:
        assert len(set(SENTENCES.values())) == len(SENTENCES) == 18
        assert SENTENCES["artifact_delivery_failed"] == "generation artifact delivery failed"


class TestRefusals:
    @pytest.mark.parametrize(
        ("request_", "code"),
        [
            (managed("elsewhere/k"), "artifact_target_rejected"),
            (managed("runsmore/k"), "artifact_target_rejected"),
            (managed("runs/../k"), "artifact_target_rejected"),
            (managed("/runs/k"), "artifact_target_rejected"),
            (managed("runs//k"), "artifact_target_rejected"),
            (managed("runs\\k"), "artifact_target_rejected"),
            (managed(""), "artifact_target_rejected"),
            (managed("runs/" + "k" * 1020), "artifact_target_rejected"),
            (ArtifactRequest(target=ManagedTarget("other", "runs/k")), "artifact_target_rejected"),
            (ArtifactRequest(target=ManagedTarget("../x", "runs/k")), "artifact_target_rejected"),
            (managed("runs/k", "moe_routes"), "artifact_unsupported"),
            (managed("runs/k", format="other"), "artifact_unsupported"),
            (sinking(accept, contents=("a", "a")), "artifact_invalid_request"),
        ],
    )
    async def test_before_inference(self, registry: Registry, request_: ArtifactRequest, code: str) -> None:
        """T42, T43, T45, T68; M2, M3, M4, M10."""
        async with ArtifactPipeline(settings(), registry) as pipeline:
            with pytest.raises(ArtifactRefusedError) as caught:
                await pipeline.admit(request_, BOUNDS)
            assert caught.value.code == code and caught.value.__cause__ is None
            assert pipeline.statistics.refused == {code: 1}
            assert pipeline.statistics.reserved_bytes == 0

    async def test_managed_targets_are_off_by_default(self, registry: Registry) -> None:
        """M5."""
        async with ArtifactPipeline(ArtifactsSection(), registry) as pipeline:
            with pytest.raises(ArtifactRefusedError, match="not enabled"):
                await pipeline.admit(managed("runs/k"), BOUNDS)

    @pytest.mark.parametrize("url", ["https://a/b", "ftp://a/b", "http://127.0.0.1/x", "S3FS://a"])
    async def test_a_scheme_that_no_target_answers_to(self, registry: Registry, url: str) -> None:
        """M11, T45."""
        profile = {"url": url, "allowed_prefixes": ["runs"], "create_only": True}
        section = ArtifactsSection(enable_managed_fsspec=True, storage_profiles={"runs": profile})
        async with ArtifactPipeline(section, registry) as pipeline:
            with pytest.raises(ArtifactRefusedError, match="scheme is not allowed"):
                await pipeline.admit(managed("runs/k"), BOUNDS)
        with pytest.raises(
            ConfigError, match=r"storage_profiles\.runs\.url: no storage plugin answers for .*memory, s3"
        ):
            check_targets(section, registry)

    @pytest.mark.parametrize(
        ("given", "switch"),
        [("storage_profiles", "enable_managed_fsspec"), ("insecure_http_hosts", "allow_insecure_http")],
    )
    async def test_what_is_set_and_not_in_force_is_said_at_start(
        self, registry: Registry, given: str, switch: str
    ) -> None:
        profile = {"url": "memory://pipeline", "allowed_prefixes": ["runs"], "create_only": True}
        values = {"storage_profiles": {"runs": profile}, "insecure_http_hosts": ("127.0.0.1:9000",)}
        with pytest.raises(ConfigError, match=f"artifacts.{given} is set, and without artifacts.{switch}") as caught:
            check_targets(ArtifactsSection(**{given: values[given]}), registry)  # type: ignore[arg-type]
        assert caught.value.fields == (f"artifacts.{given}", f"artifacts.{switch}")
        for on_purpose in (True, False):
            check_targets(ArtifactsSection(**{given: values[given], switch: on_purpose}), registry)  # type: ignore[arg-type]

    async def test_the_log_says_what_kind_of_error_it_was(
        self, registry: Registry, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Of a server that is down, for the operator; what a provider writes stays out of it."""

        async def broken(data: bytes) -> str:
            try:
                raise ConnectionRefusedError("SECRET")
            except OSError:
                raise RuntimeError("SECRET") from None

        async with ArtifactPipeline(settings(), registry) as pipeline:
            ticket = await pipeline.admit(ArtifactRequest(target=SinkTarget(broken)), BOUNDS)
            await ticket.finish(ARTIFACT)
            ticket.release()
        assert (
            "artifact of request r-1: artifact_delivery_failed (RuntimeError after ConnectionRefusedError)"
            in caplog.text
        )
        assert "SECRET" not in caplog.text

    async def test_a_prefix_itself_is_a_key(self, registry: Registry) -> None:
        async with ArtifactPipeline(settings(), registry) as pipeline:
            (await pipeline.admit(managed("runs"), BOUNDS)).release()
            (await pipeline.admit(managed(" runs/a "), BOUNDS)).release()

    async def test_presigned_rules_hold_at_admission(self, registry: Registry) -> None:
        with put_server() as server:
            async with ArtifactPipeline(ArtifactsSection(), registry) as pipeline:
                with pytest.raises(ArtifactRefusedError) as caught:
                    await pipeline.admit(ArtifactRequest(target=grant(server, 100)), BOUNDS)
            assert caught.value.code == "artifact_target_rejected" and server.accepted == 0

    async def test_a_grant_that_expires_too_soon(self, registry: Registry) -> None:
        """BR-07."""
        slow = GenerationBounds(prompt_tokens=2, max_tokens=3, expected_seconds=30)
        with put_server() as server:
            async with ArtifactPipeline(insecure(server), registry) as pipeline:
                with pytest.raises(ArtifactRefusedError) as caught:
                    await pipeline.admit(ArtifactRequest(target=grant(server, 40)), slow)
                assert caught.value.code == "artifact_target_expires_too_soon"
                (await pipeline.admit(ArtifactRequest(target=grant(server, 50)), slow)).release()

    async def test_limits(self, registry: Registry) -> None:
        async with ArtifactPipeline(settings(max_decoded_bytes=39), registry) as pipeline:
            with pytest.raises(ArtifactRefusedError) as caught:
                await pipeline.admit(managed("runs/k"), BOUNDS)
            assert caught.value.code == "artifact_limit_exceeded"
            assert pipeline.limits(BOUNDS)["longest_sequence"] == (39 + 8) // 12
        async with ArtifactPipeline(settings(process_bytes=4000), registry) as pipeline:
            with pytest.raises(ArtifactRefusedError, match="process_bytes"):
                await pipeline.admit(managed("runs/k"), BOUNDS)

    async def test_a_closed_pipeline(self, registry: Registry) -> None:
        pipeline = ArtifactPipeline(settings(), registry)
        async with pipeline:
            pass
        with pytest.raises(ArtifactRefusedError):
            await pipeline.admit(managed("runs/k"), BOUNDS)


class TestBudget:
    async def test_over_budget_waits_and_is_then_refused(self, registry: Registry) -> None:
        """BR-08, T61: admission holds no slot."""
        section = settings(process_bytes=9000, queue_timeout_seconds=1, pipeline_concurrency=1)
        async with ArtifactPipeline(section, registry) as pipeline:
            held = [await pipeline.admit(sinking(accept), BOUNDS) for _ in range(2)]
            assert pipeline.statistics.reserved_bytes <= 9000
            with pytest.raises(ArtifactRefusedError) as caught:
                await pipeline.admit(sinking(accept), BOUNDS)
            assert caught.value.code == "artifact_capacity_exhausted"
            assert caught.value.retry_after is not None and caught.value.retry_after >= 1

            async def later() -> None:
                (await pipeline.admit(sinking(accept), BOUNDS)).release()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(later)
                await anyio.wait_all_tasks_blocked()
                held[0].release()
            held[0].release()
            held[1].release()
            assert pipeline.statistics.reserved_bytes == 0

    async def test_a_cancelled_wait_reserves_nothing(self, registry: Registry) -> None:
        async with ArtifactPipeline(settings(process_bytes=5000), registry) as pipeline:
            held = await pipeline.admit(sinking(accept), BOUNDS)
            with anyio.move_on_after(0.05):
                await pipeline.admit(sinking(accept), BOUNDS)
            held.release()
            assert pipeline.statistics.reserved_bytes == 0


class _Gate:
    """A sink that notes what arrives and lets it through when told to."""

    def __init__(self) -> None:
        self.open = anyio.Event()
        self.arrived = anyio.Event()
        self.order: list[str] = []

    def sink(self, name: str) -> Sink:
        async def take(data: bytes) -> str:
            self.order.append(name)
            self.arrived.set()
            await self.open.wait()
            return name

        return take


class TestCancellation:
    async def test_aborted_before_delivery(self, registry: Registry) -> None:
        """BR-05."""
        gate = _Gate()
        gate.open.set()
        async with ArtifactPipeline(settings(), registry) as pipeline:
            ticket = await pipeline.admit(sinking(gate.sink("a")), BOUNDS)
            ticket.record(0, prompt_token_ids=[1, 2], token_ids=[3])
            assert (await ticket.finish(aborted=True)).error_code == "artifact_cancelled"
            ticket.release()
            assert gate.order == []
            wanted = await pipeline.admit(sinking(gate.sink("b"), deliver_on_abort=True), BOUNDS)
            wanted.record(0, prompt_token_ids=[1, 2], token_ids=[3])
            receipt = await wanted.finish(aborted=True)
            wanted.release()
            assert (receipt.state, receipt.completion_token_count) == ("ready", 1)

    async def test_cancelled_before_a_slot_nothing_is_written(self, registry: Registry) -> None:
        gate = _Gate()
        async with ArtifactPipeline(settings(pipeline_concurrency=1), registry) as pipeline:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(finish, pipeline, sinking(gate.sink("first")))
                await gate.arrived.wait()
                with anyio.move_on_after(0.05) as scope:
                    await finish(pipeline, sinking(gate.sink("second")))
                assert scope.cancelled_caught
                assert pipeline.statistics.queue_depth == 0
                gate.open.set()
            assert gate.order == ["first"]
            assert pipeline.statistics.failed == {"artifact_cancelled": 1}
            assert pipeline.statistics.reserved_bytes == 0

    async def test_cancelled_after_it_began_it_runs_on(self, registry: Registry) -> None:
        """Section 7, T70: the unit keeps its slot to the end and is recorded."""
        gate = _Gate()
        async with ArtifactPipeline(settings(pipeline_concurrency=1), registry) as pipeline:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(finish, pipeline, sinking(gate.sink("first")))
                    await gate.arrived.wait()
                    scope.cancel()
            assert (pipeline.statistics.running, pipeline.statistics.ready) == (1, 0)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(finish, pipeline, sinking(gate.sink("second")))
                await anyio.wait_all_tasks_blocked()
                assert gate.order == ["first"]
                gate.open.set()
            assert gate.order == ["first", "second"]
            assert pipeline.statistics.ready == 2
            assert pipeline.statistics.reserved_bytes == 0

    async def test_a_cancelled_encode_keeps_its_slot(self, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
        """T70: a thread cannot be stopped, so the next one waits for it."""
        release, began = threading.Event(), threading.Event()
        encode = infer.artifacts.assembly.encode_source

        def slow(*arguments: Any) -> Any:
            began.set()
            release.wait(10)
            return encode(*arguments)

        monkeypatch.setattr(infer.artifacts.assembly, "encode_source", slow)
        async with ArtifactPipeline(settings(pipeline_concurrency=1), registry) as pipeline:
            with anyio.move_on_after(0.1):
                await finish(pipeline, sinking(accept))
            assert began.is_set() and pipeline.statistics.running == 1
            monkeypatch.setattr(infer.artifacts.assembly, "encode_source", encode)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(finish, pipeline, sinking(accept))
                for _ in range(9):
                    await anyio.lowlevel.checkpoint()
                assert pipeline.statistics.queue_depth == 1
                release.set()
            assert pipeline.statistics.ready == 2


class TestQueue:
    async def test_the_earliest_expiry_goes_first(self, registry: Registry) -> None:
        """BR-07."""
        gate = _Gate()
        with put_server() as server:
            section = insecure(server, pipeline_concurrency=1)
            async with ArtifactPipeline(section, registry) as pipeline, anyio.create_task_group() as tasks:
                tasks.start_soon(finish, pipeline, sinking(gate.sink("none")))
                await gate.arrived.wait()
                for seconds in (900, 100, 500):
                    request = ArtifactRequest(target=grant(server, seconds, f"/{seconds}"))
                    tasks.start_soon(finish, pipeline, request)
                    await anyio.wait_all_tasks_blocked()
                assert pipeline.statistics.queue_depth == 3
                gate.open.set()
            assert [exchange.path for exchange in server.exchanges] == ["/100", "/500", "/900"]

    async def test_no_slot_in_time_and_a_full_queue(self, registry: Registry) -> None:
        """BR-08."""
        gate = _Gate()
        section = settings(pipeline_concurrency=1, queue_limit=1, queue_timeout_seconds=1)
        async with ArtifactPipeline(section, registry) as pipeline:
            codes: list[str | None] = []

            async def deliver(name: str) -> None:
                codes.append((await finish(pipeline, sinking(gate.sink(name)))).error_code)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(deliver, "running")
                await gate.arrived.wait()
                tasks.start_soon(deliver, "waiting")
                await anyio.wait_all_tasks_blocked()
                await deliver("too many")
                assert codes == ["artifact_queue_timeout"]
                while len(codes) < 2:  # noqa: ASYNC110  the waiting one gives up after a second
                    await anyio.sleep(0.05)
                gate.open.set()
            assert codes == ["artifact_queue_timeout", "artifact_queue_timeout", None]
            assert gate.order == ["running"]

    async def test_an_expired_grant_is_refreshed(self, registry: Registry) -> None:
        """BR-07."""
        now = datetime.datetime.now(datetime.UTC).timestamp()
        clock = [now]
        with put_server() as server:

            async def refresh() -> PresignedTarget:
                return grant(server, 300, "/new")

            async with ArtifactPipeline(insecure(server), registry, clock=lambda: clock[0]) as pipeline:
                ticket = await pipeline.admit(ArtifactRequest(target=grant(server, 5), refresh=refresh), BOUNDS)
                clock[0] += 10
                receipt = await ticket.finish(ARTIFACT)
                ticket.release()
            assert (receipt.state, receipt.object_id) == ("ready", "id/new")
            assert list(server.objects) == ["/new"]


class TestShutdown:
    async def test_running_deliveries_finish(self, registry: Registry) -> None:
        """BR-12."""
        gate = _Gate()
        async with anyio.create_task_group() as tasks:
            async with ArtifactPipeline(settings(), registry) as pipeline:
                tasks.start_soon(finish, pipeline, sinking(gate.sink("a")))
                await gate.arrived.wait()

                async def open_later() -> None:
                    await anyio.sleep(0.05)
                    gate.open.set()

                tasks.start_soon(open_later)
            assert pipeline.statistics.ready == 1

    async def test_at_the_deadline_each_one_is_recorded(self, registry: Registry) -> None:
        """BR-12: what was being written is unknown, what waited is cancelled."""
        gate = _Gate()
        codes: list[str | None] = []
        section = settings(pipeline_concurrency=1, drain_timeout_seconds=0)
        async with anyio.create_task_group() as tasks, ArtifactPipeline(section, registry) as pipeline:

            async def deliver(name: str) -> None:
                receipt = await finish(pipeline, sinking(gate.sink(name)))
                codes.append(receipt.error_code)
                assert (receipt.sha256 is None) == (name == "waiting")

            tasks.start_soon(deliver, "writing")
            await gate.arrived.wait()
            tasks.start_soon(deliver, "waiting")
            await anyio.wait_all_tasks_blocked()
        assert sorted(map(str, codes)) == ["artifact_cancelled", "artifact_outcome_unknown"]
        assert pipeline.statistics.reserved_bytes == 0 and gate.order == ["writing"]

    async def test_an_error_in_the_block_passes_through(self, registry: Registry) -> None:
        gate = _Gate()
        with pytest.raises(KeyError, match="mine"):
            async with ArtifactPipeline(settings(drain_timeout_seconds=0), registry) as pipeline:
                ticket = await pipeline.admit(sinking(gate.sink("a")), BOUNDS)
                with anyio.move_on_after(0.05):
                    await ticket.finish(ARTIFACT)
                raise KeyError("mine")
        assert pipeline.statistics.failed == {"artifact_outcome_unknown": 1}

    async def test_cancelled_from_outside(self, registry: Registry) -> None:
        gate = _Gate()
        with anyio.move_on_after(0.1) as scope:
            async with ArtifactPipeline(settings(), registry) as pipeline:
                await finish(pipeline, sinking(gate.sink("a")))
        assert scope.cancelled_caught
        assert pipeline.statistics.failed == {"artifact_outcome_unknown": 1}
        assert pipeline.statistics.reserved_bytes == 0


async def test_counters(registry: Registry) -> None:
    """BR-21."""

    async def refuse(data: bytes) -> str:
        raise StorageError("no", code="artifact_conflict")

    async with ArtifactPipeline(settings(), registry) as pipeline:
        ready = [await finish(pipeline, sinking(accept)) for _ in range(3)]
        await finish(pipeline, sinking(refuse))
        shown = pipeline.statistics
    assert (shown.admitted, shown.ready, dict(shown.failed)) == (4, 3, {"artifact_conflict": 1})
    assert shown.delivered_bytes == sum(receipt.actual_bytes or 0 for receipt in ready)
    assert shown.encode_seconds > 0 and shown.upload_seconds > 0
    assert (shown.running, shown.queue_depth, shown.reserved_bytes) == (0, 0, 0)


async def test_a_ticket_is_finished_once(registry: Registry) -> None:
    async with ArtifactPipeline(settings(), registry) as pipeline:
        ticket = await pipeline.admit(sinking(accept), BOUNDS)
        await ticket.finish(ARTIFACT)
        with pytest.raises(ArtifactError):
            await ticket.finish(ARTIFACT)
        ticket.release()


async def test_every_loop_gives_the_same_object(registry: Registry) -> None:
    """T114: each back-end is compared with a constant, and so with the others."""
    async with ArtifactPipeline(settings(), registry) as pipeline:
        receipt = await finish(pipeline, sinking(accept))
    assert receipt.body_sha256 == "7e0be81784fc031b2d83b693bd3cb9343e9acf97f9f9b4ffee82772910fa7a95"
