"""The scenarios of router replay that can be seen at the engine or the API, on tiny MoE models with an independent recorder.

What went wrong in public, one test each ("RE-" numbers); the others are where their half of the machinery is tested:

| row | where |
| --- | --- |
| RE-13, 14, 23, 25, 40, 41, 45, 58 | tests/unit/engine/aux/test_capture_orders.py, test_request_rows.py |
| RE-01, 03, 04, 06, 12, 22, 24, 28 to 30, 35, 55 | tests/unit/engine/worker/test_capture.py, test_block_store.py |
| RE-07, 11, 18, 36 | tests/unit/models/test_deepseek_facts.py, test_deepseek_against_transformers.py |
| RE-20, 57 | tests/unit/artifacts/test_exporters.py |
| RE-31, 52, 53 | tests/unit/artifacts/test_reader.py |
| RE-42 (refusals, render and derender) | tests/unit/api/test_artifacts.py |
| RE-02, 05, 08 to 10, 15 to 17, 19, 21, 26, 27, 32 to 34, 37 to 39, 42 to 51, 54, 56, 59 | here |
"""

from __future__ import annotations

import base64
import gc
import io
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from api_server import events
from infer import (
    ArtifactError,
    ArtifactRefusedError,
    CapturedRows,
    Choice,
    Completion,
    ConfigError,
    Engine,
    EngineConfig,
    InvalidRequestError,
    PluginConflictError,
    SamplingParams,
)
from infer.api import build_app, build_context
from infer.api.reply_fields import REPLY_FIELDS
from infer.artifacts import ArtifactRequest, GenerationArtifact, SinkTarget, decode, encode, verify_artifact
from infer.artifacts.admission import GenerationBounds, payload_bytes
from infer.artifacts.assembly import artifact_choice
from infer.artifacts.capture import Capture
from infer.artifacts.exporters import to_prime_rl, to_sglang_int32, to_skyrl, to_verl, to_vllm_npy
from infer.config.capture import MOE_ROUTES
from infer.engine.aux.rows import RequestRows
from infer.engine.blocking import BlockingEngine
from infer.models import qwen3_moe
from infer.plugins import build_registry
from infer.testing.tiny_models import random_transformers_model
from integration.engine_support import _SIZE, engine_config, greedy, parts_of, prompt, serve, write_checkpoint

NEAR = 1e-4
"""Router logits closer than this may swap places between two correct fp32 programs."""
MOE: dict[str, Any] = (
    qwen3_moe.EXAMPLE
    | _SIZE
    | {
        "num_hidden_layers": 3,
        "mlp_only_layers": [0],
        "num_experts_per_tok": 2,
        "max_position_embeddings": 1536,
    }
)
"""Routers in layers 1 and 2; 8 experts, 2 chosen."""
LAYERS, EXPERTS, TOP_K = (1, 2), 8, 2
Rows = NDArray[Any]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("routes") / "moe", MOE)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(random_transformers_model(MOE, 0))


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[BlockingEngine]:
    with serve(checkpoint, **capturing()) as running:
        yield running


@pytest.fixture
def anyio_backend() -> str:
    """One is enough here: what differs between event loops is tested over a scripted model."""
    return "asyncio"


def capturing(**sections: Any) -> dict[str, Any]:
    return {"capture": {"routed_experts": True}, **sections}


class Oracle:
    """transformers' own model: what its routers choose when a whole sequence is fed at once."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def routes(self, token_ids: Sequence[int]) -> tuple[Rows, Rows]:
        """(experts [fed tokens, routers, k], whether that choice is no near tie [fed tokens, routers])."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([list(token_ids)]), output_router_logits=True).router_logits
        stacked = torch.stack(tuple(logits), 1)[:-1].float()
        best = stacked.topk(TOP_K + 1, -1)
        gaps = best.values[..., :-1] - best.values[..., 1:]
        return best.indices[..., :TOP_K].numpy(), (gaps.min(-1).values > NEAR).numpy()

    def check(self, ids: Rows, token_ids: Sequence[int], start: int = 0) -> None:
        """The rows of a sequence from `start` on, all of them."""
        expected, clear = self.routes(token_ids)
        expected, clear = expected[start:], clear[start:]
        assert ids.shape == expected.shape
        assert np.array_equal(ids[clear], expected[clear])
        assert not len(clear) or clear.mean() > 0.95, "near ties everywhere: this proves nothing"


def rows_of(choice: Choice) -> CapturedRows:
    rows = choice.routed_experts
    assert rows is not None and rows.error is None, rows
    return rows


def array(rows: CapturedRows) -> Rows:
    return np.frombuffer(rows.data, rows.dtype).reshape(rows.count, *rows.row_shape)


def sequence(done: Completion, choice: int = 0) -> list[int]:
    return [*done.prompt_token_ids, *done.choices[choice].token_ids]


def routed(max_tokens: int = 8, **more: Any) -> SamplingParams:
    return greedy(max_tokens, return_routed_experts=True, **more)


class Shelf:
    def __init__(self) -> None:
        self.objects: list[bytes] = []

    async def __call__(self, data: bytes) -> str:
        self.objects.append(data)
        return f"shelf/{len(self.objects)}"

    def request(self, *contents: str, **changes: Any) -> ArtifactRequest:
        return ArtifactRequest(target=SinkTarget(self), contents=contents or (MOE_ROUTES,), **changes)

    @property
    def last(self) -> GenerationArtifact:
        return decode(self.objects[-1])


# -- rows against the oracle -----------------------------------------------------------------------------------------


