"""The threads of the native kernels: every task of a run is done once, also as the thread sanitizer sees it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from infer.backends.cpu.build import SOURCES, find_compiler

STRESS = Path(__file__).with_name("pool_stress.cpp")


@pytest.mark.parametrize("options", [("-O2",), ("-O1", "-g", "-fsanitize=thread")], ids=["plain", "thread sanitizer"])
def test_every_task_is_done_once(options: tuple[str, ...], tmp_path: Path) -> None:
    compiler = find_compiler()
    assert compiler is not None
    program = tmp_path / "stress"
    sources = (str(STRESS), str(SOURCES / "pool.cpp"))
    command = (compiler, "-std=c++20", *options, "-pthread", f"-I{SOURCES}", *sources, "-o", str(program))
    subprocess.run(command, check=True, timeout=120)
    done = subprocess.run([program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
