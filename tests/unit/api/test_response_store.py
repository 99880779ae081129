"""The store of responses: what it keeps and forgets, whatever is done to it, and how the route fails when a store does."""

from __future__ import annotations

import json
from typing import Any

import anyio
import httpx2
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from api_server import api_settings, events, open_engine
from infer.api import build_app, build_context
from infer.api.openai.responses.store import MemoryResponseStore
from infer.errors import StorageError
from infer.testing.fake_engine import scripted

ROW = "SERVE-RESPONSES-MESSAGES"
RESPONSES = "/v1/responses"
MAX_COUNT, MAX_BYTES = 4, 100


def done(answer: Any) -> Any:
    """What an `async def` returns that waits for nothing."""
    try:
        answer.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waits")


class StoreMachine(RuleBasedStateMachine):
    """Against a list: the last used comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryResponseStore(MAX_COUNT, MAX_BYTES)
        self.model: list[tuple[str, str, bytes]] = []

    names = st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["1", "2", "3", "4"]))

    @rule(name=names, size=st.integers(0, 60))
    def put(self, name: tuple[str, str], size: int) -> None:
        done(self.store.put(*name, b"x" * size))
        self.model = [one for one in self.model if one[:2] != name] + [(*name, b"x" * size)]
        while len(self.model) > MAX_COUNT or sum(len(one[2]) for one in self.model) > MAX_BYTES:
            del self.model[0]

    @rule(name=names)
    def get(self, name: tuple[str, str]) -> None:
        known = [one for one in self.model if one[:2] == name]
        assert done(self.store.get(*name)) == (known[0][2] if known else None)
        self.model = [one for one in self.model if one[:2] != name] + known

    @rule(name=names)
    def delete(self, name: tuple[str, str]) -> None:
        known = [one for one in self.model if one[:2] == name]
        assert done(self.store.delete(*name)) is bool(known)
        self.model = [one for one in self.model if one[:2] != name]

    @rule(name=names)
    def put_what_never_fits(self, name: tuple[str, str]) -> None:
        with pytest.raises(StorageError, match="store=false"):
            done(self.store.put(*name, b"x" * (MAX_BYTES + 1)))

    @invariant()
    def counts(self) -> None:
        assert len(self.store) == len(self.model)
        assert self.store.num_bytes == sum(len(one[2]) for one in self.model)


TestStoreMachine = pytest.mark.row(
    ROW, "the store stays within its bounds of bytes and count, least recently used first"
)(StoreMachine.TestCase)
TestStoreMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


class BrokenStore(MemoryResponseStore):
    """Fails where it is told to."""

    def __init__(self) -> None:
        super().__init__(10, 2**20)
        self.fails: set[str] = set()
        self.error: Exception = OSError("the disk is full")

    async def put(self, owner: str, response_id: str, record: bytes) -> None:
        self._fail("put")
        await super().put(owner, response_id, record)

    async def get(self, owner: str, response_id: str) -> bytes | None:
        self._fail("get")
        found = await super().get(owner, response_id)
        return b'{"response": 3' if found is not None and "spoil" in self.fails else found

    async def delete(self, owner: str, response_id: str) -> bool:
        self._fail("delete")
        return await super().delete(owner, response_id)

    def _fail(self, what: str) -> None:
        if what in self.fails:
            raise self.error


@pytest.mark.anyio
@pytest.mark.row(ROW, "a store that fails is a typed error, and nothing else fails with it")
async def test_a_store_that_fails() -> None:
    store = BrokenStore()
    async with open_engine(scripted("Ja.")) as (engine, _):
        context = build_context(engine, api_settings(), responses=store)
        transport = httpx2.ASGITransport(build_app(context))
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            made = (await client.post(RESPONSES, json={"input": "hi"})).json()["id"]
            url = f"{RESPONSES}/{made}"
            on = {"input": "a", "previous_response_id": made, "store": False}
            store.fails = {"put", "get", "delete"}
            failed = [
                await client.post(RESPONSES, json={"input": "hi"}),
                await client.get(url),
                await client.delete(url),
                await client.post(RESPONSES, json=on),
            ]
            stream = await client.post(RESPONSES, json={"input": "hi", "stream": True})
            without = await client.post(RESPONSES, json={"input": "hi", "store": False})
            store.fails = {"spoil"}
            failed += [await client.get(url), await client.post(RESPONSES, json=on)]
            store.fails, store.error = {"get"}, StorageError("asleep", code="store_asleep")
            own = await client.get(url)
            store.fails = set()
            again = await client.get(url)
    for reply in failed:
        assert (reply.status_code, reply.json()["error"]["code"]) == (500, "response_store_failed")
        assert "disk" not in reply.text, "what a store says of itself stays in the log"
    last = json.loads(events(stream.text)[-1])
    assert last["type"] == "response.failed" and last["response"]["output"][0]["content"][0]["text"] == "Ja."
    assert without.status_code == again.status_code == 200
    assert (own.status_code, own.json()["error"]["code"]) == (500, "store_asleep")


def altered(record: bytes, **change: Any) -> bytes:
    """The record with parts of the response, or `items`, replaced."""
    found = json.loads(record)
    items = change.pop("items", found["items"])
    return json.dumps({"response": {**found["response"], **change}, "items": items}).encode()


ODD_RECORDS: dict[str, dict[str, Any]] = {
    "of another response": {"id": "resp_other"},
    "no status": {"status": None},
    "a chain to a number": {"previous_response_id": 5},
    "output is a number": {"output": 5},
    "output is odd": {"output": [{"type": "function_call", "id": "fc_1"}]},
    "no text": {"output": [{"type": "message", "id": "msg_1", "role": "assistant", "content": None}]},
    "items are nothing": {"items": [None]},
    "an item without an id": {"items": [{"role": "user", "content": "hi"}]},
    "an unknown item": {"items": [{"type": "of_tomorrow", "id": "x"}]},
}


@pytest.mark.anyio
@pytest.mark.row(ROW, "a store that fails is a typed error, and nothing else fails with it")
async def test_a_store_that_gives_back_something_else() -> None:
    store = MemoryResponseStore(10, 10**6)
    async with open_engine(scripted("Ja.")) as (engine, _):
        context = build_context(engine, api_settings(), responses=store)
        transport = httpx2.ASGITransport(build_app(context))
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            made = (await client.post(RESPONSES, json={"input": "hi"})).json()["id"]
            url, record = f"{RESPONSES}/{made}", await store.get("", made)
            assert record is not None
            on = {"input": "a", "previous_response_id": made}
            for name, change in ODD_RECORDS.items():
                await store.put("", made, altered(record, **change))
                for reply in (
                    await client.get(url),
                    await client.get(f"{url}/input_items"),
                    await client.post(f"{url}/cancel"),
                    await client.post(RESPONSES, json=on),
                ):
                    told = (reply.status_code, reply.json().get("error", {}).get("code"))
                    assert told == (500, "response_store_failed"), (name, reply.text)
            await store.put("", made, altered(record))
            assert (await client.post(RESPONSES, json=on)).status_code == 200
            assert (await client.delete(url)).status_code == 200


@pytest.mark.anyio
async def test_a_response_that_is_too_large_says_so() -> None:
    async with open_engine(scripted("Ja.")) as (engine, _):
        context = build_context(engine, api_settings(responses_max_bytes=1024))
        transport = httpx2.ASGITransport(build_app(context))
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            asked = {"input": "hi" * 500}
            large = await client.post(RESPONSES, json=asked)
            unstored = await client.post(RESPONSES, json={**asked, "store": False})
    assert (large.status_code, large.json()["error"]["code"]) == (500, "response_too_large")
    assert unstored.status_code == 200


class SlowStore(MemoryResponseStore):
    """Waits at every call; the client may be gone meanwhile."""

    def __init__(self) -> None:
        super().__init__(10, 2**20)
        self.waits = False
        self.waiting = anyio.Event()

    async def put(self, owner: str, response_id: str, record: bytes) -> None:
        if self.waits:
            self.waiting.set()
            await anyio.sleep_forever()
        await super().put(owner, response_id, record)


@pytest.mark.anyio
async def test_a_call_that_is_cut_off_while_it_stores() -> None:
    store = SlowStore()
    async with open_engine(scripted("Ja.")) as (engine, _):
        context = build_context(engine, api_settings(), responses=store)
        transport = httpx2.ASGITransport(build_app(context))
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            store.waits = True
            replies: list[httpx2.Response] = []

            async def ask(stream: bool) -> None:
                replies.append(await client.post(RESPONSES, json={"input": "hi", "stream": stream}))

            for stream in (False, True):
                store.waiting = anyio.Event()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(ask, stream)
                    with anyio.fail_after(30):
                        await store.waiting.wait()
                    context.calls.cut_off()
            store.waits = False
            after = await client.post(RESPONSES, json={"input": "hi"})
    assert replies[0].status_code == 503 and replies[0].json()["error"]["code"] == "shutting_down"
    assert json.loads(events(replies[1].text)[-1])["type"] == "response.failed"
    assert after.status_code == 200 and len(store) == 1
