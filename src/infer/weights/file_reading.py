"""Exact positional reads of weight files. Worker thread, blocking; owns nothing."""

from __future__ import annotations

import os
from pathlib import Path

from infer.errors import WeightError


def read_exactly(fd: int, buffer: memoryview, offset: int, path: Path, tensor: str) -> None:
    """Fill `buffer` from `offset` of an open file, or raise `WeightError` naming the tensor."""
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(fd, [buffer[done:]], offset + done)
        except OSError as error:
            raise WeightError(f"{path}: cannot read tensor {tensor!r}: {error}", tensor=tensor) from error
        if count == 0:
            raise WeightError(f"{path} became shorter while tensor {tensor!r} was read", tensor=tensor)
        done += count
