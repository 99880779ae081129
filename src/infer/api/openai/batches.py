"""`/v1/files` and `/v1/batches`: files of requests that are answered one batch after the other, beside the calls of clients.

Handlers run in request tasks; a batch runs in the server's own task group and ends with it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterator
from typing import Annotated

import anyio
import msgspec
from pydantic import Field
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.responses import Response

from infer.api.context import ApiContext
from infer.api.errors import ApiError
from infer.api.fields import Body, BodyModel
from infer.api.openai.batch_lines import BatchLines, Line, Row, answer_all
from infer.api.openai.batch_store import BatchStore, StoredBatch, StoredFile
from infer.api.openai.paging import page
from infer.api.routing import ApiRoute, Call
from infer.errors import InferError

logger = logging.getLogger(__name__)

JSON_LINES = "application/jsonl"


class BatchBody(BodyModel):
    input_file_id: Annotated[str, Field(min_length=1)]
    """A file of purpose "batch"."""
    endpoint: Annotated[str, Field(min_length=1)]
    """The route that all its lines ask."""
    completion_window: str = "24h"
    """Kept and shown; a batch runs as soon as those before it are done."""
    metadata: dict[str, str] | None = None
    """Kept and shown."""


BATCH = Body(name="/v1/batches", model=BatchBody)


def routes(context: ApiContext) -> list[ApiRoute]:
    api = BatchApi()
    file, batch = "/v1/files/{file_id}", "/v1/batches/{batch_id}"
    return [
        ApiRoute(method="POST", path="/v1/files", handler=api.upload, summary="Store a file", raw_body=True),
        ApiRoute(method="GET", path="/v1/files", handler=api.list_files, summary="Stored files"),
        ApiRoute(method="GET", path=file, handler=api.show_file, summary="A stored file"),
        ApiRoute(method="GET", path=file + "/content", handler=api.content, summary="Its bytes"),
        ApiRoute(method="DELETE", path=file, handler=api.delete_file, summary="Delete a file"),
        ApiRoute(method="POST", path="/v1/batches", handler=api.create, summary="Answer a file", body=BATCH),
        ApiRoute(method="GET", path="/v1/batches", handler=api.list_batches, summary="Batches"),
        ApiRoute(method="GET", path=batch, handler=api.show_batch, summary="A batch"),
        ApiRoute(method="POST", path=batch + "/cancel", handler=api.cancel, summary="End it", optional_body=True),
    ]


class BatchApi:
    """Of one server."""

    def __init__(self) -> None:
        self._store = BatchStore()
        self._turn = anyio.Lock()
        self._scopes: dict[str, anyio.CancelScope] = {}

    # -- files -----------------------------------------------------------------------------------------------------

    async def upload(self, call: Call) -> Response:
        name, purpose, data = await _parsed_upload(call)
        return call.json(self._store.add_file(name, purpose, data).describe())

    async def list_files(self, call: Call) -> Response:
        purpose = call.query.get("purpose")
        found = [one for one in self._store.files.values() if purpose in (None, one.purpose)]
        return call.json(page([one.describe() for one in reversed(found)], call))

    async def show_file(self, call: Call) -> Response:
        return call.json(self._store.file(call.path["file_id"]).describe())

    async def content(self, call: Call) -> Response:
        return Response(bytes(self._store.file(call.path["file_id"]).data), media_type=JSON_LINES)

    async def delete_file(self, call: Call) -> Response:
        stored = self._store.file(call.path["file_id"])
        if any(stored.id == batch.input_file_id and not batch.is_over for batch in self._store.batches.values()):
            raise ApiError(f"file {stored.id} is read by a batch that is running", status=409, code="file_in_use")
        del self._store.files[stored.id]
        return call.json({"id": stored.id, "object": "file", "deleted": True})

    # -- batches ---------------------------------------------------------------------------------------------------

    async def create(self, call: Call) -> Response:
        context = call.context
        body, _ = BATCH.parse(call.data, unknown=context.settings.unknown_fields, notices=call.notices)
        stored = self._store.file(body.input_file_id)
        if stored.purpose != "batch":
            raise ApiError(f"file {stored.id} is of purpose {stored.purpose!r}, not batch", parameter="input_file_id")
        known = BatchLines.urls(context)
        if body.endpoint not in known:
            raise ApiError(
                f"endpoint={body.endpoint[:100]!r}: batches can ask {', '.join(known)}", parameter="endpoint"
            )
        if context.background is None:
            raise ApiError("batches run in `infer serve` only; use `infer batch`", status=501, code="no_background")
        batch = StoredBatch(
            endpoint=body.endpoint,
            input_file_id=stored.id,
            completion_window=body.completion_window,
            metadata=body.metadata,
        )
        self._store.add_batch(batch)
        scope = self._scopes[batch.id] = anyio.CancelScope()
        context.background.start_soon(self._run, context, batch, stored, scope)
        return call.json(batch.describe())

    async def list_batches(self, call: Call) -> Response:
        return call.json(page([one.describe() for one in reversed(self._store.batches.values())], call))

    async def show_batch(self, call: Call) -> Response:
        return call.json(self._store.batch(call.path["batch_id"]).describe())

    async def cancel(self, call: Call) -> Response:
        batch = self._store.batch(call.path["batch_id"])
        if batch.is_over:
            raise ApiError(f"batch {batch.id} is {batch.status}", status=409, code="batch_is_over")
        if batch.status != "cancelling":
            batch.enter("cancelling")
            self._scopes[batch.id].cancel()
        return call.json(batch.describe())

    async def _run(self, context: ApiContext, batch: StoredBatch, source: StoredFile, scope: anyio.CancelScope) -> None:
        """One batch at a time; what it has when it is cancelled is kept. Its end is always told, however it comes."""
        try:
            with scope:
                async with self._turn:
                    await self._answer(context, batch, source)
        except InferError as error:
            batch.failure = str(error)
        except Exception as error:  # a defect must not end the server
            logger.error("batch %s met a defect", batch.id, exc_info=error)
            batch.failure = f"internal error ({type(error).__name__})"
        finally:
            del self._scopes[batch.id]
            batch.enter("failed" if batch.failure else "cancelled" if scope.cancel_called else "completed")

    async def _answer(self, context: ApiContext, batch: StoredBatch, source: StoredFile) -> None:
        batch.total = sum(1 for _ in _lines(source))
        batch.enter("in_progress")

        def write(row: Row) -> None:
            if row["error"] is None:
                batch.output = batch.output or self._store.add_file(f"{batch.id}_output.jsonl", "batch_output", b"")
                batch.completed += 1
                self._store.append(batch.output, msgspec.json.encode(row) + b"\n")
            else:
                batch.errors = batch.errors or self._store.add_file(f"{batch.id}_error.jsonl", "batch_output", b"")
                batch.failed += 1
                self._store.append(batch.errors, msgspec.json.encode(row) + b"\n")

        lines = BatchLines(context, batch.endpoint)
        # Half of the slots: clients that wait for an answer find room beside a batch.
        concurrency = max(1, context.engine.resolved.scheduler.max_num_seqs // 2)
        await answer_all(_lines(source), lines.answer, write, concurrency)
        batch.enter("finalizing")


def _lines(source: StoredFile) -> Iterator[Line]:
    for number, data in enumerate(source.data.split(b"\n"), start=1):
        if data.strip():
            yield Line(number, bytes(data))


async def _parsed_upload(call: Call) -> tuple[str, str, bytes]:
    """(file name, purpose, bytes) of a form with `file` and `purpose`."""
    if not call.headers.get("content-type", "").startswith("multipart/form-data"):
        raise ApiError("send the file as multipart/form-data with the fields file and purpose", parameter="file")

    async def body() -> AsyncGenerator[bytes, None]:
        yield call.raw
        yield b""

    try:
        form = await MultiPartParser(call.headers, body(), max_files=1, max_fields=16).parse()
    except (MultiPartException, KeyError, ValueError) as error:
        raise ApiError(f"the form cannot be read: {error}", parameter="file") from None
    try:
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            raise ApiError("the form has no file in its field `file`", parameter="file")
        if purpose != "batch":
            raise ApiError(f"purpose={purpose!r:.100}: files are kept for batches, purpose=batch", parameter="purpose")
        return file.filename or "file.jsonl", purpose, await file.read()
    finally:
        await form.close()
