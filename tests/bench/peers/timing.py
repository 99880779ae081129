"""The work every engine does and how it is timed. Runs in the process of the engine that is measured, whichever that is.

Standard library alone and Python 3.10: other engines bring their own interpreters.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

Generate = Callable[["list[list[int]]", int], None]
"""Prompts as token ids, and how many tokens each is answered with: no more, no fewer, greedy. Returns when all are there."""

LOWEST_ID, HIGHEST_ID = 1000, 48_000
"""Between the special and byte tokens and the end of SmolLM2's vocabulary."""


@dataclass(frozen=True)
class Workload:
    """Lengths in tokens. Random ids, greedy, no stop: every engine computes the same number of positions."""

    prompt: int = 128
    output: int = 64
    prefill: int = 512
    shared: int = 1024
    own: int = 16
    sharing: int = 16
    """Requests behind one shared prefix."""
    shared_output: int = 32
    batches: tuple[int, ...] = (1, 8, 32)
    repeats: int = 3

    @classmethod
    def quick(cls) -> Workload:
        """To see that everything runs; the figures are of no use."""
        return cls(prompt=16, output=8, prefill=64, shared=64, sharing=4, shared_output=4, repeats=1)

    @classmethod
    def from_json(cls, text: str) -> Workload:
        fields = json.loads(text)
        return cls(**{**fields, "batches": tuple(fields["batches"])})

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class MachineProbe:
    """The program of `machine_probe.c` in a process of its own, so that its arena does not count as the engine's memory."""

    def __init__(self, program: str, nbytes: int, threads: int = 2) -> None:
        self._process = subprocess.Popen(
            [program, str(nbytes), str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def read_rate(self) -> float:
        """GB/s of one plain read of the arena, median of a few."""
        return self._ask("read")[0]

    def peak_rates(self) -> list[float]:
        """Register peaks in G operations per second: fp32 FMA, bf16 dot product, int8 dot product. 0: not on this CPU."""
        return self._ask("peaks")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def _ask(self, command: str) -> list[float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return [float(word) for word in self._process.stdout.readline().split()]


class Session:
    """What one process measured. Samples by name of the work; reads of the arena beside them by the same name."""

    def __init__(self) -> None:
        self.work = Workload.from_json(os.environ["PEERS_WORKLOAD"])
        self.wanted = set(os.environ["PEERS_PARTS"].split(","))
        self.samples: dict[str, list[float]] = {}
        self.reads: dict[str, list[float]] = {}
        self.facts: dict[str, float] = {}
        self._random = random.Random(int(os.environ["PEERS_SEED"]))
        program = os.environ.get("PEERS_PROBE")
        self._probe = MachineProbe(program, int(os.environ["PEERS_PROBE_BYTES"])) if program else None

    def ids(self, count: int) -> list[int]:
        return [self._random.randrange(LOWEST_ID, HIGHEST_ID) for _ in range(count)]

    def prompts(self, count: int, length: int) -> list[list[int]]:
        return [self.ids(length) for _ in range(count)]

    def add(self, name: str, value: float) -> None:
        self.samples.setdefault(name, []).append(value)

    def read_beside(self, name: str) -> None:
        if self._probe is not None:
            self.reads.setdefault(name, []).append(self._probe.read_rate())

    def note_first_token(self) -> None:
        """Called once, when the first token of the process is there."""
        self.add("first_token_s", time.monotonic() - float(os.environ["PEERS_STARTED"]))

    def finish(self) -> None:
        """Print what was found, as the last line of standard output."""
        if self._probe is not None:
            self._probe.close()
        print(json.dumps({"samples": self.samples, "reads": self.reads, "facts": self.facts}), flush=True)


def measure(session: Session, generate: Generate, *, resident: Callable[[], float] | None = None) -> None:
    """All the work that was asked for, in an order that is the same for every engine."""
    generate(session.prompts(1, 16), 1)
    session.note_first_token()
    parts = {"prefill": measure_prefill, "decode": measure_decode, "prefix": measure_prefix}
    for part, run in parts.items():
        if part in session.wanted:
            run(session, generate)
        if part == "decode":
            session.facts["peak_rss"] = (resident or peak_rss)()  # before longer prompts fill more of the KV cache


def seconds(generate: Generate, prompts: list[list[int]], tokens: int) -> float:
    started = time.perf_counter()
    generate(prompts, tokens)
    return time.perf_counter() - started


def measure_prefill(session: Session, generate: Generate) -> None:
    work = session.work
    generate(session.prompts(1, work.prefill), 1)
    for _ in range(work.repeats):
        took = seconds(generate, session.prompts(1, work.prefill), 1)
        session.add("prefill", work.prefill / took)
        session.read_beside("prefill")


def measure_decode(session: Session, generate: Generate) -> None:
    """Tokens per second after the first one: the time of all tokens less that of one, each with prompts of its own."""
    work = session.work
    for batch in work.batches:
        generate(session.prompts(batch, work.prompt), 2)
        repeats = work.repeats if batch < 32 else max(1, work.repeats - 1)
        firsts = []
        wholes = []
        for _ in range(repeats):
            firsts.append(seconds(generate, session.prompts(batch, work.prompt), 1))
            session.read_beside(f"decode_{batch}")
            wholes.append(seconds(generate, session.prompts(batch, work.prompt), work.output))
        first = statistics.median(firsts)
        for whole in wholes:
            if whole > first:  # else the machine was so busy that nothing can be said
                session.add(f"decode_{batch}", batch * (work.output - 1) / (whole - first))


def measure_prefix(session: Session, generate: Generate) -> None:
    """Requests that share a prefix nobody has seen before: wall time of all, and of all first tokens."""
    work = session.work
    for _ in range(max(1, work.repeats - 1)):
        for name, tokens in (("prefix_wall_s", work.shared_output), ("prefix_first_s", 1)):
            shared = session.ids(work.shared)
            prompts = [shared + session.ids(work.own) for _ in range(work.sharing)]
            session.add(name, seconds(generate, prompts, tokens))
            session.read_beside(name)


def peak_rss() -> float:
    """Highest resident set of this process and of its children, the probe left out; bytes. Linux."""
    return sum(_high_water(pid) for pid in [os.getpid(), *_descendants(os.getpid())])


def _descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            if "machine_probe" not in Path(f"/proc/{child}/cmdline").read_text():
                found += [int(child), *_descendants(int(child))]
    return found


def _high_water(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def complain(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
