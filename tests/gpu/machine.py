"""Part: what the run is on, and the two ceilings that figures are held against."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator
from typing import Any

import torch
import triton

from gpu.checks import Check, Facts
from gpu.figures import figure
from gpu.place import Place

LEAST_TORCH, LEAST_TRITON = (2, 11), (3, 6)


def checks(place: Place) -> Iterator[Check]:
    yield Check("environment", lambda: environment(place))
    yield Check("copy bandwidth", lambda: figure(place.ceilings.copy_bandwidth / 1e9, "GB/s"))
    yield Check("cuBLAS matmul bf16", lambda: figure(place.ceilings.matmul / 1e12, "TFLOP/s"))


def environment(place: Place) -> Facts:
    """Raises where torch or Triton are older than what the kernels were written for."""
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "device": "cpu, a dry run",
    }
    for name, found, least in (("torch", torch.__version__, LEAST_TORCH), ("triton", triton.__version__, LEAST_TRITON)):
        if version(found) < least:
            raise RuntimeError(f"{name} {found} is older than {'.'.join(map(str, least))}")
    if not place.dry_run:
        props = torch.cuda.get_device_properties(place.device)
        facts |= {
            "device": props.name,
            "capability": f"{props.major}.{props.minor}",
            "memory_bytes": props.total_memory,
            "multiprocessors": props.multi_processor_count,
            "driver": driver(),
        }
    return facts


def version(text: str) -> tuple[int, int]:
    major, minor = text.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def driver() -> str:
    """As nvidia-smi says; empty without one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().splitlines()[0]
