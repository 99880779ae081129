"""What the rounds found becomes ratios, verdicts and tables; who is missing is named."""

from __future__ import annotations

import fcntl
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.peers.catalog import CLASSES, HOW, Entrant, entrants, vllm_environment
from bench.peers.floors import Shape
from bench.peers.processes import arena_bytes, build_probe, run_one
from bench.peers.report import Run, tables, verdict
from bench.peers.results import Outcome, Spread, best, ratio, rivals
from bench.peers.targets import Target, target
from bench.peers.timing import MachineProbe, Workload

SHAPE = Shape(layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, intermediate=1536, vocabulary=49152)


def outcome(name: str, weight_class: str = "8-bit", **rounds: list[float]) -> Outcome:
    """One value per round and work."""
    engine, _, weights = name.partition(" ")
    found = Outcome(engine, weights, weight_class)
    for work_name, values in rounds.items():
        for number, value in enumerate(values):
            one = found.rounds.setdefault(
                number, {"samples": {}, "reads": {}, "facts": {"weights": 1.4e8, "kv_pool": 2e9}}
            )
            if work_name == "peak_rss":
                one["facts"]["peak_rss"] = value
            else:
                one["samples"][work_name], one["reads"][work_name] = [value], [40.0]
    return found


@pytest.mark.parametrize(
    ("work_name", "weight_class", "weights", "wanted"),
    [
        ("decode_1", "16-bit", "bf16", Target(1.15)),
        ("decode_1", "8-bit", "int8", Target(1.5)),
        ("decode_1", "4-bit", "Q4_1", Target(2.2, "same")),
        ("decode_1", "4-bit", "Q4_K_M", Target(1.5, "same")),
        ("decode_1", "4-bit", "int4", None),
        ("decode_8", "8-bit", "Q8_0", Target(2.4)),
        ("decode_32", "4-bit", "Q4_0", Target(2.0)),
        ("prefill", "16-bit", "bf16", Target(1.1)),
        ("prefix_wall_s", "16-bit", "bf16", Target(1.5, "vLLM")),
        ("first_token_s", "8-bit", "Q8_0", Target(10.0, "vLLM")),
        ("prefix_first_s", "16-bit", "bf16", None),
    ],
)
def test_targets_are_those_of_the_issue(work_name: str, weight_class: str, weights: str, wanted: Target | None) -> None:
    assert target(work_name, weight_class, weights) == wanted


def test_a_ratio_is_taken_round_by_round() -> None:
    ours, theirs = outcome("infer int8", decode_8=[100, 300]), outcome("OpenVINO int8", decode_8=[50, 100, 1])
    assert ratio(ours, theirs, "decode_8") == Spread(2.5, 2.0, 3.0)
    assert ratio(ours, outcome("vLLM W8A8"), "decode_8") is None


def test_of_seconds_fewer_are_better() -> None:
    ours, slow, fast = (outcome(f"{n} x", first_token_s=[t]) for n, t in (("infer", 2), ("vLLM", 70), ("OpenVINO", 4)))
    assert best([slow, fast], "first_token_s") is fast
    found = ratio(ours, slow, "first_token_s")
    assert found is not None
    assert found.median == 35
    assert best([slow, fast], "decode_1") is None


def test_rivals_are_the_class_or_the_same_quantization_or_one_engine() -> None:
    ours = outcome("infer Q4_0", "4-bit")
    same, other = outcome("llama.cpp Q4_0", "4-bit"), outcome("llama.cpp Q4_1", "4-bit")
    openvino, eight = outcome("OpenVINO int4", "4-bit"), outcome("vLLM W8A8", "8-bit")
    everybody = [ours, same, other, openvino, eight]
    assert rivals(ours, everybody, Target(2.2, "same")) == [same]
    assert rivals(ours, everybody, Target(2.2)) == rivals(ours, everybody, None) == [same, other, openvino]
    assert rivals(ours, everybody, Target(1.5, "vLLM")) == [eight]


def test_a_verdict_is_by_the_median() -> None:
    assert verdict(Spread(2.0, 1.0, 3.0), Target(2.0)) == "reached"
    assert verdict(Spread(1.99, 1.0, 3.0), Target(2.0)) == "missed"
    assert verdict(None, Target(2.0)) == "not run"
    assert verdict(Spread(1.99, 1.0, 3.0), None) == ""


