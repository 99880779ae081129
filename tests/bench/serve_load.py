"""What HTTP costs: total tokens/s over HTTP against in process, server CPU per streamed token, memory over requests.
Prints tables of ratios; asserts nothing. Server and client are processes of their own.

    python tests/bench/serve_load.py [MODEL] [--streams 32] [--rounds 3] [--threads 1] [--cpu-only] [--profile FILE]

MODEL (a GGUF or directory) is needed for the ratio; CPU per token and memory use a scripted model.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import gc
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio

from infer import Engine, EngineConfig, SamplingParams
from infer.api import serve
from infer.cli.load_client import LoadClient
from infer.cli.measure import Workload, measure_decode
from infer.cli.measure_serve import ServeBench, ServeReport, ServeWorkload
from infer.engine.step import SamplingSpec
from infer.testing.fake_engine import fake_engine
from infer.testing.fake_executor import FakeWorker

TEXT = b"the quick brown fox "


def scripted_engine(config: EngineConfig, latency: float = 0.0) -> Engine:
    """A model that costs next to nothing and forgets what it did, so that what is left is the server's own."""

    def lean(worker: FakeWorker) -> None:
        worker.check = False
        worker.plans = deque(maxlen=1)  # type: ignore[assignment]

    def next_token(token_ids: Any, sampling: SamplingSpec) -> int:
        return TEXT[len(token_ids) % len(TEXT)]

    return fake_engine(next_token, config, latency=latency, on_worker=lean)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text("utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def server_process(*arguments: str) -> Iterator[tuple[str, int]]:
    """This file as a server in a process of its own: (address, pid)."""
    command = [sys.executable, __file__, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


async def serve_here(args: argparse.Namespace) -> None:
    """The server's side."""
    api: dict[str, Any] = {"port": 0, "served_model_names": ["m"], "drain_seconds": 0.0}
    scheduler = {"max_num_seqs": 256}
    if args.serve == "scripted":
        engine = scripted_engine(EngineConfig(api=api, scheduler=scheduler), args.latency)
    else:
        platform = {"threads": args.threads}
        engine = Engine(EngineConfig(model=args.serve, api=api, scheduler=scheduler, platform=platform))
    stop = anyio.Event()
    async with engine, anyio.create_task_group() as tasks:

        async def run(*, task_status: anyio.abc.TaskStatus[str]) -> None:
            await serve(engine, stop=stop, task_status=task_status)

        print(await tasks.start(run), flush=True)
        with anyio.open_signal_receiver(signal.SIGTERM) as signals:
            profile = cProfile.Profile()
            if args.profile:
                profile.enable()
            async for _ in signals:
                break
            if args.profile:
                profile.disable()
                profile.dump_stats(args.profile)
        stop.set()


async def load(
    url: str, streams: int, input_len: int, output_len: int, num: int, vocab: int, **more: Any
) -> ServeReport:
    workload = ServeWorkload(
        base_url=url,
        model="m",
        endpoint=more.pop("endpoint", "completions"),
        prompts=more.pop("prompts", "ids"),
        num_prompts=num,
        input_len=input_len,
        output_len=output_len,
        concurrency=streams,
        request_rate=None,
        vocab_size=vocab,
        seed=random.randrange(2**31),
        extra_body=more,
    )
    async with LoadClient(url) as client:
        report = await ServeBench(workload, client).run()
    failed = [request.error for request in report.requests if request.error]
    if failed:
        sys.exit(f"{len(failed)} requests failed: {failed[0]}")
    return report


PACE = 0.01
"""Seconds per step of the scripted model: slower than the server, so that no two tokens share an event."""


async def in_process_cpu(streams: int, output_len: int) -> float:
    """CPU seconds per token of the same scripted engine read by tasks instead of clients."""
    params = SamplingParams(max_tokens=output_len, temperature=0, ignore_eos=True)
    async with scripted_engine(EngineConfig(scheduler={"max_num_seqs": 256}), PACE) as engine:

        async def read() -> None:
            async with engine.stream([1] * 16, params) as stream:
                async for _ in stream:
                    pass

        began = time.process_time()
        async with anyio.create_task_group() as tasks:
            for _ in range(streams):
                tasks.start_soon(read)
        return (time.process_time() - began) / (streams * output_len)


async def print_cpu(args: argparse.Namespace) -> None:
    output_len = 256
    print("\nserver CPU per streamed token, scripted model (goal <= 60 µs over HTTP)")
    print(f"  {'streams':>8} {'what':32} {'µs/token':>9} {'client':>9}  events/token")
    for streams in (1, args.streams):
        inside = statistics.median([await in_process_cpu(streams, output_len) for _ in range(args.rounds)])
        print(f"  {streams:8} {'in process (engine, no HTTP)':32} {inside * 1e6:9.1f}")
        for name, more in (
            ("completions", {}),
            ("completions, plain (no ids)", {"return_token_ids": False, "stream_options": None}),
            ("chat", {"endpoint": "chat", "prompts": "text"}),
            (
                "chat with 5 log-probabilities",
                {"endpoint": "chat", "prompts": "text", "logprobs": True, "top_logprobs": 5},
            ),
        ):
            costs, client, events = [], [], []
            profile = ["--profile", f"{args.profile}.{name.replace(' ', '_')}.{streams}"] if args.profile else []
            with server_process("--serve", "scripted", "--latency", str(PACE), *profile) as (url, pid):
                await load(url, streams, 16, 16, streams, 256, **dict(more))
                for _ in range(args.rounds):
                    before = cpu_seconds(pid)
                    report = await load(url, streams, 16, output_len, streams, 256, **dict(more))
                    costs.append((cpu_seconds(pid) - before) / (streams * output_len))
                    client.append(report.client_cpu_s / (streams * output_len))
                    events.append(sum(len(r.arrivals) for r in report.requests) / (streams * output_len))
            cost = statistics.median(costs)
            told = f"{statistics.median(client) * 1e6:9.1f}  {statistics.median(events):.2f}"
            print(f"  {streams:8} {name:32} {cost * 1e6:9.1f} {told}")


async def print_memory(requests: int = 2000) -> None:
    print("\nmemory of the server, scripted model, 32 at once, 32 tokens each")
    with server_process("--serve", "scripted") as (url, pid):
        await load(url, 32, 16, 32, 200, 256)
        first = rss_bytes(pid)
        print(f"  after   200 requests: {first / 2**20:8.1f} MiB")
        await load(url, 32, 16, 32, requests, 256)
        last = rss_bytes(pid)
        print(
            f"  after {200 + requests:5} requests: {last / 2**20:8.1f} MiB (grew {(last - first) / 1e6:.2f} MB; goal < 20)"
        )


async def print_ratio(args: argparse.Namespace) -> None:
    workload = Workload(input_len=32, output_len=64)
    inside: list[float] = []
    outside: list[float] = []
    client: list[float] = []
    cpu_inside: list[float] = []
    cpu_outside: list[float] = []
    config = EngineConfig(model=args.model, platform={"threads": args.threads}, scheduler={"max_num_seqs": 256})
    with server_process("--serve", args.model, "--threads", str(args.threads)) as (url, pid):
        async with Engine(config) as engine:
            vocab = engine.model_config.vocab_size
            rng = random.Random(0)
            await measure_decode(engine, 2, Workload(input_len=8, output_len=4), rng)
            for _ in range(args.rounds):
                gc.collect()
                before = time.process_time()
                inside.append((await measure_decode(engine, args.streams, workload, rng)).output_rate)
                cpu_inside.append(time.process_time() - before)
                before = cpu_seconds(pid)
                report = await load(url, args.streams, 32, 64, args.streams, vocab)
                outside.append(report.summary["output_tokens_per_s"])
                client.append(report.client_cpu_s)
                cpu_outside.append(cpu_seconds(pid) - before)
    print(
        f"\n{args.model}, {args.streams} streams, 32 in, 64 out, {args.threads} threads, {args.rounds} interleaved rounds"
    )
    for name, values in (
        ("in process, tokens/s", inside),
        ("over HTTP, tokens/s", outside),
        ("in process, CPU s", cpu_inside),
        ("server process, CPU s", cpu_outside),
        ("client, CPU s", client),
    ):
        print(f"  {name:24} {statistics.median(values):9.2f}  ({min(values):.2f} - {max(values):.2f})")
    ratio = statistics.median(o / i for o, i in zip(outside, inside, strict=True))
    cpu_ratio = statistics.median(i / o for o, i in zip(cpu_outside, cpu_inside, strict=True))
    print(f"  HTTP / in process {ratio:.3f} by the clock, {cpu_ratio:.3f} by CPU time (goal >= 0.9)")


async def main(args: argparse.Namespace) -> None:
    if args.serve:
        await serve_here(args)
        return
    await print_cpu(args)
    if not args.cpu_only:
        await print_memory()
    if args.model and not args.cpu_only:
        await print_ratio(args)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of the model; event loop and client need a core too")
    parser.add_argument("--cpu-only", action="store_true")
    parser.add_argument("--profile")
    parser.add_argument("--latency", type=float, default=0.0)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    loop = {"use_uvloop": True} if arguments.serve else {}
    anyio.run(main, arguments, backend_options=loop)
