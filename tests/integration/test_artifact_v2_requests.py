"""Requests for `generation_artifact_v2` through the whole engine, on a tiny MoE: every field against what the engine said, v1
or transformers; deltas, refusals, ends of every kind. Runs in the test's own thread."""

from __future__ import annotations

import hashlib
import io
import itertools
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from rich.console import Console

from infer import ArtifactRefusedError, Completion, Engine, SamplingParams
from infer.artifacts import (
    ArtifactParent,
    ArtifactReader,
    ArtifactReceipt,
    ArtifactRequest,
    ManagedTarget,
    SinkTarget,
    decode,
    open_artifact,
)
from infer.artifacts.record import CACHED, CAPTURED, RECOMPUTED, FieldRows
from infer.artifacts.v2.conversion import record_of
from infer.artifacts.v2.writer import encode_v2
from infer.artifacts.verify import recorded_params
from infer.cli.app import main
from infer.cli.session import Session
from infer.config.env import read_environment
from infer.engine.blocking import BlockingEngine
from infer.models import qwen3_moe
from infer.testing.tiny_models import random_transformers_model
from integration.engine_support import _SIZE, engine_config, greedy, parts_of, prompt, serve, write_checkpoint

V1, V2 = "generation_artifact_v1", "generation_artifact_v2"
MOE: dict[str, Any] = (
    qwen3_moe.EXAMPLE | _SIZE | {"num_hidden_layers": 3, "mlp_only_layers": [0], "num_experts_per_tok": 2}
)
"""Routers in layers 1 and 2; 8 experts, 2 chosen."""
CAPTURE = {"routed_experts": True, "hidden_layers": [0, 2]}
EVERYTHING = (
    *(
        "hidden_states",
        "kept_logmass",
        "kept_set",
        "moe_routes",
        "prompt_logprobs",
        "sampled_mask",
        "selected_logprobs",
    ),
    *("token_ids", "topk_logprobs", "weight_spans"),
)
SHARED = ("moe_routes", "selected_logprobs")


class Shelf:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.objects: list[bytes] = []

    async def __call__(self, data: bytes) -> str:
        self.objects.append(data)
        return f"shelf/{len(self.objects)}"

    def request(self, *contents: str, **changes: Any) -> ArtifactRequest:
        return ArtifactRequest(**({"target": SinkTarget(self), "contents": contents, "format": V2} | changes))

    @property
    def last(self) -> ArtifactReader:
        return open_artifact(self.objects[-1])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("v2") / "moe", MOE)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[BlockingEngine]:
    with serve(checkpoint, capture=CAPTURE) as running:
        yield running


@pytest.fixture
def anyio_backend() -> str:
    """One is enough here: what differs between event loops is tested over a scripted model."""
    return "asyncio"


def sampled(max_tokens: int = 8, **more: Any) -> SamplingParams:
    return SamplingParams(**({"seed": 5, "max_tokens": max_tokens, "ignore_eos": True} | more))


def receipt_of(done: Completion) -> ArtifactReceipt:
    assert done.artifact is not None and done.artifact.state == "ready", done.artifact
    return done.artifact


def forget(engine: BlockingEngine) -> None:
    assert engine._call(lambda: engine.engine.reset_prefix_cache())


def together(engine: BlockingEngine, asks: list[Callable[[], Awaitable[Completion]]]) -> list[Completion]:
    found: list[Completion | None] = [None] * len(asks)

    async def all_of_them() -> None:
        async def one(index: int) -> None:
            found[index] = await asks[index]()

        async with anyio.create_task_group() as tasks:
            for index in range(len(asks)):
                tasks.start_soon(one, index)

    engine._call(all_of_them)
    return [done for done in found if done is not None]


def routes_equal(reader: ArtifactReader, done: Completion) -> None:
    for choice in done.choices:
        rows = choice.routed_experts
        assert rows is not None and rows.error is None
        held = reader.field("moe_routes", choice.index)
        expected = np.frombuffer(rows.data, rows.dtype).reshape(rows.count, *rows.row_shape)
        assert held.row_start == rows.start and np.array_equal(held.values, expected)
        assert list(status_of(held)) == list(rows.status)


def status_of(rows: FieldRows) -> np.ndarray[Any, Any]:
    return np.zeros(rows.num_rows, np.uint8) if rows.status is None else rows.status


# -- the same facts in both formats ------------------------------------------------------------------------------------


