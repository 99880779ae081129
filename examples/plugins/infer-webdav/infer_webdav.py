"""A storage target: objects on a WebDAV server, each whole or not at all.

Runs in a delivery task, one target per delivery. Owns its HTTP client, from the first request to `aclose`.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote, unquote, urlsplit
from xml.etree import ElementTree

import anyio
import httpx2

from infer import StorageError, StorageNotFoundError
from infer.plugins import StorageTargetSpec, hookimpl

SCHEMES = {"dav": "http", "davs": "https"}
UPLOADS = ".infer-uploads"
"""A collection beside the object: uploads are there until they are whole."""
CONNECT_SECONDS = 10.0
SHIELDED_SECONDS = 5.0
"""For a request that must not be given up in the middle: taking the lock, and cleaning up."""
LOCK_SECONDS = 30
"""After so long the server forgets the lock of a writer that died."""
BUSY = (408, 425, 429, 500, 502, 503, 504, 507)
LOCK = b"""<?xml version="1.0" encoding="utf-8"?><D:lockinfo xmlns:D="DAV:"><D:lockscope><D:exclusive/></D:lockscope>
<D:locktype><D:write/></D:locktype><D:owner>infer</D:owner></D:lockinfo>"""


class WebDAVTarget:
    """One object. A write goes to a hidden name, and from there to its own with one MOVE.

    RFC 4918 does not say that MOVE looks and moves in one step, nor do servers; the MOVE therefore happens under a lock of the
    collection (depth 0), which keeps everybody else from adding members to it.
    """

    def __init__(self, uri: str, options: Mapping[str, Any]) -> None:
        """`options`: "storage_options" with username and password, and "timeout_seconds" for each call. Connects to nothing.
        Raises `StorageError` (artifact_target_rejected)."""
        self._scheme, self._authority, self._path = _parse(uri)
        given = options.get("storage_options", {})
        if unknown := sorted(set(given) - {"username", "password"}):
            raise _rejected(f"storage_options has no {unknown[0]!r}; a WebDAV profile takes username and password")
        if not all(isinstance(value, str) for value in given.values()):
            raise _rejected("username and password of a WebDAV profile are text")
        host = urlsplit(f"//{self._authority}").hostname
        if given and self._scheme == "dav" and host not in ("127.0.0.1", "::1", "localhost"):
            raise _rejected("a password may not travel in the clear; write davs:// in the profile")
        self._auth = httpx2.BasicAuth(given.get("username", ""), given.get("password", "")) if given else None
        self._seconds = float(options.get("timeout_seconds", 60))
        self._client: httpx2.AsyncClient | None = None

    def __repr__(self) -> str:
        return f"WebDAVTarget({self._path!r})"

    async def put(self, data: bytes, *, if_absent: bool) -> None:
        collection = self._path.rpartition("/")[0]
        upload = f"{collection}/{UPLOADS}/{uuid.uuid4().hex}"
        moving = moved = False
        try:
            with anyio.fail_after(self._seconds):
                await self._upload(upload, data)
                async with self._locked(collection) as token:
                    moving = True
                    # Given up in the middle, a server may have removed the old object and not yet placed the new one.
                    with anyio.CancelScope(shield=True), anyio.fail_after(SHIELDED_SECONDS):
                        await self._move(upload, token, if_absent=if_absent)
                    moving, moved = False, True
        except TimeoutError:
            raise _unknown() if moving and if_absent else _late() from None
        except httpx2.HTTPError:  # its text may show the address
            raise _unknown() if moving and if_absent else _away() from None
        except StorageError as error:  # an answer: the server is not moving any more
            moving = error.code == "artifact_outcome_unknown"
            raise
        finally:
            if not moving and not moved:
                await self._quietly("DELETE", upload)

    async def get(self, start: int = 0, end: int | None = None) -> bytes:
        """The whole object is fetched: a server may ignore a range."""
        response = await self._read("GET")
        if response.status_code == 404:
            raise StorageNotFoundError("there is no such object on the WebDAV server")
        _expect(response, 200)
        return response.content[start:end]

    async def exists(self) -> bool:
        response = await self._read("HEAD")
        if response.status_code != 404:
            _expect(response, 200)
        return response.status_code == 200

    async def list(self) -> list[str]:
        """The objects of the collection that this one is in, as URIs."""
        response = await self._read("PROPFIND", self._path.rpartition("/")[0] + "/", {"Depth": "1"})
        if response.status_code == 404:
            return []
        _expect(response, 207)
        try:
            hrefs = [href.text or "" for href in ElementTree.fromstring(response.content).iter("{DAV:}href")]
        except ElementTree.ParseError:
            raise StorageError("the WebDAV server's list is not XML") from None
        paths = sorted(unquote(urlsplit(href).path) for href in hrefs)
        return [f"{self._scheme}://{self._authority}{path}" for path in paths if not path.endswith("/")]

    async def delete(self) -> None:
        response = await self._read("DELETE")
        if response.status_code != 404:
            _expect(response, 200, 204)

    async def aclose(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with anyio.CancelScope(shield=True), anyio.move_on_after(SHIELDED_SECONDS):
                await client.aclose()

    async def _read(
        self, method: str, path: str | None = None, headers: dict[str, str] | None = None
    ) -> httpx2.Response:
        try:
            with anyio.fail_after(self._seconds):
                return await self._send(method, path or self._path, headers)
        except TimeoutError:
            raise _late() from None
        except httpx2.HTTPError:
            raise _away() from None

    async def _upload(self, path: str, data: bytes) -> None:
        response = await self._send("PUT", path, content=data)
        if response.status_code in (403, 404, 409):  # the collection is missing; servers disagree on how to say so
            await self._make_collection(path.rpartition("/")[0])
            response = await self._send("PUT", path, content=data)
        _expect(response, 200, 201, 204)

    async def _make_collection(self, path: str) -> None:
        """With its parents. What cannot be made is seen by the upload that follows."""
        response = await self._send("MKCOL", f"{path}/")
        if response.status_code in (404, 409) and path.count("/") > 1:
            await self._make_collection(path.rpartition("/")[0])
            await self._send("MKCOL", f"{path}/")

    async def _move(self, upload: str, token: str, *, if_absent: bool) -> None:
        collection = self._url(self._path.rpartition("/")[0] + "/")
        headers = {"Destination": self._url(self._path), "Overwrite": "F" if if_absent else "T"}
        response = await self._send("MOVE", upload, {**headers, "If": f"<{collection}> ({token})"})
        if response.status_code == 412:  # the object is there, or the lock is not
            if if_absent and (await self._send("HEAD", self._path)).status_code == 200:
                raise StorageError("an object exists already", code="artifact_conflict")
            raise StorageError("the WebDAV server gave the lock to somebody else", retryable=True)
        if response.status_code in (502, 503, 504) and if_absent:  # said by a proxy, which does not know
            raise _unknown()
        _expect(response, 201, 204)

    @asynccontextmanager
    async def _locked(self, collection: str) -> AsyncIterator[str]:
        """Nobody else adds to the collection or removes from it. Gives the lock token, in angle brackets."""
        headers = {"Depth": "0", "Timeout": f"Second-{LOCK_SECONDS}", "Content-Type": "application/xml"}
        pause = 0.02
        while True:
            # Given up in the middle, the lock would be held by nobody until it ends.
            with anyio.CancelScope(shield=True), anyio.fail_after(SHIELDED_SECONDS):
                response = await self._request("LOCK", f"{collection}/", headers, LOCK)
            if response.status_code != 423:
                break
            await anyio.sleep(pause)
            pause = min(2 * pause, 0.5)
        if response.status_code in (405, 501):
            raise _rejected("the WebDAV server has no locks (class 2), and without them cannot create safely")
        _expect(response, 200, 201)
        token = response.headers.get("Lock-Token", "")
        try:
            yield token
        finally:
            await self._quietly("UNLOCK", f"{collection}/", {"Lock-Token": token})

    async def _send(
        self, method: str, path: str, headers: dict[str, str] | None = None, content: bytes | None = None
    ) -> httpx2.Response:
        """Waits while somebody else holds a lock; the caller has a deadline."""
        pause = 0.02
        while True:
            response = await self._request(method, path, headers, content)
            if response.status_code != 423:
                return response
            await anyio.sleep(pause)
            pause = min(2 * pause, 0.5)

    async def _request(
        self, method: str, path: str, headers: dict[str, str] | None = None, content: bytes | None = None
    ) -> httpx2.Response:
        if self._client is None:  # neither a proxy nor a password out of the environment, no redirects
            timeout = httpx2.Timeout(self._seconds, connect=min(CONNECT_SECONDS, self._seconds))
            secure = self._scheme == "davs"  # reading the certificates takes longer than a request
            self._client = httpx2.AsyncClient(auth=self._auth, timeout=timeout, trust_env=False, verify=secure)
        return await self._client.request(method, self._url(path), headers=headers, content=content)

    async def _quietly(self, method: str, path: str, headers: dict[str, str] | None = None) -> None:
        """Also when cancelled, but not for long. What stays behind is hidden, or ends by itself."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(SHIELDED_SECONDS):
            try:
                await self._request(method, path, headers)
            except httpx2.HTTPError:
                return

    def _url(self, path: str) -> str:
        return f"{SCHEMES[self._scheme]}://{self._authority}{quote(path)}"


