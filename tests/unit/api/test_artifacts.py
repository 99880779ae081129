"""Generation artifacts over HTTP: both spellings, where the receipt is on each route, what is refused, what is never told."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import httpx2
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import infer.engine.stream
from api_server import Server, events, in_process, on_loopback, until
from infer import EngineConfig, StorageError
from infer.api.openapi import openapi_document
from infer.artifacts import GenerationArtifact, ManagedTarget, open_artifact
from infer.artifacts.receipt import SENTENCES
from infer.storage._memory import MemoryObject

pytestmark = pytest.mark.anyio
CHAT, COMPLETIONS, GENERATE, SGLANG = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate", "/generate"
ROUTES = (CHAT, COMPLETIONS, GENERATE)
SECTION: dict[str, Any] = {
    "enable_managed_fsspec": True,
    "storage_profiles": {
        "here": {
            "url": "memory://api",
            "storage_options": {"max_bytes": 2**24, "secret": "OPERATOR-SECRET"},
            "allowed_prefixes": ["runs"],
            "create_only": True,
        }
    },
    "presigned_hosts": ["bucket.example"],
}
URL = "https://bucket.example/k%2Fx?X-Signature=CLIENT-SECRET&a=1&a=2"
HEADER = "HEADER-SECRET"
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _empty_memory() -> Any:
    yield
    for name in [name for name in MemoryFileSystem.store if name.startswith("/api/")]:
        del MemoryFileSystem.store[name]


def config(section: dict[str, Any] | None = None) -> EngineConfig:
    return EngineConfig(cache={"num_blocks": 4096}, artifacts=SECTION | (section or {}))


@asynccontextmanager
async def served(
    *, section: dict[str, Any] | None = None, settings: dict[str, Any] | None = None, **fake: Any
) -> AsyncIterator[tuple[httpx2.AsyncClient, Server]]:
    async with in_process(config=config(section), settings=settings, **fake) as (client, server):
        yield client, server


def body(route: str, **more: Any) -> dict[str, Any]:
    """A request of six tokens in the route's own words."""
    if route == CHAT:
        return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, **more}
    if route == COMPLETIONS:
        return {"prompt": "hi", "max_tokens": 6, **more}
    if route == GENERATE:
        return {
            "token_ids": list(b"hi"),
            "sampling_params": {"max_tokens": 6} | more.pop("sampling_params", {}),
            **more,
        }
    return {"input_ids": list(b"hi"), "sampling_params": {"max_new_tokens": 6}, **more}


def managed(*contents: str, key: str | None = None) -> dict[str, Any]:
    key = key or f"runs/{next(_numbers)}"
    target = {"kind": "managed_fsspec", "profile": "here", "object_key": key}
    return {
        "format": "generation_artifact_v1",
        "contents": list(contents),
        "delivery": {"mode": "object_store", "target": target},
    }


def presigned(**changes: Any) -> dict[str, Any]:
    target = {
        "kind": "presigned_http_put",
        "url": URL,
        "expires_at": "2099-01-01T00:00:00Z",
        "max_bytes": 2**20,
        "required_headers": {"if-none-match": "*", "x-amz-meta-a": HEADER},
        "object_id": "opaque",
    }
    return {
        "format": "generation_artifact_v1",
        "contents": [],
        "delivery": {"mode": "object_store", "target": target | changes},
    }


def stored(receipt: dict[str, Any]) -> GenerationArtifact:
    """The object that a receipt names, verified."""
    assert receipt["state"] == "ready", receipt
    profile, _, key = receipt["object_id"].partition(":")
    assert profile == "here"
    reader = open_artifact(f"memory://api/{key}")
    reader.verify(sha256=receipt["sha256"])
    return reader.artifact()


def tokens(receipt: dict[str, Any]) -> list[int]:
    (choice,) = stored(receipt).choices
    return [int(token_id) for token_id in choice.sequence_token_ids]


async def post(client: httpx2.AsyncClient, route: str, data: dict[str, Any], status: int = 200) -> Any:
    reply = await client.post(route, json=data)
    assert reply.status_code == status, reply.text
    return reply.json()


