"""What a step costs outside the model: schedule, apply and deliver at 256 to 4,096 running requests, and prefix lookups.
Run as a script; prints tables and, with --json FILE, writes the numbers. Asserts no time."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import anyio

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from infer.engine.kv_cache.manager import KVCacheManager
from infer.engine.loop import EngineLoop
from infer.engine.mailbox import Mailbox
from infer.engine.request import Request
from infer.engine.scheduler.scheduler import Scheduler
from infer.testing.fake_executor import FakeExecutor, FakeWorker
from step_driver import cache_config, full_group, new_request, scheduler_config

PROMPT, STEPS = 32, 120
GOAL_MS = 1.0


def make(num_requests: int, *, groups: int = 1) -> tuple[Scheduler, FakeWorker]:
    """A scheduler with room for everyone, and a worker that answers 5 to everything."""
    pools = [full_group(num_requests * 40) for _ in range(groups)]
    cache = cache_config(*pools, watermark=0.01)
    config = scheduler_config(max_num_seqs=num_requests, max_num_batched_tokens=num_requests * PROMPT)
    scheduler = Scheduler(config, KVCacheManager(cache, "bench"))
    return scheduler, FakeWorker(cache.groups, cache.block_size, lambda ids, sampling: 5, check=False)


def make_request(index: int) -> Request:
    return new_request([index] * PROMPT, 16 * 30, arrival=index)


def step_cost(num_requests: int) -> dict[str, float]:
    """Milliseconds per decode step: median and mean of CPU time of this thread, every reader having fetched."""
    scheduler, worker = make(num_requests)
    requests = [make_request(index) for index in range(num_requests)]
    for request in requests:
        scheduler.add(request)
    planned, booked = [], []
    gc.collect()
    for _ in range(STEPS):
        begin = time.thread_time()
        step = scheduler.schedule()
        planned.append(time.thread_time() - begin)
        assert step is not None
        result = worker.execute(step.plan)
        worker.plans.clear()
        begin = time.thread_time()
        scheduler.apply(result)
        booked.append(time.thread_time() - begin)
        for request in requests:
            request.outbox._updates.clear()
    totals = [1e3 * (a + b) for a, b in zip(planned, booked, strict=True)][10:]
    return {
        "running": num_requests,
        "schedule_ms": 1e3 * statistics.median(planned[10:]),
        "apply_deliver_ms": 1e3 * statistics.median(booked[10:]),
        "total_ms": statistics.median(totals),
        "total_mean_ms": statistics.mean(totals),
        "us_per_request": 1e3 * statistics.median(totals) / num_requests,
    }


def wake_up_cost(num_requests: int, control_ms: float) -> dict[str, float]:
    """Milliseconds per step of the whole loop with one reading task per request, less the control plane's own."""

    async def main() -> float:
        scheduler, worker = make(num_requests)
        mailbox = Mailbox()
        loop = EngineLoop(scheduler, FakeExecutor(worker), mailbox)

        async def read(request: Request) -> None:
            while not any(update.finish_reason for update in await request.outbox.take()):
                pass

        spent = 0.0
        async with anyio.create_task_group() as serving:
            serving.start_soon(loop.run)
            async with anyio.create_task_group() as readers:
                for index in range(num_requests):
                    request = new_request([index] * PROMPT, STEPS, arrival=index)
                    readers.start_soon(read, request)
                    mailbox.post_request(request)
                begin = time.thread_time()
            spent = time.thread_time() - begin
            serving.cancel_scope.cancel()
        return 1e3 * spent / STEPS

    whole = anyio.run(main)
    return {"running": num_requests, "whole_loop_ms": whole, "wake_ups_ms": whole - control_ms}


def lookup_cost(num_blocks: int) -> dict[str, float]:
    """Microseconds per block of a prefix lookup: a first one (one hash per block) and a repeated one (none)."""
    cache = cache_config(full_group(2 * num_blocks + 2))
    kv = KVCacheManager(cache, "bench")
    ids = list(range(16 * num_blocks + 1))
    first = new_request(ids)
    kv.admit(first, kv.match(first), len(ids))
    first.num_computed = len(ids)
    kv.register(first)
    fresh, repeated = [], []
    for _ in range(9):
        request = new_request(ids)
        begin = time.thread_time()
        hit = kv.match(request)
        middle = time.thread_time()
        kv.match(request)
        fresh.append(middle - begin)
        repeated.append(time.thread_time() - middle)
        if hit.num_tokens != 16 * num_blocks:
            raise SystemExit(f"expected a whole hit, got {hit.num_tokens} tokens")
    return {
        "blocks": num_blocks,
        "first_us_per_block": 1e6 * statistics.median(fresh) / num_blocks,
        "repeated_us_per_block": 1e6 * statistics.median(repeated) / num_blocks,
    }


def table(title: str, rows: list[dict[str, float]]) -> None:
    print(f"\n{title}")
    names = list(rows[0])
    print("  ".join(f"{name:>22}" for name in names))
    for row in rows:
        print(
            "  ".join(f"{row[name]:>22.3f}" if isinstance(row[name], float) else f"{row[name]:>22}" for name in names)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 1024, 4096])
    asked = parser.parse_args()
    steps = [step_cost(size) for size in asked.sizes]
    table("One step, CPU time of the loop thread (schedule + apply + deliver)", steps)
    wakes = [wake_up_cost(row["running"], row["total_ms"]) for row in steps]  # type: ignore[arg-type]
    table("With one reading task per request on asyncio", wakes)
    lookups = [lookup_cost(blocks) for blocks in (1, 4, 16, 64, 256, 1024)]
    table("Prefix lookup", lookups)
    first = steps[0]
    print(f"\ngoal at {first['running']}: under {GOAL_MS} ms; measured {first['total_ms']:.3f} ms")
    numbers: dict[str, Any] = {"steps": steps, "wake_ups": wakes, "prefix_lookup": lookups, "goal_ms": GOAL_MS}
    if asked.json:
        asked.json.write_text(json.dumps(numbers, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
