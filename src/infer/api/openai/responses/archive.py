"""What is kept of a response: its JSON and its input items, and the conversation that a chain of responses amounts to.

Runs in request tasks; owns nothing but the reference to the store.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from infer.api.errors import ApiError
from infer.api.openai.responses.items import Item, read_items
from infer.api.openai.responses.store import ResponseStore
from infer.errors import InvalidRequestError, StorageError

logger = logging.getLogger(__name__)

MAX_CHAIN = 4096
"""Responses that one conversation may go back."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kept:
    """One stored response."""

    response: dict[str, Any]
    items: list[Item]
    """Its own input, without that of earlier responses."""


class Archive:
    """Responses of one server, each readable by the key that made it."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def keep(self, owner: str, response: dict[str, Any], items: list[Item]) -> None:
        """Raises `StorageError`."""
        record = msgspec.json.encode({"response": response, "items": items})
        await _asked(self._store.put(owner, response["id"], record))

    async def find(self, owner: str, response_id: str) -> Kept:
        """Raises `ApiError` 404, or `StorageError`."""
        found = await self._get(owner, response_id)
        if found is None:
            raise unknown(response_id)
        return found

    async def forget(self, owner: str, response_id: str) -> None:
        """Raises `ApiError` 404, or `StorageError`."""
        if not await _asked(self._store.delete(owner, response_id)):
            raise unknown(response_id)

    async def conversation(self, owner: str, response_id: str | None) -> list[Item]:
        """Input and output items up to that response, oldest first. Raises `ApiError`, or `StorageError`.

        The way back ends with the oldest one: in a store that forgets what was not used for long, it is the last to go."""
        turns: list[Kept] = []
        following = None
        while response_id is not None:
            found = await self._get(owner, response_id)
            if found is None:
                raise _no_previous(response_id, following)
            if len(turns) >= MAX_CHAIN:
                raise ApiError(
                    f"the conversation goes back more than {MAX_CHAIN} responses; start a new one",
                    parameter="previous_response_id",
                )
            turns.append(found)
            following, response_id = response_id, found.response["previous_response_id"]
        return [item for turn in reversed(turns) for item in (*turn.items, *turn.response["output"])]

    async def _get(self, owner: str, response_id: str) -> Kept | None:
        record = await _asked(self._store.get(owner, response_id))
        if record is None:
            return None
        try:
            return _read(record, response_id)
        except (msgspec.MsgspecError, UnicodeDecodeError, InvalidRequestError) as error:
            logger.error("the store holds no response for %s", response_id, exc_info=error)
            raise _failed(error) from error


class _Response(msgspec.Struct):
    """What is used of a stored response."""

    id: str
    status: str
    previous_response_id: str | None
    output: list[Item]


class _Record(msgspec.Struct):
    response: msgspec.Raw
    items: list[Item]


def _read(record: bytes, response_id: str) -> Kept:
    """Whatever a store gave back, or another release wrote. Raises `MsgspecError`, or `InvalidRequestError`."""
    found = msgspec.json.decode(record, type=_Record)
    known = msgspec.json.decode(found.response, type=_Response)
    if known.id != response_id:
        raise msgspec.ValidationError(f"the record is that of {known.id[:100]!r}")
    for items in (known.output, found.items):
        read_items(items, [])
        if not all(item.get("id") for item in items):
            raise msgspec.ValidationError("an item has no id")
    return Kept(msgspec.json.decode(found.response), found.items)


async def _asked(answer: Awaitable[T]) -> T:
    """A store may be anybody's: however it fails, the caller learns that it did."""
    try:
        return await answer
    except StorageError:
        raise
    except Exception as error:
        logger.error("the store of responses failed", exc_info=error)
        raise _failed(error) from error


def _failed(error: Exception) -> StorageError:
    return StorageError(
        f"the store of responses failed ({type(error).__name__}); the server's log has the details. Ask with store=false "
        "and without previous_response_id to do without it",
        code="response_store_failed",
    )


def unknown(response_id: str) -> ApiError:
    return ApiError(
        f"Response with id {response_id[:100]!r} not found: it was never stored, was deleted, or had to make room",
        status=404,
        code="response_not_found",
        parameter="response_id",
    )


def _no_previous(response_id: str, following: str | None) -> ApiError:
    """OpenAI's status and code: clients start their conversation over when they see them."""
    whose = "" if following is None else f", which {following[:100]!r} goes on from,"
    return ApiError(
        f"Previous response with id {response_id[:100]!r}{whose} not found: it was never stored, was deleted, or had to make "
        "room; send the whole conversation as input",
        code="previous_response_not_found",
        parameter="previous_response_id",
    )
