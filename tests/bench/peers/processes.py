"""Starts the processes of a comparison, one at a time, and reads what they print. Runs in the process of `compare_peers.py`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from .catalog import Entrant
from .timing import Workload

TIME_LIMIT = 900
"""Seconds for one process; vLLM alone may need 90 before its first token."""


def build_probe(directory: Path) -> Path | None:
    """The program that measures what the machine can do; None without a compiler."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    program = directory / "machine_probe"
    if compiler is None:
        return None
    source = Path(__file__).parent / "machine_probe.c"
    subprocess.run([compiler, "-O2", "-march=native", "-pthread", source, "-o", program], check=True)
    return program


def run_one(
    entrant: Entrant, parts: set[str], work: Workload, seed: int, probe: Path | None, time_limit: float = TIME_LIMIT
) -> dict[str, Any]:
    """Start one process and read what it printed; it leaves no other behind. Raises `RuntimeError` with its last words."""
    environment = {
        **os.environ, **entrant.environment,
        "PEERS_WORKLOAD": work.to_json(),
        "PEERS_PARTS": ",".join(sorted(parts & set(entrant.parts))),
        "PEERS_SEED": str(seed),
        "PEERS_PROBE": str(probe or ""),
        "PEERS_PROBE_BYTES": str(arena_bytes(entrant)),
        "PEERS_STARTED": repr(time.monotonic()),
    }  # fmt: skip
    # A session of its own: vLLM's processes outlive their parent when that is killed.
    with subprocess.Popen(
        entrant.command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=time_limit)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"no end after {time_limit:g} s") from error
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    lines = [line for line in output.splitlines() if line.startswith('{"samples"')]
    if process.returncode or not lines:
        raise RuntimeError(f"exit {process.returncode}: {(errors or output).strip()[-600:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def arena_bytes(entrant: Entrant) -> int:
    """As large as the weights that are read: what stays in the caches of the one does so in those of the other."""
    path = entrant.needs[-1]
    if path.is_file():
        return path.stat().st_size
    files = [each for each in path.iterdir() if each.suffix in (".safetensors", ".bin")]
    size = sum(each.stat().st_size for each in files)
    return {"int8": size // 2, "int4": size // 3}.get(entrant.weights, size) if entrant.engine == "infer" else size
