"""Measurements behind `infer bench`: time to first token, tokens per second, peak memory, through the public engine.

Runs in the engine's event loop; owns nothing.
"""

from __future__ import annotations

import itertools
import random
import resource
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field

import anyio

from infer.engine.engine import Engine
from infer.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Workload:
    """Random token ids in, greedy ids out, EOS ignored, nothing shared between prompts."""

    input_len: int = 128
    output_len: int = 64
    repeat: int = 3
    prefill_len: int = 512
    seed: int = 0


@dataclass(slots=True)
class Sample:
    """One run of `concurrency` requests at once. Seconds and tokens."""

    concurrency: int
    wall: float
    first_tokens: list[float]
    gaps: list[float]
    """Between consecutive tokens of one request."""
    decode_rate: float
    """Tokens per second over all requests from the last first token on."""
    output_rate: float
    """Output tokens per second of the whole run, prefill included."""


@dataclass(slots=True)
class Report:
    """Medians over the repeats, with the lowest and highest beside them."""

    workload: Workload
    prefill_rate: dict[str, float] = field(default_factory=dict)
    concurrency: dict[int, dict[str, dict[str, float]]] = field(default_factory=dict)
    peak_rss: int = 0
    """Bytes, of the whole process."""

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def peak_rss() -> int:
    """Highest resident set size so far, bytes (the kernel counts KiB on Linux, bytes on macOS)."""
    value = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return value if sys.platform == "darwin" else value * 1024


async def measure_prefill(engine: Engine, workload: Workload, rng: random.Random) -> float:
    """Prompt tokens per second of one prompt alone, up to its first output token."""
    prompt = _prompt(engine, workload.prefill_len, rng)
    started = time.perf_counter()
    await engine.generate(prompt, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
    return len(prompt) / (time.perf_counter() - started)


async def measure_decode(engine: Engine, concurrency: int, workload: Workload, rng: random.Random) -> Sample:
    """`concurrency` requests started together and read token by token."""
    params = SamplingParams(max_tokens=workload.output_len, temperature=0, ignore_eos=True)
    prompts = [_prompt(engine, workload.input_len, rng) for _ in range(concurrency)]
    arrivals: list[list[float]] = [[] for _ in prompts]

    async def read(index: int) -> None:
        async with engine.stream(prompts[index], params) as stream:
            async for delta in stream:
                arrivals[index] += [time.perf_counter()] * len(delta.token_ids)

    started = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for index in range(concurrency):
            tasks.start_soon(read, index)
    ended = time.perf_counter()
    last_first = max(times[0] for times in arrivals)
    decoded = sum(1 for times in arrivals for at in times if at > last_first)
    return Sample(
        concurrency=concurrency,
        wall=ended - started,
        first_tokens=[times[0] - started for times in arrivals],
        gaps=[b - a for times in arrivals for a, b in itertools.pairwise(times)],
        decode_rate=decoded / (ended - last_first) if decoded else 0.0,
        output_rate=concurrency * workload.output_len / (ended - started),
    )


async def measure(engine: Engine, concurrencies: list[int], workload: Workload) -> Report:
    """All figures, the repeats interleaved so that a slow minute of the machine hits every row."""
    rng = random.Random(workload.seed)
    report = Report(workload)
    prefill: list[float] = []
    samples: dict[int, list[Sample]] = {concurrency: [] for concurrency in concurrencies}
    await measure_decode(engine, 1, Workload(input_len=8, output_len=4), rng)  # not counted
    for _ in range(workload.repeat):
        prefill.append(await measure_prefill(engine, workload, rng))
        for concurrency in concurrencies:
            samples[concurrency].append(await measure_decode(engine, concurrency, workload, rng))
    report.prefill_rate = spread(prefill)
    for concurrency, runs in samples.items():
        report.concurrency[concurrency] = {
            "decode_tokens_per_s": spread([run.decode_rate for run in runs]),
            "output_tokens_per_s": spread([run.output_rate for run in runs]),
            "ttft_s": spread([at for run in runs for at in run.first_tokens]),
            "itl_s": spread([gap for run in runs for gap in run.gaps] or [0.0]),
        }
    report.peak_rss = peak_rss()
    return report


def _prompt(engine: Engine, length: int, rng: random.Random) -> list[int]:
    return [rng.randrange(engine.model_config.vocab_size) for _ in range(length)]
