"""Where an engine lives: the process, thread and event loop it was entered in. From anywhere else nobody would be woken.

Checked in the caller's task or thread; immutable.
"""

from __future__ import annotations

import os
import threading

from anyio.lowlevel import current_token

from infer.errors import EngineClosedError, EngineError


class Home:
    """Made in the task that enters the engine."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._thread = threading.get_ident()
        self._loop = current_token().native_token

    def check_process(self) -> None:
        check_process(self._pid)

    def check_thread(self) -> None:
        """For calls that do not wait."""
        if threading.get_ident() != self._thread:
            raise EngineError(
                "this was called from another thread than the engine's: use anyio.from_thread.run_sync, or Engine.blocking"
            )

    def check_loop(self) -> None:
        """For calls that wait."""
        if current_token().native_token is not self._loop:
            raise EngineError(
                "the engine was entered in another event loop than this one: use it there, use Engine.blocking, which "
                "threads may share, or enter another engine here"
            )


def check_process(pid: int) -> None:
    """Threads do not survive a fork, so neither does an engine."""
    if os.getpid() != pid:
        raise EngineClosedError(f"the engine lives in process {pid}, not in its fork; start another one here")
