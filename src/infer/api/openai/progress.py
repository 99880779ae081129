"""Prefill progress of a stream: in keep-alive comments, and as chunks for clients that ask with `return_progress`.

Runs beside the stream in its call's task group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import anyio

if TYPE_CHECKING:
    from infer.api.sse import EventStream
    from infer.engine.stream import Stream

_LOOK = 0.02


def silence(streams: Sequence[Stream]) -> str:
    """What a keep-alive comment says: why nothing comes."""
    done, total = _prefilled(streams)
    return f"prefill {done}/{total}" if done < total else "keep-alive"


async def report_progress(events: EventStream, streams: Sequence[Stream], chunk: Callable[..., dict[str, Any]]) -> None:
    """A chunk whenever more of the prompt is computed, until all of it is. Never goes back."""
    told = -1
    while True:
        done, total = _prefilled(streams)
        if done > told:
            told = done
            await events.send(chunk([], prompt_progress={"total": total, "processed": done}))
        if done >= total or events.ended:
            return
        await anyio.sleep(_LOOK)


def _prefilled(streams: Sequence[Stream]) -> tuple[int, int]:
    counts = [stream.prefilled for stream in streams]
    return sum(done for done, _ in counts), sum(total for _, total in counts)
