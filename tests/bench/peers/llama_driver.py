"""llama.cpp by its own bench programs: `llama_driver.py BIN MODEL THREADS`. They neither sample nor schedule.

Its shared prompt (`-pps`) has no tokens of its own behind the prefix, which is in its favour.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from timing import Session


class Programs:
    """llama-bench and llama-batched-bench on one model."""

    def __init__(self, binaries: Path, model: str, threads: str) -> None:
        self._binaries = binaries
        self._options = ["-m", model, "-t", threads]
        self._environment = {**os.environ, "LD_LIBRARY_PATH": str(binaries)}

    def bench(self, *options: str) -> dict[str, Any]:
        return self._run("llama-bench", *options, "-o", "jsonl")[-1]

    def batched(self, *options: str) -> list[dict[str, Any]]:
        return self._run("llama-batched-bench", *options, "--output-format", "jsonl")

    def _run(self, program: str, *options: str) -> list[dict[str, Any]]:
        command = [str(self._binaries / program), *self._options, *options]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not lines:
            raise SystemExit(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr[-2000:]}")
        return lines


def main(binaries: Path, model: str, threads: str) -> None:
    session, programs = Session(), Programs(binaries, model, threads)
    work = session.work
    started = time.monotonic()
    programs.bench("-p", "16", "-n", "0", "-r", "1", "--no-warmup")
    session.add("first_token_s", time.monotonic() - started)  # the whole process: its end comes right after the token
    repeats = str(work.repeats)
    if "prefill" in session.wanted:
        found = programs.bench("-p", str(work.prefill), "-n", "0", "-r", repeats)
        session.samples["prefill"] = [1e9 * work.prefill / took for took in found["samples_ns"]]
        session.read_beside("prefill")
    if "decode" in session.wanted:
        found = programs.bench("-p", "0", "-n", str(work.output), "-d", str(work.prompt), "-r", repeats)
        session.samples["decode_1"] = [1e9 * work.output / took for took in found["samples_ns"]]
        session.read_beside("decode_1")
        context = max(work.batches) * (work.prompt + work.output)
        batches = ",".join(str(batch) for batch in work.batches if batch > 1)
        shape = ["-c", str(context), "-b", "2048", "-ub", "512", "-npp", str(work.prompt), "-ntg", str(work.output)]
        for _ in range(max(1, work.repeats - 1)):
            for line in programs.batched(*shape, "-npl", batches):
                session.add(f"decode_{line['pl']}", line["speed_tg"])
                session.read_beside(f"decode_{line['pl']}")
        session.facts["peak_rss"] = 1024.0 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    if "prefix" in session.wanted:
        context = work.shared + work.sharing * work.shared_output
        shape = [
            "-c",
            str(context),
            "-b",
            "2048",
            "-ub",
            "512",
            "-npp",
            str(work.shared),
            "-ntg",
            str(work.shared_output),
        ]
        shape += ["-pps", "-kvu"]  # one prompt, and one cache that all sequences find it in
        for _ in range(max(1, work.repeats - 1)):
            line = programs.batched(*shape, "-npl", str(work.sharing))[-1]
            session.add("prefix_wall_s", line["t_pp"] + line["t_tg"])
            session.add("prefix_first_s", line["t_pp"])
            session.read_beside("prefix_wall_s")
    session.finish()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
