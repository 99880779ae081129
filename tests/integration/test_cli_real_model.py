"""The installed command with the real small model: an answer, a conversation at a terminal, Ctrl-C in it."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.model

INFER = [sys.executable, "-m", "infer"]
GREEDY = ["--temperature", "0", "--cache.memory", "64MiB"]


def test_run_answers_and_says_what_it_took(smollm2_gguf: Path) -> None:
    question = "What is the capital of France? Answer in one sentence."
    command = [*INFER, "run", str(smollm2_gguf), question, *GREEDY, "--max-tokens", "30"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout and done.stdout.endswith("\n")
    assert "memory plan: weights" in done.stderr and "tokens/s" in done.stderr.strip().splitlines()[-1]


def test_a_cache_that_cannot_hold_the_length_is_refused_in_one_line(smollm2_gguf: Path) -> None:
    command = [*INFER, "run", str(smollm2_gguf), "hi", "--cache.memory", "1MiB", "--max-model-len", "8192"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("infer: error: model.max_model_len=8192") and "cache.memory" in last


class Terminal:
    """A command at a pseudo-terminal of its own session, so that Ctrl-C means what it means to people."""

    def __init__(self, command: list[str]) -> None:
        self.pid, self.descriptor = pty.fork()
        if self.pid == 0:  # pragma: no cover  (the child)
            os.execv(command[0], command)
        self.seen = ""

    def expect(self, text: str, seconds: float = 60) -> str:
        """Read until `text` shows up; returns everything up to and including it."""
        limit = time.monotonic() + seconds
        while text not in self.seen:
            ready, _, _ = select.select([self.descriptor], [], [], max(0.0, limit - time.monotonic()))
            if not ready:
                pytest.fail(f"no {text!r} within {seconds} s; the terminal shows {self.seen[-2000:]!r}")
            try:
                data = os.read(self.descriptor, 4096)
            except OSError:  # the other end is closed
                data = b""
            if not data:
                pytest.fail(f"it ended without {text!r}; the terminal shows {self.seen[-2000:]!r}")
            self.seen += data.decode("utf-8", "replace")
        before, _, self.seen = self.seen.partition(text)
        return before + text

    def type(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def wait(self) -> int:
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.descriptor)
        return code


def test_chat_remembers_is_interrupted_and_goes_on(smollm2_gguf: Path) -> None:
    terminal = Terminal([*INFER, "chat", str(smollm2_gguf), *GREEDY])
    terminal.expect("> ")
    terminal.type("Write a very long story about the sea.\r")
    terminal.expect("sea.\r\n")
    assert terminal.expect("the").strip()  # the answer has begun
    terminal.type("\x03")
    terminal.expect("[stopped]")
    terminal.expect("> ")
    time.sleep(0.5)  # a signal between the prompt and readline's first wait is not seen before the next key
    terminal.type("\x03")
    terminal.expect("Ctrl-D) leaves")
    terminal.expect("> ")
    terminal.type("/reset\r")
    terminal.expect("forgotten")
    terminal.expect("> ")
    terminal.type("What is the capital of France? One sentence.\r")
    terminal.expect("Paris")
    terminal.expect("tokens/s")
    terminal.expect("> ")
    terminal.type("\x04")
    assert terminal.wait() == 0