@pytest.mark.row("X-ARTIFACT-V2", "v1 and v2 of one generation agree bit for bit, after hits and chunks, for n = 3")
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("length", [1, 16, 150])
def test_both_formats_agree_bit_for_bit(engine: BlockingEngine, length: int, n: int) -> None:
    """A step takes 64 tokens. Each format has a cold run and one that finds the prompt in the prefix cache."""
    ids, params = prompt(length, seed=40 + n), sampled(9, n=n)
    found: dict[str, list[Any]] = {}
    for name in (V1, V2):
        forget(engine)
        shelf = Shelf()
        for _ in range(2):
            done = engine.generate(ids, params, artifact=shelf.request(*SHARED, format=name))
            assert receipt_of(done).format == name
        assert done.usage.cached_tokens == (length - 1) // 16 * 16
        found[name] = [open_artifact(data).artifact() for data in shelf.objects]
    assert found[V1] == found[V2]
    assert decode(shelf.objects[0]) == found[V2][0]


@pytest.mark.row("X-ARTIFACT-V2", "the artifact says what the response says, after preemption")
def test_preempted_requests_are_whole(checkpoint: Path) -> None:
    shelf = Shelf()
    with serve(checkpoint, capture=CAPTURE, cache={"num_blocks": 28}) as small:

        def ask(index: int) -> Callable[[], Awaitable[Completion]]:
            params = sampled(30, seed=index, return_routed_experts=True, logprobs=2)
            request = shelf.request("moe_routes", "hidden_states", "topk_logprobs", "selected_logprobs", "weight_spans")
            return lambda: small.engine.generate(prompt(60, seed=60 + index), params, artifact=request)

        done = together(small, [ask(index) for index in range(8)])
        assert small.engine.statistics().preemptions > 0
    statuses, by_digest = set(), {hashlib.sha256(data).hexdigest(): data for data in shelf.objects}
    for one in done:
        reader = open_artifact(by_digest[str(receipt_of(one).sha256)])
        routes_equal(reader, one)
        assert reader.tokens().tolist() == [*one.prompt_token_ids, *one.token_ids]
        assert reader.logprobs().logprobs.tolist() == [np.float32(entry.logprob) for entry in one.logprobs or ()]
        top = reader.field("topk_logprobs")
        assert top.extra["token_ids"].tolist() == [[pair[0] for pair in entry.top] for entry in one.logprobs or ()]
        assert np.array_equal(status_of(reader.field("hidden_states")), status_of(reader.field("moe_routes")))
        assert [(span.start, span.end, span.version) for span in reader.weight_spans()] == [(0, 90, "0")]
        statuses |= set(status_of(reader.field("moe_routes")).tolist())
    assert statuses & {CACHED, RECOMPUTED} and CAPTURED in statuses


# -- every field -------------------------------------------------------------------------------------------------------


@pytest.mark.row("X-ARTIFACT-V2", "any field")
def test_everything_of_one_request(engine: BlockingEngine) -> None:
    """Nothing of it leaks into the response."""
    forget(engine)
    shelf, ids = Shelf(), prompt(33, seed=3)
    params = sampled(7, top_p=0.8, top_k=40, temperature=0.9)
    done = engine.generate(ids, params, artifact=shelf.request(*EVERYTHING))
    public = engine.generate(
        ids, sampled(7, top_p=0.8, top_k=40, temperature=0.9, logprobs=20, prompt_logprobs=0, return_kept_set=True)
    )
    assert done.logprobs is None and done.prompt_logprobs is None and done.choices[0].captured == {}
    assert done.token_ids == public.token_ids
    receipt, reader = receipt_of(done), shelf.last
    assert reader.verify(sha256=receipt.sha256, actual_bytes=receipt.actual_bytes).body_sha256 == receipt.body_sha256
    assert {one.name for one in reader.fields()} == set(EVERYTHING) == set(dict(receipt.field_sha256))
    entries = public.logprobs or ()
    assert reader.field("selected_logprobs").values.tolist() == [np.float32(entry.logprob) for entry in entries]
    top = reader.field("topk_logprobs")
    assert top.values.shape == (7, 20)
    assert [list(zip(*row, strict=True)) for row in zip(top.extra["token_ids"], top.values, strict=True)] == [
        [(token_id, np.float32(value)) for token_id, value in entry.top] for entry in entries
    ]
    scored = reader.field("prompt_logprobs")
    assert (scored.row_start, scored.values.shape) == (1, (32, 1))
    assert scored.extra["token_ids"][:, 0].tolist() == ids[1:]
    assert scored.values[:, 0].tolist() == [
        np.float32(one.logprob) for one in (public.prompt_logprobs or ())[1:] if one
    ]
    assert reader.field("sampled_mask").values.tolist() == [0] * 33 + [1] * 7
    kept = reader.field("kept_set")
    for index, entry in enumerate(entries):
        assert entry.kept_ids is not None and kept.row(index).tolist() == list(entry.kept_ids)
    masses = reader.field("kept_logmass").values.tolist()
    assert masses == [np.float32(entry.kept_logmass) for entry in entries]
    assert [(span.start, span.end, span.version) for span in reader.weight_spans()] == [(0, 40, "0")]