@pytest.mark.row("SAMPLE-ROUTED-EXPERTS", "equal to top-k of transformers' router logits, after hits and chunks")
@pytest.mark.parametrize("length", [1, 15, 16, 17, 200])
def test_rows_of_a_cold_a_chunked_and_a_warm_prompt(engine: BlockingEngine, oracle: Oracle, length: int) -> None:
    """The budget of a step is 64 tokens; a second run finds the prompt's full blocks."""
    shelf = Shelf()
    ids = prompt(length, seed=11)
    cold = engine.generate(ids, routed(), artifact=shelf.request("moe_routes", "selected_logprobs"))
    warm = engine.generate(ids, routed(), artifact=shelf.request())
    assert warm.usage.cached_tokens == (length - 1) // 16 * 16
    for done in (cold, warm):
        rows = rows_of(done.choices[0])
        assert (rows.start, rows.count, rows.layer_ids, rows.num_experts) == (0, length + 7, LAYERS, EXPERTS)
        oracle.check(array(rows), sequence(done))
        assert done.choices[0].weight_versions == ((0, 8, 0),) and rows.versions == ((length + 7, 0),)
    assert rows_of(cold.choices[0]).data == rows_of(warm.choices[0]).data
    assert rows_of(cold.choices[0]).status == bytes(length + 7)
    assert rows_of(warm.choices[0]).status == bytes([1] * warm.usage.cached_tokens).ljust(length + 7, b"\0")
    for data, done in zip(shelf.objects, (cold, warm), strict=True):
        [choice] = decode(data).choices
        assert choice.moe_routes is not None
        assert np.array_equal(choice.moe_routes.expert_ids, array(rows_of(done.choices[0])))
        assert list(choice.moe_routes.router_ids) == list(LAYERS)


@pytest.mark.row("SAMPLE-ROUTED-EXPERTS", "equal to top-k of transformers' router logits, after preemption")
def test_rows_of_preempted_requests(checkpoint: Path, oracle: Oracle) -> None:
    """Eight requests that cannot all be held: each is whole."""
    shelf = Shelf()
    prompts = [prompt(60, seed=20 + index) for index in range(8)]
    with serve(checkpoint, **capturing(cache={"num_blocks": 28})) as small:

        async def together() -> list[Completion]:
            done: list[Completion | None] = [None] * 8

            async def one(index: int) -> None:
                done[index] = await small.engine.generate(prompts[index], routed(30), artifact=shelf.request())

            async with anyio.create_task_group() as tasks:
                for index in range(8):
                    tasks.start_soon(one, index)
            return [completion for completion in done if completion is not None]

        found = small._call(together)
        assert small.engine.statistics().preemptions > 0
    statuses = set()
    for done in found:
        rows = rows_of(done.choices[0])
        oracle.check(array(rows), sequence(done))
        statuses |= set(rows.status)
        assert done.artifact is not None and done.artifact.state == "ready"
    assert len(shelf.objects) == 8 and statuses - {0}, "nothing was read back or computed again"


@pytest.mark.row("SAMPLE-ROUTED-EXPERTS", "all choices of a request share the rows of their prompt")
def test_rows_of_several_choices(engine: BlockingEngine, oracle: Oracle) -> None:
    shelf = Shelf()
    params = SamplingParams(n=3, seed=5, max_tokens=9, ignore_eos=True, return_routed_experts=True)
    done = engine.generate(prompt(37, seed=3), params, artifact=shelf.request())
    assert len({choice.token_ids for choice in done.choices}) > 1
    for index, choice in enumerate(done.choices):
        oracle.check(array(rows_of(choice)), sequence(done, index))
    assert [choice.choice_index for choice in shelf.last.choices] == [0, 1, 2]
    for held, choice in zip(shelf.last.choices, done.choices, strict=True):
        assert held.moe_routes is not None
        assert np.array_equal(held.moe_routes.expert_ids, array(rows_of(choice)))


def test_a_stop_string_cuts_the_rows_where_it_cuts_the_tokens(engine: BlockingEngine, oracle: Oracle) -> None:
    """BR-23 and routed_experts.md 2: the engine went on behind it."""
    ids = prompt(20, seed=4)
    whole = engine.generate(ids, greedy(40))
    text = whole.text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    shelf = Shelf()
    done = engine.generate(ids, routed(40, stop=stop), artifact=shelf.request("moe_routes", "selected_logprobs"))
    assert done.finish_reason == "stop" and len(done.token_ids) < 40
    oracle.check(array(rows_of(done.choices[0])), sequence(done))
    [choice] = shelf.last.choices
    assert list(choice.sequence_token_ids) == sequence(done) and choice.selected_logprobs is not None
    assert len(choice.selected_logprobs.logprobs) == len(done.token_ids)


@pytest.mark.parametrize("block", [256])
def test_re_59_a_hot_prompt_is_byte_equal_to_a_cold_one(checkpoint: Path, oracle: Oracle, block: int) -> None:
    """RE-59: blocks of 256; a prompt of 1,024 tokens reuses 768 rows."""
    ids = prompt(1024, seed=6)
    with serve(checkpoint, **capturing(cache={"num_blocks": 40, "block_size": block})) as wide:
        cold, hot = (wide.generate(ids, routed(4)) for _ in range(2))
    assert (cold.usage.cached_tokens, hot.usage.cached_tokens) == (0, 768)
    assert rows_of(cold.choices[0]).data == rows_of(hot.choices[0]).data
    assert rows_of(hot.choices[0]).status.count(1) == 768
    oracle.check(array(rows_of(hot.choices[0])), sequence(hot))


