"""The platform "cuda" as a plugin: whether this machine has what it takes, and where it is made.

Read when platforms are looked for, on any thread; touches no device and does not import Triton.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import metadata

import torch

from infer.backends.cuda.driver import Driver, DriverError, read_driver
from infer.plugins.hookspecs import hookimpl
from infer.plugins.platform import API_VERSION, PlatformSpec, Probe

OLDEST_CAPABILITY = (8, 0)
"""Ampere: the first with bfloat16 and asynchronous copies. What the kernels are compiled for in the tests begins there."""
OLDEST_TRITON = (3, 6)


def probe(
    driver: Callable[[], Driver] = read_driver,
    version_of: Callable[[str], str] = metadata.version,
    torch_cuda: str | None = torch.version.cuda,
) -> Probe:
    """Torch's build, Triton, the driver and the GPU, in this order; the first that does not fit is the reason."""
    if torch_cuda is None:
        return Probe(False, f"torch {torch.__version__} is not built for CUDA; install a build that is")
    reason = _triton_problem(version_of)
    if reason is not None:
        return Probe(False, reason)
    try:
        found = driver()
    except DriverError as error:
        return Probe(False, str(error))
    if found.cuda[0] < _version(torch_cuda)[0]:
        return Probe(
            False,
            f"the NVIDIA driver serves CUDA {_dotted(found.cuda)} and torch {torch.__version__} needs {torch_cuda}; "
            "update the driver, or install a torch for an older CUDA",
        )
    if found.capability < OLDEST_CAPABILITY:
        return Probe(
            False,
            f"the GPU has compute capability {_dotted(found.capability)}; the kernels need "
            f"{_dotted(OLDEST_CAPABILITY)} or newer",
        )
    return Probe(True)


def _triton_problem(version_of: Callable[[str], str]) -> str | None:
    needed = _dotted(OLDEST_TRITON)
    try:
        version = version_of("triton")
    except metadata.PackageNotFoundError:
        return f"Triton is not installed; pip install 'triton>={needed}' (the extra cuda names it)"
    if _version(version) < OLDEST_TRITON:
        return f"Triton {version} is installed and the kernels need {needed} or newer"
    return None


def _version(text: str) -> tuple[int, int]:
    """The first two numbers."""
    numbers = [int(number) for number in re.findall(r"\d+", text)[:2]]
    return (*numbers, 0, 0)[0], (*numbers, 0, 0)[1]


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


@hookimpl
def infer_platforms() -> list[PlatformSpec]:
    return [
        PlatformSpec(
            name="cuda",
            api=API_VERSION,
            factory="infer.backends.cuda.cuda_platform:create",
            probe=f"{__name__}:probe",
            priority=20,
            settings=("numerics",),
            example={},
        )
    ]