def test_the_prompt_tokens_are_checked_by_a_second_oracle(engine: BlockingEngine) -> None:
    shelf, ids = Shelf(), prompt(20, seed=4)
    engine.generate(ids, sampled(3, prompt_logprobs=2), artifact=shelf.request("prompt_logprobs"))
    with torch.inference_mode():
        logits = random_transformers_model(MOE, 0)(torch.tensor([ids])).logits[0].float()
    expected = logits.log_softmax(-1)[:-1]
    rows = shelf.last.field("prompt_logprobs")
    chosen = expected.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert np.allclose(rows.values[:, 0], chosen.numpy(), atol=1e-4)
    assert np.allclose(rows.values[:, 1:], expected.topk(2).values.numpy(), atol=1e-4)


@pytest.mark.row("X-AUX", "routed experts and hidden states of one artifact have equal rows and match transformers")
@pytest.mark.row("X-AUX-KINDS", "prompt logprobs and hidden states are delivered like routes")
def test_hidden_states_are_those_of_transformers(engine: BlockingEngine) -> None:
    """Cold and from the prefix cache."""
    shelf, ids = Shelf(), prompt(70, seed=6)
    model = random_transformers_model(MOE, 0)
    for _ in range(2):
        done = engine.generate(ids, greedy(6), artifact=shelf.request("hidden_states", "moe_routes"))
        rows, routes = shelf.last.field("hidden_states"), shelf.last.field("moe_routes")
        with torch.inference_mode():
            states = model(torch.tensor([[*ids, *done.token_ids]]), output_hidden_states=True).hidden_states
            normed = model.model.norm(torch.from_numpy(rows.values[:, 1].copy()))  # as transformers' last one is
        assert rows.attributes == {"layer_ids": (0, 2)} and rows.values.shape == (75, 2, _SIZE["hidden_size"])
        assert (routes.row_start, routes.num_rows) == (rows.row_start, rows.num_rows) == (0, 75)
        assert np.allclose(rows.values[:, 0], states[1][0, :-1].numpy(), atol=1e-4)
        assert np.allclose(normed.numpy(), states[3][0, :-1].numpy(), atol=1e-3)
        assert np.array_equal(status_of(rows), status_of(routes))
    assert done.usage.cached_tokens == 64 and status_of(rows)[:64].tolist() == [CACHED] * 64


@pytest.mark.row("X-KEPT-SET", "the artifact's set is what a filter on the same logits leaves; its mass renormalises")
def test_kept_sets_are_those_of_an_independent_filter(engine: BlockingEngine) -> None:
    """top_k 30, then top_p 0.7, over transformers' logits of the same sequence."""
    shelf, ids = Shelf(), prompt(12, seed=7)
    params = sampled(6, top_k=30, top_p=0.7, temperature=1.0)
    done = engine.generate(ids, params, artifact=shelf.request("kept_set", "kept_logmass", "selected_logprobs"))
    processed = engine.generate(ids, params.model_copy(update={"logprobs": 0, "logprobs_mode": "processed"}))
    with torch.inference_mode():
        logits = random_transformers_model(MOE, 0)(torch.tensor([[*ids, *done.token_ids]])).logits[0].double()
    rows, masses = shelf.last.field("kept_set"), shelf.last.field("kept_logmass").values
    for index in range(6):
        scores = logits[len(ids) - 1 + index].numpy()
        best = np.argsort(-scores)[:30]
        chances = np.exp(scores[best] - scores[best].max())
        before = np.concatenate([[0], np.cumsum(chances / chances.sum())[:-1]])
        assert rows.row(index).tolist() == sorted(best[before < 0.7].tolist())
        everything = np.exp(scores - scores.max())
        assert abs(np.log(everything[rows.row(index)].sum() / everything.sum()) - masses[index]) < 1e-4
    raw = shelf.last.logprobs().logprobs
    assert np.allclose([entry.logprob for entry in processed.logprobs or ()], np.array(raw) - masses, atol=1e-5)


def test_a_draw_from_the_whole_vocabulary_lists_nothing(engine: BlockingEngine) -> None:
    """A kept set is never empty, so an empty row says that nothing was left out."""
    shelf = Shelf()
    engine.generate(prompt(5), sampled(4), artifact=shelf.request("kept_set", "kept_logmass"))
    assert shelf.last.field("kept_set").offsets is not None
    assert [len(shelf.last.field("kept_set").row(index)) for index in range(4)] == [0] * 4
    assert shelf.last.field("kept_logmass").values.tolist() == [0.0] * 4
    engine.generate(prompt(5), greedy(4), artifact=shelf.request("kept_set"))
    assert [len(shelf.last.field("kept_set").row(index)) for index in range(4)] == [1] * 4


