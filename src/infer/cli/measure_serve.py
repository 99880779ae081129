"""What `infer bench serve` does: requests at a rate or at a concurrency, the times of each, and their summary.

Runs in the benchmark's event loop; owns the records.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import anyio

from infer.cli.load_client import LoadClient, LoadError

WORDS = (
    "river",
    "stone",
    "light",
    "morning",
    "paper",
    "garden",
    "window",
    "music",
    "winter",
    "ocean",
    "letter",
    "bridge",
)
EXTRAS = ("return_token_ids", "ignore_eos", "stream_options")
"""Fields beyond the oldest servers' API; left out, last first refused first, where a server refuses them."""
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeWorkload:
    """What is asked. `request_rate` (per second, Poisson) or `concurrency` (so many at once, or at most so many)."""

    base_url: str
    model: str | None
    endpoint: str
    prompts: str
    num_prompts: int
    input_len: int
    output_len: int
    concurrency: int | None
    request_rate: float | None
    vocab_size: int
    seed: int
    extra_body: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class RequestTimes:
    """One request. Seconds since the run began, to the microsecond."""

    index: int
    due: float
    """When it was to start: the clock of all its times, so that a late client does not flatter the server."""
    sent: float
    arrivals: list[float] = field(default_factory=list)
    """One per event that brought output."""
    ended: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


