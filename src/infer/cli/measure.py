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
class TokenTimes:
    """One request of a run. Seconds since the run began."""

    prompt_tokens: int
    output_tokens: int
    arrivals: list[float]
    """One per output token."""


@dataclass(slots=True)
class Sample:
    """One run of `concurrency` requests at once."""

    concurrency: int
    wall: float
    requests: list[TokenTimes]

    @property
    def first_tokens(self) -> list[float]:
        return [request.arrivals[0] for request in self.requests]

    @property
    def gaps(self) -> list[float]:
        """Between consecutive tokens of one request."""
        return [b - a for request in self.requests for a, b in itertools.pairwise(request.arrivals)]

    @property
    def decode_rate(self) -> float:
        """Tokens per second over all requests from the last first token on."""
        last_first = max(self.first_tokens)
        decoded = sum(1 for request in self.requests for at in request.arrivals if at > last_first)
        return decoded / (self.wall - last_first) if decoded else 0.0

    @property
    def output_rate(self) -> float:
        """Output tokens per second of the whole run, prefill included."""
        return sum(request.output_tokens for request in self.requests) / self.wall


@dataclass(slots=True)
class Prefill:
    """One prompt alone."""

    prompt_tokens: int
    seconds: float
    """Up to its first output token."""

    @property
    def rate(self) -> float:
        return self.prompt_tokens / self.seconds


@dataclass(slots=True)
class Report:
    """Medians over the repeats, with the lowest and highest beside them."""

    workload: Workload
    prefill_rate: dict[str, float] = field(default_factory=dict)
    concurrency: dict[int, dict[str, dict[str, float]]] = field(default_factory=dict)
    peak_rss: int = 0
    """Bytes, of the whole process."""
    prefills: list[Prefill] = field(default_factory=list)
    runs: list[Sample] = field(default_factory=list)
    """What the figures were computed from."""

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def peak_rss() -> int:
    """Highest resident set size so far, bytes (the kernel counts KiB on Linux, bytes on macOS)."""
    value = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return value if sys.platform == "darwin" else value * 1024


async def measure_prefill(engine: Engine, workload: Workload, rng: random.Random) -> Prefill:
    """One prompt alone, up to its first output token."""
    prompt = _prompt(engine, workload.prefill_len, rng)
    started = time.perf_counter()
    done = await engine.generate(prompt, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
    return Prefill(done.usage.prompt_tokens, round(time.perf_counter() - started, 6))


async def measure_decode(engine: Engine, concurrency: int, workload: Workload, rng: random.Random) -> Sample:
    """`concurrency` requests started together and read token by token."""
    params = SamplingParams(max_tokens=workload.output_len, temperature=0, ignore_eos=True)
    prompts = [_prompt(engine, workload.input_len, rng) for _ in range(concurrency)]
    found: list[TokenTimes | None] = [None] * concurrency

    async def read(index: int) -> None:
        arrivals: list[float] = []
        async with engine.stream(prompts[index], params) as stream:
            async for delta in stream:
                arrivals += [round(time.perf_counter() - started, 6)] * len(delta.token_ids)
        usage = stream.result.usage
        found[index] = TokenTimes(usage.prompt_tokens, usage.output_tokens, arrivals)

    started = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for index in range(concurrency):
            tasks.start_soon(read, index)
    wall = round(time.perf_counter() - started, 6)
    return Sample(concurrency, wall, [times for times in found if times is not None])


async def measure(engine: Engine, concurrencies: list[int], workload: Workload) -> Report:
    """All figures, the repeats interleaved so that a slow minute of the machine hits every row."""
    rng = random.Random(workload.seed)
    report = Report(workload)
    samples: dict[int, list[Sample]] = {concurrency: [] for concurrency in concurrencies}
    await measure_decode(engine, 1, Workload(input_len=8, output_len=4), rng)  # not counted
    for _ in range(workload.repeat):
        report.prefills.append(await measure_prefill(engine, workload, rng))
        for concurrency in concurrencies:
            samples[concurrency].append(await measure_decode(engine, concurrency, workload, rng))
    report.prefill_rate = spread([prefill.rate for prefill in report.prefills])
    report.runs = [run for runs in samples.values() for run in runs]
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
