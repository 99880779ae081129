"""What an engine plans and then takes, in a process of its own: `python memory_driver.py CASE` with a JSON case prints JSON.

Runs an engine over the case's checkpoint and the planned worst steps on its worker thread. Owns the process.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import torch


def resident(name: str) -> int:
    """VmRSS, or VmHWM: the most of this program so far, or since `watch_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


STARTED = resident("VmHWM")
"""After `import torch`, before anything of the engine."""

from infer import Engine, EngineConfig  # noqa: E402
from infer.config.model import StepBounds  # noqa: E402
from infer.engine.step import SamplingSpec  # noqa: E402
from infer.engine.worker.runner import Runner, null_plan  # noqa: E402
from infer.engine.worker.workspace import worst_steps  # noqa: E402


def watch_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def storages(tensors: list[Any]) -> int:
    """Bytes of the distinct storages, small tensors left out."""
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.numel() * t.element_size() > 4096}
    return sum(storage.nbytes() for storage in kept.values())


def run_worst_steps(engine: Engine, spec: SamplingSpec) -> int:
    """On the worker thread -> the rise of resident memory at its highest."""
    resolved, runner = engine.resolved, engine._parts.executor._worker  # type: ignore[union-attr]
    limits = resolved.scheduler
    bounds = StepBounds(
        num_tokens=limits.max_num_batched_tokens, num_rows=limits.max_num_seqs, max_model_len=limits.max_model_len
    )
    plans = [null_plan(rows, len(resolved.cache.groups), [spec] * len(rows)) for rows in worst_steps(bounds)]
    gc.collect()
    runner._platform.trim()  # again: what this driver itself has done since the engine trimmed
    level = resident("VmRSS")
    watch_peak()
    for plan in plans:
        result = runner.execute(plan)
        if result.errors:
            raise RuntimeError(f"a row failed: {result.errors}")
        del result
    return resident("VmHWM") - level


async def main(case: dict[str, Any]) -> dict[str, Any]:
    warm_up, loaded = Runner.warm_up, []

    def watched(runner: Runner) -> None:
        loaded.append(resident("VmHWM"))
        warm_up(runner)

    Runner.warm_up = watched  # type: ignore[method-assign]
    started = time.perf_counter()
    async with Engine(EngineConfig(**case["config"])) as engine:
        startup = time.perf_counter() - started
        plan = engine.resolved.memory
        measured = engine._parts.executor._worker.measured()  # type: ignore[union-attr]
        live = storages([o for o in gc.get_objects() if type(o) is torch.Tensor])
        spec = SamplingSpec(seed=0, top_p=0.5, logprobs=2, prompt_logprobs=2)
        executor = engine._parts.executor  # type: ignore[union-attr]
        workspace = await executor.call(lambda: run_worst_steps(engine, spec))
    return {
        "planned": {"weights": plan.weights, "kv_cache": plan.kv_cache, "workspace": plan.workspace},
        "measured": {"weights": measured["weights"], "kv_cache": measured["kv_cache"], "workspace": workspace},
        "live": live,
        "loading": loaded[0] - STARTED,
        "startup_s": startup,
    }


if __name__ == "__main__":
    print(json.dumps(anyio.run(main, json.loads(sys.argv[1]))))
