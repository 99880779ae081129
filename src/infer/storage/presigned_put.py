"""Storage target: one HTTP PUT to a signed URL, under rules that leave a client's URL nothing to attack with.

Runs in the pipeline's task. Owns one connection from creation to close; nothing is shared between two deliveries.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
from anyio.streams.tls import TLSStream

from infer.errors import StorageError
from infer.plugins.hookspecs import hookimpl
from infer.plugins.storage_target import API_VERSION, StorageTargetSpec
from infer.storage._addresses import Address, refused_address, resolve
from infer.storage._grant import Grant, parse_grant
from infer.storage._http import Lost, Reply, exchange

LOST_ATTEMPTS = 2
"""A second try when the first was lost on the way: the upload is create-only, so it cannot store twice."""
ATTEMPTS = 4
"""In all, when the server says that it is busy."""
UNDECIDED = (409, 425, 429)
"""Not stored, and to be tried again. S3 answers 409 while another conditional write of the key is on its way."""
BUSY = (*UNDECIDED, 408, 500, 502, 503, 504)
_PAUSE_SECONDS = 0.2
_SLOWER = 3


@dataclass(slots=True)
class _Progress:
    """What may have happened at the other end."""

    handed_over: bool = False
    """The whole object left in some attempt, and nothing said that it was not stored."""


class PresignedPut:
    """`parse_grant` has checked everything that a URL can show; addresses are checked at every connection."""

    def __init__(
        self,
        grant: Grant,
        *,
        connect_seconds: float,
        total_seconds: float,
        clock: Callable[[], float] = time.time,
        resolver: Callable[[str, int], Awaitable[list[Address]]] = resolve,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._grant = grant
        self._connect_seconds = connect_seconds
        self._total_seconds = total_seconds
        self._clock = clock
        self._resolver = resolver
        self._ssl_context = ssl_context

    @property
    def expires_at(self) -> float:
        return self._grant.expires_at

    @property
    def object_id(self) -> str:
        return self._grant.object_id

    def __repr__(self) -> str:
        return f"PresignedPut(object_id={self._grant.object_id!r}, max_bytes={self._grant.max_bytes})"

    async def put(self, data: bytes, *, if_absent: bool) -> None:
        if not if_absent:
            raise StorageError("a presigned upload can only create an object", code="artifact_target_rejected")
        if len(data) > self._grant.max_bytes:
            raise StorageError("the object exceeds the grant's max_bytes", code="artifact_too_large")
        progress = _Progress()
        try:
            with anyio.fail_after(self._total_seconds):
                await self._put(data, progress)
        except TimeoutError:
            if progress.handed_over:
                raise _unknown() from None
            raise _late() from None

    async def aclose(self) -> None:
        """Every attempt closes its own connection."""

    async def _put(self, data: bytes, progress: _Progress) -> None:
        num_lost, was_lost, pause = 0, False, _PAUSE_SECONDS
        for attempt in range(ATTEMPTS):
            earlier = progress.handed_over  # an earlier attempt may have stored the object, and it cannot be read back
            if self._grant.expires_at <= self._clock():
                raise _unknown() if earlier else StorageError("the grant has expired", code="artifact_target_expired")
            try:
                reply = await self._attempt(data, progress)
            except Lost as lost:
                num_lost, was_lost = num_lost + 1, was_lost or progress.handed_over
                if num_lost == LOST_ATTEMPTS or attempt == ATTEMPTS - 1:
                    raise _gone(progress, lost) from None
                await anyio.sleep(pause)
                continue
            if 200 <= reply.status < 300:
                return
            if reply.status in UNDECIDED:
                progress.handed_over = earlier
            wait = max(pause, reply.retry_after or 0)
            if reply.status not in BUSY or attempt == ATTEMPTS - 1 or not self._is_time_for(wait):
                raise _refusal(reply.status, earlier, was_lost)
            await anyio.sleep(wait)
            pause *= _SLOWER

    def _is_time_for(self, wait: float) -> bool:
        """Whether another attempt after so many seconds is within the deadline and the grant's life."""
        left = min(anyio.current_effective_deadline() - anyio.current_time(), self._grant.expires_at - self._clock())
        return wait < left

    async def _attempt(self, data: bytes, progress: _Progress) -> Reply:
        """The answer to one PUT on a connection of its own. Raises `Lost`."""
        stream = await self._connect()

        def handed_over() -> None:
            progress.handed_over = True

        try:
            return await exchange(stream, self._grant.head(len(data)), data, handed_over)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.aclose_forcefully(stream)

    async def _connect(self) -> anyio.abc.ByteStream:
        """To an address that was just checked; the name stays for TLS and Host. No proxy is asked."""
        grant = self._grant
        try:
            with anyio.fail_after(self._connect_seconds):
                addresses = await self._resolver(grant.host, grant.port)
                if not addresses:
                    raise Lost
                if reason := refused_address(addresses, loopback=grant.insecure):
                    raise StorageError(reason, code="artifact_address_refused")
                stream = await _first_answering(addresses, grant.port)
                if grant.insecure:
                    return stream
                return await self._secure(stream)
        except TimeoutError:
            raise Lost(timed_out=True) from None
        except (OSError, ssl.SSLError, anyio.BrokenResourceError, anyio.EndOfStream):
            raise Lost from None

    async def _secure(self, stream: anyio.abc.SocketStream) -> anyio.abc.ByteStream:
        try:
            context = self._ssl_context or await anyio.to_thread.run_sync(ssl.create_default_context)
            return await TLSStream.wrap(
                stream, server_side=False, hostname=self._grant.host, ssl_context=context, standard_compatible=False
            )
        except BaseException:
            with anyio.CancelScope(shield=True):
                await anyio.aclose_forcefully(stream)
            raise