def test_forced_tokens_were_not_sampled(engine: BlockingEngine) -> None:
    shelf = Shelf()
    done = engine.generate(
        prompt(5), sampled(6, forced_token_ids=(9, 8, 7)), artifact=shelf.request("sampled_mask", "topk_logprobs")
    )
    assert shelf.last.field("sampled_mask").values.tolist() == [0] * 8 + [1] * 3
    assert done.logprobs is not None and {entry.top for entry in done.logprobs} == {()}, (
        "20 were computed for the artifact"
    )


EXCLUDING: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 1},
    "top_p": {"top_p": 0.01},
    "min_p": {"min_p": 0.99},
    "allowed_token_ids": {"allowed_token_ids": (1, 2)},
    "bad_words": {"bad_words": ("t9 ",)},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": (9,)},
}
"""What may leave the forced token 9 without a probability."""


@pytest.mark.parametrize("form", [V1, V2])
@pytest.mark.parametrize("name", EXCLUDING)
def test_forced_tokens_that_may_have_no_probability_are_refused_by_name(
    engine: BlockingEngine, name: str, form: str
) -> None:
    """Of the processed logits -inf is the truth, and no format holds it; raw ones, and what truncates nothing, go through."""
    forced = {"forced_token_ids": (9, 8, 7), "logprobs_mode": "processed"}

    def done(**more: Any) -> Completion:
        return engine.generate(
            prompt(5), sampled(6, **forced | more), artifact=Shelf().request("selected_logprobs", format=form)
        )

    with pytest.raises(ArtifactRefusedError, match=f"leave {name} out") as refused:
        done(**EXCLUDING[name])
    assert refused.value.code == "artifact_unsupported"
    assert engine.engine.artifact_statistics.reserved_bytes == 0
    for harmless in (EXCLUDING[name] | {"logprobs_mode": "raw"}, {"temperature": 0.7, "logit_bias": {9: -100}}):
        answer = done(**harmless)
        assert answer.artifact is not None and answer.artifact.state == "ready", harmless
    if name in ("top_k", "top_p", "min_p"):  # a greedy request truncates nothing
        greedy_answer = done(**EXCLUDING[name], temperature=0)
        assert greedy_answer.artifact is not None and greedy_answer.artifact.state == "ready"


def test_alternatives_that_do_not_exist_are_said_to_be_so(engine: BlockingEngine) -> None:
    """Processed log-probabilities with top_k 3 have three alternatives; the number of columns is the request's."""
    shelf = Shelf()
    params = sampled(3, top_k=3, logprobs=5, logprobs_mode="processed")
    engine.generate(prompt(5), params, artifact=shelf.request("topk_logprobs"))
    rows = shelf.last.field("topk_logprobs")
    assert rows.values.shape == (3, 5) and (rows.values[:, 3:] == np.finfo(np.float32).min).all()
    assert (rows.extra["token_ids"][:, 3:] == 0).all() and (rows.values[:, :3] > -100).all()
    shelf.last.verify()


# -- provenance --------------------------------------------------------------------------------------------------------


@pytest.mark.row("X-ARTIFACT-V2", "provenance: model, numerics, sampling, seeds, finish reasons, no time of day")
def test_where_it_comes_from(engine: BlockingEngine, checkpoint: Path) -> None:
    shelf, params = Shelf(), sampled(4, temperature=0.5, top_p=0.9, stop="no such text", n=2)
    for _ in range(2):
        forget(engine)
        done = engine.generate(prompt(5), params, artifact=shelf.request("selected_logprobs"))
    assert shelf.objects[0] == shelf.objects[1], "equal facts have equal bytes"
    known = shelf.last.provenance
    resolved = engine.engine.resolved
    assert known is not None and known.model == engine.engine.model_config.identity
    assert (known.numerics.mode, known.numerics.platform) == (resolved.numerics, resolved.platform)
    assert (known.numerics.weights_dtype, known.numerics.kv_dtype) == ("float32", resolved.cache.dtype)
    assert known.numerics.compute_dtype == "float32"
    assert known.tokenizer_digest == hashlib.sha256((checkpoint / "tokenizer.json").read_bytes()).hexdigest()
    assert known.template_digest and known.engine_version and known.logprobs_mode == "raw"
    (weights,) = checkpoint.glob("*.safetensors")
    assert known.weights_digest == f"sha256:{hashlib.sha256(weights.read_bytes()).hexdigest()}"
    kernels = known.numerics.kernel_fingerprint
    assert kernels == resolved.kernel_fingerprint and kernels.startswith(resolved.platform)
    assert f"torch-{torch.__version__}" in kernels
    sampling = known.sampling
    assert (sampling["temperature"], sampling["top_p"], sampling["seed"], sampling["max_tokens"]) == (0.5, 0.9, 5, 4)
    assert sampling["stop"] == ("no such text",) and "prompt_logprobs" not in sampling
    assert [(choice.seed, choice.finish_reason) for choice in shelf.last.choices] == [(5, "length"), (6, "length")]
    assert [choice.seed for choice in done.choices] == [5, 6]


