"""`artifact=` over a scripted model: what is in the object, when it is delivered, what the receipt says, what is refused."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import anyio
import pytest

import infer.artifacts.capture
from infer import (
    ArtifactError,
    ArtifactRefusedError,
    Engine,
    EngineClosedError,
    EngineConfig,
    InvalidRequestError,
    SamplingParams,
    StepError,
    StorageError,
)
from infer.artifacts import (
    ArtifactRequest,
    GenerationArtifact,
    ManagedTarget,
    PresignedTarget,
    SinkTarget,
    decode,
)
from infer.artifacts.receipt import SENTENCES
from infer.engine.delivery import LOGPROB_INTERVAL, expected_seconds
from infer.engine.metrics import EngineMetrics
from infer.testing.fake_engine import fake_engine
from infer.testing.fake_executor import FakeWorker
from served import Script, answer, letters, wait_until_idle

pytestmark = pytest.mark.anyio
SECTION: dict[str, Any] = {
    "enable_managed_fsspec": True,
    "storage_profiles": {"here": {"url": "memory://facade", "allowed_prefixes": ["runs"], "create_only": True}},
}
LOGPROBS = ("selected_logprobs",)


class Shelf:
    """A sink that keeps what it gets; `gate` holds it up, `error` breaks it."""

    def __init__(self, error: Exception | None = None, gate: anyio.Event | None = None) -> None:
        self.objects: list[bytes] = []
        self.arrived = anyio.Event()
        self._error = error
        self._gate = gate

    async def __call__(self, data: bytes) -> str:
        self.arrived.set()
        if self._gate is not None:
            await self._gate.wait()
        if self._error is not None:
            raise self._error
        self.objects.append(data)
        return f"shelf/{len(self.objects)}"

    @property
    def only(self) -> GenerationArtifact:
        (data,) = self.objects
        return decode(data)

    def request(self, *contents: str, **changes: Any) -> ArtifactRequest:
        return ArtifactRequest(target=SinkTarget(self), contents=contents, **changes)


def engine_of(
    model: Any = letters, *, latency: float = 0.0, section: dict[str, Any] | None = None, **fake: Any
) -> Engine:
    config = EngineConfig(cache={"num_blocks": 200}, artifacts=SECTION | (section or {}))
    return fake_engine(model, config, latency=latency, **fake)


def tokens_of(artifact: GenerationArtifact) -> list[list[int]]:
    return [list(choice.sequence_token_ids) for choice in artifact.choices]


def logprobs_of(artifact: GenerationArtifact) -> list[list[float]]:
    found = []
    for choice in artifact.choices:
        assert choice.selected_logprobs is not None
        found.append([float(value) for value in choice.selected_logprobs.logprobs])
    return found


def nothing_held(engine: Engine) -> None:
    shown = engine.artifact_statistics
    assert (shown.reserved_bytes, shown.running, shown.queue_depth) == (0, 0, 0)


class TestContents:
    async def test_tokens_alone(self) -> None:
        """T54: contents [] without route capture."""
        shelf = Shelf()
        async with engine_of() as engine:
            done = await engine.generate("abc", SamplingParams(max_tokens=9, seed=5), artifact=shelf.request())
            assert done.artifact is not None and done.artifact.state == "ready"
            assert (done.artifact.object_id, done.artifact.completion_token_count) == ("shelf/1", 9)
            assert tokens_of(shelf.only) == [[*b"abc", *done.token_ids]]
            assert shelf.only.choices[0].prompt_token_count == 3
            assert shelf.only.choices[0].selected_logprobs is None and shelf.only.choices[0].moe_routes is None
            assert decode(shelf.objects[0], sha256=done.artifact.sha256) == shelf.only
            nothing_held(engine)
            await wait_until_idle(engine)

    @pytest.mark.parametrize("streamed", [False, True])
    async def test_private_logprobs_stay_private(self, streamed: bool) -> None:
        """T78, section 2.4: the engine computes the chosen token's only, and the caller sees none."""
        shelf, workers, deltas = Shelf(), list[FakeWorker](), []
        async with engine_of(on_worker=workers.append) as engine:
            params = SamplingParams(max_tokens=7, seed=1)
            async with engine.stream("abc", params, artifact=shelf.request(*LOGPROBS)) as stream:
                async for delta in stream:
                    deltas.append(delta)
            done = stream.result
            if not streamed:
                done = await engine.generate("abd", params, artifact=shelf.request(*LOGPROBS))
        specs = [admission.sampling for plan in workers[0].plans for admission in plan.admissions]
        assert {spec.logprobs for spec in specs} == {0}
        assert done.logprobs is None and done.sampling.logprobs is None
        assert {delta.logprobs for delta in deltas} == {None}
        artifact = decode(shelf.objects[-1])
        assert logprobs_of(artifact) == [[-1.0] * 7]
        assert done.artifact is not None and done.artifact.logprobs_mode == "raw"

    async def test_public_logprobs_beside_an_artifact(self) -> None:
        """T115: both, each as if the other were not there."""
        shelf = Shelf()
        async with engine_of() as engine:
            params = SamplingParams(max_tokens=5, seed=1, logprobs=0)
            alone = await engine.generate("abc", params)
            both = await engine.generate("abc", params, artifact=shelf.request(*LOGPROBS))
            tokens_only = await engine.generate("abc", params, artifact=shelf.request())
        assert alone.artifact is None
        assert both.logprobs == alone.logprobs == tokens_only.logprobs and both.token_ids == alone.token_ids
        first, second = (decode(data) for data in shelf.objects)
        assert logprobs_of(first) == [[entry.logprob for entry in alone.logprobs or ()]]
        assert second.choices[0].selected_logprobs is None

    async def test_all_choices_are_in_one_object(self) -> None:
        """BR-17."""
        shelf = Shelf()
        async with engine_of() as engine:
            params = SamplingParams(max_tokens=6, seed=3, n=4)
            done = await engine.generate("abc", params, artifact=shelf.request(*LOGPROBS))
        assert [choice.choice_index for choice in shelf.only.choices] == [0, 1, 2, 3]
        assert tokens_of(shelf.only) == [[*b"abc", *answer("abc", 6, 3 + index)] for index in range(4)]
        assert done.artifact is not None and done.artifact.completion_token_count == (6, 6, 6, 6)

    @pytest.mark.row(
        "SAMPLE-ROUTED-EXPERTS", "a stop string inside a multi-token step cuts artifact and response alike"
    )
    @pytest.mark.parametrize("include", [False, True])
    async def test_a_stop_string_cuts_the_artifact_where_it_cuts_the_answer(self, include: bool) -> None:
        """BR-23: the engine went on behind the stop string, and nothing of that is in the object."""
        shelf = Shelf()
        async with engine_of(Script("one two three four five")) as engine:
            params = SamplingParams(max_tokens=20, stop="three", include_stop=include, seed=1)
            gate = anyio.Event()
            async with engine.stream("abc", params, artifact=shelf.request(*LOGPROBS)) as stream:
                while engine.statistics().steps < 18:  # the reader is slow: one update holds many tokens
                    await anyio.lowlevel.checkpoint()
                gate.set()
                async for _ in stream:
                    pass
            done = stream.result
        assert (done.finish_reason, done.stop_reason) == ("stop", "three")
        assert bytes(done.token_ids) == b"one two three"
        assert tokens_of(shelf.only) == [[*b"abc", *b"one two three"]]
        assert logprobs_of(shelf.only) == [[-1.0] * 13]
        assert done.artifact is not None and done.artifact.completion_token_count == 13

    async def test_eos_is_a_token_of_the_artifact(self) -> None:
        shelf = Shelf()
        async with engine_of(Script("ab")) as engine:
            done = await engine.generate("x", artifact=shelf.request())
        assert done.finish_reason == "stop"
        assert tokens_of(shelf.only) == [[*b"x", *done.token_ids]]

    async def test_each_of_many_prompts_has_its_own(self) -> None:
        """`generate_many`: in the order of the prompts, none where none is asked for."""
        shelf = Shelf()
        async with engine_of() as engine:
            few = SamplingParams(max_tokens=4, seed=1)
            wanted = [shelf.request(), None, shelf.request()]
            done = await engine.generate_many(["ab", "cd", "ef"], few, artifacts=wanted, max_concurrent=1)
            for wrong in (wanted[:2], shelf.request()):
                given: Any = wrong
                with pytest.raises(InvalidRequestError, match="a list of 3, one for each prompt") as refused:
                    await engine.generate_many(["ab", "cd", "ef"], few, artifacts=given)
                assert refused.value.parameter == "artifacts"
            nothing_held(engine)
        receipts = [one.artifact for one in done]
        assert receipts[1] is None and len(shelf.objects) == 2
        for index in (0, 2):
            receipt = receipts[index]
            assert receipt is not None and receipt.object_id is not None
            held = decode(shelf.objects[int(receipt.object_id.removeprefix("shelf/")) - 1], sha256=receipt.sha256)
            assert tokens_of(held) == [[*done[index].prompt_token_ids, *done[index].token_ids]]

    async def test_every_loop_gives_the_same_object(self) -> None:
        """T114."""
        shelf = Shelf()
        async with engine_of() as engine:
            done = await engine.generate(
                "abc", SamplingParams(max_tokens=9, seed=5, n=2), artifact=shelf.request(*LOGPROBS)
            )
        assert done.artifact is not None
        assert done.artifact.body_sha256 == BODY_SHA256

    async def test_without_the_argument_nothing_is_captured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """T55."""

        def refuse(*arguments: Any) -> None:
            raise AssertionError("something was captured")

        monkeypatch.setattr(infer.artifacts.capture.Capture, "__init__", refuse)
        async with engine_of() as engine:
            done = await engine.generate("abc", SamplingParams(max_tokens=3, logprobs=1))
            assert done.artifact is None
            assert engine.artifact_statistics.admitted == 0


