"""Bytes somewhere, read in ranges: in memory, or behind any fsspec URL. Synchronous; keeps the beginning once read."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import fsspec  # type: ignore[import-untyped]

from infer.errors import (
    ArtifactCorruptError,
    ArtifactError,
    StorageError,
    StorageNotFoundError,
    StorageUnavailableError,
)

HEAD_BYTES = 1 << 14
"""What the first request fetches: prelude and, as a rule, the whole header."""


class ByteSource:
    """`read` gives exactly the range or raises."""

    size: int

    def read(self, start: int, end: int) -> bytes | memoryview:
        raise NotImplementedError

    def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[bytes | memoryview]:
        """Several ranges, at the same time where the store can."""
        return [self.read(start, end) for start, end in ranges]


class ClosedSource(ByteSource):
    """What is left of a source whose reader was closed."""

    def __init__(self, size: int) -> None:
        self.size = size

    def read(self, start: int, end: int) -> bytes:
        raise ArtifactError("this reader was closed; open the artifact again")


class MemorySource(ByteSource):
    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._data = memoryview(data).cast("B").toreadonly()
        self.size = len(self._data)

    def read(self, start: int, end: int) -> memoryview:
        return self._data[start:end]


class RemoteSource(ByteSource):
    """The first `HEAD_BYTES` are fetched once, and what lies within them is served from there."""

    def __init__(self, uri: str, options: dict[str, Any]) -> None:
        self._uri = shown_uri(uri)
        self._has_secret = self._uri != uri
        try:
            self._filesystem, self._path = fsspec.core.url_to_fs(uri, **options)
            self.size = int(self._filesystem.info(self._path)["size"] or 0)
        except FileNotFoundError as error:
            raise self._absent("opened", error) from None
        except ImportError as error:
            raise StorageUnavailableError(
                f"{self._uri} needs another package ({error}); s3:// comes with `pip install 'infer-engine[s3]'`"
            ) from error
        except Exception as error:  # every filesystem has exceptions of its own
            raise self._unavailable("opened", error) from self._cause(error)
        self._head = b""
        self._head = bytes(self._fetch([(0, min(self.size, HEAD_BYTES))])[0])

    def read(self, start: int, end: int) -> bytes | memoryview:
        return self.read_many([(start, end)])[0]

    def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[bytes | memoryview]:
        beyond = [end > len(self._head) and end > start for start, end in ranges]
        fetched = iter(self._fetch([pair for pair, far in zip(ranges, beyond, strict=True) if far]))
        head = memoryview(self._head)
        return [next(fetched) if far else head[start:end] for (start, end), far in zip(ranges, beyond, strict=True)]

    def _fetch(self, ranges: list[tuple[int, int]]) -> list[bytes | memoryview]:
        if not any(end > start for start, end in ranges):
            return [b"" for _ in ranges]
        starts, ends = [start for start, _ in ranges], [end for _, end in ranges]
        try:
            if len(ranges) == 1:
                found = [self._filesystem.cat_file(self._path, start=starts[0], end=ends[0])]
            else:
                found = self._filesystem.cat_ranges([self._path] * len(ranges), starts, ends, on_error="raise")
        except FileNotFoundError as error:
            raise self._absent("read", error) from None
        except Exception as error:
            raise self._unavailable("read", error) from self._cause(error)
        return [self._exact(data, start, end) for data, (start, end) in zip(found, ranges, strict=True)]

    def _unavailable(self, verb: str, error: BaseException) -> StorageUnavailableError:
        """Clients quote the whole URL in their errors."""
        told = str(getattr(error, "status", "") if self._has_secret else error)
        return StorageUnavailableError(f"{self._uri} cannot be {verb} ({type(error).__name__}{told and f': {told}'})")

    def _absent(self, verb: str, error: FileNotFoundError) -> StorageError:
        """fsspec says of every failed request over HTTP that the file is not there."""
        cause = error.__cause__
        if cause is None or isinstance(cause, FileNotFoundError) or getattr(cause, "status", None) in (404, 410):
            return StorageNotFoundError(f"{self._uri} does not exist{_hint(self._uri)}")
        if isinstance(cause, OSError) or type(cause).__module__.startswith("aiohttp"):
            return self._unavailable(verb, cause)
        return StorageNotFoundError(f"{self._uri} does not exist{_hint(self._uri)}")

    def _cause(self, error: Exception) -> Exception | None:
        return None if self._has_secret else error

    def _exact(self, data: bytes, start: int, end: int) -> bytes:
        if len(data) == self.size and end - start < self.size:  # a server that knows no ranges
            data = data[start:end]
        if len(data) != end - start:
            raise ArtifactCorruptError(f"{self._uri}: {len(data)} bytes came for the range {start}-{end}")
        return data


def _hint(uri: str) -> str:
    """A receipt's object_id looks like an address to somebody who has only the receipt."""
    if "://" in uri or not re.fullmatch(r"[A-Za-z0-9_-]{2,}:[^:]+", uri):
        return ""
    return "; an object_id of a receipt is PROFILE:KEY: open the profile's url with /KEY behind it"


def shown_uri(uri: str) -> str:
    """A URL without what may be a secret: user information and query (of a signed URL, the signature)."""
    if "://" not in uri:
        return uri
    return re.sub(r"\?.*", "?...", re.sub(r"(?<=://)[^/?#]*@", "", uri), flags=re.DOTALL)


def open_source(
    source: str | os.PathLike[str] | bytes | bytearray | memoryview, storage_options: Mapping[str, Any] | None = None
) -> ByteSource:
    """Bytes, a path or any fsspec URL. Raises `StorageNotFoundError`, `StorageUnavailableError`."""
    if isinstance(source, bytes | bytearray | memoryview):
        return MemorySource(source)
    return RemoteSource(os.fspath(source), dict(storage_options or {}))
