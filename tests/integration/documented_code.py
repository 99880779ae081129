"""Finds the code that the documentation shows, and runs it as a reader would: a fresh interpreter, the real model.
Used by the documentation tests; owns nothing."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])

_FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(language: str) -> list[Block]:
    """All fenced blocks of one language, in reading order."""
    found = []
    for page in PAGES:
        content = page.read_text("utf-8")
        for match in _FENCE.finditer(content):
            if match["language"] == language:
                found.append(Block(page, content.count("\n", 0, match.start()) + 1, language, match["text"]))
    return found


def reader_environment(cache: Path) -> dict[str, str]:
    """The environment of someone who follows the documentation: this virtual environment first, no INFER_* settings."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("INFER_")}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    environment["INFER_CACHE_DIR"] = str(cache / "engine")
    return environment


def run(
    command: list[str], cache: Path, *, cwd: Path, stdin: str = "", timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run to the end. The caller judges the exit code."""
    return subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        text=True,
        cwd=cwd,
        env=reader_environment(cache),
        timeout=timeout,
        check=False,
    )


@contextlib.contextmanager
def documented_server(cache: Path, cwd: Path) -> Iterator[str]:
    """`infer serve` as the documentation says it, on a free port. Gives the address it prints; ends as Ctrl-C does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["infer", "serve", "--port", str(port)]
    environment = reader_environment(cache)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=cwd, env=environment)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith("serving on "), f"infer serve said {said!r}"
        yield said.split()[-1]
    finally:
        process.send_signal(signal.SIGINT)
        code = process.wait(timeout=120)
    assert code == 0, f"infer serve ended with {code}"


def told(done: subprocess.CompletedProcess[str]) -> str:
    """What to show when a documented command failed."""
    return f"exit code {done.returncode}\n--- stdout\n{done.stdout[-2000:]}\n--- stderr\n{done.stderr[-4000:]}"
