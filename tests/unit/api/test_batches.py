"""`/v1/files` and `/v1/batches` with the openai client: upload, run, read, cancel, delete, and what is refused."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx2
import openai
import pytest

from api_server import MODEL, Server, in_process, on_loopback
from infer.api.openai import batch_store
from infer.config.engine import EngineConfig
from served import letters

pytestmark = pytest.mark.anyio
ROW = "SERVE-BATCH-API"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(params=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """The openai client runs on asyncio."""
    return "asyncio", {"use_uvloop": request.param == "uvloop"}


def line(custom_id: str, text: str, url: str = CHAT, **more: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": text}]} if url == CHAT else {"prompt": text}
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": url,
        "body": {"model": MODEL, "max_tokens": 8, "seed": 3, **prompt, **more},
    }


def as_file(lines: Sequence[Any]) -> tuple[str, io.BytesIO]:
    text = "".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines)
    return "in.jsonl", io.BytesIO(text.encode())


@asynccontextmanager
async def served(**more: Any) -> AsyncIterator[tuple[openai.AsyncOpenAI, Server]]:
    async with on_loopback(letters, **more) as server:
        key = (more.get("settings") or {}).get("api_keys", ("unused",))[0]
        async with openai.AsyncOpenAI(base_url=server.url, api_key=key, max_retries=0) as client:
            yield client, server


async def finished(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    with anyio.fail_after(60):
        while True:
            batch = await client.batches.retrieve(batch_id)
            if batch.status in ("completed", "failed", "cancelled"):
                return batch
            await anyio.sleep(0.02)


async def rows(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str | None, Any]:
    if file_id is None:
        return {}
    text = (await client.files.content(file_id)).text
    return {row["custom_id"]: row for row in map(json.loads, text.splitlines())}


@pytest.mark.row(ROW, "through /v1/files and /v1/batches with the openai client, results equal the online endpoint")
async def test_a_batch_from_upload_to_results() -> None:
    async with served() as (client, _):
        lines = [line(f"c{i}", f"question {i}") for i in range(20)]
        uploaded = await client.files.create(
            file=as_file([*lines, "{broken", line("bad", "a", temperature=-1)]), purpose="batch"
        )
        assert (uploaded.object, uploaded.purpose, uploaded.filename) == ("file", "batch", "in.jsonl")
        batch = await client.batches.create(
            input_file_id=uploaded.id, endpoint=CHAT, completion_window="24h", metadata={"of": "mine"}
        )
        assert (batch.object, batch.endpoint, batch.metadata) == ("batch", CHAT, {"of": "mine"})
        done = await finished(client, batch.id)
        assert (done.status, done.errors) == ("completed", None)
        assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (22, 20, 2)
        answers, failures = await rows(client, done.output_file_id), await rows(client, done.error_file_id)
        assert set(answers) == {one["custom_id"] for one in lines} and set(failures) == {None, "bad"}
        assert failures["bad"]["response"]["status_code"] == 400
        assert failures[None]["error"]["code"] == "invalid_json_line"
        for one in lines:
            online = await client.chat.completions.create(**one["body"])
            body = answers[one["custom_id"]]["response"]["body"]
            assert body["choices"][0]["message"]["content"] == online.choices[0].message.content
            assert body["usage"]["completion_tokens"] == online.usage.completion_tokens  # type: ignore[union-attr]
        listed = [one.id async for one in client.batches.list()]
        assert listed == [batch.id]
        assert {one.id async for one in client.files.list()} == {uploaded.id, done.output_file_id, done.error_file_id}
        assert [one.id async for one in client.files.list(purpose="batch")] == [uploaded.id]
        assert (await client.files.delete(uploaded.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(uploaded.id)
        assert done.created_at <= done.in_progress_at <= done.completed_at  # type: ignore[operator]


async def test_lists_are_read_page_by_page_newest_first() -> None:
    async with served() as (client, _):
        made = [(await client.files.create(file=as_file([line(str(i), "x")]), purpose="batch")).id for i in range(5)]
        page = await client.files.list(limit=2)
        assert [one.id for one in page.data] == made[:2:-1] and page.has_more
        assert [one.id async for one in client.files.list(limit=2)] == made[::-1]


async def test_clients_are_answered_while_a_batch_runs_and_batches_take_turns() -> None:
    async with served(latency=0.01, config=EngineConfig(scheduler={"max_num_seqs": 4}, cache={"num_blocks": 512})) as (
        client,
        server,
    ):
        long = await client.files.create(
            file=as_file([line(str(i), "x", max_tokens=60) for i in range(8)]), purpose="batch"
        )
        first = await client.batches.create(input_file_id=long.id, endpoint=CHAT, completion_window="24h")
        second = await client.batches.create(input_file_id=long.id, endpoint=CHAT, completion_window="24h")
        with anyio.fail_after(60):
            while (await client.batches.retrieve(first.id)).status == "validating":
                await anyio.lowlevel.checkpoint()
        for _ in range(3):
            await client.completions.create(model=MODEL, prompt="now", max_tokens=2)
            assert server.engine.statistics().running <= 3, "half of the slots are left to clients"
        assert (await client.batches.retrieve(second.id)).status == "validating"
        with pytest.raises(openai.ConflictError, match="is read by a batch"):
            await client.files.delete(long.id)
        cancelled = await client.batches.cancel(second.id)
        assert cancelled.status == "cancelling"
        assert (await finished(client, second.id)).status == "cancelled"
        await client.batches.cancel(first.id)
        stopped = await finished(client, first.id)
        assert stopped.status == "cancelled" and stopped.request_counts.completed < 8  # type: ignore[union-attr]
        assert len(await rows(client, stopped.output_file_id)) == stopped.request_counts.completed  # type: ignore[union-attr]
        with pytest.raises(openai.ConflictError):
            await client.batches.cancel(first.id)
        with anyio.fail_after(60):
            while server.engine.statistics().running:
                await anyio.lowlevel.checkpoint()


async def test_lines_need_no_key_and_a_batch_does() -> None:
    async with served(settings={"api_keys": ("secret",)}) as (client, server):
        uploaded = await client.files.create(file=as_file([line("a", "x", TEXT)]), purpose="batch")
        batch = await client.batches.create(input_file_id=uploaded.id, endpoint=TEXT, completion_window="24h")
        assert (await finished(client, batch.id)).request_counts.completed == 1
        async with httpx2.AsyncClient() as stranger:
            for path in ("files", "batches", f"files/{uploaded.id}/content", f"batches/{batch.id}"):
                assert (await stranger.get(f"{server.url}/{path}")).status_code == 401
            assert (await stranger.post(f"{server.url}/files", content=b"x")).status_code == 401


async def test_what_is_refused() -> None:
    async with served() as (client, server):
        uploaded = await client.files.create(file=as_file([line("a", "x")]), purpose="batch")
        for values, parameter in (
            ({"input_file_id": "file-none", "endpoint": CHAT}, "file_id"),
            ({"input_file_id": uploaded.id, "endpoint": "/v1/embeddings"}, "endpoint"),
            ({"input_file_id": uploaded.id, "endpoint": CHAT, "no_such": 1}, "no_such"),
            ({"endpoint": CHAT}, "input_file_id"),
        ):
            async with httpx2.AsyncClient() as plain:
                reply = await plain.post(f"{server.url}/batches", json=values)
            assert reply.status_code in (400, 404) and reply.json()["error"]["param"] == parameter
        wrong = await client.batches.create(input_file_id=uploaded.id, endpoint=TEXT, completion_window="24h")
        done = await finished(client, wrong.id)
        assert (await rows(client, done.error_file_id))["a"]["error"]["code"] == "invalid_url"
        with pytest.raises(openai.BadRequestError):
            await client.files.create(file=as_file([]), purpose="fine-tune")
        async with httpx2.AsyncClient() as plain:
            for sent in (
                {"json": {"file": "x"}},
                {"content": b"", "headers": {"content-type": "multipart/form-data"}},
                {"content": b"--x\r\nnonsense", "headers": {"content-type": "multipart/form-data; boundary=x"}},
                {"data": {"purpose": "batch"}, "files": {"other": b"x"}},
            ):
                reply = await plain.post(f"{server.url}/files", **sent)  # type: ignore[arg-type]
                assert reply.status_code == 400, sent
            for query in ("limit=0", "limit=x", "after=none"):
                assert (await plain.get(f"{server.url}/files?{query}")).status_code == 400
            for path in ("files/none", "files/none/content", "batches/none"):
                assert (await plain.get(f"{server.url}/{path}")).status_code == 404


async def test_the_store_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as (client, _):
        uploaded = await client.files.create(file=as_file([line(str(i), "x") for i in range(20)]), purpose="batch")
        monkeypatch.setattr(batch_store, "MAX_BYTES", uploaded.bytes + 500)
        with pytest.raises(openai.APIStatusError, match="delete some") as refused:
            await client.files.create(file=as_file([line(str(i), "x") for i in range(20)]), purpose="batch")
        assert refused.value.status_code == 413
        batch = await client.batches.create(input_file_id=uploaded.id, endpoint=CHAT, completion_window="24h")
        done = await finished(client, batch.id)
        assert done.status == "failed" and "delete some" in done.errors.data[0].message  # type: ignore[union-attr,index,operator]


async def test_without_a_server_batches_are_refused_by_name() -> None:
    async with in_process(letters) as (client, _):
        stored = await client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", b"{}\n")})
        reply = await client.post("/v1/batches", json={"input_file_id": stored.json()["id"], "endpoint": CHAT})
    assert (reply.status_code, reply.json()["error"]["code"]) == (501, "no_background")
