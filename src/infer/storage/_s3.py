"""Objects in S3 through s3fs, one PutObject with If-None-Match each. Blocks; runs on a worker thread.

Owns one filesystem with one client, made for this delivery and closed with it.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import time
from typing import Any

import fsspec  # type: ignore[import-untyped]

from infer.errors import StorageError, StorageNotFoundError, StorageUnavailableError

CHUNK = 2**26
"""s3fs sends one PutObject for anything below twice this."""
_MARK = "infer-delivery"
_PAUSES = (0.2, 0.6)
"""Seconds before a write that met another one is tried again."""
_EXPECTED = "s3fs.core.S3FileSystem"


class S3Object:
    """`path` is bucket/key."""

    def __init__(self, scheme: str, path: str, options: dict[str, Any], seconds: float) -> None:
        self._scheme = scheme
        self._path = path
        given = dict(options.pop("config_kwargs", {}))
        defaults = {
            "connect_timeout": min(seconds, 10),
            "read_timeout": seconds,
            "retries": {"max_attempts": 2, "mode": "standard"},
        }
        self._options = {**options, "config_kwargs": {**defaults, **given}}
        self._mark = secrets.token_hex(16)
        self._filesystem: Any = None
        self.writing = False

    def put(self, data: bytes, *, if_absent: bool) -> None:
        filesystem = self._open()
        self.writing = True
        mode = "create" if if_absent else "overwrite"
        try:
            self._put(filesystem, data, mode)
        except Exception as error:
            failure = _put_failure(error)
            if failure.code in ("artifact_conflict", "artifact_outcome_unknown"):
                ours = self._is_ours(data)
                if ours:
                    return
                if ours is False:
                    failure = _conflict()
                elif _was_retried(error):
                    failure = _unknown()
            raise failure from None

    def _put(self, filesystem: Any, data: bytes, mode: str) -> None:
        metadata = {_MARK: self._mark}
        # One request whatever the size: an upload in parts is not created atomically.
        size = max(CHUNK, len(data))
        for pause in (*_PAUSES, None):
            try:
                filesystem.pipe_file(self._path, data, mode=mode, chunksize=size, Metadata=metadata)
                return
            except Exception as error:
                # Another conditional write of this key is on its way, and which of them wins is told later.
                if pause is None or _status(error) != 409:
                    raise
            time.sleep(pause)

    def get(self, start: int, end: int | None) -> bytes:
        try:
            content: bytes = self._open().cat_file(self._path, start=start or None, end=end)
        except FileNotFoundError:
            raise StorageNotFoundError("the object does not exist") from None
        return content

    def exists(self) -> bool:
        filesystem = self._open()
        filesystem.invalidate_cache()
        return bool(filesystem.exists(self._path))

    def list(self) -> list[str]:
        folder = self._path.rpartition("/")[0]
        names: list[str] = self._open().ls(folder, detail=False, refresh=True)
        return sorted(names)

    def delete(self) -> None:
        self._open().rm_file(self._path)

    def close(self) -> None:
        filesystem, self._filesystem = self._filesystem, None
        creator = getattr(filesystem, "_s3creator", None)
        if creator is not None:
            with contextlib.suppress(Exception):
                filesystem.close_session(filesystem.loop, creator)

    def _open(self) -> Any:
        if self._filesystem is None:
            made = fsspec.filesystem(self._scheme, skip_instance_cache=True, use_listings_cache=False, **self._options)
            names = {f"{base.__module__}.{base.__qualname__}" for base in type(made).__mro__}
            protocols = (made.protocol,) if isinstance(made.protocol, str) else tuple(made.protocol)
            # fsspec lets any package register itself under any name.
            if _EXPECTED not in names or self._scheme not in protocols:
                raise StorageError(
                    "the filesystem behind the profile's scheme is not S3", code="artifact_upload_rejected"
                )
            made.retries = 1
            self._filesystem = made
        return self._filesystem

    def _is_ours(self, data: bytes) -> bool | None:
        """Client libraries repeat a write whose answer was lost, not all of them say so, and a repetition meets its own
        object. The mark that each write carries tells whose is there. None: it cannot be read."""
        try:
            mark = self._open().metadata(self._path).get(_MARK)
            return bool(mark == self._mark and self._open().cat_file(self._path) == data)
        except Exception:
            return None


def _response(error: BaseException) -> dict[str, Any]:
    """botocore's account of the last answer; s3fs keeps it as the cause."""
    for candidate in (error, error.__cause__):
        response = getattr(candidate, "response", None)
        if isinstance(response, dict):
            return response
    return {}


def _status(error: BaseException) -> int | None:
    metadata = _response(error).get("ResponseMetadata", {})
    status = metadata.get("HTTPStatusCode")
    return status if isinstance(status, int) else None


def _was_retried(error: BaseException) -> bool:
    return bool(_response(error).get("ResponseMetadata", {}).get("RetryAttempts"))


def _never_connected(error: BaseException) -> bool:
    names = {type(candidate).__name__ for candidate in (error, error.__cause__) if candidate is not None}
    return bool(
        names & {"EndpointConnectionError", "ConnectTimeoutError", "NoCredentialsError", "ParamValidationError"}
    )


def _put_failure(error: BaseException) -> StorageError:
    status = _status(error)
    exists = isinstance(error, FileExistsError) or (isinstance(error, OSError) and error.errno == errno.EEXIST)
    if exists or status == 412:
        return _conflict()
    if status is not None:
        return StorageError("managed artifact write failed", retryable=status >= 500, code="artifact_upload_rejected")
    if _never_connected(error):
        return StorageUnavailableError("managed artifact write failed")
    return _unknown()


def _conflict() -> StorageError:
    return StorageError("an object exists already", code="artifact_conflict")


def _unknown() -> StorageError:
    return StorageError("the object may or may not have been stored", code="artifact_outcome_unknown")
