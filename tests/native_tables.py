"""The native operations of one build under several numbers of threads, as a fixture. Owns the libraries' threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from infer.backends.cpu.build import build_library
from infer.backends.cpu.library import Library
from infer.backends.cpu.ops import make_kernels, make_ops
from infer.plugins.platform import Ops


@pytest.fixture(scope="module")
def tables(kernel_cache: Path) -> Iterator[dict[int, Ops]]:
    """Threads -> table."""
    libraries = {threads: Library(build_library(kernel_cache), threads) for threads in (1, 2, 3)}
    yield {threads: make_ops(*make_kernels(library)) for threads, library in libraries.items()}
    for library in libraries.values():
        library.close()
