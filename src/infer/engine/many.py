"""Many prompts through one engine, a bounded number at a time. Runs in the caller's task; owns nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import anyio

from infer.types import Completion, Prompt, SamplingParams

Generate = Callable[[Prompt, SamplingParams | None], Awaitable[Completion]]


async def at_most(
    limit: int, generate: Generate, prompts: Sequence[Prompt], params: Sequence[SamplingParams | None]
) -> list[Completion]:
    """Answers in the order of the prompts. The first failure cancels the rest and is raised."""
    limiter = anyio.Semaphore(limit)
    done: list[Completion | None] = [None] * len(prompts)
    failures: list[Exception] = []

    async def one(index: int) -> None:
        async with limiter:
            try:
                done[index] = await generate(prompts[index], params[index])
            except Exception as error:
                failures.append(error)
                tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for index in range(len(prompts)):
            tasks.start_soon(one, index)
    if failures:
        raise failures[0]
    return [completion for completion in done if completion is not None]
