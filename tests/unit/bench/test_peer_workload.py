"""The work that every engine of a comparison does, driven with an engine that only counts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bench.peers import timing
from bench.peers.floors import served_positions
from bench.peers.timing import Session, Workload, measure

SMALL = Workload(prompt=5, output=4, prefill=9, shared=7, own=3, sharing=4, shared_output=2, batches=(1, 8), repeats=2)


class Counter:
    """Remembers what was asked of it."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[list[int]], int]] = []

    def __call__(self, prompts: list[list[int]], tokens: int) -> None:
        self.calls.append((prompts, tokens))

    @property
    def positions(self) -> int:
        return sum(len(prompt) + tokens for prompts, tokens in self.calls for prompt in prompts)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> object:
    def begin(work: Workload, parts: str, seed: int = 3) -> Session:
        monkeypatch.setenv("PEERS_WORKLOAD", work.to_json())
        monkeypatch.setenv("PEERS_PARTS", parts)
        monkeypatch.setenv("PEERS_SEED", str(seed))
        monkeypatch.setenv("PEERS_STARTED", "0.0")
        monkeypatch.delenv("PEERS_PROBE", raising=False)
        return Session()

    return begin


def test_a_workload_survives_its_way_to_another_interpreter() -> None:
    assert Workload.from_json(SMALL.to_json()) == SMALL
    assert Workload.from_json(Workload.quick().to_json()) == Workload.quick()


@pytest.mark.parametrize("work", [SMALL, Workload(), Workload.quick()], ids=["small", "full", "quick"])
def test_memory_is_read_after_as_many_positions_as_the_floor_says(start, work: Workload) -> None:
    session, counter, at_peak = start(work, "prefill,decode"), Counter(), []

    def resident() -> float:
        at_peak.append(counter.positions)
        return 1.0

    measure(session, counter, resident=resident)
    assert at_peak == [served_positions(work)]
    assert session.facts["peak_rss"] == 1.0


def test_prompts_share_what_they_should_and_nothing_else(start) -> None:
    session, counter = start(SMALL, "prefill,decode,prefix"), Counter()
    measure(session, counter)
    groups = [prompts for prompts, _ in counter.calls if len(prompts) == SMALL.sharing]
    beginnings = [{tuple(prompt[: SMALL.shared]) for prompt in prompts} for prompts in groups]
    assert [len(found) for found in beginnings] == [1] * len(groups)
    assert len(set().union(*beginnings)) == len(groups), "a later group would find the prefix of an earlier one"
    others = [tuple(prompt) for prompts, _ in counter.calls if len(prompts) != SMALL.sharing for prompt in prompts]
    assert len(set(others)) == len(others)
    assert all(len(set(map(tuple, prompts))) == SMALL.sharing for prompts in groups)


def test_one_seed_gives_every_engine_the_same_prompts(start) -> None:
    calls = []
    for seed in (3, 3, 4):
        counter = Counter()
        measure(start(SMALL, "decode", seed), counter)
        calls.append(counter.calls)
    assert calls[0] == calls[1] != calls[2]


def test_only_what_was_asked_for_is_run(start) -> None:
    session = start(SMALL, "prefix")
    measure(session, Counter())
    assert set(session.samples) == {"first_token_s", "prefix_wall_s", "prefix_first_s"}


def test_decode_is_the_time_of_all_tokens_less_that_of_one(start, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that takes 2 s to read a prompt and 0.5 s a token: 2 tokens a second for each request."""
    clock = [0.0]

    def generate(prompts: list[list[int]], tokens: int) -> None:
        clock[0] += 2.0 + 0.5 * (tokens - 1)

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    session = start(SMALL, "prefill,decode")
    measure(session, generate)
    assert session.samples["decode_1"] == [2.0, 2.0]
    assert session.samples["decode_8"] == [16.0, 16.0]
    assert session.samples["prefill"] == [SMALL.prefill / 2.0] * 2


def test_a_machine_that_is_too_busy_gives_no_rate(start, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def generate(prompts: list[list[int]], tokens: int) -> None:
        clock[0] += 1.0 if tokens > 1 else 3.0

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    session = start(SMALL, "decode")
    measure(session, generate)
    assert "decode_1" not in session.samples


def test_what_a_process_found_is_its_last_line(start, capsys: pytest.CaptureFixture[str]) -> None:
    session = start(SMALL, "")
    session.add("prefill", 2.0)
    session.facts["weights"] = 5.0
    session.finish()
    last = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(last) == {"samples": {"prefill": [2.0]}, "reads": {}, "facts": {"weights": 5.0}}
    assert last.startswith('{"samples"')


def test_memory_of_children_counts(tmp_path: Path) -> None:
    """A child that touches 64 MiB raises what is reported for its parent by at least that."""
    import subprocess
    import sys

    before = timing.peak_rss()
    code = "x = bytearray(b'1') * (64 << 20); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        during = timing.peak_rss()
        child.communicate(b"\n")
    assert during - before > 64 << 20
    assert timing._high_water(os.getpid()) > 0