async def refused(client: httpx2.AsyncClient, route: str, data: dict[str, Any], status: int = 400) -> dict[str, Any]:
    found: dict[str, Any] = (await post(client, route, data, status))["error"]
    return found


async def chunks(client: httpx2.AsyncClient, route: str, data: dict[str, Any]) -> list[dict[str, Any]]:
    reply = await client.post(route, json={**data, "stream": True})
    assert reply.status_code == 200, reply.text
    found = events(reply.text)
    assert found[-1] == "[DONE]"
    return [json.loads(event) for event in found[:-1]]


def asking(route: str, spelling: str, artifact: dict[str, Any], **more: Any) -> dict[str, Any]:
    fields = {"nvext": {"generation_artifact": artifact}} if spelling == "nvext" else {"generation_artifact": artifact}
    return body(route, **fields, **more)


def place(route: str, spelling: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Where the receipt is, and that it is nowhere else."""

    def look(reply: dict[str, Any]) -> dict[str, Any]:
        if spelling == "nvext" and route != GENERATE:
            assert "generation_artifact" not in reply
            found: dict[str, Any] = reply["nvext"]["generation_artifact"]
        else:
            assert "nvext" not in reply
            found = reply["generation_artifact"]
        return found

    return look


class TestReceipts:
    @pytest.mark.parametrize("spelling", ["nvext", "native"])
    @pytest.mark.parametrize("route", ROUTES)
    async def test_in_the_reply(self, route: str, spelling: str) -> None:
        """T111, section 8.2."""
        async with served() as (client, _):
            reply = await post(client, route, asking(route, spelling, managed(), return_token_ids=True))
        receipt = place(route, spelling)(reply)
        ids = reply.get("prompt_token_ids") or reply["choices"][0]["prompt_token_ids"]
        assert tokens(receipt) == [*ids, *reply["choices"][0]["token_ids"]]
        assert receipt["completion_token_count"] == 6 and receipt["contents"] == []
        assert "routed_experts" not in reply["choices"][0]

    @pytest.mark.parametrize("spelling", ["nvext", "native"])
    @pytest.mark.parametrize("route", ROUTES)
    async def test_in_the_chunk_with_the_finish_reason(self, route: str, spelling: str) -> None:
        """T111, T75, T76: and in no other; no chunk has anything that was not asked for."""
        usage = {"stream_options": {"include_usage": True}}
        async with served() as (client, _):
            found = await chunks(client, route, asking(route, spelling, managed(), return_token_ids=True, **usage))
        holding = [chunk for chunk in found if "generation_artifact" in chunk or "nvext" in chunk]
        [chunk] = holding
        assert [choice["finish_reason"] for choice in chunk["choices"]] == ["length"]
        receipt = place(route, spelling)(chunk)
        told = [choice.get("token_ids", ()) for piece in found for choice in piece["choices"]]
        assert tokens(receipt)[-6:] == [token_id for ids in told for token_id in ids]
        assert "routed_experts" not in json.dumps(found)
        assert found[-1]["usage"]["completion_tokens"] == 6

    async def test_engine_data_holds_it_once_more(self) -> None:
        """T73: only for who asks."""
        async with served() as (client, _):
            fields = {"generation_artifact": managed(), "extra_fields": ["engine_data"]}
            reply = await post(client, CHAT, body(CHAT, nvext=fields))
            assert reply["nvext"]["engine_data"] == {"generation_artifact": reply["nvext"]["generation_artifact"]}
            reply = await post(client, CHAT, body(CHAT, nvext={"extra_fields": ["engine_data"]}))
            assert "nvext" not in reply
            error = await refused(client, CHAT, body(CHAT, nvext={"extra_fields": ["timing"]}))
            assert error["param"] == "nvext"

    @pytest.mark.parametrize("streamed", [False, True])
    async def test_sglang(self, streamed: bool) -> None:
        async with served() as (client, _):
            data = body(SGLANG, generation_artifact=managed())
            reply = (await chunks(client, SGLANG, data))[-1] if streamed else await post(client, SGLANG, data)
            assert tokens(reply["generation_artifact"]) == [*b"hi", *reply["output_ids"]]
            error = await refused(client, SGLANG, {**data, "input_ids": [[1], [2]]})
        assert error["code"] == "artifact_invalid_request"

    @pytest.mark.parametrize("streamed", [False, True])
    @pytest.mark.parametrize("route", ROUTES)
    async def test_logprobs_in_the_artifact_alone(self, route: str, streamed: bool) -> None:
        """T78: the public reply shows none."""
        async with served() as (client, _):
            data = asking(route, "native", managed("selected_logprobs"))
            replies = await chunks(client, route, data) if streamed else [await post(client, route, data)]
        assert all(not choice.get("logprobs") for reply in replies for choice in reply["choices"])
        (choice,) = stored(next(r for r in replies if "generation_artifact" in r)["generation_artifact"]).choices
        assert choice.selected_logprobs is not None
        assert [float(value) for value in choice.selected_logprobs.logprobs] == [-1.0] * 6

    async def test_logprobs_in_both(self) -> None:
        """T115."""
        async with served() as (client, _):
            alone = await post(client, CHAT, body(CHAT, logprobs=True, top_logprobs=2, seed=4))
            both = await post(
                client,
                CHAT,
                asking(CHAT, "native", managed("selected_logprobs"), logprobs=True, top_logprobs=2, seed=4),
            )
        assert alone["choices"] == both["choices"]

    @pytest.mark.parametrize("streamed", [False, True])
    async def test_all_choices_are_in_one_object(self, streamed: bool) -> None:
        """BR-17: one receipt, with the choice that ends last."""
        async with served() as (client, _):
            data = asking(CHAT, "native", managed(), n=3, return_token_ids=True)
            replies = await chunks(client, CHAT, data) if streamed else [await post(client, CHAT, data)]
        [holding] = [reply for reply in replies if "generation_artifact" in reply]
        artifact = stored(holding["generation_artifact"])
        assert [choice.choice_index for choice in artifact.choices] == [0, 1, 2]
        assert holding["generation_artifact"]["completion_token_count"] == [6, 6, 6]
        if streamed:
            finished = [c["index"] for reply in replies for c in reply["choices"] if c["finish_reason"]]
            assert [c["index"] for c in holding["choices"]] == finished[-1:]

    @pytest.mark.parametrize("streamed", [False, True])
    async def test_a_stop_string_cuts_the_artifact_too(self, streamed: bool) -> None:
        """BR-23: the answer is `Hello, wörld! ✓`."""
        async with served() as (client, _):
            data = asking(COMPLETIONS, "native", managed(), stop=["rld"]) | {"max_tokens": 20}
            replies = await chunks(client, COMPLETIONS, data) if streamed else [await post(client, COMPLETIONS, data)]
        receipt = next(reply for reply in replies if "generation_artifact" in reply)["generation_artifact"]
        assert bytes(tokens(receipt)).decode() == "hiHello, wörld"
        assert "".join(c["text"] for reply in replies for c in reply["choices"]) == "Hello, wö"

    async def test_a_receipt_that_never_came(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """T74: a defect is said, with what was asked for as it was asked for."""

        async def forget(self: Any) -> None:
            self._result = self._complete()

        monkeypatch.setattr(infer.engine.stream.Stream, "_deliver", forget)
        async with served() as (client, _):
            whole = await post(client, CHAT, asking(CHAT, "nvext", managed("selected_logprobs")))
            streamed = await chunks(client, CHAT, asking(CHAT, "nvext", managed("selected_logprobs")))
        expected = {
            "format": "generation_artifact_v1",
            "contents": ["selected_logprobs"],
            "state": "failed",
            "error_code": "artifact_receipt_missing",
            "error": SENTENCES["artifact_receipt_missing"],
        }
        assert whole["nvext"]["generation_artifact"] == expected
        assert [chunk["nvext"]["generation_artifact"] for chunk in streamed if "nvext" in chunk] == [expected]


@pytest.fixture
def broken_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    def put(self: Any, data: bytes, *, if_absent: bool) -> None:
        raise StorageError("PROVIDER-SECRET", code="artifact_upload_rejected")

    monkeypatch.setattr(MemoryObject, "put", put)


@pytest.mark.usefixtures("broken_storage")
class TestFailures:
    @pytest.mark.parametrize("streamed", [False, True])
    @pytest.mark.parametrize("route", ROUTES)
    async def test_tokens_are_delivered(self, route: str, streamed: bool) -> None:
        """Section 9: status 200, and the failure is in the receipt."""
        async with served() as (client, _):
            data = asking(route, "native", managed())
            replies = await chunks(client, route, data) if streamed else [await post(client, route, data)]
        assert "PROVIDER-SECRET" not in json.dumps(replies)
        receipt = next(reply for reply in replies if "generation_artifact" in reply)["generation_artifact"]
        assert (receipt["state"], receipt["error_code"]) == ("failed", "artifact_upload_rejected")
        assert receipt["error"] == SENTENCES["artifact_upload_rejected"] and len(receipt["sha256"]) == 64
        assert replies[-1]["choices"][-1]["finish_reason"] == "length"

    @pytest.mark.parametrize("spelling", ["nvext", "native"])
    async def test_strict(self, spelling: str) -> None:
        """BR-22."""
        async with served() as (client, _):
            data = asking(CHAT, spelling, managed(), generation_artifact_strict=True)
            error = await refused(client, CHAT, data, 500)
            assert (error["code"], error["message"]) == (
                "artifact_upload_rejected",
                SENTENCES["artifact_upload_rejected"],
            )
            found = await chunks(client, CHAT, data)
            assert found[-1]["error"]["code"] == "artifact_upload_rejected"
            text = "".join(c["delta"].get("content", "") for chunk in found[:-1] for c in chunk["choices"])
            assert text == "Hello,"
            assert place(CHAT, spelling)(found[-2])["state"] == "failed"


class TestEnds:
    @pytest.mark.parametrize("streamed", [False, True])
    @pytest.mark.parametrize("route", [CHAT, GENERATE])
    async def test_an_abort(self, route: str, streamed: bool) -> None:
        """BR-05: an explicit receipt; on /inference/v1/generate an error (8.2)."""
        async with served(settings={"admin": True}, next_token=lambda ids, spec: 97, latency=0.002) as (client, server):
            data = asking(route, "native", managed())
            (data if route == CHAT else data["sampling_params"])["max_tokens"] = 1500
            replies: list[httpx2.Response] = []
            async with anyio.create_task_group() as tasks:

                async def ask() -> None:
                    replies.append(await client.post(route, json=data | {"stream": streamed}))

                tasks.start_soon(ask)
                await until(lambda: server.engine.statistics().running > 0)
                await post(client, "/abort_requests", {})
            [reply] = replies
            assert server.engine.artifact_statistics.failed == {"artifact_cancelled": 1}
            assert server.engine.artifact_statistics.reserved_bytes == 0
        if streamed:
            last = json.loads(events(reply.text)[-2])
        else:
            last = reply.json()
            assert reply.status_code == (409 if route == GENERATE else 200)
        if route == GENERATE:
            assert last["error"]["code"] == "artifact_cancelled"
        else:
            assert last["generation_artifact"]["error_code"] == "artifact_cancelled"
            assert last["choices"][0]["finish_reason"] == "abort"

    async def test_a_client_that_hangs_up(self) -> None:
        """Nothing is written, nothing is held."""
        async with on_loopback(lambda ids, spec: 97, config=config(), latency=0.002) as server:
            async with httpx2.AsyncClient(base_url=server.address) as client, anyio.create_task_group() as tasks:
                body = asking(CHAT, "native", managed()) | {"max_tokens": 1500}
                tasks.start_soon(partial(client.post, CHAT, json=body))
                await until(lambda: server.engine.artifact_statistics.reserved_bytes > 0)
                tasks.cancel_scope.cancel()
            await until(lambda: server.engine.artifact_statistics.failed == {"artifact_cancelled": 1})
            assert server.engine.artifact_statistics.reserved_bytes == 0
            assert not any(name.startswith("/api/") for name in MemoryFileSystem.store)


BAD: dict[str, tuple[Any, str]] = {
    "text": ("text", "artifact_invalid_request"),
    "a list": ([managed()], "artifact_invalid_request"),
    "false": (False, "artifact_invalid_request"),
    "nothing in it": ({}, "artifact_invalid_request"),
    "an unknown key": (managed() | {"extra": 1}, "artifact_invalid_request"),
    "codec": (managed() | {"codec": "none"}, "artifact_invalid_request"),
    "codec as a number": (managed() | {"codec": 1}, "artifact_invalid_request"),
    "format": (managed() | {"format": " external_artifact_v2 "}, "artifact_unsupported"),
    "blank format": (managed() | {"format": " "}, "artifact_invalid_request"),
    "contents": (managed("opaque_component"), "artifact_unsupported"),
    "topk under v1": (managed("topk_logprobs"), "artifact_unsupported"),
    "twice": (managed("moe_routes", "moe_routes"), "artifact_invalid_request"),
    "routes": (managed("moe_routes"), "artifact_unsupported"),
    "key": (managed(key="../escape"), "artifact_target_rejected"),
    "absolute key": (managed(key="/absolute"), "artifact_target_rejected"),
    "prefix": (managed(key="elsewhere/a"), "artifact_target_rejected"),
    "host": (presigned(url="https://other.example/k?sig=CLIENT-SECRET"), "artifact_target_rejected"),
    "private address": (presigned(url="https://127.0.0.1/k?sig=CLIENT-SECRET"), "artifact_target_rejected"),
    "no if-none-match": (presigned(required_headers={}), "artifact_target_rejected"),
    "long header": (presigned(required_headers={HEADER * 5000: "v"}), "artifact_target_rejected"),
    "far away": (presigned(), "artifact_target_rejected"),
    "small": (presigned(max_bytes=0), "artifact_invalid_request"),
    "text as size": (presigned(max_bytes=URL), "artifact_invalid_request"),
    "headers as text": (presigned(required_headers=HEADER), "artifact_invalid_request"),
}


class TestRefusals:
    @pytest.mark.parametrize("name", BAD)
    async def test_400_with_its_code(self, name: str, caplog: pytest.LogCaptureFixture) -> None:
        """Section 9; BR-16, BR-18; and section 2.5: no message quotes what was sent."""
        value, code = BAD[name]
        caplog.set_level(logging.DEBUG)
        async with served() as (client, server):
            for route, spelling in ((CHAT, "nvext"), (COMPLETIONS, "native"), (GENERATE, "native")):
                error = await refused(client, route, asking(route, spelling, value))
                assert error["code"] == code and error["type"] == "invalid_request_error"
                assert "SECRET" not in json.dumps(error)
            assert server.worker.plans == []
        assert "SECRET" not in caplog.text and "bucket.example" not in caplog.text

    @pytest.mark.parametrize("route", ROUTES)
    async def test_both_spellings_at_once(self, route: str) -> None:
        """T111."""
        async with served() as (client, _):
            data = body(route, nvext={"generation_artifact": managed()}, generation_artifact=managed())
            error = await refused(client, route, data)
            assert error["code"] == "artifact_invalid_request"
            # null is absent
            await post(client, route, body(route, nvext={"generation_artifact": None}, generation_artifact=managed()))
            reply = await post(client, route, body(route, nvext=None, generation_artifact=None))
        assert "generation_artifact" not in reply and "nvext" not in reply

    @pytest.mark.parametrize(
        "nvext",
        [
            {"generation_artifacts": presigned()},
            [{"generation_artifact": presigned()}],
            URL,
            {"generation_artifact": managed(), "unknown": URL},
        ],
        ids=["misspelt", "a list", "text", "unknown key"],
    )
    @pytest.mark.parametrize("policy", ["refuse", "notice"])
    async def test_nvext_is_closed(self, nvext: Any, policy: str) -> None:
        """Section 2.1: whatever is done with other unknown fields; and it is not quoted."""
        async with served(settings={"unknown_fields": policy}) as (client, _):
            error = await refused(client, CHAT, body(CHAT, nvext=nvext))
        assert "SECRET" not in json.dumps(error) and error["param"].startswith("nvext")

    async def test_strict_is_a_boolean(self) -> None:
        async with served() as (client, _):
            await refused(client, CHAT, asking(CHAT, "native", managed(), generation_artifact_strict="yes"))

    async def test_one_artifact_is_one_prompt_as_it_is_returned(self) -> None:
        async with served() as (client, _):
            for more in ({"prompt": ["a", "b"]}, {"best_of": 2}, {"max_tokens": 0, "echo": True}):
                error = await refused(client, COMPLETIONS, asking(COMPLETIONS, "native", managed()) | more)
                assert error["code"] == "artifact_invalid_request"

    async def test_no_room_is_503(self) -> None:
        """BR-08."""
        async with served(section={"process_bytes": 8000, "queue_timeout_seconds": 1}, latency=0.05) as (
            client,
            server,
        ):
            async with anyio.create_task_group() as tasks:

                async def first() -> None:
                    await post(client, CHAT, asking(CHAT, "native", managed()) | {"max_tokens": 60, "ignore_eos": True})

                tasks.start_soon(first)
                await until(lambda: server.engine.artifact_statistics.reserved_bytes > 0)
                reply = await client.post(CHAT, json=asking(CHAT, "native", managed()))
            assert reply.status_code == 503 and int(reply.headers["retry-after"]) >= 1
            assert reply.json()["error"]["code"] == "artifact_capacity_exhausted"

    async def test_too_long_is_told_what_fits(self) -> None:
        """BR-31."""
        async with served(section={"max_decoded_bytes": 100}) as (client, _):
            error = await refused(client, CHAT, asking(CHAT, "native", managed()))
        assert error["code"] == "artifact_limit_exceeded" and "at most 12 tokens" in error["message"]

    @pytest.mark.parametrize("route", (*ROUTES, SGLANG))
    async def test_routes_of_an_engine_that_captures_none(self, route: str) -> None:
        """RE-42: refused by name on every route, never left out."""
        where = {GENERATE: "sampling_params.return_routed_experts"}.get(route, "return_routed_experts")
        async with served() as (client, _):
            data = body(route)
            (data["sampling_params"] if route == GENERATE else data)["return_routed_experts"] = True
            error = await refused(client, route, data)
        assert error["param"] == where and "capture.routed_experts" in error["message"]

    @pytest.mark.parametrize("start", [-1, 1000, 1.5, True, "1"])
    @pytest.mark.parametrize("route", (*ROUTES, SGLANG))
    async def test_a_route_start_that_no_prompt_has(self, route: str, start: Any) -> None:
        """T51; routed_experts.md 2.4: also when capture is off."""
        name = "routed_experts_start_len" if route == SGLANG else "routed_experts_prompt_start"
        async with served() as (client, _):
            data = body(route)
            (data["sampling_params"] if route == GENERATE else data)[name] = start
            error = await refused(client, route, data)
        assert error["param"].removeprefix("sampling_params.") == name

    async def test_generate_has_the_route_fields_in_sampling_params(self) -> None:
        async with served() as (client, _):
            error = await refused(client, GENERATE, body(GENERATE, return_routed_experts=True))
        assert "inside sampling_params" in error["message"]


class TestSecrets:
    async def test_a_grant_is_in_no_log(self, caplog: pytest.LogCaptureFixture) -> None:
        """Section 2.5: also when the delivery fails."""
        caplog.set_level(logging.DEBUG)
        async with served(section={"max_presigned_ttl_seconds": 2**33, "presigned_timeout_seconds": 1}) as (
            client,
            server,
        ):
            reply = await client.post(CHAT, json=asking(CHAT, "native", presigned()))
            assert reply.status_code == 200
            receipt = reply.json()["generation_artifact"]
            assert receipt["state"] == "failed" and receipt["object_id"] == "opaque"
            assert server.engine.artifact_statistics.failed
        assert "SECRET" not in caplog.text + reply.text and "bucket.example" not in caplog.text + reply.text

    async def test_server_info_has_limits_and_no_credentials(self) -> None:
        """BR-14, BR-31."""
        async with served(settings={"admin": True}) as (client, server):
            reply = await client.get("/server_info")
            assert "OPERATOR-SECRET" not in reply.text
            told = reply.json()
            assert told["artifacts"] == server.engine.artifact_limits()
            assert told["artifacts"]["longest_sequence"] > 5_000_000
            assert told["artifacts"]["smallest_target_bytes"] == 4215
            profile = told["config"]["artifacts"]["storage_profiles"]["here"]
            assert profile["url"] == "memory://api" and "storage_options" not in profile

    def test_the_description_says_that_ids_are_always_written(self) -> None:
        """BR-25."""
        from infer.api.openai import chat

        context: Any = None
        schemas = openapi_document(chat.routes(context))["components"]["schemas"]
        [native] = [p for p in schemas["v1_chat_completions"]["properties"].items() if p[0] == "generation_artifact"]
        assert "prompt and completion token ids always included" in json.dumps(native)
        assert "always written" in json.dumps(schemas["Nvext"])


async def test_a_scrape_after_a_scripted_run() -> None:
    """BR-21."""
    async with served() as (client, server):
        for _ in range(2):
            await post(client, CHAT, asking(CHAT, "native", managed(key="runs/same")))
        await refused(client, CHAT, asking(CHAT, "native", managed(key="elsewhere/a")))
        text = (await client.get("/metrics")).text
        statistics = server.engine.artifact_statistics
    lines = [line for line in text.splitlines() if line.startswith("infer_artifact")]
    found = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}
    labels = 'engine="0",model_name="fake-model"'
    expected = {
        f"infer_artifacts_admitted_total{{{labels}}}": 2,
        f"infer_artifacts_ready_total{{{labels}}}": 1,
        f'infer_artifacts_failed_total{{code="artifact_conflict",{labels}}}': 1,
        f'infer_artifacts_refused_total{{code="artifact_target_rejected",{labels}}}': 1,
        f"infer_artifact_bytes_total{{{labels}}}": statistics.delivered_bytes,
        f"infer_artifact_queue_depth{{{labels}}}": 0,
        f"infer_artifacts_delivering{{{labels}}}": 0,
        f"infer_artifact_reserved_bytes{{{labels}}}": 0,
    }
    assert {name: found[name] for name in expected} == expected
    for name in ("encode", "upload"):
        assert found[f"infer_artifact_{name}_seconds_total{{{labels}}}"] > 0


@pytest.mark.parametrize("spelling", ["nvext", "native"])
async def test_a_rendered_chat_still_asks_for_its_artifact(spelling: str) -> None:
    """RE-42: neither half of the chat endpoint loses the request or the receipt."""
    async with served() as (client, _):
        asked = asking(CHAT, spelling, managed())
        rendered = await post(client, f"{CHAT}/render", asked)
        answer = await post(client, GENERATE, rendered)
        data = {"generate_response": answer, "chat_request": asked, "prompt_token_ids": rendered["token_ids"]}
        reply = await post(client, f"{CHAT}/derender", data)
        assert tokens(place(CHAT, spelling)(reply)) == [*rendered["token_ids"], *answer["choices"][0]["token_ids"]]
        del answer["generation_artifact"]
        reply = await post(client, f"{CHAT}/derender", data)
        assert place(CHAT, spelling)(reply)["error_code"] == "artifact_receipt_missing"


async def test_a_rendered_completion_still_asks_for_its_artifact() -> None:
    """RE-42."""
    async with served() as (client, _):
        [rendered] = await post(client, f"{COMPLETIONS}/render", asking(COMPLETIONS, "native", managed()))
        answer = await post(client, GENERATE, rendered)
        assert tokens(answer["generation_artifact"]) == [*b"hi", *answer["choices"][0]["token_ids"]]
        error = await refused(
            client, f"{COMPLETIONS}/render", asking(COMPLETIONS, "native", managed()) | {"prompt": ["a", "b"]}
        )
        assert error["code"] == "artifact_invalid_request"


def test_the_targets_are_those_of_the_section() -> None:
    """What these tests ask for is what an in-process caller would write."""
    from infer.artifacts.request import parse_request

    assert parse_request(managed(key="runs/x")).target == ManagedTarget("here", "runs/x")
