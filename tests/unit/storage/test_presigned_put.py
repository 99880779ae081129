"""The presigned PUT against real sockets: exact bytes, redirects, refusals, lost answers, deadlines, addresses, TLS."""

from __future__ import annotations

import ssl
import threading
from typing import Any

import anyio
import pytest

from infer.errors import StorageError
from infer.storage._grant import parse_grant
from infer.storage.presigned_put import ATTEMPTS, BUSY, PresignedPut
from put_server import (
    Behaviour,
    Exchange,
    PutServer,
    answer,
    drop,
    normal,
    put_server,
    reached,
    silent,
    stalled,
    status,
    store_and_drop,
)

pytestmark = pytest.mark.anyio
NOW = 1_800_000_000.0
DATA = bytes(range(256)) * 700


def grant_for(server: PutServer, path: str = "/object", **changes: Any) -> Any:
    options = {
        "expires_at": "2027-01-15T08:10:00Z",
        "max_bytes": 10_000_000,
        "object_id": "opaque-1",
        "required_headers": {"content-type": "application/octet-stream", "if-none-match": "*"},
        "insecure_hosts": (server.authority,),
    }
    return parse_grant(server.url(path), options | changes, NOW)


def target(server: PutServer, path: str = "/object", **changes: Any) -> PresignedPut:
    own = {name: changes.pop(name) for name in list(changes) if name in ("clock", "resolver", "total_seconds")}
    settings: dict[str, Any] = {"connect_seconds": 5, "total_seconds": 10, "clock": lambda: NOW} | own
    return PresignedPut(grant_for(server, path, **changes), **settings)


async def failure(made: PresignedPut, data: bytes = DATA) -> str:
    with pytest.raises(StorageError) as caught:
        await made.put(data, if_absent=True)
    error = caught.value
    assert error.__cause__ is None, "no chained cause"
    assert "127.0.0.1" not in str(error) and "object?" not in str(error)
    return error.code


async def test_the_bytes_on_the_wire() -> None:
    """T35: method, raw path and query, headers, body."""
    with put_server() as server:
        await target(server, "/k%2Fx//y?sig=a%2Bb&a=1&a=2").put(DATA, if_absent=True)
        (exchange,) = server.exchanges
    assert exchange.request_line == "PUT /k%2Fx//y?sig=a%2Bb&a=1&a=2 HTTP/1.1"
    assert exchange.headers == {
        "host": server.authority,
        "content-length": str(len(DATA)),
        "content-type": "application/octet-stream",
        "if-none-match": "*",
    }
    assert exchange.body == DATA


@pytest.mark.parametrize(
    "reply", [status(200), status(201), status(204), b"HTTP/1.0 200 OK\r\n\r\n", b"HTTP/1.1 200\r\n\r\n"]
)
async def test_any_2xx_is_success(reply: bytes) -> None:
    with put_server(answer(reply)) as server:
        await target(server).put(b"", if_absent=True)


