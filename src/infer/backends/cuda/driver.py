"""What the NVIDIA driver says of itself and of its first GPU, asked without torch and without taking memory of the device.

Called by the probe, from any thread; owns nothing.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

LIBRARY = "libcuda.so.1"
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_* of cuda.h."""


@dataclass(frozen=True, slots=True)
class Driver:
    """Versions are (major, minor)."""

    cuda: tuple[int, int]
    """The newest CUDA that the driver serves."""
    capability: tuple[int, int]
    """Compute capability of the first GPU that this process may see."""


class DriverError(Exception):
    """There is no driver, or no GPU for this process; the message says which."""


def read_driver(load: Any = ctypes.CDLL) -> Driver:
    """`load` opens a library by name. Raises `DriverError`."""
    try:
        library = load(LIBRARY)
    except OSError as error:
        raise DriverError(f"there is no NVIDIA driver: {error}") from None
    _call(library, "cuInit", 0)
    version, count = ctypes.c_int(), ctypes.c_int()
    _call(library, "cuDriverGetVersion", ctypes.byref(version))
    _call(library, "cuDeviceGetCount", ctypes.byref(count))
    if count.value < 1:
        raise DriverError("the NVIDIA driver shows no GPU to this process; see CUDA_VISIBLE_DEVICES")
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    _call(library, "cuDeviceGet", ctypes.byref(device), 0)
    _call(library, "cuDeviceGetAttribute", ctypes.byref(major), CAPABILITY_MAJOR, device)
    _call(library, "cuDeviceGetAttribute", ctypes.byref(minor), CAPABILITY_MINOR, device)
    return Driver((version.value // 1000, version.value % 1000 // 10), (major.value, minor.value))


def _call(library: Any, name: str, *args: Any) -> None:
    status = getattr(library, name)(*args)
    if status == 100:  # CUDA_ERROR_NO_DEVICE
        raise DriverError("the NVIDIA driver shows no GPU to this process; see CUDA_VISIBLE_DEVICES")
    if status != 0:
        raise DriverError(f"the NVIDIA driver answers {name} with error {status}")