@pytest.mark.heavy
def test_re_59_a_hot_prompt_of_65536_tokens(tmp_path: Path) -> None:
    """RE-59: it reuses 65,280 rows, which were computed in many steps. Byte-equal to the cold run."""
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1}
    long = MOE | size | {"mlp_only_layers": [], "max_position_embeddings": 66_000, "intermediate_size": 32}
    sections = {
        "cache": {"num_blocks": 300, "block_size": 256},
        "scheduler": {"max_num_seqs": 1, "max_num_batched_tokens": 1024},
    }
    ids = prompt(65_536, seed=7)
    with serve(write_checkpoint(tmp_path / "long", long), **capturing(**sections)) as wide:
        cold, hot = (wide.generate(ids, routed(2)) for _ in range(2))
    assert (cold.usage.cached_tokens, hot.usage.cached_tokens) == (0, 65_280)
    assert rows_of(cold.choices[0]).count == 65_537 and rows_of(hot.choices[0]).status.count(1) == 65_280
    assert rows_of(cold.choices[0]).data == rows_of(hot.choices[0]).data
    assert len(set(array(rows_of(cold.choices[0])).ravel().tolist())) == EXPERTS


def test_re_21_a_long_context_is_compared_with_the_recorder(engine: BlockingEngine, oracle: Oracle) -> None:
    """RE-21: two runs of one engine agreeing would prove nothing; the oracle is another program's router."""
    done = engine.generate(prompt(1400, seed=8), routed(16))
    rows = array(rows_of(done.choices[0]))
    assert rows.shape == (1415, len(LAYERS), TOP_K)
    oracle.check(rows, sequence(done))


@pytest.mark.anyio
@pytest.mark.row("X-WEIGHT-SPANS", "spans cover every token once across three updates mid-stream, end to end")
async def test_every_token_and_row_says_its_weights(checkpoint: Path, oracle: Oracle) -> None:
    """Versions are committed between steps while the request runs; the weights stay the same, so its rows do, too."""
    shelf = Shelf()
    async with Engine(engine_config(checkpoint, **capturing())) as engine:
        parts, seen, version = parts_of(engine), 0, 0
        async with engine.stream(prompt(40, seed=18), routed(120), artifact=shelf.request()) as stream:
            async for delta in stream:
                seen += len(delta.token_ids)
                if seen >= 30 * (version + 1) and version < 3:
                    version += 1
                    parts.mailbox.post_call(lambda to=version: parts.scheduler.commit_version(to))
        [choice] = stream.result.choices
        warm = await engine.generate(prompt(40, seed=18), routed(4))
    spans = choice.weight_versions
    assert [span[2] for span in spans] == [0, 1, 2, 3]
    assert [span[0] for span in spans] == [0, *(span[1] for span in spans[:-1])] and spans[-1][1] == 120
    rows = rows_of(choice)
    assert [version for _, version in rows.versions] == [0, 1, 2, 3]
    assert sum(count for count, _ in rows.versions) == rows.count == 159
    oracle.check(array(rows), sequence(stream.result))
    assert warm.usage.cached_tokens == 0, "rows of other weights are not reused, so neither is their prompt"
    assert rows_of(warm.choices[0]).versions == ((43, 3),)


# -- ends of prompts and answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_re_08_a_request_that_ends_with_its_prompt(checkpoint: Path, oracle: Oracle, depth: int) -> None:
    """RE-08, RE-48: `max_tokens` 1 ends at the prefill, in chunks and with a step in flight: every row is there."""
    with serve(checkpoint, **capturing(scheduler={"in_flight_depth": depth})) as running:
        done = running.generate_many([prompt(length, seed=9) for length in (1, 64, 65, 150)], routed(1))
    for completion in done:
        rows = rows_of(completion.choices[0])
        assert rows.count == len(completion.prompt_token_ids)
        oracle.check(array(rows), sequence(completion))


@pytest.mark.anyio
async def test_re_47_a_request_of_its_prompt_alone_keeps_its_last_row(checkpoint: Path, oracle: Oracle) -> None:
    """RE-47: nothing sampled is shown (max_tokens 0 with echo), and P - s rows are."""
    ids = prompt(21, seed=10)
    async with client_of(checkpoint) as client:
        for start in (0, 5, 21):
            asked = {"prompt": ids, "max_tokens": 0, "echo": True, "return_token_ids": True} | ask(start)
            [choice] = (await post(client, "/v1/completions", asked))["choices"]
            assert choice["token_ids"] == [] and choice["routed_experts_prompt_start"] == start
            found = inline(choice)
            assert len(found) == 21 - start
            oracle.check(found[:, LAYERS], [*ids, 0], start)


@pytest.mark.parametrize("start", [0, 1, 16, 19, 20])
def test_re_15_rows_begin_where_they_were_asked_from(engine: BlockingEngine, oracle: Oracle, start: int) -> None:
    """RE-15 in process: the start is told, and rows = tokens - 1 - start."""
    shelf = Shelf()
    params = routed(1 if start == 20 else 6, routed_experts_prompt_start=start)
    done = engine.generate(prompt(20, seed=12), params, artifact=shelf.request())
    rows = rows_of(done.choices[0])
    assert (rows.start, rows.count) == (start, len(sequence(done)) - 1 - start)
    oracle.check(array(rows), sequence(done), start)
    [choice] = shelf.last.choices
    assert choice.moe_routes is not None and choice.moe_routes.token_start == start
    assert done.artifact is not None and done.artifact.token_start == start