async def _first_answering(addresses: list[Address], port: int) -> anyio.abc.SocketStream:
    for address in addresses[:-1]:
        try:
            return await anyio.connect_tcp(address, port)
        except OSError:
            continue
    return await anyio.connect_tcp(addresses[-1], port)


def _refusal(status: int, earlier: bool, was_lost: bool) -> StorageError:
    """`earlier`: an attempt before this one may have stored the object; `was_lost`: nothing was heard of such a one."""
    if was_lost or (earlier and status == 412):
        return _unknown()
    if status == 412:
        return StorageError("an object exists already", code="artifact_conflict")
    return StorageError("the upload was not accepted", retryable=status in BUSY, code="artifact_upload_rejected")


def _gone(progress: _Progress, lost: Lost) -> StorageError:
    if progress.handed_over:
        return _unknown()
    return _late() if lost.timed_out else StorageError("the upload failed", retryable=True)


def _late() -> StorageError:
    return StorageError("the upload did not finish in time", retryable=True, code="artifact_upload_timeout")


def _unknown() -> StorageError:
    return StorageError("the object may or may not have been stored", code="artifact_outcome_unknown")


def create(uri: str, options: dict[str, Any]) -> PresignedPut:
    """`options`: the grant's expires_at, max_bytes, object_id and required_headers; the operator's hosts, insecure_hosts,
    max_ttl_seconds, connect_timeout_seconds and timeout_seconds. Raises `StorageError` (artifact_target_rejected)."""
    return PresignedPut(
        parse_grant(uri, options, time.time()),
        connect_seconds=options.get("connect_timeout_seconds", 10),
        total_seconds=options.get("timeout_seconds", 60),
    )


@hookimpl
def infer_storage_targets() -> list[StorageTargetSpec]:
    return [
        StorageTargetSpec(
            name="presigned_http_put",
            api=API_VERSION,
            factory="infer.storage.presigned_put:create",
            schemes=("https", "http"),
            example={
                "uri": "http://127.0.0.1:{port}/",
                "options": {
                    "expires_at": "2099-01-01T00:00:00Z",
                    "max_ttl_seconds": 10**10,
                    "max_bytes": 2**20,
                    "object_id": "example",
                    "required_headers": {"if-none-match": "*"},
                    "insecure_hosts": ("127.0.0.1:{port}",),
                },
                "create_only": True,
            },
        )
    ]
