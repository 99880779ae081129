"""Part: what a profiler's trace of decode steps shows: what crosses the bus, replayed graphs, and the gaps between steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from gpu.checkpoints import RandomCheckpoint, dense
from gpu.checks import Check, Facts
from gpu.engines import engine, greedy, random_prompts
from gpu.place import Place

ROWS = 4
BYTES_PER_ROW = 16384
"""Ids, positions, one block table and what sampling needs; a token's keys and values of all layers are more."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Device events of some decode steps."""

    steps: int
    copies: dict[str, list[int]]
    """Direction ("HtoD") -> bytes of each copy."""
    busy: float
    """Microseconds in which a kernel ran."""
    idle: float
    """Between the first kernel and the last."""
    kernels: int
    replays: int


class Shared:
    """Two traces of the same work."""

    def __init__(self, place: Place) -> None:
        self.place = place

    @cached_property
    def checkpoint(self) -> RandomCheckpoint:
        return dense(self.place)

    @cached_property
    def ahead(self) -> Trace:
        return traced(self.place, self.checkpoint, 2)

    @cached_property
    def one_by_one(self) -> Trace:
        return traced(self.place, self.checkpoint, 1)


def checks(place: Place) -> Iterator[Check]:
    shared = Shared(place)
    yield Check("only ids and metadata cross the bus", lambda: copies(shared))
    yield Check("graphs are replayed", lambda: replays(shared))
    yield Check("gaps between steps shrink at depth 2", lambda: gaps(shared))


def traced(place: Place, checkpoint: RandomCheckpoint, depth: int) -> Trace:
    steps = place.sizes.trace_steps
    scheduler = {"max_num_seqs": ROWS, "in_flight_depth": depth}
    prompts = random_prompts(checkpoint, ROWS, 8)
    kinds = [ProfilerActivity.CPU] if place.dry_run else [ProfilerActivity.CUDA]
    with engine(place, checkpoint, scheduler=scheduler) as opened:
        opened.generate_many(prompts, greedy(steps, logprobs=None))
        with profile(activities=kinds) as profiler:
            opened.generate_many(prompts, greedy(steps, logprobs=None))
            place.synchronize()
    path = place.directory / f"trace-{depth}.json"
    profiler.export_chrome_trace(str(path))
    return read_trace(path, steps)


def read_trace(path: Path, steps: int) -> Trace:
    events = [event for event in json.loads(path.read_text("utf-8"))["traceEvents"] if event.get("ph") == "X"]
    copied: dict[str, list[int]] = {}
    for event in events:
        if event.get("cat") == "gpu_memcpy":
            copied.setdefault(event["name"].split()[1], []).append(int(event["args"].get("bytes", 0)))
    kernels = sorted((event for event in events if event.get("cat") == "kernel"), key=lambda event: float(event["ts"]))
    busy, idle = spans(kernels)
    launches = sum("GraphLaunch" in event["name"] for event in events if event.get("cat") == "cuda_runtime")
    return Trace(steps, copied, busy, idle, len(kernels), launches)


def spans(kernels: list[dict[str, Any]]) -> tuple[float, float]:
    """Events in the order of their starts -> microseconds that one of them covers, and the others up to the last end."""
    busy = idle = 0.0
    end: float | None = None
    for event in kernels:
        begins, ends = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        if end is None:
            end = begins
        idle += max(0.0, begins - end)
        busy += max(0.0, ends - max(begins, end))
        end = max(end, ends)
    return busy, idle


def copies(shared: Shared) -> Facts:
    """By step: the host gets no more than sampled ids, and gives no more than ids and metadata."""
    trace = shared.ahead
    assert shared.place.dry_run or trace.kernels, "the profiler saw no kernel; CUPTI may not be allowed here"
    facts = {f"{way}_bytes_per_step": sum(sizes) / trace.steps for way, sizes in trace.copies.items()}
    for way in ("HtoD", "DtoH"):
        per_step = facts.get(f"{way}_bytes_per_step", 0.0)
        assert per_step <= ROWS * BYTES_PER_ROW, f"{per_step:.0f} bytes {way} in each step of {ROWS} rows"
    return facts


def replays(shared: Shared) -> Facts:
    trace = shared.ahead
    if not shared.place.dry_run:
        assert trace.replays > 0, "no graph was replayed"
    return {"graph_launches_per_step": trace.replays / trace.steps, "kernels_per_step": trace.kernels / trace.steps}


def gaps(shared: Shared) -> Facts:
    ahead, one_by_one = (trace.idle / trace.steps for trace in (shared.ahead, shared.one_by_one))
    if not shared.place.dry_run:
        assert ahead < one_by_one, f"{ahead:.1f} us idle in a step at depth 2, {one_by_one:.1f} at depth 1"
    return {"idle_us_per_step_depth_2": ahead, "idle_us_per_step_depth_1": one_by_one}