def _parse(uri: str) -> tuple[str, str, str]:
    """Scheme, authority and path; the path is as it is read, without percent signs for anything."""
    scheme, _, rest = uri.partition("://")
    authority, slash, path = rest.partition("/")
    parts = path.split("/")
    try:
        address = urlsplit(f"//{authority}")
        good = bool(address.hostname) and (address.port is None or address.port > 0) and address.netloc == authority
    except ValueError:
        good = False
    if "@" in authority:
        raise _rejected("write username and password into storage_options, not into the URL")
    if scheme not in SCHEMES or not good or not slash or any(part in ("", ".", "..") for part in parts):
        raise _rejected("the URL of a WebDAV object is davs://HOST[:PORT]/PATH or dav://HOST[:PORT]/PATH")
    if not path.isprintable() or any(mark in path for mark in "?;\\") or UPLOADS in parts:
        # A server that decodes a Destination too early ends the name at ? or ;, and would store under another one.
        raise _rejected(f"a WebDAV object's path has no control characters, none of ? ; \\ and no {UPLOADS!r} in it")
    return scheme, authority, f"/{path}"


def _expect(response: httpx2.Response, *wanted: int) -> None:
    status = response.status_code
    if status in wanted:
        return
    if status in (401, 403):
        raise StorageError(f"the WebDAV server refuses (status {status}); look at the profile's username and password")
    raise StorageError(f"the WebDAV server failed with status {status}", retryable=status in BUSY)


def _rejected(problem: str) -> StorageError:
    return StorageError(problem, code="artifact_target_rejected")


def _late() -> StorageError:
    return StorageError("the WebDAV server did not finish in time", retryable=True, code="artifact_upload_timeout")


def _away() -> StorageError:
    return StorageError("the WebDAV server cannot be reached, or broke off", retryable=True)


def _unknown() -> StorageError:
    return StorageError("the object may or may not have been stored", code="artifact_outcome_unknown")


@hookimpl
def infer_storage_targets() -> list[StorageTargetSpec]:
    return [
        StorageTargetSpec(
            name="webdav",
            api=1,
            factory=f"{__name__}:WebDAVTarget",
            schemes=tuple(SCHEMES),
            example={"uri": "dav://127.0.0.1:8080{tmp}/"},
        )
    ]
