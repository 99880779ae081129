"""Faults of a disk, for the kit of storage targets: `"faults": "infer.testing.storage_faults:disk"` in a spec's example.

Changes a limit of the whole process while a check runs, so nothing else may write files then. Owns nothing.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

from infer.testing.kits._storage_machine import Fault

PARTIAL = 64 * 1024


@contextmanager
def disk(fault: Fault) -> Iterator[None]:
    """error: no file can grow beyond nothing, partial: beyond 64 KiB; the system call then fails as on a full disk (EFBIG)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0 if fault == "error" else PARTIAL, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
