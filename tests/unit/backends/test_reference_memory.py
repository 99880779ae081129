"""What the machine offers, read from made-up /proc and cgroup trees."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from infer.backends.reference.memory import memory, native_bfloat16, resident_bytes, usable_cpus

GIB = 2**30


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in {
        "proc/meminfo": "MemTotal:  16777216 kB\nMemFree: 1048576 kB\nMemAvailable:  8388608 kB\n",
        **files,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_without_cgroups(tmp_path: Path) -> None:
    assert memory(tree(tmp_path, {})) == (16 * GIB, 8 * GIB)


def test_cgroup_v2_counts_what_can_be_reclaimed_as_free(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/app/web"
    files = {
        "proc/self/cgroup": "0::/app/web\n",
        f"{group}/memory.max": f"{4 * GIB}\n",
        f"{group}/memory.current": f"{3 * GIB}\n",
        f"{group}/memory.stat": f"anon {GIB}\ninactive_file {2 * GIB}\n",
    }
    assert memory(tree(tmp_path, files)) == (4 * GIB, 3 * GIB)


def test_the_tightest_parent_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/app/web\n",
        "sys/fs/cgroup/app/memory.max": f"{2 * GIB}\n",
        "sys/fs/cgroup/app/memory.current": f"{GIB}\n",
        "sys/fs/cgroup/app/web/memory.max": "max\n",
        "sys/fs/cgroup/app/web/memory.current": f"{GIB}\n",
    }
    assert memory(tree(tmp_path, files)) == (2 * GIB, GIB)


def test_a_namespaced_container_sees_its_limit_at_the_root(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{GIB}\n",
        "sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
    }
    assert memory(tree(tmp_path, files)) == (GIB, 0)


def test_cgroup_v1(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/docker/abc"
    files = {
        "proc/self/cgroup": "9:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/\n",
        f"{group}/memory.limit_in_bytes": f"{6 * GIB}\n",
        f"{group}/memory.usage_in_bytes": f"{5 * GIB}\n",
        f"{group}/memory.stat": f"total_inactive_file {GIB}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{5 * GIB}\n",
    }
    assert memory(tree(tmp_path, files)) == (6 * GIB, 2 * GIB)


def test_damaged_files_are_no_limit(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/../../etc\nnonsense\n",
        "sys/fs/cgroup/memory.max": "",
        "sys/fs/cgroup/memory.current": "many\n",
    }
    assert memory(tree(tmp_path, files)) == (16 * GIB, 8 * GIB)


def test_cpu_quota_rounds_up(tmp_path: Path) -> None:
    here = len(os.sched_getaffinity(0))
    unlimited = tree(tmp_path / "a", {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"})
    assert usable_cpus(unlimited) == here
    half = tree(tmp_path / "b", {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"})
    assert usable_cpus(half) == 1
    v1 = {
        "proc/self/cgroup": "4:cpu,cpuacct:/x\n",
        "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "110000\n",
        "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "100000\n",
    }
    assert usable_cpus(tree(tmp_path / "c", v1)) == min(2, here)


@pytest.mark.parametrize(
    ("text", "native"),
    [
        ("processor: 0\nflags\t\t: fpu avx512f avx512_bf16\n", True),
        ("flags : fpu amx_bf16 amx_tile\n", True),
        ("Features : fp asimd bf16\n", True),
        ("flags : fpu avx2 avx512f\n", False),
        ("", False),
    ],
)
def test_native_bfloat16(tmp_path: Path, text: str, native: bool) -> None:
    assert native_bfloat16(tree(tmp_path, {"proc/cpuinfo": text})) is native


def test_this_machine() -> None:
    total, available = memory()
    assert 0 < available <= total
    assert 1 <= usable_cpus() <= (os.cpu_count() or 1)
    before = resident_bytes()
    block = mmap.mmap(-1, 64 * 2**20)  # not malloc's: its heap may hold as much already, free but resident
    block.write(b"\1" * len(block))
    assert resident_bytes() - before > 32 * 2**20
    del block