def test_re_33_no_row_is_a_legal_answer(engine: BlockingEngine) -> None:
    """RE-33: shape (0, layers, k), in process, in the artifact and in every encoding. What is replayed is addressed by
    position (`infer verify`), so nothing is consumed by reading it twice."""
    shelf = Shelf()
    done = engine.generate(prompt(20), routed(1, routed_experts_prompt_start=20), artifact=shelf.request())
    rows = rows_of(done.choices[0])
    assert (rows.count, bytes(rows.data), rows.status, rows.versions) == (0, b"", b"", ())
    choice = artifact_choice(done.choices[0], done.prompt_token_ids)
    assert choice.moe_routes is not None and np.asarray(choice.moe_routes.expert_ids).shape == (0, 2, 2)
    assert shelf.last.choices[0] == choice
    assert np.load(io.BytesIO(base64.b64decode(to_vllm_npy(choice).routed_experts))).shape == (0, 2, 2)
    assert to_prime_rl(choice)["shape"] == [0, 2, 2] and to_sglang_int32(choice)["routed_experts"] == ""
    assert decode(encode(shelf.last)) == decode(encode(shelf.last))


@pytest.mark.anyio
@pytest.mark.row(
    "X-ABORT", "an abort before the first token says so; one later returns the rows of the accepted tokens"
)
async def test_re_32_an_abort_before_the_first_token_has_an_outcome(checkpoint: Path) -> None:
    """RE-32: no array, and why; the artifact says cancelled, also when it was to be delivered on abort."""
    shelf = Shelf()
    async with Engine(engine_config(checkpoint, **capturing())) as engine:
        for deliver in (False, True):
            request = shelf.request(deliver_on_abort=deliver)
            async with engine.stream(prompt(300), routed(8), request_id="r", artifact=request) as stream:
                engine.abort("r")
                async for _ in stream:
                    pass
            [choice] = stream.result.choices
            assert (choice.finish_reason, choice.token_ids) == ("abort", ())
            rows = choice.routed_experts
            assert rows is not None and rows.count == 0 and "before its first token" in str(rows.error)
            assert stream.result.artifact is not None
            assert stream.result.artifact.error_code == "artifact_cancelled"
        assert shelf.objects == [] and engine.artifact_statistics.reserved_bytes == 0


@pytest.mark.anyio
@pytest.mark.row("SAMPLE-ROUTED-EXPERTS", "equal to top-k of transformers' router logits, after an abort")
async def test_an_abort_delivers_the_rows_of_what_was_accepted(checkpoint: Path, oracle: Oracle) -> None:
    shelf = Shelf()
    async with Engine(engine_config(checkpoint, **capturing())) as engine:
        request = shelf.request(deliver_on_abort=True)
        async with engine.stream(prompt(40), routed(800), request_id="r", artifact=request) as stream:
            async for delta in stream:
                if len(delta.token_ids):
                    engine.abort("r")
        done = stream.result
    assert done.finish_reason == "abort" and 0 < len(done.token_ids) < 800
    oracle.check(array(rows_of(done.choices[0])), sequence(done))
    [choice] = shelf.last.choices
    assert list(choice.sequence_token_ids) == sequence(done)


# -- over HTTP -------------------------------------------------------------------------------------------------------

VLLM_ROUTES = ("/v1/chat/completions", "/v1/completions", "/inference/v1/generate")


@asynccontextmanager
async def client_of(path: Path, **sections: Any) -> AsyncIterator[httpx2.AsyncClient]:
    async with Engine(engine_config(path, **capturing(**sections))) as engine:
        transport = httpx2.ASGITransport(build_app(build_context(engine)))
        async with httpx2.AsyncClient(transport=transport, base_url="http://test", timeout=120) as client:
            yield client