BODY_SHA256 = "5e51e4296439ab245069543cce63dabefb0dbaec246c68bf2a9e457c405cfa88"


class TestStreams:
    async def test_the_last_delta_does_not_wait_for_storage(self) -> None:
        """Section 7: upload latency delays the receipt, not a token."""
        gate = anyio.Event()
        shelf = Shelf(gate=gate)
        text = ""
        async with engine_of() as engine:
            params = SamplingParams(max_tokens=5, seed=2)
            async with engine.stream("abc", params, artifact=shelf.request()) as stream:
                async for delta in stream:
                    text += delta.text
                    if delta.finish_reason is not None:
                        assert not shelf.arrived.is_set()
                        gate.set()
                assert stream.result.artifact is not None and stream.result.artifact.state == "ready"
        assert text.encode() == bytes(answer("abc", 5, 2))

    async def test_a_reader_who_stops_at_the_last_delta_has_no_receipt(self) -> None:
        shelf = Shelf()
        async with engine_of() as engine:
            async with engine.stream("abc", SamplingParams(max_tokens=2), artifact=shelf.request()) as stream:
                async for delta in stream:
                    if delta.finish_reason is not None:
                        break
            assert engine.artifact_statistics.failed == {"artifact_cancelled": 1}
            nothing_held(engine)
        assert shelf.objects == []

    async def test_logprobs_are_taken_in_pieces(self) -> None:
        """BR-09: as objects they would take many times what was admitted, so they do not pile up until the end."""
        shelf, sizes = Shelf(), list[int]()
        async with engine_of(latency=0.0001) as engine:
            request = shelf.request(*LOGPROBS)
            generate = engine.generate(
                "abc", SamplingParams(max_tokens=1200, seed=1, ignore_eos=True), artifact=request
            )
            async with anyio.create_task_group() as tasks:

                async def watch() -> None:
                    while True:
                        for requests in engine._requests.values():
                            sizes.extend(len(u.logprobs) for r in requests for u in r.outbox._updates.values())
                        await anyio.lowlevel.checkpoint()

                tasks.start_soon(watch)
                done = await generate
                tasks.cancel_scope.cancel()
        assert len(done.token_ids) == 1200 and logprobs_of(shelf.only) == [[-1.0] * 1200]
        assert 0 < max(sizes) <= LOGPROB_INTERVAL + 8


