"""infer in a process of its own: `infer_driver.py MODEL SETTINGS`, settings of an EngineConfig as JSON.

A user's engine: everything not named in SETTINGS is the default. Prints what `timing.Session` measured.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from timing import Session, measure

from infer import Engine, EngineConfig, SamplingParams


def main(model: str, settings: dict[str, Any]) -> None:
    session = Session()
    config = EngineConfig(**{**settings, "model": {"ref": model, **settings.get("model", {})}})
    with Engine.blocking(config) as engine:

        def generate(prompts: list[list[int]], tokens: int) -> None:
            params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
            done = engine.generate_many(prompts, params)
            assert all(len(each.token_ids) == tokens for each in done)

        memory = engine.engine.resolved.memory
        session.facts |= {"weights": float(memory.weights), "kv_pool": float(memory.kv_cache)}
        measure(session, generate)
    session.finish()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