async def post(client: httpx2.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    reply = await client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def chunks(client: httpx2.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    reply = await client.post(path, json={**body, "stream": True})
    assert reply.status_code == 200, reply.text
    return [json.loads(event) for event in events(reply.text)[:-1]]


def ask(start: int | None = None) -> dict[str, Any]:
    return {"return_routed_experts": True} | ({} if start is None else {"routed_experts_prompt_start": start})


def body_of(route: str, start: int | None = None, max_tokens: int = 6) -> dict[str, Any]:
    """The route's own words for six tokens and their experts."""
    if route == "/generate":
        sampling = {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        more = {} if start is None else {"routed_experts_start_len": start}
        return {"input_ids": prompt(20), "sampling_params": sampling, "return_routed_experts": True, **more}
    common = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **ask(start)}
    if route == "/inference/v1/generate":
        return {"token_ids": prompt(20), "return_token_ids": True, "sampling_params": common}
    if route == "/v1/completions":
        return {"prompt": prompt(20), "return_token_ids": True, **common}
    return {"messages": [{"role": "user", "content": "The dog barks"}], "return_token_ids": True, **common}


def inline(choice: dict[str, Any]) -> Rows:
    """vLLM's array: all hidden layers. The dense ones hold 0, 1, ..."""
    assert choice["routed_experts_layer_ids"] == list(LAYERS)
    found: Rows = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"], validate=True)), allow_pickle=False)
    assert found.dtype == np.uint8 and found.shape[1:] == (3, TOP_K)
    assert (found[:, 0] == np.arange(TOP_K)).all()
    return found


@pytest.mark.anyio
@pytest.mark.row("SAMPLE-ROUTED-EXPERTS", "over HTTP, in the encodings of vLLM's and SGLang's clients")
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("route", [*VLLM_ROUTES, "/generate"])
async def test_re_42_asked_for_means_there(checkpoint: Path, oracle: Oracle, route: str, streamed: bool) -> None:
    """RE-42, RE-15, RE-16, RE-50: on every token surface, with the start told again; in a stream in the chunk that ends
    the choice and in no other."""
    async with client_of(checkpoint) as client:
        for start in (None, 0, 7):
            body = body_of(route, start)
            pieces = await chunks(client, route, body) if streamed else [await post(client, route, body)]
            if route == "/generate":
                [meta] = [piece["meta_info"] for piece in pieces if "routed_experts" in piece["meta_info"]]
                assert meta["finish_reason"]["type"] == "length"
                told, ids = meta["routed_experts_start_len"], [*prompt(20), *pieces[-1]["output_ids"]]
                flat = np.frombuffer(base64.b64decode(meta["routed_experts"], validate=True), "<i4")
                found: Rows = flat.reshape(-1, 3, TOP_K)
            else:
                choices = [choice for piece in pieces for choice in piece["choices"]]
                [last] = [choice for choice in choices if "routed_experts" in choice]
                assert last["finish_reason"] == "length" and last["weight_versions"] == [[0, 6, 0]]
                told, found = last["routed_experts_prompt_start"], inline(last)
                listed = {f.name for f in REPLY_FIELDS[route] if f.asked_by == "return_routed_experts"}
                assert {name for name in last if "route" in name or "weight" in name} == listed - {
                    "routed_experts_error"
                }
                answered = [token_id for choice in choices for token_id in choice.get("token_ids", ())]
                first = pieces[0]
                prompted = first.get("prompt_token_ids") or first["choices"][0]["prompt_token_ids"]
                ids = [*prompted, *answered]
            assert told == (start or 0) and len(found) == len(ids) - 1 - told
            oracle.check(found[:, LAYERS], ids, told)


@pytest.mark.anyio
async def test_re_42_rows_that_are_not_there_are_said(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RE-42, RE-32: null and the reason, never a missing key."""
    monkeypatch.setattr(RequestRows, "_wrong", lambda self, piece: "a store lost them")
    async with client_of(checkpoint) as client:
        for route in VLLM_ROUTES:
            for reply in (await post(client, route, body_of(route)), (await chunks(client, route, body_of(route)))[-1]):
                [choice] = reply["choices"]
                assert choice["routed_experts"] is None and choice["routed_experts_error"] == "a store lost them"
        meta = (await post(client, "/generate", body_of("/generate")))["meta_info"]
        assert meta["routed_experts"] is None and meta["routed_experts_error"] == "a store lost them"


@pytest.mark.anyio
async def test_re_45_what_is_captured_is_seen_in_the_metrics(checkpoint: Path) -> None:
    """RE-45: on, and nobody asks: nothing is captured; who asks is counted."""
    async with client_of(checkpoint) as client:
        for asked, rows in ((False, 0), (True, 25)):
            body = body_of("/v1/completions") | {"return_routed_experts": asked}
            await post(client, "/v1/completions", body)
            text = (await client.get("/metrics")).text
            [line] = [line for line in text.splitlines() if line.startswith("infer_captured_rows_total")]
            assert float(line.rpartition(" ")[2]) == rows


def test_re_26_starting_captures_nothing_and_engines_share_nothing(checkpoint: Path, oracle: Oracle) -> None:
    """RE-26, RE-27: the step that measures memory at start and the one of a health probe have no rows; a second engine in
    the process, started while the first has rows, changes nothing of it."""
    ids = prompt(40, seed=17)
    with serve(checkpoint, **capturing()) as first:
        aux = parts_of(first).scheduler.aux
        assert (first.engine.statistics().captured_rows, aux.num_live, len(aux.retained)) == (0, 0, 0)
        one = first.generate(ids, routed())
        with serve(checkpoint, **capturing()) as second:
            first.generate([0], greedy(1))
            assert len(parts_of(second).scheduler.aux.retained) == 0
            two = second.generate(ids, routed())
            again = first.generate(ids, routed())
        assert (two.usage.cached_tokens, again.usage.cached_tokens) == (0, 32)
        for done in (one, two, again):
            oracle.check(array(rows_of(done.choices[0])), sequence(done))
        assert first.engine.statistics().captured_rows == 2 * 47


def stuck(logits: torch.Tensor, rule: Any, bias: Any, tap: Any) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.full((len(logits), TOP_K), 3)
    if tap is not None:
        tap[: len(ids)].copy_(ids)
    return torch.ones(len(ids), TOP_K), ids


def test_a_router_that_always_answers_the_same_is_counted(checkpoint: Path) -> None:
    """routed_experts.md 3.4: legal, and suspicious: a warning metric. A router that really chooses counts nothing."""
    with serve(checkpoint, **capturing()) as running:
        running.generate(prompt(40), routed(4))
        assert running.engine.statistics().uniform_blocks == 0
        model: Any = parts_of(running).executor._worker._model
        for layer in model._sparse():
            layer.route = stuck
        running.generate(prompt(40, seed=1), routed(4))
        assert running.engine.statistics().uniform_blocks == 2


@pytest.mark.anyio
async def test_re_16_a_slow_reader_gets_the_rows_at_the_end(checkpoint: Path, oracle: Oracle) -> None:
    """RE-16, RE-49: deltas are merged for a slow reader and for one behind a bounded queue; the rows come once, whole."""
    async with Engine(engine_config(checkpoint, **capturing())) as engine:
        ids = prompt(30, seed=14)
        whole = await engine.generate(ids, routed(40))
        got: list[int] = []
        send, receive = anyio.create_memory_object_stream[Any](1)

        async def produce() -> None:
            async with send, engine.stream(ids, routed(40)) as stream:
                async for delta in stream:
                    await send.send(delta)
                await send.send(stream.result)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(produce)
            async with receive:
                async for item in receive:
                    await anyio.sleep(0.002)
                    if isinstance(item, Completion):
                        done = item
                    else:
                        got += item.token_ids
    assert got == list(done.token_ids) == list(whole.token_ids)
    assert rows_of(done.choices[0]).data == rows_of(whole.choices[0]).data
    oracle.check(array(rows_of(done.choices[0])), sequence(done))


@pytest.mark.anyio
async def test_re_44_a_conversation_moves_each_row_once(checkpoint: Path, oracle: Oracle) -> None:
    """RE-44: twenty turns, each from the rows that are held already: the pieces are the final array, and the first row of
    a turn is the one that the turn before did not have."""
    ids, pieces, size = prompt(30, seed=15), list[Rows](), 0
    async with client_of(checkpoint) as client:
        for turn in range(20):
            held = sum(len(piece) for piece in pieces)
            body = {
                "token_ids": ids,
                "sampling_params": {"max_tokens": 8, "temperature": 0, "ignore_eos": True, **ask(held)},
            }
            reply = await client.post("/inference/v1/generate", json=body)
            assert reply.status_code == 200, reply.text
            [choice] = reply.json()["choices"]
            size += len(base64.b64decode(choice["routed_experts"]))
            pieces.append(inline(choice))
            assert choice["routed_experts_prompt_start"] == held
            ids = [*ids, *choice["token_ids"], *prompt(5, seed=100 + turn)]
    ids = ids[:-5]
    joined = np.concatenate(pieces)
    oracle.check(joined[:, LAYERS], ids)
    assert size == 20 * 128 + joined.nbytes, "a .npy header each, and every row once"


@pytest.mark.anyio
async def test_re_51_no_list_of_lists_anywhere(checkpoint: Path) -> None:
    """RE-51, BR-30: routes are one string of the bytes that they are."""
    async with client_of(checkpoint) as client:
        for route in (*VLLM_ROUTES, "/generate"):
            body = body_of(route, max_tokens=150)
            body.pop("return_token_ids", None)
            reply = await client.post(route, json=body)
            found = reply.json()
            place = found["meta_info"] if route == "/generate" else found["choices"][0]
            assert isinstance(place["routed_experts"], str)
            width = 4 if route == "/generate" else 1
            rows = 150 + found.get("usage", {}).get("prompt_tokens", 20) - 1
            raw = len(base64.b64decode(place["routed_experts"]))
            assert raw == rows * 3 * TOP_K * width + (0 if width == 4 else 128)
            assert "[[[" not in reply.text


# -- failures and limits ---------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_re_17_one_of_eight_without_routes_is_counted_and_seen(
    checkpoint: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RE-17: the other seven are whole; the one says so in its outcome, in its receipt, in the counters, and as an error
    to who asked for that."""
    prompts = [prompt(25 + index, seed=16) for index in range(8)]
    wrong = RequestRows._wrong

    def break_one(self: RequestRows, piece: Any) -> str | None:
        return "its rows were lost" if self.prompt_len == 28 else wrong(self, piece)

    monkeypatch.setattr(RequestRows, "_wrong", break_one)
    shelf, found = Shelf(), dict[int, Completion]()
    async with Engine(engine_config(checkpoint, **capturing())) as engine:

        async def one(index: int) -> None:
            found[index] = await engine.generate(prompts[index], routed(10), artifact=shelf.request())

        async with anyio.create_task_group() as tasks:
            for index in range(8):
                tasks.start_soon(one, index)
        with pytest.raises(ArtifactError) as strict:
            await engine.generate(prompts[3], greedy(10), artifact=shelf.request(strict=True))
        assert strict.value.code == "artifact_capture_failed"
        assert engine.artifact_statistics.failed == {"artifact_capture_failed": 2}
        assert engine.artifact_statistics.ready == 7
        now = engine.statistics()
        assert (now.capture_failures, now.capturing) == (2, 0) and now.captured_rows == sum(range(34, 42)) - 37
    for index, done in found.items():
        assert len(done.token_ids) == 10 and done.artifact is not None
        if index == 3:
            rows = done.choices[0].routed_experts
            assert rows is not None and (rows.error, rows.count) == ("its rows were lost", 0)
            assert done.artifact.error_code == "artifact_capture_failed"
        else:
            oracle.check(array(rows_of(done.choices[0])), sequence(done))
            assert done.artifact.state == "ready"


@pytest.mark.anyio
async def test_re_46_what_is_admitted_is_what_is_held(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RE-46, BR-02: at the exact limit a request is let in, one byte below it is not; and what it can ever hold, rows
    included, is what was admitted."""
    made: list[int] = []
    for kind, size in ((Capture, lambda held: held.capacity), (RequestRows, lambda held: held.nbytes)):
        begin = kind.__init__

        def noting(self: Any, *arguments: Any, _begin: Any = begin, _size: Any = size, **more: Any) -> None:
            _begin(self, *arguments, **more)
            made.append(_size(self))

        monkeypatch.setattr(kind, "__init__", noting)
    shelf = Shelf()
    asked = shelf.request("moe_routes", "selected_logprobs")
    bytes_needed = 8 * 32 + 4 * 12 + 31 * 2 * 2
    for limit, fits in ((bytes_needed - 1, False), (bytes_needed, True)):
        made.clear()
        config = engine_config(checkpoint, **capturing(artifacts={"max_decoded_bytes": limit}))
        async with Engine(config) as engine:
            if fits:
                done = await engine.generate(prompt(20), greedy(12), artifact=asked)
                assert done.artifact is not None and done.artifact.state == "ready"
                layout = engine._deliveries.layout
                assert layout is not None
                bounds = GenerationBounds(prompt_tokens=20, max_tokens=12, router_layout=layout)
                assert sum(made) == payload_bytes(asked.contents, 20, 12, bounds.router_layout) == bytes_needed
            else:
                with pytest.raises(ArtifactRefusedError, match="at most 31 tokens") as refused:
                    await engine.generate(prompt(20), greedy(12), artifact=asked)
                assert refused.value.code == "artifact_limit_exceeded" and made == []


@pytest.mark.anyio
async def test_rows_for_the_caller_are_admitted_too(checkpoint: Path) -> None:
    """routed_experts.md 10: inline rows are weighed before the request runs, and their room comes back."""
    config = engine_config(checkpoint, **capturing(artifacts={"process_bytes": 31 * 4}))
    async with Engine(config) as engine:
        done = await engine.generate(prompt(20), routed(12))
        assert rows_of(done.choices[0]).count == 31
        with pytest.raises(ArtifactRefusedError, match="may hold 128 bytes"):
            await engine.generate(prompt(21), routed(12))
        assert engine.artifact_statistics.reserved_bytes == 0


@pytest.mark.anyio
async def test_re_54_nothing_is_kept_of_aborted_rollouts(checkpoint: Path) -> None:
    """RE-54: half of the requests are aborted, cancelled or left; every buffer of rows goes."""
    shelf = Shelf()

    def alive() -> int:
        gc.collect()
        return sum(type(item) is RequestRows for item in gc.get_objects())

    before = alive()
    async with Engine(engine_config(checkpoint, **capturing())) as engine:

        async def whole(index: int) -> None:
            await engine.generate(prompt(30, seed=index), routed(20), artifact=shelf.request())

        async def aborted(index: int) -> None:
            async with engine.stream(prompt(30, seed=index), routed(900), request_id=f"r{index}") as stream:
                async for _ in stream:
                    engine.abort(f"r{index}")

        async def left(index: int) -> None:
            async with engine.stream(prompt(30, seed=index), routed(900), artifact=shelf.request()) as stream:
                async for _ in stream:
                    break

        async def cancelled(index: int) -> None:
            with anyio.move_on_after(0.05):
                await engine.generate(prompt(30, seed=index), routed(900), artifact=shelf.request())

        for kinds in range(3):
            async with anyio.create_task_group() as tasks:
                for index, run in enumerate((whole, aborted, left, cancelled)):
                    tasks.start_soon(run, 4 * kinds + index)
        await engine.generate(prompt(5), greedy(3))  # the loop has seen every end
        assert engine.artifact_statistics.reserved_bytes == 0
        assert parts_of(engine).scheduler.aux.num_live == 0
        assert alive() == before
    assert len(shelf.objects) == 3


def test_re_56_off_is_absent(checkpoint: Path) -> None:
    """RE-56: with the feature off nothing of it exists, so nothing of it can cost; with it on, a request that does not ask
    is planned as before. What it costs where it is used is measured by tests/bench."""
    with serve(checkpoint) as off, serve(checkpoint, **capturing()) as on:
        plans = []
        for running in (off, on):
            parts: Any = parts_of(running)
            submit, seen = parts.executor.submit, list[Any]()

            def watch(plan: Any, _submit: Any = submit, _seen: Any = seen) -> Any:
                _seen.append(plan)
                return _submit(plan)

            parts.executor.submit = watch
            done = running.generate(prompt(40), greedy(10))
            assert done.choices[0].captured == {} and done.choices[0].weight_versions == ((0, 10, 0),)
            plans.append(seen)
            assert {plan.aux for plan in seen} == {None}
        assert parts_of(off).scheduler.aux is None and parts_of(off).resolved.capture is None
        assert [list(plan.counts) for plan in plans[0]] == [list(plan.counts) for plan in plans[1]]
        with pytest.raises(InvalidRequestError, match=r"capture\.routed_experts"):
            off.generate(prompt(4), routed(2))


@pytest.mark.anyio
async def test_re_43_an_artifact_is_bound_to_its_token_ids(checkpoint: Path) -> None:
    """RE-43: a conversation that was encoded again has other ids: rows of another sequence are told, not used."""
    shelf = Shelf()
    async with Engine(engine_config(checkpoint, **capturing())) as engine:
        done = await engine.generate(prompt(40), greedy(12), artifact=shelf.request("moe_routes", "selected_logprobs"))
        assert list(shelf.last.choices[0].sequence_token_ids) == sequence(done)
        assert (await verify_artifact(shelf.last, engine)).verdict == "equal"
        [choice] = shelf.last.choices
        other = [*done.prompt_token_ids[:-1], (done.prompt_token_ids[-1] + 1) % 300, *done.token_ids]
        changed = GenerationArtifact(
            [type(choice)(0, 40, other, choice.moe_routes, choice.selected_logprobs)],
        )
        assert (await verify_artifact(changed, engine)).verdict == "wrong"
        assert done.artifact is not None
        with pytest.raises(ArtifactError, match="SHA-256"):
            decode(encode(changed), sha256=done.artifact.sha256)


@pytest.mark.anyio
async def test_re_37_late_output_of_an_aborted_request_is_dropped(checkpoint: Path, oracle: Oracle) -> None:
    """RE-37: a request is aborted with steps in flight; what comes for it later belongs to nobody, and the engine and its
    neighbour go on. (Becomes a test of a keep-mode pause with SERVE-ADMIN.)"""
    async with Engine(engine_config(checkpoint, **capturing(scheduler={"in_flight_depth": 2}))) as engine:
        found: list[Completion] = []

        async def neighbour() -> None:
            found.append(await engine.generate(prompt(50, seed=30), routed(60)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(neighbour)
            for round_ in range(10):
                async with engine.stream(prompt(20, seed=round_), routed(900), request_id=f"r{round_}") as stream:
                    async for _ in stream:
                        assert engine.abort(f"r{round_}")
                        assert not engine.abort("unknown")
                assert rows_of(stream.result.choices[0]).count == 19 + len(stream.result.token_ids)
        oracle.check(array(rows_of(found[0].choices[0])), sequence(found[0]))
        assert parts_of(engine).scheduler.aux.num_live == 0


@pytest.mark.anyio
async def test_re_39_every_abort_ends_its_stream(checkpoint: Path) -> None:
    """RE-39: waiting, running, several choices, and on an engine that does nothing else. (Becomes a test of replicas with
    PAR-DP.)"""
    config = engine_config(checkpoint, **capturing(scheduler={"max_num_seqs": 2}))
    async with Engine(config) as engine:
        reasons: list[str] = []

        async def one(name: str, n: int) -> None:
            params = routed(900, n=n, temperature=1.0)
            async with engine.stream(prompt(20), params, request_id=name) as stream:
                async for _ in stream:
                    pass
            reasons.extend(choice.finish_reason for choice in stream.result.choices)

        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                for index in range(4):
                    tasks.start_soon(one, f"r{index}", 1 + index % 2)
                while engine.statistics().running < 1:  # waiting for all tasks to block may outlast 900 tokens
                    await anyio.lowlevel.checkpoint()
                for index in range(4):
                    while not engine.abort(f"r{index}"):
                        await anyio.lowlevel.checkpoint()
        assert reasons == ["abort"] * 6


# -- encodings -------------------------------------------------------------------------------------------------------


def test_re_19_axes_are_named_by_content() -> None:
    """RE-19: with as many rows as layers as experts per token every transposition has the same shape; the content shows
    it."""
    from infer.artifacts import ArtifactChoice, RoutedExperts

    ids = np.arange(27).reshape(3, 3, 3)
    choice = ArtifactChoice(0, 1, [1, 2, 3, 4], RoutedExperts(0, ids, (0, 1, 2), (27,) * 3))
    found = [
        np.load(io.BytesIO(base64.b64decode(to_vllm_npy(choice).routed_experts))),
        np.frombuffer(base64.b64decode(to_prime_rl(choice)["data"]), "u1").reshape(3, 3, 3),
        np.frombuffer(base64.b64decode(to_skyrl(choice).routed_experts["data"]), "u1").reshape(3, 3, 3),
        np.frombuffer(base64.b64decode(to_sglang_int32(choice)["routed_experts"]), "<i4").reshape(3, 3, 3),
        to_verl(choice).routed_experts[:3],
    ]
    for exported in found:
        for token in range(3):
            for layer in range(3):
                assert list(exported[token, layer]) == [9 * token + 3 * layer + k for k in range(3)]


# -- combinations that do not exist yet ------------------------------------------------------------------------------

REFUSED_SETTINGS = [
    pytest.param({"speculative": {"method": "draft_model"}}, marks=pytest.mark.waits("SPEC-DRAFT-MODEL"), id="RE-02"),
    pytest.param({"parallel": {"tensor_parallel_size": 2}}, marks=pytest.mark.waits("PAR-TP"), id="RE-05"),
    pytest.param({"parallel": {"pipeline_parallel_size": 2}}, marks=pytest.mark.waits("PAR-PP"), id="RE-09"),
    pytest.param({"connectors": ["handoff"]}, marks=pytest.mark.waits("KV-CONNECTORS"), id="RE-10"),
    pytest.param({"cache": {"offload": "1GiB"}}, marks=pytest.mark.waits("KV-OFFLOAD"), id="RE-38"),
    pytest.param({"parallel": {"data_parallel_size": 2}}, marks=pytest.mark.waits("PAR-DP"), id="RE-39"),
]


@pytest.mark.parametrize("sections", REFUSED_SETTINGS)
def test_a_combination_of_a_later_feature_is_refused_at_start(sections: dict[str, Any]) -> None:
    """BR-24. RE-02 a MoE draft model (with it: only the target's routers, equal to the run without); RE-05 token-sharded routers
    (rows gathered in token order); RE-09 pipeline stages (merged by layer range); RE-10 prefill and decode apart (both
    sides' rows spliced); RE-38 aborts during offload; RE-39 replicas. The setting that the feature brings turns each of
    these into a test of what it does, and fails this one."""
    [section] = sections
    with pytest.raises(ConfigError, match="unknown setting") as refused:
        EngineConfig(model={"ref": "x"}, capture={"routed_experts": True}, **sections)
    assert any(section in field for field in refused.value.fields)


@pytest.mark.waits("KV-CONNECTORS")
@pytest.mark.anyio
async def test_re_10_a_handed_over_prompt_is_refused_by_name(checkpoint: Path) -> None:
    """RE-10: its rows would be missing. Becomes a test of spliced rows when prefill and decode can be apart."""
    async with client_of(checkpoint) as client:
        for route in VLLM_ROUTES:
            body = body_of(route) | {"kv_transfer_params": {"remote_engine_id": "p"}}
            reply = await client.post(route, json=body)
            assert reply.status_code == 400 and "kv_transfer_params" in reply.json()["error"]["message"]


def test_re_34_a_name_that_clashes_is_refused_and_both_owners_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RE-34: at registration, not as a crash of a worker with an empty message."""
    (tmp_path / "clashing.py").write_text(
        "import dataclasses\n"
        "from infer.artifacts.fields import moe_routes\n"
        "from infer.plugins import hookimpl\n\n\n"
        "@hookimpl\n"
        "def infer_artifact_fields():\n"
        "    return [dataclasses.replace(moe_routes.infer_artifact_fields()[0], example={})]\n"
    )
    info = tmp_path / "clashing_fields-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: clashing-fields\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[infer]\nfields = clashing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginConflictError) as refused:
        build_registry(EngineConfig().plugins)
    for part in ("artifact_field 'moe_routes'", "clashing-fields 1.2", "infer"):
        assert part in str(refused.value)
