"""`artifact=` in the open format over a scripted model, on every event loop: what is computed, what the caller sees of it, what
the object says, and what happens when something breaks."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest

import infer.artifacts.v2.capture
from infer import ArtifactRefusedError, SamplingParams
from infer.artifacts import ArtifactParent, ArtifactReader, ArtifactRequest, SinkTarget, open_artifact
from infer.artifacts.admission import GenerationBounds
from infer.artifacts.record import ChoiceRecord, FieldRows, GenerationRecord, WeightSpan
from infer.artifacts.v2.writer import encode_v2
from infer.engine.delivery import Delivery
from infer.testing.fake_executor import FakeWorker
from served import Script, answer, wait_until_idle
from unit.engine.test_facade_artifacts import FEW, Shelf, engine_of, nothing_held

pytestmark = pytest.mark.anyio
V2 = "generation_artifact_v2"
EVERYTHING = (
    *("kept_logmass", "kept_set", "prompt_logprobs", "sampled_mask", "selected_logprobs", "topk_logprobs"),
    "weight_spans",
)


def asking(shelf: Shelf, *contents: str, **changes: Any) -> ArtifactRequest:
    return shelf.request(*contents, **({"format": V2} | changes))


def opened(shelf: Shelf) -> ArtifactReader:
    return open_artifact(shelf.objects[-1])


async def test_everything_that_needs_no_capture() -> None:
    """Byte for byte what a record made by hand gives, whatever the event loop."""
    shelf, params = Shelf(), SamplingParams(max_tokens=5, seed=3, n=2, top_k=7)
    async with engine_of() as engine:
        done = await engine.generate("abc", params, artifact=asking(shelf, *EVERYTHING))
        nothing_held(engine)
        await wait_until_idle(engine)
    assert done.artifact is not None and done.artifact.state == "ready"
    known = opened(shelf).provenance
    assert known is not None and known.sampling["max_tokens"] == 5 and known.sampling["top_k"] == 7
    choices = []
    for index in range(2):
        output = answer("abc", 5, 3 + index)
        top = opened(shelf).field("topk_logprobs", index)
        choices.append(
            ChoiceRecord(
                choice_index=index,
                prompt_token_ids=list(b"abc"),
                output_token_ids=output,
                fields={
                    "selected_logprobs": FieldRows(values=np.full(5, -1, np.float32), row_start=3),
                    "kept_set": FieldRows(values=np.array(output, np.int32), offsets=np.arange(6), row_start=3),
                    "kept_logmass": FieldRows(values=np.full(5, -0.5, np.float32), row_start=3),
                    "sampled_mask": FieldRows(values=np.array([0] * 3 + [1] * 5, np.uint8)),
                    "topk_logprobs": FieldRows(values=top.values, extra=top.extra, row_start=3),
                    "prompt_logprobs": FieldRows(
                        values=np.full((2, 1), -1, np.float32),
                        extra={"token_ids": np.array([[98], [99]], np.int32)},
                        row_start=1,
                    ),
                },
                weight_spans=[WeightSpan(0, 8, "0")],
                finish_reason="length",
                seed=3 + index,
            )
        )
    by_hand = encode_v2(GenerationRecord(choices=choices, provenance=known))
    assert by_hand.data == shelf.objects[-1]
    assert (done.artifact.sha256, done.artifact.body_sha256) == (by_hand.sha256, by_hand.body_sha256)
    assert dict(done.artifact.field_sha256) == dict(by_hand.field_sha256)
    assert (done.artifact.header_sha256, done.artifact.header_bytes) == (by_hand.header_sha256, by_hand.header_bytes)
    assert done.artifact.raw_bytes == by_hand.raw_bytes and done.artifact.completion_token_count == (5, 5)


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_is_computed_for_the_artifact_stays_there(streamed: bool) -> None:
    shelf, workers, deltas = Shelf(), list[FakeWorker](), []
    async with engine_of(on_worker=workers.append) as engine:
        request = asking(shelf, *EVERYTHING)
        if streamed:
            async with engine.stream("abc", FEW, artifact=request) as stream:
                async for delta in stream:
                    deltas.append(delta)
                assert stream.prompt_logprobs is None
            done = stream.result
        else:
            done = await engine.generate("abc", FEW, artifact=request)
    [spec] = [admission.sampling for plan in workers[0].plans for admission in plan.admissions]
    assert (spec.logprobs, spec.prompt_logprobs, spec.return_kept_set) == (20, 0, True)
    assert done.logprobs is None and done.prompt_logprobs is None and {delta.logprobs for delta in deltas} <= {None}
    assert (done.sampling.logprobs, done.sampling.prompt_logprobs, done.sampling.return_kept_set) == (None, None, False)
    assert opened(shelf).field("topk_logprobs").values.shape == (9, 20)


async def test_what_the_caller_asked_for_is_as_if_there_were_no_artifact() -> None:
    shelf = Shelf()
    params = SamplingParams(max_tokens=5, seed=1, logprobs=0, prompt_logprobs=1)
    async with engine_of() as engine:
        alone = await engine.generate("abc", params)
        both = await engine.generate("abc", params, artifact=asking(shelf, *EVERYTHING))
        kept = await engine.generate("abc", params.model_copy(update={"return_kept_set": True}))
    assert both.logprobs == alone.logprobs and both.prompt_logprobs == alone.prompt_logprobs
    assert {(entry.top, entry.kept_ids, entry.kept_logmass) for entry in both.logprobs or ()} == {((), None, None)}
    assert kept.logprobs is not None and kept.logprobs[0].kept_logmass == -0.5
    assert opened(shelf).field("prompt_logprobs").values.shape == (2, 2)


@pytest.mark.parametrize("contents", [(), ("token_ids",), ("sampled_mask",), ("weight_spans",)])
async def test_tokens_alone_cost_no_logprobs(contents: tuple[str, ...]) -> None:
    shelf, workers = Shelf(), list[FakeWorker]()
    async with engine_of(on_worker=workers.append) as engine:
        done = await engine.generate("abc", FEW, artifact=asking(shelf, *contents))
    [spec] = [admission.sampling for plan in workers[0].plans for admission in plan.admissions]
    assert (spec.logprobs, spec.prompt_logprobs, spec.return_kept_set) == (None, None, False)
    assert opened(shelf).tokens().tolist() == [*b"abc", *done.token_ids]


async def test_a_stop_string_cuts_every_field_where_it_cuts_the_answer() -> None:
    shelf = Shelf()
    async with engine_of(Script("one two three four five")) as engine:
        params = SamplingParams(max_tokens=20, stop="three", include_stop=True, seed=1)
        async with engine.stream("abc", params, artifact=asking(shelf, *EVERYTHING)) as stream:
            while engine.statistics().steps < 18:  # the reader is slow: one update holds many tokens
                await anyio.lowlevel.checkpoint()
            async for _ in stream:
                pass
    reader = opened(shelf)
    assert bytes(reader.tokens().tolist()) == b"abcone two three"
    for name in ("selected_logprobs", "topk_logprobs", "kept_set", "kept_logmass"):
        assert (reader.field(name).row_start, reader.field(name).num_rows) == (3, 13)
    assert reader.weight_spans()[-1].end == 16 and reader.choices[0].finish_reason == "stop"


async def test_a_capture_that_breaks_in_the_middle_costs_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """BR-03."""
    record = infer.artifacts.v2.capture.OpenCapture.record

    def short(self: Any, index: int, *, entries: Any = (), **more: Any) -> None:
        record(self, index, entries=entries[:-1], **more)

    monkeypatch.setattr(infer.artifacts.v2.capture.OpenCapture, "record", short)
    shelf = Shelf()
    async with engine_of() as engine:
        done = await engine.generate("abc", FEW.model_copy(update={"seed": 2}), artifact=asking(shelf, "kept_set"))
        nothing_held(engine)
    assert list(done.token_ids) == answer("abc", 9, 2)
    assert done.artifact is not None and done.artifact.error_code == "artifact_capture_failed" and shelf.objects == []
    assert done.artifact.field_sha256 == () and done.artifact.header_sha256 is None


async def test_without_the_argument_nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("something was captured")

    monkeypatch.setattr(infer.artifacts.v2.capture.OpenCapture, "__init__", refuse)
    async with engine_of() as engine:
        assert (await engine.generate("abc", SamplingParams(max_tokens=3, logprobs=1))).artifact is None


async def test_an_abort_before_the_first_token() -> None:
    """Tokens and mask are known then; spans and prompt logprobs are not."""
    shelf = Shelf()
    async with engine_of(latency=0.05) as engine:
        for contents, state in ((("sampled_mask",), "ready"), (("weight_spans",), "failed")):
            request = asking(shelf, *contents, deliver_on_abort=True)
            async with engine.stream("abc", FEW, artifact=request) as stream:
                engine.abort(stream.request_id)
                async for _ in stream:
                    pass
            receipt = stream.result.artifact
            assert receipt is not None and receipt.state == state
        nothing_held(engine)
    assert opened(shelf).tokens().tolist() == [*b"abc"] and len(shelf.objects) == 1


PARENT = ArtifactParent(sha256="ab" * 32, header_sha256="ab" * 32, token_count=2)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nobody records it": ({"contents": ("entropy",)}, "entropy"),
    "not captured": ({"contents": ("hidden_states",)}, "capture.hidden_layers"),
    "not a list": ({"contents": "kept_set"}, "array of strings"),
    "not names": ({"contents": (5,)}, "array of strings"),
    "not even hashable": ({"contents": ([],), "parent": PARENT}, "array of strings"),
    "a parent that is none": ({"parent": 5}, "ArtifactParent"),
    "a parent of other types": (
        {"parent": ArtifactParent(sha256=5, header_sha256=[], token_count="")},
        "parent.sha256",
    ),
    "fields that are none": ({"parent": dataclasses.replace(PARENT, fields=5)}, "parent.fields"),
    "fields of other types": ({"parent": dataclasses.replace(PARENT, fields=(5, "a"))}, "parent.fields"),
    "a count that nothing has": ({"parent": dataclasses.replace(PARENT, token_count=2**70)}, "parent.token_count"),
    "small target": ({"target": SinkTarget(Shelf(), max_bytes=500)}, "target max_bytes"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_refused_before_any_inference(name: str) -> None:
    changes, words = REFUSED[name]
    workers: list[FakeWorker] = []
    async with engine_of(on_worker=workers.append) as engine:
        request = dataclasses.replace(asking(Shelf()), **changes)
        with pytest.raises(ArtifactRefusedError, match=words):
            await engine.generate("abc", FEW, artifact=request)
        assert workers[0].plans == [] and engine.request_ids == ()
        nothing_held(engine)


async def test_room_is_reserved_for_what_is_held_and_written() -> None:
    gate = anyio.Event()
    shelf, held = Shelf(gate=gate), list[int]()
    async with engine_of() as engine, anyio.create_task_group() as tasks:

        async def ask() -> None:
            await engine.generate("abc", SamplingParams(max_tokens=1000), artifact=asking(shelf, "topk_logprobs"))

        assert engine.artifact_limits()["v2_max_managed_bytes"] == 2**29
        tasks.start_soon(ask)
        await shelf.arrived.wait()
        held.append(engine.artifact_statistics.reserved_bytes)
        gate.set()
    row = 20 * 8 + 8
    assert 2 * 1000 * row <= held[0] < 2.1 * 1003 * row


@pytest.mark.parametrize(("num_kept", "tokens"), [(1, 256), (4096, 256), (2**15, 32), (2**21, 1)])
def test_large_kept_sets_are_read_often(num_kept: int, tokens: int) -> None:
    """As the engine hands them over they take memory that was not admitted: 4 MiB at a time."""
    facts: Any = SimpleNamespace(request=asking(Shelf(), "kept_set"))
    bounds = GenerationBounds(prompt_tokens=1, max_tokens=1, num_kept=num_kept)
    pipeline: Any = None
    assert Delivery(pipeline, bounds, facts, {}).interval == tokens
    facts.request = asking(Shelf(), "selected_logprobs")
    assert Delivery(pipeline, bounds, facts, {}).interval == 256
    facts.request = asking(Shelf(), "weight_spans")
    assert Delivery(pipeline, bounds, facts, {}).interval is None
