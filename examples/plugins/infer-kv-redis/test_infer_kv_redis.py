"""The plugin against the kit, with a real server that ends, hangs, loses and damages what it was given."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import infer_kv_redis
import pytest
from redis_server import RedisServer

from infer import ConfigError
from infer.plugins import KVConnectorSpec
from infer.testing.kits import Check, kv_connector

(SPEC,) = infer_kv_redis.infer_kv_connectors()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    running = RedisServer(tmp_path_factory.mktemp("redis"))
    yield running
    running.close()


def checks(spec: KVConnectorSpec, directory: Path, server: Any) -> dict[str, Check]:
    return {check.name: check for check in kv_connector.checks(spec, directory, lambda options: server)}


@pytest.mark.parametrize("name", list(checks(SPEC, Path("unused"), None)))
def test_conforms(server: RedisServer, name: str, tmp_path: Path) -> None:
    server.client.flushall()
    spec = dataclasses.replace(SPEC, example={"url": server.url})
    checks(spec, tmp_path, server)[name].run()


def test_values_expire(server: RedisServer) -> None:
    server.client.flushall()
    store = infer_kv_redis.open_store({"url": server.url, "ttl": "60"})
    store.put({"a": b"1"})
    assert store.contains(["a", "b"]) == [True, False] and store.get(["b", "a"]) == [None, b"1"]
    assert 0 < server.client.ttl("infer:a") <= 60
    store.close()


@pytest.mark.parametrize(
    "options", [{"uri": "x"}, {"ttl": "soon"}, {"ttl": 0}, {"url": "http://:secret@host"}, {"url": 7}], ids=repr
)
def test_wrong_options_are_refused_without_a_secret(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="the connector 'redis'") as caught:
        infer_kv_redis.open_store(options)
    assert "secret" not in str(caught.value)
