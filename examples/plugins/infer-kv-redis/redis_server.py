"""A real redis-server for tests, and what can happen to one. Needs the program (Debian: redis-server)."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis


class RedisServer:
    """Listens on a free port of this machine, keeps its data in a directory. These are the kit's `Faults`."""

    def __init__(self, directory: Path) -> None:
        program = shutil.which("redis-server")
        if program is None:
            raise RuntimeError("there is no redis-server here; on Debian and Ubuntu: apt-get install redis-server")
        directory.mkdir(parents=True, exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._command = [program, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(directory)]
        self._command += ["--save", "", "--appendonly", "yes", "--appendfsync", "always", "--logfile", "redis.log"]
        self.client = redis.Redis(port=self.port)
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self._process = subprocess.Popen(self._command)
        deadline = time.monotonic() + 60
        while True:
            try:
                self.client.ping()
                return
            except redis.RedisError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise
                time.sleep(0.02)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        self._process.wait(60)

    def close(self) -> None:
        self.client.close()
        self.stop()

    @contextmanager
    def outage(self) -> Iterator[None]:
        """The server ends, and is started again."""
        self.stop()
        try:
            yield
        finally:
            self.start()

    @contextmanager
    def delay(self) -> Iterator[None]:
        """The server takes what it is sent and does nothing."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def lose(self) -> None:
        for key in sorted(self.client.keys())[::2]:
            self.client.delete(key)

    def damage(self) -> None:
        for number, key in enumerate(sorted(self.client.keys())):
            value: Any = self.client.get(key)
            self.client.set(key, value[:-1] if number % 2 else value[:-3] + bytes([value[-3] ^ 8]) + value[-2:])
