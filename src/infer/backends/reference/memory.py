"""Memory, CPU and instruction-set facts of this machine, as far as this process may use it.

Called at start and when a plan is printed, from any thread; reads /proc and the cgroup files, owns nothing.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import sys
from pathlib import Path

UNLIMITED = 1 << 60
"""cgroup v1 writes a number near 2**63 for "no limit"."""


def memory(root: Path = Path("/")) -> tuple[int, int]:
    """-> (total, available) bytes: the machine's, lowered to every cgroup limit above this process."""
    facts = _fields(root / "proc/meminfo")
    if "MemTotal" not in facts:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return total, total
    total = facts["MemTotal"] * 1024
    available = facts.get("MemAvailable", facts.get("MemFree", 0)) * 1024
    for limit, usage in _memory_limits(root):
        total = min(total, limit)
        available = min(available, max(0, limit - usage))
    return total, available


def resident_bytes(root: Path = Path("/")) -> int:
    """Resident memory of this process."""
    try:
        pages = int((root / "proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return pages * os.sysconf("SC_PAGE_SIZE")


def return_free_memory() -> None:
    """Give freed heap pages back to the operating system. glibc keeps them otherwise, a whole model's worth."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def usable_cpus(root: Path = Path("/")) -> int:
    """CPUs this process may use: its affinity, lowered to the cgroup quota (rounded up)."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for directory in _cgroups(root, "cpu"):
        quota, period = _cpu_quota(directory)
        if quota is not None and period > 0:
            cpus = min(cpus, max(1, math.ceil(quota / period)))
    return cpus


def native_bfloat16(root: Path = Path("/")) -> bool:
    """Whether the CPU multiplies bfloat16 itself; elsewhere torch emulates it, several times slower than float32."""
    try:
        text = (root / "proc/cpuinfo").read_text()
    except OSError:
        return False
    flags: set[str] = set()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            flags.update(value.split())
            break
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


def _fields(path: Path) -> dict[str, int]:
    """Lines "Name: 123 kB" or "name 123"."""
    found: dict[str, int] = {}
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdigit():
            found[words[0]] = int(words[1])
    return found


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def _cgroups(root: Path, controller: str) -> list[Path]:
    """This process's cgroup directories for a controller, innermost first, both versions."""
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            base = mount
        elif controller in controllers.split(","):
            base = mount / controllers if (mount / controllers).is_dir() else mount / controller
        else:
            continue
        relative = path.strip("/")
        parts = relative.split("/") if relative and ".." not in relative else []
        found += [base.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return [directory for directory in found if directory.is_dir()]


def _memory_limits(root: Path) -> list[tuple[int, int]]:
    """(limit, bytes in use that cannot be reclaimed) of every limited cgroup."""
    limits = []
    for directory in _cgroups(root, "memory"):
        limit = _number(directory / "memory.max")
        usage = _number(directory / "memory.current")
        reclaimable = "inactive_file"
        if usage is None:
            limit = _number(directory / "memory.limit_in_bytes")
            usage = _number(directory / "memory.usage_in_bytes")
            reclaimable = "total_inactive_file"
        if limit is None or usage is None or limit >= UNLIMITED:
            continue
        limits.append((limit, max(0, usage - _fields(directory / "memory.stat").get(reclaimable, 0))))
    return limits


def _cpu_quota(directory: Path) -> tuple[int | None, int]:
    try:
        quota, period = (directory / "cpu.max").read_text().split()[:2]
    except (OSError, ValueError):
        number = _number(directory / "cpu.cfs_quota_us")
        return (number if number is not None and number > 0 else None), _number(directory / "cpu.cfs_period_us") or 0
    return (None if quota == "max" else int(quota)), int(period)
