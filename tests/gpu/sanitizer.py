"""Part: the kernels under NVIDIA's compute-sanitizer, which sees reads and writes that are nobody's and change no result."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from gpu.checkpoints import sparse
from gpu.checks import Check, Facts, NotHere
from gpu.kernel_cases import cases
from gpu.place import Place
from gpu.shared_expert import Layers, same
from gpu.sizes import TINY

TOOL = "compute-sanitizer"
SECONDS = 100


def checks(place: Place) -> Iterator[Check]:
    yield Check("memcheck of the kernels", lambda: memcheck(place))


def memcheck(place: Place) -> Facts:
    """The kernels at tiny sizes, on the device, in a process of their own."""
    tool = shutil.which(TOOL)
    if place.dry_run or tool is None:
        raise NotHere(f"{TOOL} of the CUDA toolkit is not on PATH, or there is no GPU")
    with tempfile.TemporaryDirectory(dir=place.directory) as directory:
        command = [
            tool,
            "--tool",
            "memcheck",
            "--error-exitcode",
            "9",
            sys.executable,
            "-m",
            "gpu.sanitizer",
            directory,
        ]
        # An allocator that keeps freed memory would hide what is read beyond a tensor.
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS
            )
        except subprocess.TimeoutExpired:
            raise NotHere(f"{TOOL} did not come to an end within {SECONDS} s") from None
    words = (done.stdout + done.stderr)[-3000:]
    if "Device not supported" in words:
        raise NotHere(f"{TOOL} does not support this device or its virtual machine")
    assert done.returncode == 0, words
    assert "0 errors" in words, words
    return {"output": words[-200:]}


def small_kernels(directory: Path) -> int:
    """Every case of the table once, tiny, and sparse layers on two streams. -> how many cases."""
    place = Place(directory, dry_run=False)
    place.sizes = TINY
    count = 0
    with torch.inference_mode():
        for case in cases():
            case.make(place).run()
            count += 1
        same(Layers(place, lambda: sparse(place)))
    place.synchronize()
    return count


if __name__ == "__main__":
    print(f"{small_kernels(Path(sys.argv[1]))} kernels ran")