async def test_interim_answers_are_passed_over() -> None:
    with put_server(answer(status(100) + b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n" + status(204))) as server:
        await target(server).put(DATA, if_absent=True)


@pytest.mark.parametrize("code", [301, 302, 307, 308])
async def test_a_redirect_is_a_failure_and_not_followed(code: int) -> None:
    """T36."""
    with put_server() as other, put_server(answer(status(code, f"location: {other.url()}"))) as server:
        assert await failure(target(server)) == "artifact_upload_rejected"
        assert (server.accepted, other.accepted) == (1, 0)


@pytest.mark.parametrize("code", [400, 401, 403, 404, 405, 411, 413, 501])
async def test_other_answers_are_refusals(code: int) -> None:
    with put_server(answer(status(code))) as server:
        assert await failure(target(server)) == "artifact_upload_rejected"
        assert server.accepted == 1


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.storage.presigned_put._PAUSE_SECONDS", 0.01)


@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize("code", BUSY)
async def test_a_busy_server_is_asked_again(code: int) -> None:
    with put_server(answer(status(code)), answer(status(code))) as server:
        await target(server).put(DATA, if_absent=True)
        assert server.objects == {"/object": DATA} and server.accepted == 3


async def test_it_is_asked_when_it_says() -> None:
    with put_server(answer(status(503, "Retry-After: 1"))) as server:
        before = anyio.current_time()
        await target(server).put(DATA, if_absent=True)
        assert anyio.current_time() - before >= 1 and server.accepted == 2


@pytest.mark.parametrize(
    ("header", "changes"),
    [("retry-after: 11", {}), ("retry-after: 7", {"expires_at": "2027-01-15T08:00:06Z"})],
    ids=["deadline", "grant"],
)
async def test_a_wait_beyond_the_deadline_is_not_begun(header: str, changes: dict[str, str]) -> None:
    with put_server(answer(status(503, header))) as server:
        before = anyio.current_time()
        with pytest.raises(StorageError) as caught:
            await target(server, **changes).put(DATA, if_absent=True)
        assert (caught.value.code, caught.value.retryable) == ("artifact_upload_rejected", True)
        assert anyio.current_time() - before < 5 and server.accepted == 1


@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize(
    "words", ["retry-after: soon", "retry-after: -5", "retry-after:", "retry-after: Fri, 1 Jan 2100"]
)
async def test_a_wait_that_cannot_be_read_is_the_usual_one(words: str) -> None:
    with put_server(answer(status(429, words))) as server:
        await target(server).put(DATA, if_absent=True)
        assert server.accepted == 2


@pytest.mark.usefixtures("short_pauses")
async def test_busy_for_ever() -> None:
    with put_server(*[answer(status(503))] * 9) as server:
        assert await failure(target(server)) == "artifact_upload_rejected"
        assert server.accepted == ATTEMPTS


def store_and_say(code: int) -> Behaviour:
    def behave(exchange: Exchange) -> None:
        exchange.create()
        exchange.socket.sendall(status(code))

    return behave


@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize(
    ("first", "code"),
    [
        (store_and_say(500), "artifact_outcome_unknown"),
        (store_and_say(503), "artifact_outcome_unknown"),
        (store_and_say(409), "artifact_conflict"),
        (store_and_say(429), "artifact_conflict"),
    ],
    ids=["500", "503", "409", "429"],
)
async def test_an_object_that_is_there_after_a_busy_answer(first: Behaviour, code: str) -> None:
    """A server error may come after the object was stored; 409 and 429 say that it was not."""
    with put_server(first) as server:
        assert await failure(target(server)) == code
        assert server.accepted == 2


@pytest.mark.usefixtures("short_pauses")
async def test_lost_and_then_busy_for_ever_is_not_known() -> None:
    with put_server(drop, *[answer(status(503))] * 9) as server:
        assert await failure(target(server)) == "artifact_outcome_unknown"
        assert server.accepted == ATTEMPTS


async def test_a_second_object_is_a_conflict() -> None:
    with put_server() as server:
        await target(server).put(DATA, if_absent=True)
        assert await failure(target(server), b"other") == "artifact_conflict"
        assert server.objects == {"/object": DATA}


async def test_stored_but_the_answer_is_lost() -> None:
    """BR-11: the second try meets the object; a grant cannot read it, so nothing is claimed."""
    with put_server(store_and_drop) as server:
        assert await failure(target(server)) == "artifact_outcome_unknown"
        assert server.objects == {"/object": DATA} and server.accepted == 2


async def test_not_stored_and_the_answer_is_lost() -> None:
    """BR-11: the second try stores it."""
    with put_server(drop) as server:
        await target(server).put(DATA, if_absent=True)
        assert server.objects == {"/object": DATA} and server.accepted == 2


@pytest.mark.parametrize(
    "reply", [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 200", b"HTTP/2 200\r\n\r\n", b"HTTP/1.1 101 X\r\n\r\n"]
)
async def test_answers_that_are_none(reply: bytes) -> None:
    with put_server(answer(reply), answer(reply)) as server:
        assert await failure(target(server)) == "artifact_outcome_unknown"


async def test_an_endless_head_is_cut_off() -> None:
    endless = answer(b"HTTP/1.1 200 OK\r\n" + b"x-a: " + b"y" * 200_000)
    with put_server(endless, endless) as server:
        assert await failure(target(server)) == "artifact_outcome_unknown"


async def test_a_refusal_before_the_body_was_read() -> None:
    with put_server(answer(status(403)), answer(status(403)), read_body=False) as server:
        assert await failure(target(server), bytes(9_000_000)) in (
            "artifact_upload_rejected",
            "artifact_delivery_failed",
        )


async def test_nobody_listens() -> None:
    with put_server() as server:
        made = target(server)
    assert await failure(made) == "artifact_delivery_failed"


async def test_a_server_that_takes_all_and_says_nothing() -> None:
    with put_server(silent) as server:
        assert await failure(target(server, total_seconds=0.3)) == "artifact_outcome_unknown"


async def test_a_server_that_takes_nothing() -> None:
    with put_server(stalled, read_body=False) as server:
        assert await failure(target(server, total_seconds=0.3), bytes(9_500_000)) == "artifact_upload_timeout"


async def test_size_and_expiry_are_checked_before_the_network() -> None:
    """T24, T25."""
    with put_server() as server:
        assert await failure(target(server, max_bytes=4), b"12345") == "artifact_too_large"
        assert await failure(target(server, clock=lambda: NOW + 600)) == "artifact_target_expired"
        assert server.accepted == 0
        await target(server, max_bytes=5).put(b"12345", if_absent=True)


async def test_only_creation() -> None:
    with put_server() as server:
        with pytest.raises(StorageError):
            await target(server).put(DATA, if_absent=False)
        assert server.accepted == 0


async def test_two_overlapping_uploads_share_nothing() -> None:
    """T23, BR-01: the fast one ends, and closes, while the slow one waits."""
    fast_is_done = threading.Event()

    def slow(exchange: Exchange) -> None:
        fast_is_done.wait(10)
        normal(exchange)

    with put_server(slow) as server:
        results: list[str] = []

        async def put(path: str) -> None:
            await target(server, path).put(DATA, if_absent=True)
            results.append(path)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(put, "/slow")
            await reached(server)
            await put("/fast")
            fast_is_done.set()
        assert results == ["/fast", "/slow"]
        assert server.objects == {"/fast": DATA, "/slow": DATA}


async def test_cancellation_closes_the_connection() -> None:
    with put_server(silent) as server:
        with anyio.move_on_after(0.3) as scope:
            await target(server).put(DATA, if_absent=True)
        assert scope.cancelled_caught
        # the server's thread ends when its client has gone; leaving the block waits for that


@pytest.mark.parametrize(
    "addresses", [["10.0.0.1"], ["8.8.8.8", "127.0.0.1"], ["169.254.169.254"], ["::ffff:127.0.0.1"], ["nonsense"]]
)
async def test_names_that_resolve_to_private_addresses_are_never_contacted(
    addresses: list[str], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """BR-06."""

    async def resolver(host: str, port: int) -> list[str]:
        assert (host, port) == ("bucket.example", 443)
        return addresses

    async def connect(*_: Any, **__: Any) -> Any:
        raise AssertionError("contacted")

    monkeypatch.setattr(anyio, "connect_tcp", connect)
    made = PresignedPut(
        parse_grant("https://bucket.example/k", options | {"max_ttl_seconds": 10**10}, 0.0),
        connect_seconds=5,
        total_seconds=5,
        resolver=resolver,
    )
    assert await failure(made) == "artifact_address_refused"


async def test_addresses_are_checked_again_for_every_connection() -> None:
    """BR-06: the name changes its answer between two tries."""
    answers = [["127.0.0.1"], ["10.0.0.1"]]

    async def resolver(host: str, port: int) -> list[str]:
        return answers.pop(0)

    with put_server(drop) as server:
        assert await failure(target(server, resolver=resolver)) == "artifact_address_refused"
        assert server.accepted == 1


async def test_the_next_address_is_tried() -> None:
    async def resolver(host: str, port: int) -> list[str]:
        return ["127.0.0.2", "127.0.0.1"]

    with put_server() as server:
        await target(server, resolver=resolver).put(DATA, if_absent=True)


async def test_a_name_without_addresses() -> None:
    async def resolver(host: str, port: int) -> list[str]:
        raise OSError("no such name")

    with put_server() as server:
        assert await failure(target(server, resolver=resolver)) == "artifact_delivery_failed"


class TestTls:
    """The connection goes to the address that was checked; certificate and Host are those of the name."""

    def made(self, server: PutServer, options: dict[str, Any], context: ssl.SSLContext | None) -> PresignedPut:
        asked: list[str] = []

        async def resolver(host: str, port: int) -> list[str]:
            asked.append(host)
            return ["127.0.0.1"]

        hosts = (f"bucket.example:{server.port}",)
        grant = parse_grant(f"https://bucket.example:{server.port}/k", options | {"hosts": hosts}, 0.0)
        return PresignedPut(grant, connect_seconds=5, total_seconds=10, resolver=resolver, ssl_context=context)

    @pytest.fixture(autouse=True)
    def loopback_is_public(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("infer.storage.presigned_put.refused_address", lambda addresses, loopback: "")

    @pytest.fixture
    def long(self, options: dict[str, Any]) -> dict[str, Any]:
        return options | {"max_ttl_seconds": 10**10}

    async def test_upload(self, long: dict[str, Any], server_tls: ssl.SSLContext, client_tls: ssl.SSLContext) -> None:
        with put_server(tls=server_tls) as server:
            await self.made(server, long, client_tls).put(DATA, if_absent=True)
            assert server.exchanges[0].headers["host"] == f"bucket.example:{server.port}"
            assert server.objects == {"/k": DATA}

    async def test_the_name_is_what_the_certificate_must_have(
        self, long: dict[str, Any], server_tls: ssl.SSLContext, client_tls: ssl.SSLContext
    ) -> None:
        """Its own name is offered to the server; a certificate of another name is refused."""
        offered: list[str | None] = []
        server_tls.sni_callback = lambda _, name, __: offered.append(name)
        with put_server(tls=server_tls) as server:
            hosts = (f"other.example:{server.port}",)
            grant = parse_grant(f"https://{hosts[0]}/k", long | {"hosts": hosts}, 0.0)

            async def resolver(host: str, port: int) -> list[str]:
                return ["127.0.0.1"]

            made = PresignedPut(grant, connect_seconds=5, total_seconds=10, resolver=resolver, ssl_context=client_tls)
            assert await failure(made) == "artifact_delivery_failed"
            assert server.exchanges == [] and set(offered) == {"other.example"}

    async def test_a_certificate_that_nobody_signed(self, long: dict[str, Any], server_tls: ssl.SSLContext) -> None:
        with put_server(tls=server_tls) as server:
            assert await failure(self.made(server, long, None)) == "artifact_delivery_failed"
            assert server.exchanges == []

    async def test_a_server_that_speaks_no_tls(self, long: dict[str, Any], client_tls: ssl.SSLContext) -> None:
        with put_server(answer(b"hello"), answer(b"hello"), read_body=False) as server:
            made = self.made(server, long, client_tls)
            made._connect_seconds = 0.5
            assert await failure(made) in ("artifact_delivery_failed", "artifact_upload_timeout")


async def test_proxy_variables_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    with put_server() as proxy, put_server() as server:
        for name in ("http_proxy", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url(""))
        await target(server).put(DATA, if_absent=True)
        assert (server.accepted, proxy.accepted) == (1, 0)