@pytest.mark.anyio
@pytest.mark.row("X-WEIGHT-SPANS", "the artifact's spans cover every token once across updates, prompt KV included")
async def test_spans_across_updates(checkpoint: Path) -> None:
    """Versions are committed while the request runs; then a prompt is computed under the last."""
    shelf = Shelf()
    async with Engine(engine_config(checkpoint, capture=CAPTURE)) as engine:
        parts, seen, version = parts_of(engine), 0, 0
        request = shelf.request("weight_spans", "moe_routes")
        async with engine.stream(prompt(40, seed=18), greedy(60), artifact=request) as stream:
            async for delta in stream:
                seen += len(delta.token_ids)
                if seen >= 15 * (version + 1) and version < 3:
                    version += 1
                    parts.mailbox.post_call(lambda to=version: parts.scheduler.commit_version(to))
        spans = shelf.last.weight_spans()
        later = await engine.generate(prompt(40, seed=18), greedy(4), artifact=request)
        with pytest.raises(ArtifactRefusedError, match="weight_spans"):
            await engine.generate(prompt(8), greedy(2), artifact=shelf.request("weight_spans"))
    assert [span.version for span in spans] == ["0", "1", "2", "3"]
    assert spans[0].start == 0 and spans[-1].end == 100
    assert all(before.end == after.start for before, after in itertools.pairwise(spans))
    expected = [(40 + first, 40 + end) for first, end, _ in stream.result.choices[0].weight_versions]
    assert [(max(40, span.start), span.end) for span in spans] == expected
    assert receipt_of(later) and [(s.start, s.end, s.version) for s in shelf.last.weight_spans()] == [(0, 44, "3")]


# -- choices, deltas ---------------------------------------------------------------------------------------------------


@pytest.mark.row("X-ARTIFACT-V2", "the prompt's rows are stored once for all choices")
def test_the_prompt_is_stored_once(engine: BlockingEngine) -> None:
    shelf, ids = Shelf(), prompt(90, seed=9)
    contents = ("moe_routes", "hidden_states", "prompt_logprobs", "weight_spans", "sampled_mask", "selected_logprobs")
    done = engine.generate(ids, sampled(5, n=3, return_routed_experts=True), artifact=shelf.request(*contents))
    reader = shelf.last
    routes_equal(reader, done)
    for one in reader.fields():
        assert one.choices == (0, 1, 2) if one.scope == "prompt_token" else len(one.choices) == 1, one
    for index, choice in enumerate(done.choices):
        assert reader.tokens(index).tolist() == [*ids, *choice.token_ids]
        assert reader.field("prompt_logprobs", index).num_rows == 89
    assert receipt_of(done).completion_token_count == (5, 5, 5)


@pytest.mark.row("X-ARTIFACT-V2", "a child stores only rows that its parent lacks")
@pytest.mark.parametrize("explicit", [False, True])
def test_a_second_turn_stores_what_the_first_lacks(engine: BlockingEngine, explicit: bool) -> None:
    shelf, ids = Shelf(), prompt(40, seed=10)
    contents = ("moe_routes", "hidden_states", "selected_logprobs", "weight_spans", "sampled_mask")
    first = engine.generate(ids, sampled(6, n=2), artifact=shelf.request(*contents))
    turn = [*ids, *first.choices[1].token_ids]
    parent = receipt_of(first).as_parent(len(turn), choice_index=1)
    if explicit:
        fields = ("token_ids", "moe_routes", "hidden_states", "weight_spans", "sampled_mask")
        parent = replace(parent, fields=fields)
    more = [*turn, *prompt(11, seed=12)]
    params = sampled(5, routed_experts_prompt_start=len(turn) - 1 if explicit else 0)
    second = engine.generate(more, params, artifact=shelf.request(*contents, parent=parent))
    assert receipt_of(second).token_start == len(turn) - 1
    alone, whole = shelf.last, open_artifact(shelf.objects[-1], parent=open_artifact(shelf.objects[0]))
    sequence = [*more, *second.token_ids]
    assert whole.tokens().tolist() == sequence
    for name in ("moe_routes", "hidden_states"):
        held, joined = alone.field(name), whole.field(name)
        assert (held.row_start, held.row_end) == (len(turn) - 1, len(sequence) - 1)
        assert (joined.row_start, joined.row_end) == (0, len(sequence) - 1)
    assert alone.field("token_ids").row_start == len(turn)
    with torch.inference_mode():
        logits = random_transformers_model(MOE, 0)(torch.tensor([sequence]), output_router_logits=True).router_logits
    best = torch.stack(tuple(logits), 1)[:-1].topk(2).indices.numpy()
    assert (whole.routes().expert_ids == best).mean() > 0.99


