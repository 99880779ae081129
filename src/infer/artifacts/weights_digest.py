"""What the weights of an engine are, by the bytes of their files. Runs on a worker thread, for as long as reading takes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from infer.config.model import ModelConfig
from infer.plugins.model_files import fingerprint
from infer.weights.safetensors_header import safetensors_files

WHOLE_BYTES = 2**33
"""Weights up to here are read as a whole; of larger ones a sample."""
_PIECE = 2**20
_SAMPLE = 2**16
_EVERY = 2**24


class Stopped(Exception):
    """Nobody needs the digest any more."""


def weights_digest(model: ModelConfig, is_stopped: Callable[[], bool] = bool, *, whole_bytes: int = WHOLE_BYTES) -> str:
    """`sha256:` and the digest of the file (of several: of what `sha256sum *.safetensors` prints in their directory).

    Weights of more than `whole_bytes` have `sha256-sampled:` in front: of each file its size, 64 KiB of every 16 MiB and
    the last 64 KiB are read. Empty when that is not known: no such file, or a file changed since the model was loaded.
    """
    try:
        files = [model.path] if model.path.is_file() else safetensors_files(model.path)
        total = sum(file.stat().st_size for file in files)
        pieces, kind = (_whole, "sha256") if total <= whole_bytes else (_sampled, "sha256-sampled")
        digests = {file.name: _digest(file, pieces, is_stopped) for file in files}
        loaded = model.identity.partition("+")[0]  # behind it: what was done to the weights while they were loaded
        if loaded.startswith("local:") and fingerprint(model.path) != loaded:
            return ""
    except (OSError, Stopped):
        return ""
    if not digests:
        return ""
    lines = "".join(f"{digest}  {name}\n" for name, digest in digests.items())
    found = next(iter(digests.values())) if len(digests) == 1 else hashlib.sha256(lines.encode()).hexdigest()
    return f"{kind}:{found}"


def _digest(path: Path, pieces: Callable[[BinaryIO, int], Iterator[bytes]], is_stopped: Callable[[], bool]) -> str:
    digest, size = hashlib.sha256(), path.stat().st_size
    with path.open("rb") as file:
        for piece in pieces(file, size):
            if is_stopped():
                raise Stopped
            digest.update(piece)
    return digest.hexdigest()


def _whole(file: BinaryIO, size: int) -> Iterator[bytes]:
    while piece := file.read(_PIECE):
        yield piece


def _sampled(file: BinaryIO, size: int) -> Iterator[bytes]:
    yield size.to_bytes(8, "little")
    for start in (*range(0, size, _EVERY), max(0, size - _SAMPLE)):
        file.seek(start)
        yield file.read(_SAMPLE)
