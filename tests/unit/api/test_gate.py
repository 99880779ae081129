"""Keys, origins, request ids, methods and bodies: what happens before and around every handler."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import anyio
import pytest

from api_server import MODEL, api_settings, in_process, until
from infer.api.auth import key_digests
from infer.api.errors import ApiError
from infer.api.limits import decode_object
from infer.config.engine import ApiSection, EngineConfig
from infer.errors import ConfigError

pytestmark = pytest.mark.anyio
CHAT, MODELS = "/v1/chat/completions", "/v1/models"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


async def test_a_key_is_asked_for_and_several_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("from-file\n\nthird\n")
    settings = {"api_keys": ("first",), "api_key_file": str(tmp_path / "keys")}
    async with in_process(settings=settings) as (client, _):
        for key in ("first", "from-file", "third"):
            assert (await client.get(MODELS, headers={"authorization": f"Bearer {key}"})).status_code == 200
            assert (await client.get(MODELS, headers={"x-api-key": key})).status_code == 200
        for headers in ({}, {"authorization": "Bearer firs"}, {"authorization": "Basic first"}, {"x-api-key": ""}):
            reply = await client.post(CHAT, json=BODY, headers=headers)
            assert reply.status_code == 401 and reply.headers["www-authenticate"] == "Bearer"
            assert reply.json()["error"]["code"] == "invalid_api_key"
            assert reply.json()["error"]["type"] == "authentication_error"
        for path in ("/health", "/ready", "/ping"):
            assert (await client.get(path)).status_code == 200


def test_keys_are_never_shown(tmp_path: Path) -> None:
    config = EngineConfig(api={"api_keys": "a-secret,b-secret"})
    assert "secret" not in repr(config) + str(config.model_dump()) + config.model_dump_json()
    assert len(key_digests(config.api)) == 2 and b"a-secret" not in key_digests(config.api)


@pytest.mark.parametrize("content", [None, "\n\n", b"\xff\xfe"])
def test_a_key_file_that_holds_no_key(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match="api_key_file"):
        key_digests(ApiSection(api_key_file=str(path)))


async def test_pages_of_foreign_origins_may_not_act() -> None:
    async with in_process() as (client, _):
        foreign = await client.post(CHAT, json=BODY, headers={"origin": "http://evil.example"})
        own = await client.post(CHAT, json=BODY, headers={"origin": "http://test"})
        read = await client.get(MODELS, headers={"origin": "http://evil.example"})
        preflight = await client.options(
            CHAT, headers={"origin": "http://evil.example", "access-control-request-method": "POST"}
        )
    assert foreign.status_code == 403 and foreign.json()["error"]["code"] == "origin_not_allowed"
    assert own.status_code == 200
    assert read.status_code == 200 and "access-control-allow-origin" not in read.headers
    assert preflight.status_code == 403


async def test_listed_origins_get_cors_headers() -> None:
    async with in_process(settings={"cors_origins": "http://app.example"}) as (client, _):
        origin = {"origin": "http://app.example"}
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        preflight = await client.options(CHAT, headers={**origin, **asked})
        reply = await client.post(CHAT, json=BODY, headers=origin)
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == "http://app.example"
    assert preflight.headers["access-control-allow-headers"] == "authorization"
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert reply.headers["access-control-allow-origin"] == "http://app.example"
    async with in_process(settings={"cors_origins": "*"}) as (client, _):
        reply = await client.get(MODELS, headers={"origin": "http://any.example"})
    assert reply.headers["access-control-allow-origin"] == "*"


async def test_request_ids_are_taken_made_and_returned() -> None:
    async with in_process() as (client, _):
        stated = await client.get(MODELS, headers={"x-request-id": "abc-1"})
        strange = await client.get(MODELS, headers={"x-request-id": "a b;c"})
        made = await client.get("/nowhere")
    assert stated.headers["x-request-id"] == "abc-1"
    assert len(strange.headers["x-request-id"]) == 32 and len(made.headers["x-request-id"]) == 32


async def test_two_requests_with_one_id_do_not_collide() -> None:
    async with in_process(latency=0.01) as (client, _):
        statuses = []

        async def one() -> None:
            statuses.append((await client.post(CHAT, json=BODY, headers={"x-request-id": "same"})).status_code)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one)
            tasks.start_soon(one)
    assert statuses == [200, 200]


async def test_unknown_routes_and_methods_answer_in_openais_shape() -> None:
    async with in_process() as (client, _):
        nowhere = await client.get("/v1/nowhere")
        wrong = await client.get(CHAT)
        head = await client.head("/health")
        deleted = await client.delete(MODELS)
    assert nowhere.status_code == 404 and nowhere.json()["error"]["code"] == "not_found"
    assert wrong.status_code == 405 and wrong.headers["allow"] == "POST"
    assert head.status_code == 200
    assert deleted.status_code == 405


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"messages": NaN}',
        b'{"a": "\xff\xfe"}',
        b'{"a": "\\ud800"}',
        b'{"a": 1e999}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"messages": [' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"]}",
        b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": ' + b"9" * 300 + b"}",
        b'{"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"x": '
        + b"[" * 500
        + b"]" * 500
        + b"}}",
    ],
    ids=lambda body: repr(body[:24]),
)
async def test_bodies_that_are_no_requests_answer_400(body: bytes) -> None:
    async with in_process() as (client, _):
        reply = await client.post(CHAT, content=body)
        assert (await client.post(CHAT, json=BODY)).status_code == 200
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["message"]
    assert len(reply.content) < 3000


def test_json_errors_say_where() -> None:
    with pytest.raises(ApiError, match="not valid JSON"):
        decode_object(b'{"a": }')


async def test_a_long_body_is_refused() -> None:
    async with in_process(settings={"max_body_bytes": 2048}) as (client, _):
        reply = await client.post(CHAT, json={**BODY, "user": "x" * 4000})
        assert (await client.post(CHAT, json=BODY)).status_code == 200
    assert reply.status_code == 413 and reply.json()["error"]["code"] == "body_too_long"
    assert "2048" in reply.json()["error"]["message"]


async def test_too_many_requests_at_once_are_refused() -> None:
    async with in_process(settings={"max_concurrent_requests": 1}, latency=0.05) as (client, server):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: client.post(CHAT, json={**BODY, "max_tokens": 8}))
            await until(lambda: len(server.calls) == 1)
            refused = await client.post(CHAT, json=BODY)
            health = await client.get("/health")
        after = await client.post(CHAT, json=BODY)
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert health.status_code == 200 and after.status_code == 200


async def test_a_full_engine_queue_is_429() -> None:
    config = EngineConfig(cache={"num_blocks": 64}, scheduler={"max_num_waiting": 1, "max_num_seqs": 1})
    async with in_process(config=config, latency=0.05) as (client, server), anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(lambda: client.post(CHAT, json={**BODY, "max_tokens": 20}))
        await until(lambda: server.engine.statistics().waiting == 1)
        whole = await client.post(CHAT, json=BODY)
        streamed = await client.post(CHAT, json={**BODY, "stream": True})
        ready = await client.get("/ready")
        tasks.cancel_scope.cancel()
    for reply in (whole, streamed):
        assert reply.status_code == 429 and reply.json()["error"]["code"] == "queue_full"
        assert int(reply.headers["retry-after"]) >= 1
    assert ready.status_code == 503


async def test_a_defect_is_a_500_that_hides_its_details(caplog: pytest.LogCaptureFixture) -> None:
    async with in_process() as (client, server):
        server.engine._admission.prompts.encode = None  # type: ignore[method-assign, assignment]
        with caplog.at_level(logging.ERROR, "infer.api"):
            reply = await client.post(CHAT, json=BODY)
    assert reply.status_code == 500 and reply.json()["error"]["type"] == "server_error"
    assert "TypeError" in reply.json()["error"]["message"] and "NoneType" not in reply.text
    assert "Traceback" in caplog.text


def test_settings_that_contradict() -> None:
    for wrong, named in (
        ({"tls_cert": "a"}, "api.tls_key"),
        ({"uds": "/tmp/x", "fd": 3}, "api.fd"),
        ({"port": 70000}, "api.port"),
        ({"unknown_fields": "drop"}, "api.unknown_fields"),
    ):
        with pytest.raises(ConfigError) as caught:
            EngineConfig(api=wrong)
        assert named in caught.value.fields
    assert api_settings().max_body_bytes == 32 * 2**20