# -- ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.row("X-ARTIFACT-V2", "an aborted request delivers what was accepted when asked to")
async def test_an_abort_delivers_what_was_accepted(checkpoint: Path) -> None:
    shelf = Shelf()
    async with Engine(engine_config(checkpoint, capture=CAPTURE)) as engine:
        request = shelf.request("moe_routes", "selected_logprobs", "weight_spans", deliver_on_abort=True)
        async with engine.stream(
            prompt(30, seed=13), greedy(400, return_routed_experts=True), artifact=request
        ) as stream:
            async for delta in stream:
                if delta.finish_reason is None and delta.token_ids:
                    engine.abort(stream.request_id)
        done = stream.result
        assert done.finish_reason == "abort" and 0 < len(done.token_ids) < 400
        reader = shelf.last
        routes_equal(reader, done)
        assert reader.tokens().tolist() == [*prompt(30, seed=13), *done.token_ids]
        assert reader.choices[0].finish_reason == "abort" and len(reader.logprobs().logprobs) == len(done.token_ids)
        unasked = replace(request, deliver_on_abort=False)
        async with engine.stream(prompt(30, seed=13), greedy(400), artifact=unasked) as stream:
            async for _ in stream:
                engine.abort(stream.request_id)
        assert stream.result.artifact is not None and stream.result.artifact.error_code == "artifact_cancelled"
        engine.abort("nobody")
        # Before the first token there are no rows.
        async with engine.stream(prompt(30, seed=14), greedy(4), artifact=request) as stream:
            engine.abort(stream.request_id)
            async for _ in stream:
                pass
        assert stream.result.artifact is not None and stream.result.artifact.error_code == "artifact_cancelled"
        assert engine.artifact_statistics.reserved_bytes == 0
    assert len(shelf.objects) == 1


def test_one_token_and_one_prompt_token(engine: BlockingEngine) -> None:
    shelf = Shelf()
    done = engine.generate([5], sampled(1), artifact=shelf.request(*EVERYTHING))
    reader = shelf.last
    assert reader.field("moe_routes").num_rows == 1 and reader.field("prompt_logprobs").num_rows == 0
    assert reader.verify().sha256 == receipt_of(done).sha256


# -- refusals ----------------------------------------------------------------------------------------------------------

DIGEST = "ab" * 32
PARENT = ArtifactParent(sha256=DIGEST, header_sha256=DIGEST, token_count=4)
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "not recorded": ({"contents": ("entropy",)}, {}, "artifact_unsupported", "does not record entropy"),
    "no indexer": ({"contents": ("indexer_topk",)}, {}, "artifact_unsupported", "does not record indexer_topk"),
    "unknown": ({"contents": ("routes",)}, {}, "artifact_unsupported", "'routes' is not supported; token_ids"),
    "plugin": (
        {"contents": ("dist.field",)},
        {},
        "artifact_unsupported",
        "'dist.field' is not captured; capture.fields",
    ),
    "twice": ({"contents": ("moe_routes",) * 2}, {}, "artifact_invalid_request", "duplicates"),
    "codec": ({"codec": "none"}, {}, "artifact_unsupported", "codec"),
    "logits": ({"contents": ("topk_logprobs",)}, {"logprobs_mode": "raw_logits"}, "artifact_unsupported", "raw_logits"),
    "ids": (
        {"contents": ("prompt_logprobs",)},
        {"logprob_token_ids": (5,)},
        "artifact_unsupported",
        "logprob_token_ids",
    ),
    "digest": ({"parent": replace(PARENT, sha256="AB")}, {}, "artifact_invalid_request", "parent.sha256"),
    "header": ({"parent": replace(PARENT, header_sha256=5)}, {}, "artifact_invalid_request", "parent.header_sha256"),
    "no tokens": ({"parent": replace(PARENT, token_count=0)}, {}, "artifact_invalid_request", "parent.token_count"),
    "too many": ({"parent": replace(PARENT, token_count=9)}, {}, "artifact_invalid_request", "parent.token_count=9"),
    "choice": ({"parent": replace(PARENT, choice_index=-1)}, {}, "artifact_invalid_request", "parent.choice_index"),
    "fields": ({"parent": replace(PARENT, fields=("moe_routes",))}, {}, "artifact_invalid_request", "parent.fields"),
    "gap": (
        {"contents": ("moe_routes",), "parent": PARENT},
        {"routed_experts_prompt_start": 5},
        "artifact_invalid_request",
        "routed_experts_prompt_start=5 leaves a gap",
    ),
    "v1 parent": ({"format": V1, "parent": PARENT}, {}, "artifact_unsupported", "knows no parent"),
    "format": ({"format": "generation_artifact_v3"}, {}, "artifact_unsupported", "generation_artifact_v2"),
}