def test_tables_show_ratio_target_and_floor() -> None:
    ours = outcome("infer Q8_0", decode_8=[900.0], peak_rss=[7e8], first_token_s=[2.0])
    theirs = outcome("OpenVINO int8", decode_8=[450.0], peak_rss=[8e8])
    text = "\n".join(tables(Run(Workload(), SHAPE, (235.0, 468.0, 940.0)), [ours, theirs]))
    [row] = [line for line in text.splitlines() if line.startswith("| Q8_0 | 900 |")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[2:6] == ["OpenVINO int8 450", "2.00", ">= 2.4", "missed"]
    # 8 requests of 128 + 32.5 positions of 23,040 bytes and 140 MB of weights, at the 40 GB/s read beside it
    seconds = (1.4e8 + 8 * 160.5 * 23040) / 40e9
    assert cells[6] == f"{8 / seconds:,.0f}"
    assert cells[7] == f"{100 * 900 * seconds / 8:.0f} %"
    assert "Under 4 s: reached by all" in text
    assert "| 8-bit | OpenVINO int8 |" in text


def test_without_a_probe_there_is_no_arithmetic_in_the_floor() -> None:
    text = "\n".join(tables(Run(Workload(), SHAPE, None), [outcome("infer bf16", "16-bit", prefill=[100.0])]))
    assert "| bf16 | 100 |" in text


def test_the_cache_off_is_compared_with_the_cache_on() -> None:
    on, off = Outcome("infer", "bf16", "16-bit"), Outcome("infer", "bf16, prefix cache off", "16-bit")
    on.rounds[0] = {"samples": {"prefix_first_s": [0.5]}, "reads": {}, "facts": {}}
    off.rounds[0] = {"samples": {"prefix_first_s": [5.0]}, "reads": {}, "facts": {}}
    text = "\n".join(tables(Run(Workload(), SHAPE, None), [on, off]))
    assert "on against off: 10.00 times faster (target >= 8): reached" in text


def test_an_empty_folder_lacks_every_engine_by_name(tmp_path: Path) -> None:
    found = entrants(tmp_path, "smollm2", 2)
    assert {one.engine for one in found} == {"infer", "llama.cpp", "OpenVINO", "vLLM"}
    assert all(one.missing for one in found)
    assert {one.engine for one in found} - {"infer"} <= set(HOW)
    assert [one.weight_class for one in found] == sorted((o.weight_class for o in found), key=CLASSES.index)
    assert len({one.name for one in found}) == len(found)


def test_what_is_there_is_not_missing(tmp_path: Path) -> None:
    model = tmp_path / "models" / "smollm2" / "q8_0.gguf"
    model.parent.mkdir(parents=True)
    model.write_bytes(b"x" * 10)
    by_name = {one.name: one for one in entrants(tmp_path, "smollm2", 2)}
    assert by_name["infer Q8_0"].missing == ()
    assert arena_bytes(by_name["infer Q8_0"]) == 10
    programs = tmp_path / "llama-build" / "bin"
    assert by_name["llama.cpp Q8_0"].missing == (programs / "llama-bench", programs / "llama-batched-bench")


def test_an_allocator_in_the_environment_goes_before_the_system(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    mine = tmp_path / "lib" / "libtcmalloc_minimal.so.4"
    mine.touch()
    assert str(mine) in vllm_environment(tmp_path, 2)["LD_PRELOAD"].split(":")
    assert vllm_environment(tmp_path, 4)["VLLM_CPU_OMP_THREADS_BIND"] == "0-3"


def entrant(tmp_path: Path, code: str) -> Entrant:
    weights = tmp_path / "weights.gguf"
    weights.write_bytes(b"x")
    return Entrant("other", "x", "8-bit", (sys.executable, "-c", code), (weights,), {"MINE": "yes"}, ("decode",))


def test_a_process_is_told_what_to_do_and_its_last_line_is_read(tmp_path: Path) -> None:
    code = (
        "import json, os; print('noise'); names = 'PEERS_PARTS', 'PEERS_SEED', 'PEERS_PROBE', 'PEERS_PROBE_BYTES', 'MINE'\n"
        "print(json.dumps({'samples': {}, 'told': [os.environ[name] for name in names]}))"
    )
    found: Any = run_one(entrant(tmp_path, code), {"decode", "prefix"}, Workload(), 7, None)
    assert found["told"] == ["decode", "7", "", "1", "yes"]


@pytest.mark.parametrize(
    "code", ["raise SystemExit('out of luck')", "import sys; print('out of luck', file=sys.stderr)"]
)
def test_a_process_that_fails_or_says_nothing_is_quoted(tmp_path: Path, code: str) -> None:
    with pytest.raises(RuntimeError, match="out of luck"):
        run_one(entrant(tmp_path, code), {"decode"}, Workload(), 0, None)


def test_what_a_process_has_started_ends_with_it(tmp_path: Path) -> None:
    """A child outlives its parent and holds a lock; when the lock can be had, the child is gone."""
    lock = tmp_path / "lock"
    child = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); f.write('held'); f.flush()\n"
        "print(flush=True); time.sleep(600)"
    )
    code = (
        "import subprocess, sys; pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)\n"
        f"p = subprocess.Popen([sys.executable, '-c', {child!r}, {str(lock)!r}], **pipes); p.stdout.readline(); sys.exit(3)"
    )
    with pytest.raises(RuntimeError, match="exit 3"):
        run_one(entrant(tmp_path, code), {"decode"}, Workload(), 0, None)
    assert lock.read_text() == "held"
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # waits for ever, and the test fails, where the child still runs


def test_a_process_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"no end after 0\.5 s"):
        run_one(entrant(tmp_path, "import time; time.sleep(600)"), {"decode"}, Workload(), 0, None, time_limit=0.5)


def test_the_probe_measures_memory_and_registers(tmp_path: Path) -> None:
    program = build_probe(tmp_path)
    assert program is not None
    probe = MachineProbe(str(program), 4 << 20)
    rates, peaks = probe.read_rate(), probe.peak_rates()
    probe.close()
    assert 0.01 < rates < 1e4  # GB/s: anything beyond means that the compiler dropped the reads
    assert len(peaks) == 3
    has = Path("/proc/cpuinfo").read_text()
    assert [rate > 0 for rate in peaks] == [f" {flag} " in has for flag in ("avx512f", "avx512_bf16", "avx512_vnni")]


def test_outcomes_are_plain_data() -> None:
    from dataclasses import asdict

    json.dumps(asdict(outcome("infer Q8_0", decode_8=[1.0])))
