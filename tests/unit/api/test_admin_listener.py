"""A listener for admin routes alone: they are served only there, under the same keys, and it stops with the other one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from api_server import MODEL, api_settings, open_engine, until
from infer.api import open_admin_listener, open_listener, serve
from infer.config.engine import EngineConfig
from infer.engine.engine import Engine
from infer.engine.step import SamplingSpec
from infer.errors import ConfigError

pytestmark = pytest.mark.anyio
ADMIN_ROUTES = {
    ("GET", "/server_info"),
    ("GET", "/explain"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/abort_requests"),
}
MONITORING = ("/health", "/ready", "/ping", "/metrics", "/version")


def endless(token_ids: Sequence[int], sampling: SamplingSpec) -> int:
    return 97


@asynccontextmanager
async def two_listeners(**settings: Any) -> AsyncIterator[tuple[Engine, str, str, anyio.Event]]:
    """(engine, public address, admin address, what stops the server)."""
    chosen = api_settings(admin=True, **settings)
    stop = anyio.Event()
    async with open_engine(endless, latency=0.02) as (engine, _), anyio.create_task_group() as tasks:
        public, admin = open_listener(chosen), open_admin_listener(chosen)
        assert admin is not None

        async def run(*, task_status: Any) -> None:
            await serve(engine, chosen, listener=public, admin_listener=admin, stop=stop, task_status=task_status)

        address = await tasks.start(run)
        yield engine, address, admin.address, stop
        tasks.cancel_scope.cancel()


def client_of(address: str, **more: Any) -> httpx2.AsyncClient:
    if address.startswith("unix:"):
        transport = httpx2.AsyncHTTPTransport(uds=address.removeprefix("unix:"))
        return httpx2.AsyncClient(transport=transport, base_url="http://x", **more)
    return httpx2.AsyncClient(base_url=address, **more)


async def paths(client: httpx2.AsyncClient) -> set[str]:
    return set((await client.get("/openapi.json")).json()["paths"])


@pytest.mark.row("SERVE-ADMIN", "all answer 404 on the public listener once there is one for them")
@pytest.mark.parametrize("place", ["port", "uds"])
async def test_admin_routes_are_on_their_own_listener_only(place: str, tmp_path: Path) -> None:
    settings = {"admin_port": 0} if place == "port" else {"admin_uds": str(tmp_path / "admin.sock")}
    async with (
        two_listeners(**settings) as (engine, public_address, admin_address, _),
        client_of(public_address) as public,
        client_of(admin_address) as admin,
    ):
        assert public_address != admin_address
        for method, path in ADMIN_ROUTES:
            assert (await public.request(method, path)).status_code == 404, path
            expected = 400 if path == "/explain" else 200  # which request?
            assert (await admin.request(method, path)).status_code == expected, path
        for path in MONITORING:
            assert (await public.get(path)).status_code == (await admin.get(path)).status_code == 200, path
        asked = {"model": MODEL, "prompt": "a", "max_tokens": 1}
        assert (await public.post("/v1/completions", json=asked)).status_code == 200
        assert (await admin.post("/v1/completions", json=asked)).status_code == 404
        assert "/" not in await paths(admin) and (await admin.get("/")).status_code == 404
        shared = {*MONITORING, "/openapi.json"}
        assert await paths(admin) == {path for _, path in ADMIN_ROUTES} | shared
        assert await paths(public) & await paths(admin) == shared
        assert engine.statistics().running == 0
    assert not (tmp_path / "admin.sock").exists()


async def test_the_same_keys_open_both() -> None:
    async with (
        two_listeners(admin_port=0, api_keys=("k1", "k2")) as (_, public_address, admin_address, _),
        client_of(public_address) as public,
        client_of(admin_address) as admin,
    ):
        for client, path in ((public, "/v1/models"), (admin, "/server_info"), (admin, "/metrics")):
            assert (await client.get(path)).status_code == 401
            assert (await client.get(path, headers={"authorization": "Bearer k2"})).status_code == 200
        assert (await admin.get("/health")).status_code == 200


async def test_pages_of_other_origins_may_not_act_there() -> None:
    origin = {"origin": "https://page.example"}
    async with (
        two_listeners(admin_port=0, cors_origins=("*",)) as (_, public_address, admin_address, _),
        client_of(public_address) as public,
        client_of(admin_address) as admin,
    ):
        asked = {"prompt": "a", "max_tokens": 1}
        assert (await public.post("/v1/completions", json=asked, headers=origin)).status_code == 200
        assert (await admin.post("/abort_requests", headers=origin)).status_code == 403


async def test_a_gentle_stop_drains_both_and_closes_both() -> None:
    async with (
        two_listeners(admin_port=0) as (engine, public_address, admin_address, stop),
        client_of(public_address, timeout=30) as public,
        client_of(admin_address) as admin,
    ):
        replies: list[httpx2.Response] = []

        async def one() -> None:
            replies.append(await public.post("/v1/completions", json={"prompt": "a", "max_tokens": 1500}))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one)
            await until(lambda: engine.statistics().running == 1)
            stop.set()
            assert (await admin.get("/ready")).status_code == 503
            refused = await admin.post("/reset_prefix_cache")
            aborted = await admin.post("/abort_requests")
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
    assert aborted.json()["aborted"] == 1
    assert replies[0].status_code == 200 and replies[0].json()["choices"][0]["finish_reason"] == "abort"
    for address in (public_address, admin_address):
        async with client_of(address) as late:
            with pytest.raises(httpx2.ConnectError):
                await late.get("/ping")


async def test_without_its_own_listener_they_are_on_the_public_one() -> None:
    assert open_admin_listener(api_settings(admin=True)) is None


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({"admin_port": 1, "admin_uds": "/x"}, ("api.admin_port", "api.admin_uds")),
        ({"admin_host": "::1"}, ("api.admin_host", "api.admin_port")),
        ({"admin": False, "admin_port": 0}, ("api.admin_port", "api.admin")),
        ({"admin": False, "admin_uds": "/x"}, ("api.admin_uds", "api.admin")),
        ({"port": 9000, "admin_port": 9000}, ("api.admin_port", "api.port")),
        ({"uds": "/x", "admin_uds": "/x"}, ("api.admin_uds", "api.uds")),
    ],
)
def test_contradictions_name_both_fields(settings: dict[str, Any], fields: tuple[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(api={"admin": True, **settings})
    assert caught.value.fields == fields and all(field in str(caught.value) for field in fields)


async def test_a_place_that_is_taken_is_one_line() -> None:
    with open_listener(api_settings()) as taken:
        taken.listen(10)
        port = int(taken.address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: Address already in use") as caught:
            open_admin_listener(api_settings(admin=True, admin_port=port))
    assert caught.value.fields == ("api.admin_host", "api.admin_port")
