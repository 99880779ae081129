"""Pages of OpenAI's lists, by `limit` and `after`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from infer.api.errors import ApiError
from infer.api.routing import Call


def page(entries: Sequence[dict[str, Any]], call: Call, *, default: int = 100, most: int = 10_000) -> dict[str, Any]:
    """`limit` entries behind the one named by `after`, in the order given. Raises `ApiError` naming the parameter."""
    limit = call.query.get("limit", str(default))
    if not limit.isascii() or not limit.isdecimal() or not 1 <= int(limit[:9]) <= most:
        raise ApiError(f"limit={limit[:20]!r} is not a number from 1 to {most}", parameter="limit")
    start, after = 0, call.query.get("after")
    if after is not None:
        place = next((place for place, entry in enumerate(entries) if entry["id"] == after), None)
        if place is None:
            raise ApiError(f"after={after[:100]!r} is none of these", parameter="after")
        start = place + 1
    shown = list(entries[start : start + int(limit)])
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": start + len(shown) < len(entries),
    }
