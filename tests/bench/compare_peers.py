"""infer against llama.cpp, OpenVINO and vLLM on this CPU: interleaved rounds, a process each. Prints tables, asserts nothing.

    python tests/bench/compare_peers.py [--peers DIR] [--rounds 3] [--quick] [--model smollm2] [--only NAME] [--json FILE]

DIR holds what `peers/prepare.py` makes and the engines that are installed; what is not there is named, with the way to get it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

from peers.catalog import HOW, Entrant, entrants
from peers.floors import Shape
from peers.processes import build_probe, run_one
from peers.report import Run, tables
from peers.results import Outcome
from peers.timing import MachineProbe, Workload


def say(words: str) -> None:
    """Progress, where it does not mix with the tables."""
    print(f"{time.strftime('%H:%M:%S')} load {os.getloadavg()[0]:.1f}  {words}", file=sys.stderr, flush=True)


def measured_peaks(program: Path | None, threads: int) -> tuple[float, float, float] | None:
    if program is None:
        return None
    probe = MachineProbe(str(program), 1 << 21, threads)
    rates = [probe.peak_rates() for _ in range(3)]
    probe.close()
    return (max(r[0] for r in rates), max(r[1] for r in rates), max(r[2] for r in rates))


def higher(
    one: tuple[float, float, float] | None, other: tuple[float, float, float] | None
) -> tuple[float, float, float] | None:
    if one is None or other is None:
        return one or other
    return (max(one[0], other[0]), max(one[1], other[1]), max(one[2], other[2]))


def report_missing(everybody: list[Entrant]) -> list[Entrant]:
    """Those that can run; the others are named."""
    hints = set()
    for entrant in everybody:
        if entrant.missing:
            absent = entrant.missing[0]
            print(f"not found: {entrant.name} ({absent})")
            hints.add("models" if "models" in absent.parts else entrant.engine)
    for hint in sorted(hints):
        print(f"  {hint}: {HOW[hint]}")
    return [entrant for entrant in everybody if not entrant.missing]


def header(options: argparse.Namespace, run: Run, rounds: int, began: float) -> str:
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    peaks = "not measured" if run.peaks is None else "fp32 {:.0f}, bf16 {:.0f}, int8 {:.0f} G op/s".format(*run.peaks)
    loads = "{:.1f} {:.1f} {:.1f}".format(*os.getloadavg())
    quick = ", QUICK" * options.quick
    return (
        f"\n{options.model}, {options.threads} threads, {rounds} rounds of {run.work.repeats} repeats{quick}; "
        f"{cpu}, {os.cpu_count()} CPUs; load average at the end {loads}, at the start {began:.1f}; register peaks {peaks}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=Path("peers"), help="the folder with models and engines")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, help="of each piece of work in one process")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default="smollm2", help="smollm2, 0.5b or 1b, as prepare.py made them")
    parser.add_argument("--part", action="append", choices=["prefill", "decode", "prefix"])
    parser.add_argument(
        "--only", action="append", metavar="NAME", help='engines or entrants, such as infer or "infer Q8_0"'
    )
    parser.add_argument("--quick", action="store_true", help="one round with little work, to see that everything runs")
    parser.add_argument("--json", type=Path, help="write all samples here; rewritten after every process")
    options = parser.parse_args()
    began = os.getloadavg()[0]
    everybody = entrants(options.peers.resolve(), options.model, options.threads)
    chosen = [one for one in everybody if not options.only or {one.engine, one.name} & set(options.only)]
    running = report_missing(chosen)
    config = options.peers / "models" / options.model / "hf" / "config.json"
    if not running or not config.exists():
        raise SystemExit(f"nothing to run, or no {config}: {HOW['models']}")
    work = Workload.quick() if options.quick else Workload()
    if options.repeats:
        work = Workload(repeats=options.repeats)
    rounds = 1 if options.quick else options.rounds
    outcomes = {one.name: Outcome(one.engine, one.weights, one.weight_class) for one in running}
    with tempfile.TemporaryDirectory() as scratch:
        probe = build_probe(Path(scratch))
        if probe is None:
            say("no C compiler: the floors are left out")
        run = Run(work, Shape.read(config), measured_peaks(probe, options.threads))
        for number in range(rounds):
            # Every second round goes backwards, so that nobody always runs on a machine that somebody has warmed up.
            for place, one in enumerate(running if number % 2 == 0 else running[::-1]):
                say(f"round {number + 1} of {rounds}, {place + 1} of {len(running)}: {one.name}")
                try:
                    parts = set(options.part or ("prefill", "decode", "prefix"))
                    outcomes[one.name].rounds[number] = run_one(one, parts, work, number, probe)
                except RuntimeError as error:
                    outcomes[one.name].failures.append(str(error))
                    say(f"{one.name} FAILED: {error}")
                if options.json:
                    found = {
                        "work": asdict(work),
                        "peaks": run.peaks,
                        "outcomes": [asdict(o) for o in outcomes.values()],
                    }
                    options.json.write_text(json.dumps(found, indent=1))
        # The higher of two: what else ran at the beginning may be gone.
        run = replace(run, peaks=higher(run.peaks, measured_peaks(probe, options.threads)))
    print(header(options, run, rounds, began))
    for line in tables(run, list(outcomes.values())):
        print(line)
    for outcome in outcomes.values():
        if outcome.failures:
            print(f"\nFAILED in {len(outcome.failures)} of {rounds} rounds: {outcome.name}: {outcome.failures[-1]}")


if __name__ == "__main__":
    main()