FAILURES: dict[str, Exception] = {
    "artifact_conflict": StorageError("SECRET", code="artifact_conflict"),
    "artifact_delivery_failed": RuntimeError("SECRET"),
}


class TestFailures:
    @pytest.mark.parametrize("code", FAILURES)
    async def test_a_failed_artifact_never_fails_the_tokens(self, code: str, caplog: pytest.LogCaptureFixture) -> None:
        """BR-22, T77."""
        caplog.set_level(logging.DEBUG)
        shelf = Shelf(FAILURES[code])
        async with engine_of() as engine:
            done = await engine.generate("abc", SamplingParams(max_tokens=5, seed=2), artifact=shelf.request())
            nothing_held(engine)
        assert list(done.token_ids) == answer("abc", 5, 2)
        assert done.artifact is not None
        assert (done.artifact.state, done.artifact.error_code, done.artifact.error) == ("failed", code, SENTENCES[code])
        assert "SECRET" not in caplog.text + repr(done)

    async def test_strict_raises(self) -> None:
        """BR-22: after every delta was handed out; the result stays readable."""
        shelf, got = Shelf(StorageError("no", code="artifact_conflict")), list[int]()
        async with engine_of() as engine:
            params = SamplingParams(max_tokens=5, seed=2)
            with pytest.raises(ArtifactError) as caught:
                await engine.generate("abc", params, artifact=shelf.request(strict=True))
            assert caught.value.code == "artifact_conflict"
            async with engine.stream("abc", params, artifact=shelf.request(strict=True)) as stream:
                with pytest.raises(ArtifactError):
                    async for delta in stream:
                        got += delta.token_ids
                assert stream.result.artifact is not None and stream.result.artifact.state == "failed"
            ready = await engine.generate("abc", params, artifact=Shelf().request(strict=True))
            assert ready.artifact is not None and ready.artifact.state == "ready"
            nothing_held(engine)
        assert got == answer("abc", 5, 2)

    @pytest.mark.parametrize("streamed", [False, True])
    async def test_a_capture_that_breaks_in_the_middle(self, streamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """BR-03: all tokens arrive."""
        record = infer.artifacts.capture.Capture.record

        def short(self: Any, index: int, *, token_ids: Sequence[int] = (), logprobs: Any = None, **more: Any) -> None:
            record(self, index, token_ids=token_ids, logprobs=logprobs[:-1] if logprobs else logprobs, **more)

        monkeypatch.setattr(infer.artifacts.capture.Capture, "record", short)
        shelf, got = Shelf(), list[int]()
        async with engine_of() as engine:
            params = SamplingParams(max_tokens=6, seed=2)
            if streamed:
                async with engine.stream("abc", params, artifact=shelf.request(*LOGPROBS)) as stream:
                    async for delta in stream:
                        got += delta.token_ids
                done = stream.result
            else:
                done = await engine.generate("abc", params, artifact=shelf.request(*LOGPROBS))
            nothing_held(engine)
        assert list(done.token_ids) == answer("abc", 6, 2) and (not streamed or got == list(done.token_ids))
        assert done.artifact is not None and done.artifact.error_code == "artifact_capture_failed"
        assert shelf.objects == []

    async def test_a_failed_step_releases_what_was_admitted(self) -> None:
        workers: list[FakeWorker] = []
        async with engine_of(on_worker=workers.append) as engine:
            workers[0].fail_at = lambda plan: RuntimeError("a broken kernel") if plan.step_id == 3 else None
            with pytest.raises(StepError):
                await engine.generate("abc", artifact=Shelf().request())
            assert engine.artifact_statistics.failed == {"artifact_capture_failed": 1}
            nothing_held(engine)


class TestEnds:
    @pytest.mark.parametrize("deliver", [False, True])
    async def test_abort(self, deliver: bool) -> None:
        """BR-05: an explicit receipt; the tokens accepted so far only if they were asked for."""
        shelf = Shelf()
        async with engine_of(latency=0.002) as engine:
            request = shelf.request(*LOGPROBS, deliver_on_abort=deliver)
            async with engine.stream("abc", SamplingParams(max_tokens=500), request_id="r", artifact=request) as stream:
                async for delta in stream:
                    if delta.token_ids:
                        engine.abort("r")
            done = stream.result
            nothing_held(engine)
        assert done.finish_reason == "abort" and done.artifact is not None and 0 < len(done.token_ids) < 500
        if deliver:
            assert done.artifact.state == "ready"
            assert tokens_of(shelf.only) == [[*b"abc", *done.token_ids]]
        else:
            assert done.artifact.error_code == "artifact_cancelled" and shelf.objects == []

    async def test_abort_before_the_first_step(self) -> None:
        """Nothing was generated; that is what the object says."""
        shelf = Shelf()
        async with engine_of() as engine:
            request = shelf.request(deliver_on_abort=True)
            async with engine.stream("abc", SamplingParams(max_tokens=5), request_id="r", artifact=request) as stream:
                engine.abort("r")
                async for _ in stream:
                    pass
        assert stream.result.artifact is not None and stream.result.artifact.completion_token_count == 0
        assert tokens_of(shelf.only) == [[*b"abc"]]

    async def test_a_deadline_is_an_end_like_any_other(self) -> None:
        shelf = Shelf()
        async with engine_of(latency=0.002) as engine:
            done = await engine.generate(
                "abc", SamplingParams(max_tokens=500), artifact=shelf.request(*LOGPROBS), deadline=0.1
            )
        assert done.finish_reason == "deadline" and done.artifact is not None and done.artifact.state == "ready"
        assert tokens_of(shelf.only) == [[*b"abc", *done.token_ids]]

    @pytest.mark.parametrize("streamed", [False, True])
    async def test_a_cancelled_task_leaves_nothing(self, streamed: bool) -> None:
        """Sections 7 and 9: nothing is written, nothing is held, and it is counted."""
        shelf = Shelf()
        async with engine_of(latency=0.002) as engine:
            with anyio.move_on_after(0.05) as scope:
                request = shelf.request(deliver_on_abort=True)
                if streamed:
                    async with engine.stream("abc", SamplingParams(max_tokens=1500), artifact=request) as stream:
                        async for _ in stream:
                            pass
                else:
                    await engine.generate("abc", SamplingParams(max_tokens=1500), artifact=request)
            assert scope.cancelled_caught
            nothing_held(engine)
            assert engine.artifact_statistics.failed == {"artifact_cancelled": 1}
            with anyio.fail_after(30):
                while engine.statistics().running or engine.statistics().kv_usage:  # noqa: ASYNC110  a step takes its time
                    await anyio.sleep(0.002)
        assert shelf.objects == []

    async def test_a_delivery_that_has_begun_outlives_its_task(self) -> None:
        """Section 7: cancelled after the slot, the unit runs on and is counted; closing the engine waits for it."""
        gate = anyio.Event()
        shelf = Shelf(gate=gate)
        async with anyio.create_task_group() as tasks, engine_of() as engine:

            async def ask() -> None:
                with scope:
                    await engine.generate("abc", SamplingParams(max_tokens=3), artifact=shelf.request())

            scope = anyio.CancelScope()
            tasks.start_soon(ask)
            await shelf.arrived.wait()
            scope.cancel()
            statistics = engine.artifact_statistics
            while not scope.cancelled_caught:
                await anyio.lowlevel.checkpoint()
            assert (statistics.running, statistics.ready) == (1, 0)

            async def open_later() -> None:
                await anyio.sleep(0.05)
                gate.set()

            tasks.start_soon(open_later)
        assert len(shelf.objects) == 1
        assert (statistics.ready, statistics.reserved_bytes) == (1, 0)

    async def test_closing_does_not_wait_for_ever(self) -> None:
        """BR-12."""
        shelf = Shelf(gate=anyio.Event())
        receipts: list[Any] = []
        async with anyio.create_task_group() as tasks, engine_of(section={"drain_timeout_seconds": 0}) as engine:

            async def ask() -> None:
                done = await engine.generate("abc", SamplingParams(max_tokens=3), artifact=shelf.request())
                receipts.append(done.artifact)

            tasks.start_soon(ask)
            await shelf.arrived.wait()
            statistics = engine.artifact_statistics
        assert [receipt.error_code for receipt in receipts] == ["artifact_outcome_unknown"]
        assert statistics.reserved_bytes == 0

    async def test_a_cancelled_engine_does_not_wait_for_storage(self) -> None:
        shelf = Shelf(gate=anyio.Event())
        async with anyio.create_task_group() as tasks:

            async def cancel() -> None:
                await shelf.arrived.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(cancel)
            async with engine_of() as engine:
                await engine.generate("abc", SamplingParams(max_tokens=3), artifact=shelf.request())
        assert tasks.cancel_scope.cancelled_caught and shelf.objects == []


def presigned(**changes: Any) -> PresignedTarget:
    facts: dict[str, Any] = {
        "url": "https://bucket.example/k?sig=SECRET",
        "expires_at": "2099-01-01T00:00:00Z",
        "max_bytes": 2**20,
        "object_id": "opaque",
        "required_headers": {"if-none-match": "*"},
    }
    return PresignedTarget(**(facts | changes))


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "format": ({"format": "external_artifact_v2"}, {}, "artifact_unsupported", "generation_artifact_v1"),
    "contents": ({"contents": ("topk_logprobs",)}, {}, "artifact_unsupported", "topk_logprobs"),
    "routes": ({"contents": ("moe_routes",)}, {}, "artifact_unsupported", "capture.routed_experts"),
    "named ids": (
        {"contents": LOGPROBS},
        {"logprob_token_ids": (5,)},
        "artifact_unsupported",
        "cannot be combined with logprob_token_ids",
    ),
    "logits": ({"contents": LOGPROBS}, {"logprobs_mode": "raw_logits"}, "artifact_unsupported", "raw_logits"),
    "profile": ({"target": ManagedTarget("elsewhere", "runs/a")}, {}, "artifact_target_rejected", "profile is unknown"),
    "prefix": ({"target": ManagedTarget("here", "other/a")}, {}, "artifact_target_rejected", "outside the profile"),
    "key": ({"target": ManagedTarget("here", "../escape")}, {}, "artifact_target_rejected", "relative path"),
    "host": ({"target": presigned()}, {}, "artifact_target_rejected", ""),
    "small target": (
        {"target": SinkTarget(Shelf(), max_bytes=4000)},
        {},
        "artifact_limit_exceeded",
        "may exceed target max_bytes",
    ),
}


