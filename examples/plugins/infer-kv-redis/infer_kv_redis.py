"""KV blocks in Redis. The plugin only moves bytes: keys, checksums, threads and outages are `StoreMatcher`'s and
`StoreTransfer`'s business."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from infer import ConfigError
from infer.plugins import KVConnectorSpec, KVFacts, StoreMatcher, StoreTransfer, hookimpl

CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 5.0
"""Longer than this, and Redis counts as away: its requests compute what they wanted to load."""
DAY = 24 * 60 * 60


class RedisStore:
    """A `KVStore`. Keys are `infer:` and what the engine calls them; Redis may drop any of them at any time."""

    def __init__(self, url: str, ttl: int) -> None:
        """Does not connect yet: an engine starts without Redis and uses it when it is there. Raises ValueError for a URL that
        is none."""
        self._ttl = ttl
        self._client = redis.Redis.from_url(
            url,
            socket_connect_timeout=CONNECT_SECONDS,
            socket_timeout=ANSWER_SECONDS,
            retry=Retry(NoBackoff(), 1),  # a connection from before a restart of Redis is made anew
        )

    def contains(self, keys: Sequence[str]) -> list[bool]:
        with self._client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.exists(_name(key))
            return [bool(count) for count in pipe.execute()]

    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        values: list[Any] = self._client.mget([_name(key) for key in keys])  # bytes: nothing is decoded
        return values

    def put(self, values: Mapping[str, bytes]) -> None:
        with self._client.pipeline(transaction=False) as pipe:
            for key, value in values.items():
                pipe.set(_name(key), value, ex=self._ttl)
            pipe.execute()

    def close(self) -> None:
        self._client.close()


def _name(key: str) -> str:
    return f"infer:{key}"


def open_store(options: Mapping[str, Any]) -> RedisStore:
    """`url`, and `ttl` in seconds. Raises `ConfigError`, which never shows the URL: it may hold a password."""
    unknown = sorted(set(options) - {"url", "ttl"})
    if unknown:
        raise _refusal(f"has no option {unknown[0]!r}; it takes url and ttl")
    try:
        ttl = int(options.get("ttl", DAY))
    except (TypeError, ValueError):
        ttl = 0
    if ttl < 1:
        raise _refusal(f"ttl={options['ttl']!r}: write whole seconds, at least 1")
    try:
        return RedisStore(options.get("url", "redis://127.0.0.1:6379/0"), ttl)
    except (AttributeError, TypeError, ValueError):
        raise _refusal("url: write redis://HOST:PORT/NUMBER, or rediss:// or unix://") from None


def _refusal(problem: str) -> ConfigError:
    return ConfigError(f"kv_connector.options: the connector 'redis' {problem}", fields=("kv_connector.options",))


def scheduler_half(options: dict[str, Any], facts: KVFacts) -> StoreMatcher:
    return StoreMatcher(open_store(options), facts)


def worker_half(options: dict[str, Any], facts: KVFacts) -> StoreTransfer:
    return StoreTransfer(open_store(options), facts)


@hookimpl
def infer_kv_connectors() -> list[KVConnectorSpec]:
    return [
        KVConnectorSpec(
            name="redis",
            api=1,
            factory="infer_kv_redis:scheduler_half",
            worker_factory="infer_kv_redis:worker_half",
            example={"url": "redis://127.0.0.1:6379/0"},
        )
    ]
