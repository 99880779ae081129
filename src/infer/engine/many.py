"""Many prompts through one engine, a bounded number at a time. Runs in the caller's task; owns nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from infer.types import Completion


async def at_most(limit: int, generate: Callable[[int], Awaitable[Completion]], count: int) -> list[Completion]:
    """Answers to the prompts 0 to `count` - 1, in this order. The first failure cancels the rest and is raised."""
    limiter = anyio.Semaphore(limit)
    done: list[Completion | None] = [None] * count
    failures: list[Exception] = []

    async def one(index: int) -> None:
        async with limiter:
            try:
                done[index] = await generate(index)
            except Exception as error:
                failures.append(error)
                tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for index in range(count):
            tasks.start_soon(one, index)
    if failures:
        raise failures[0]
    return [completion for completion in done if completion is not None]