@pytest.mark.row("X-ARTIFACT-V2", "a field that the engine cannot fill is refused by name at admission")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(engine: BlockingEngine, name: str) -> None:
    changes, sampling, code, words = REFUSED[name]
    with pytest.raises(ArtifactRefusedError) as refused:
        engine.generate(prompt(8), sampled(4, **sampling), artifact=Shelf().request(**changes))
    assert refused.value.code == code and words in str(refused.value)
    assert engine.engine.artifact_statistics.reserved_bytes == 0


def test_what_is_not_captured_is_refused_by_name(checkpoint: Path) -> None:
    with serve(checkpoint) as plain:
        for name, setting in (("moe_routes", "routed_experts"), ("hidden_states", "hidden_layers")):
            with pytest.raises(ArtifactRefusedError, match=rf"{name} needs capture\.{setting}"):
                plain.generate(prompt(8), sampled(4), artifact=Shelf().request(name))


def test_limits_of_their_own(checkpoint: Path) -> None:
    """More than 64 MiB may be asked for; v1 is what it was. What does not fit is told how much would."""
    section = {"v2_max_decoded_bytes": 50_000, "max_decoded_bytes": 400}
    with serve(checkpoint, capture=CAPTURE, artifacts=section) as small:
        shelf = Shelf()
        small.generate(prompt(8), sampled(60), artifact=shelf.request("moe_routes"))
        with pytest.raises(ArtifactRefusedError, match="decoded byte limit of 400"):
            small.generate(prompt(8), sampled(60), artifact=shelf.request("moe_routes", format=V1))
        with pytest.raises(ArtifactRefusedError, match=r"v2_max_decoded_bytes=50000; .* at most (\d+)") as refused:
            small.generate(prompt(8), sampled(300), artifact=shelf.request("hidden_states"))
        longest = int(str(refused.value).split("at most ")[1].split()[0])
        small.generate(prompt(8), sampled(longest), artifact=shelf.request("hidden_states"))
        with pytest.raises(ArtifactRefusedError):
            small.generate(prompt(8), sampled(longest + 1), artifact=shelf.request("hidden_states"))
        with pytest.raises(ArtifactRefusedError, match="max_bytes"):
            target = SinkTarget(shelf, max_bytes=3000)
            small.generate(prompt(8), sampled(60), artifact=replace(shelf.request("moe_routes"), target=target))
        shown = small.engine.artifact_limits()
        assert shown["v2_max_decoded_bytes"] == 50_000 and shown["max_decoded_bytes"] == 400
    assert len(shelf.objects) == 2


# -- read back ---------------------------------------------------------------------------------------------------------


class CountingFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """What the engine wrote to memory, with every range that is asked for."""

    protocol = "counting-v2"
    ranges: list[tuple[int, int]] = []  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        name: str = super()._strip_protocol(path.replace("counting-v2://", "memory://"))
        return name

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        self.ranges.append((start or 0, end or 0))
        data: bytes = super().cat_file(path, start=start, end=end, **options)
        return data


def profile(url: str) -> dict[str, Any]:
    here = {"url": url, "allowed_prefixes": ["runs"], "create_only": True}
    return {"enable_managed_fsspec": True, "storage_profiles": {"here": here}}


@pytest.mark.row("X-ARTIFACT-V2", "range reads fetch only the named field of an object that the engine wrote")
def test_one_field_is_read_from_the_store(checkpoint: Path) -> None:
    """Of an object of several hundred KiB: the header, then the routes, or one layer's hidden states."""
    fsspec.register_implementation("counting-v2", CountingFileSystem, clobber=True)
    with serve(checkpoint, capture=CAPTURE, artifacts=profile("memory://v2-requests")) as running:
        request = ArtifactRequest(
            target=ManagedTarget("here", "runs/a"), contents=("hidden_states", "moe_routes"), format=V2
        )
        done = running.generate(prompt(500, seed=15), sampled(9, return_routed_experts=True), artifact=request)
    receipt = receipt_of(done)
    assert receipt.object_id == "here:runs/a" and (receipt.actual_bytes or 0) > 200_000
    CountingFileSystem.ranges.clear()
    reader = open_artifact("counting-v2://v2-requests/runs/a")
    head = CountingFileSystem.ranges.copy()
    assert len(head) == 1
    routes_equal(reader, done)
    routes = CountingFileSystem.ranges[1:]
    assert sum(end - start for start, end in routes) < 5_000 and len(routes) <= 2
    CountingFileSystem.ranges.clear()
    states = reader.field("hidden_states", tokens=slice(490, 495), layers=[2])
    assert states.values.shape == (5, 1, 64) and states.row_start == 490
    assert sum(end - start for start, end in CountingFileSystem.ranges) < (receipt.actual_bytes or 0)