class TestRefusals:
    @pytest.mark.parametrize("name", REFUSED)
    async def test_before_any_inference(self, name: str, caplog: pytest.LogCaptureFixture) -> None:
        """Sections 2.3, 4, 6; T50, T53, T55, T58, T68."""
        changes, sampling, code, words = REFUSED[name]
        caplog.set_level(logging.DEBUG)
        workers: list[FakeWorker] = []
        async with engine_of(on_worker=workers.append) as engine:
            request = ArtifactRequest(**({"target": ManagedTarget("here", "runs/a")} | changes))
            with pytest.raises(ArtifactRefusedError) as refused:
                await engine.generate("abc", SamplingParams(max_tokens=4, **sampling), artifact=request)
            assert refused.value.code == code and words in str(refused.value)
            assert workers[0].plans == [] and engine.request_ids == ()
            assert engine.artifact_statistics.refused == {code: 1}
            nothing_held(engine)
            await engine.generate("abc", SamplingParams(max_tokens=2))
        assert "SECRET" not in caplog.text + str(refused.value)

    async def test_a_long_request_is_told_what_would_fit(self) -> None:
        """BR-31."""
        async with engine_of(section={"max_decoded_bytes": 1000}) as engine:
            with pytest.raises(ArtifactRefusedError, match=r"at most 84 tokens"):
                await engine.generate("abc", SamplingParams(max_tokens=200), artifact=Shelf().request(*LOGPROBS))
            assert engine.artifact_limits()["longest_sequence"] == 83

    async def test_room_is_waited_for_and_then_refused(self) -> None:
        """BR-08: 503 at the API."""
        gate = anyio.Event()
        shelf = Shelf(gate=gate)
        async with engine_of(section={"process_bytes": 8_000, "queue_timeout_seconds": 1}) as engine:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_generate, engine, shelf.request())
                await shelf.arrived.wait()
                with pytest.raises(ArtifactRefusedError) as refused:
                    await engine.generate("abc", SamplingParams(max_tokens=9), artifact=shelf.request())
                assert refused.value.code == "artifact_capacity_exhausted" and (refused.value.retry_after or 0) >= 1
                assert list(engine.request_ids) == ["request-0"]
                gate.set()
            nothing_held(engine)

    @pytest.mark.parametrize("value", [{"target": {"url": "SECRET"}}, "SECRET", 5, {"contents": ["moe_routes"]}])
    async def test_an_argument_of_another_type(self, value: Any) -> None:
        async with engine_of() as engine:
            for wrong in (value, ArtifactRequest(target=value)):
                with pytest.raises(InvalidRequestError, match="artifact") as refused:
                    await engine.generate("abc", artifact=wrong)
                assert refused.value.parameter == "artifact"
                assert "SECRET" not in f"{refused.value} {refused.value.value}"

    @pytest.mark.parametrize(
        "request_",
        [
            ArtifactRequest(target=SinkTarget(Shelf()), contents="moe_routes"),  # type: ignore[arg-type]
            ArtifactRequest(target=SinkTarget(Shelf()), contents=(5,)),  # type: ignore[arg-type]
            ArtifactRequest(target=SinkTarget(Shelf()), contents=None),  # type: ignore[arg-type]
            ArtifactRequest(target=SinkTarget(Shelf()), contents=([],)),  # type: ignore[arg-type]
            ArtifactRequest(target=SinkTarget(Shelf(), max_bytes="many")),  # type: ignore[arg-type]
            ArtifactRequest(target=ManagedTarget(5, None)),  # type: ignore[arg-type]
            ArtifactRequest(target=ManagedTarget("here", ["runs/a"])),  # type: ignore[arg-type]
            ArtifactRequest(target=presigned(url=5, max_bytes="x", object_id=None)),
            ArtifactRequest(target=presigned(required_headers={5: 6}), format=5),  # type: ignore[arg-type]
            ArtifactRequest(target=presigned(expires_at=5)),
        ],
        ids=["text", "a number", "none", "a list", "size", "managed", "key", "grant", "headers", "expiry"],
    )
    async def test_values_of_other_types_are_refused(self, request_: ArtifactRequest) -> None:
        """In process nothing was parsed: it is still a typed refusal, and nothing is held."""
        async with engine_of() as engine:
            with pytest.raises(ArtifactRefusedError):
                await engine.generate("abc", SamplingParams(max_tokens=2), artifact=request_)
            nothing_held(engine)
            assert engine.is_alive

    async def test_closing_lets_nobody_wait_for_room(self) -> None:
        gate = anyio.Event()
        shelf, outcomes = Shelf(gate=gate), list[str]()
        async with anyio.create_task_group() as tasks:
            with anyio.fail_after(20):  # the queue deadline is 30 s
                async with engine_of(section={"process_bytes": 8_000, "drain_timeout_seconds": 0}) as engine:

                    async def ask() -> None:
                        try:
                            await engine.generate("abc", FEW, artifact=shelf.request())
                        except (ArtifactRefusedError, EngineClosedError) as error:
                            outcomes.append(type(error).__name__)

                    tasks.start_soon(ask)
                    await shelf.arrived.wait()
                    tasks.start_soon(ask)
                    await anyio.wait_all_tasks_blocked()
        assert outcomes == ["ArtifactRefusedError"]

    async def test_a_name_taken_while_waiting_for_room(self) -> None:
        """Nothing is held afterwards."""
        gate = anyio.Event()
        shelf = Shelf(gate=gate)
        async with engine_of(section={"process_bytes": 8_000}) as engine:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_generate, engine, shelf.request())
                await shelf.arrived.wait()

                async def second() -> None:
                    with pytest.raises(InvalidRequestError, match="is running already"):
                        await engine.generate("abc", request_id="mine", artifact=shelf.request(), params=FEW)

                tasks.start_soon(second)
                await anyio.wait_all_tasks_blocked()
                async with engine.stream("abc", SamplingParams(max_tokens=1), request_id="mine") as stream:
                    gate.set()
                    while engine.artifact_statistics.admitted < 2:
                        await anyio.lowlevel.checkpoint()
                    async for _ in stream:
                        pass
            nothing_held(engine)

    @pytest.mark.parametrize("start", [4, 10**30])
    async def test_a_route_start_beyond_the_prompt(self, start: int) -> None:
        """routed_experts.md 2.4: also when capture is off."""
        async with engine_of() as engine:
            with pytest.raises(InvalidRequestError, match="must not exceed the prompt length") as refused:
                await engine.generate("abc", SamplingParams(routed_experts_prompt_start=start))
            assert refused.value.parameter == "routed_experts_prompt_start"
            await engine.generate("abc", SamplingParams(routed_experts_prompt_start=3, max_tokens=1))


FEW = SamplingParams(max_tokens=9)


async def _generate(engine: Engine, request: ArtifactRequest) -> None:
    await engine.generate("abc", FEW, artifact=request)


def test_the_expected_time_goes_by_the_requests_before() -> None:
    """BR-07."""
    metrics = EngineMetrics()
    assert expected_seconds(metrics, 1000) == 0
    metrics.queued.observe(2.0)
    metrics.prefill.observe(1.0)
    metrics.inter_token.observe(0.5, 10)
    assert expected_seconds(metrics, 100) == 53.0
    metrics.output_length.observe(20)
    assert expected_seconds(metrics, 100) == 23.0
    assert expected_seconds(metrics, 10) == 8.0


async def test_a_grant_that_the_expected_time_outlives_is_refused() -> None:
    """BR-07: before any token."""
    async with engine_of(
        section={"presigned_hosts": ("bucket.example",), "max_presigned_ttl_seconds": 2**33}
    ) as engine:
        engine.metrics.inter_token.observe(10**8)
        with pytest.raises(ArtifactRefusedError) as refused:
            await engine.generate("abc", SamplingParams(max_tokens=100), artifact=ArtifactRequest(target=presigned()))
        assert refused.value.code == "artifact_target_expires_too_soon"