@dataclass(slots=True)
class ServeReport:
    workload: ServeWorkload
    left_out: list[str]
    """Fields that this server refused."""
    requests: list[RequestTimes]
    client_cpu_s: float
    summary: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def summarize(requests: Sequence[RequestTimes]) -> dict[str, Any]:
    """Everything the table says, from the records alone."""
    done = [request for request in requests if request.error is None]
    started = min((request.due for request in requests), default=0.0)
    seconds = max((request.ended for request in requests), default=0.0) - started
    rate = 1 / seconds if seconds > 0 else 0.0
    prompt_tokens = sum(request.prompt_tokens for request in done)
    output_tokens = sum(request.output_tokens for request in done)
    with_output = [request for request in done if request.arrivals]
    return {
        "completed": len(done),
        "failed": len(requests) - len(done),
        "seconds": seconds,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "requests_per_s": len(done) * rate,
        "output_tokens_per_s": output_tokens * rate,
        "total_tokens_per_s": (prompt_tokens + output_tokens) * rate,
        "most_at_once": most_at_once(requests),
        "ttft_s": spread([request.arrivals[0] - request.due for request in with_output]),
        "itl_s": spread([b - a for request in with_output for a, b in itertools.pairwise(request.arrivals)]),
        "tpot_s": spread(
            [
                (request.arrivals[-1] - request.arrivals[0]) / (request.output_tokens - 1)
                for request in with_output
                if request.output_tokens > 1
            ]
        ),
        "e2e_s": spread([request.ended - request.due for request in done]),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles (nearest rank); empty when there is nothing to tell."""
    if not values:
        return {}
    ordered = sorted(values)
    found = {"mean": statistics.fmean(ordered), "min": ordered[0], "max": ordered[-1]}
    return found | {f"p{p}": ordered[max(0, math.ceil(p / 100 * len(ordered)) - 1)] for p in PERCENTILES}


def most_at_once(requests: Sequence[RequestTimes]) -> int:
    events = sorted([(r.sent, 1) for r in requests] + [(r.ended, -1) for r in requests])
    return max(itertools.accumulate(change for _, change in events), default=0)


class ServeBench:
    """One run against one server."""

    def __init__(self, workload: ServeWorkload, client: LoadClient) -> None:
        self.workload = workload
        self.left_out: list[str] = []
        self._client = client
        self._rng = random.Random(workload.seed)
        self._model = workload.model or ""
        self._prompts: list[Any] = []
        self._began = 0.0
        self._records: list[RequestTimes] = []

    async def run(self) -> ServeReport:
        """Find the model, try one request that does not count, then all. Raises `LoadError` if the trial fails."""
        workload = self.workload
        if not self._model:
            self._model = (await self._client.get("/v1/models"))["data"][0]["id"]
        self._prompts = [self._prompt() for _ in range(workload.num_prompts + 1)]
        await self._try()
        dues = self._dues()
        cpu = time.process_time()
        self._began = time.perf_counter()
        slots = anyio.Semaphore(workload.concurrency or workload.num_prompts)
        async with anyio.create_task_group() as tasks:
            for index, due in enumerate(dues):
                if due is not None:
                    await anyio.sleep(max(0.0, due - self._now()))
                    tasks.start_soon(self._one, index, due, slots)
                else:  # as soon as there is room
                    await slots.acquire()
                    tasks.start_soon(self._one, index, self._now(), slots)
        cpu = time.process_time() - cpu
        records = sorted(self._records, key=lambda record: record.index)
        return ServeReport(workload, self.left_out, records, cpu, summarize(records))

    def _dues(self) -> list[float | None]:
        rate = self.workload.request_rate
        if rate is None:
            return [None] * self.workload.num_prompts
        gaps = (self._rng.expovariate(rate) for _ in range(self.workload.num_prompts - 1))
        return list(itertools.accumulate(gaps, initial=0.0))

    async def _try(self) -> None:
        """A warm-up that also finds out which extra fields this server knows."""
        while True:
            trial = RequestTimes(-1, 0.0, 0.0)
            try:
                await self._read(trial, self._body(self._prompts[-1], 2))
                return
            except LoadError as error:
                refused = [name for name in EXTRAS if name not in self.left_out]
                if error.status not in (400, 422) or not refused:
                    raise
                named = [name for name in refused if name in str(error)]
                self.left_out += (named or refused)[:1]

    async def _one(self, index: int, due: float, slots: anyio.Semaphore) -> None:
        if self.workload.request_rate is not None:
            await slots.acquire()
        record = RequestTimes(index, due, self._now())
        try:
            await self._read(record, self._body(self._prompts[index], self.workload.output_len))
            if not record.arrivals:
                record.error = "the reply brought no output"
        except LoadError as error:
            record.error = str(error)
        finally:
            slots.release()
        record.ended = self._now()
        self._records.append(record)

    async def _read(self, record: RequestTimes, body: dict[str, Any]) -> None:
        ids = events_with_output = 0
        path = "/v1/completions" if self.workload.endpoint == "completions" else "/v1/chat/completions"
        async with self._client.request("POST", path, body) as reply:
            while (events := await reply.events()) is not None:
                now = self._now()
                for event in events:
                    for choice in event.get("choices") or ():
                        fresh = len(choice.get("token_ids") or ())
                        if fresh or choice.get("text") or (choice.get("delta") or {}).get("content"):
                            ids += fresh
                            events_with_output += 1
                            record.arrivals.append(now)
                    if event.get("usage"):
                        record.prompt_tokens = event["usage"]["prompt_tokens"]
                        record.output_tokens = event["usage"]["completion_tokens"]
        record.output_tokens = record.output_tokens or ids or events_with_output
        if not record.prompt_tokens and self.workload.prompts == "ids":
            record.prompt_tokens = self.workload.input_len

    def _body(self, prompt: Any, max_tokens: int) -> dict[str, Any]:
        asked: dict[str, Any] = {"prompt": prompt}
        if self.workload.endpoint == "chat":
            asked = {"messages": [{"role": "user", "content": prompt}]}
        body = {
            "model": self._model,
            **asked,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "return_token_ids": True,
        }
        return {name: value for name, value in body.items() if name not in self.left_out} | self.workload.extra_body

    def _prompt(self) -> Any:
        """Random, so that no prefix is shared."""
        count = self.workload.input_len
        if self.workload.prompts == "text":
            return " ".join(self._rng.choices(WORDS, k=count))
        low = min(100, self.workload.vocab_size - 1)  # the first ids are often special
        return [self._rng.randrange(low, self.workload.vocab_size) for _ in range(count)]

    def _now(self) -> float:
        return round(time.perf_counter() - self._began, 6)