@pytest.mark.row("X-VERIFY", "judges what was written as generation_artifact_v2, sampling and format read from it")
def test_what_was_written_is_verified(engine: BlockingEngine, checkpoint: Path, tmp_path: Path) -> None:
    """Sampled at a temperature, with processed log-probabilities: all of it is in the file."""
    shelf = Shelf()
    params = sampled(20, temperature=0.7, top_k=50, n=2, logprobs_mode="processed", logit_bias={9: -1.0})
    engine.generate(prompt(30, seed=16), params, artifact=shelf.request("moe_routes", "selected_logprobs"))
    path = tmp_path / "a.infgen"
    path.write_bytes(shelf.objects[-1])
    known = recorded_params(shelf.last.provenance)
    assert (known.temperature, known.top_k, known.logprobs_mode, known.logit_bias) == (0.7, 50, "processed", {9: -1.0})
    console = Console(file=io.StringIO(), soft_wrap=True, color_system=None)
    environment = read_environment({"INFER_CACHE_DIR": str(tmp_path / "cache")})
    settings = ["--platform.threads", "1", "--cache.num-blocks", "128"]
    arguments = ["verify", str(path), "--model", str(checkpoint), *settings]
    assert main(arguments, Session(stated_environment=environment, err=console)) == 0
    broken = open_artifact(path).artifact()
    ids = np.array(broken.choices[0].sequence_token_ids)
    ids[32] = (ids[32] + 1) % 300 + 3
    wrong = replace(broken, choices=[replace(broken.choices[0], sequence_token_ids=ids), *broken.choices[1:]])
    path.write_bytes(encode_v2(record_of(wrong, provenance=shelf.last.provenance)).data)
    assert main(arguments, Session(stated_environment=environment, err=console)) == 1


# -- a plugin's field --------------------------------------------------------------------------------------------------

PLUGIN = """
from infer.config.capture import CaptureProfile
from infer.plugins import hookimpl
from infer.plugins.artifact_field import ArtifactFieldSpec


class FirstChoice:
    def __init__(self, facts):
        self._profile = CaptureProfile(
            name="first_choice", dtype="int32", row_shape=(len(facts.routed_layers),), model_identity=facts.model_identity
        )

    def profile(self):
        return self._profile

    def select(self, tap, tokens, out):
        out.copy_(tap[:, :, 0].index_select(1, tokens).T)

    def encode(self, rows, count):
        return rows

    def decode(self, data, count):
        return data


@hookimpl
def infer_artifact_fields():
    return [
        ArtifactFieldSpec(
            name="first_choice",
            api=1,
            factory="first_choice_plugin:FirstChoice",
            coordinate="executed_token",
            reuse="prefix_block",
            tap="router",
            encoding="raw",
            example={},
        )
    ]
"""


@pytest.mark.row("X-ARTIFACT-V2", "any field: a plugin's own, as distribution.name")
@pytest.mark.row("X-AUX-KINDS", "a plugin's field is delivered without a line of ours about it")
def test_a_field_of_a_plugin(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution that is installed beside infer; rows are reused with the prefix cache like any other."""
    (tmp_path / "first_choice_plugin.py").write_text(PLUGIN)
    info = tmp_path / "first_choice-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: First-Choice\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[infer]\nfields = first_choice_plugin\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    capture = {"routed_experts": True, "fields": ["first_choice"]}
    shelf, name = Shelf(), "first-choice.first_choice"
    with serve(checkpoint, capture=capture) as running:
        for _ in range(2):
            done = running.generate(prompt(40, seed=17), sampled(6), artifact=shelf.request("moe_routes", name))
        assert done.usage.cached_tokens == 32
        with pytest.raises(
            ArtifactRefusedError, match=r"'first_choice' is not supported; .*first-choice\.first_choice"
        ):
            running.generate(prompt(8), sampled(4), artifact=shelf.request("first_choice"))
    for data in shelf.objects:
        reader = open_artifact(data)
        rows = reader.field(name)
        assert rows.executed and rows.values.dtype == np.int32 and rows.num_rows == 45
        assert np.array_equal(rows.values, reader.field("moe_routes").values[:, :, 0])
