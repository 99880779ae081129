"""Why the platform "cuda" cannot run here: each reason by name, and nothing of a device is touched to find it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from importlib import metadata
from typing import Any

import pytest

from infer.backends.cuda.buckets import graph_sizes
from infer.backends.cuda.driver import Driver, DriverError, read_driver
from infer.backends.cuda.platform import probe

HOPPER = Driver(cuda=(12, 8), capability=(9, 0))


def versions(triton: str | None) -> Callable[[str], str]:
    def version_of(name: str) -> str:
        assert name == "triton"
        if triton is None:
            raise metadata.PackageNotFoundError(name)
        return triton

    return version_of


def no_driver() -> Driver:
    raise DriverError("there is no NVIDIA driver: libcuda.so.1: cannot open")


@pytest.mark.parametrize(
    ("driver", "triton", "torch_cuda", "reason"),
    [
        (lambda: HOPPER, "3.6.0", None, "is not built for CUDA"),
        (lambda: HOPPER, None, "12.8", "Triton is not installed; pip install 'triton>=3.6'"),
        (lambda: HOPPER, "3.5.1", "12.8", "Triton 3.5.1 is installed and the kernels need 3.6 or newer"),
        (no_driver, "3.6.0", "12.8", "there is no NVIDIA driver"),
        (
            lambda: Driver((11, 8), (9, 0)),
            "3.6.0",
            "12.8",
            "serves CUDA 11.8 and torch .* needs 12.8; update the driver",
        ),
        (lambda: Driver((12, 8), (7, 5)), "3.6.0", "12.8", "compute capability 7.5; the kernels need 8.0 or newer"),
    ],
)
def test_what_does_not_fit_is_named(
    driver: Callable[[], Driver], triton: str | None, torch_cuda: str | None, reason: str
) -> None:
    found = probe(driver, versions(triton), torch_cuda)
    assert not found.available
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(found.reason)


@pytest.mark.parametrize("driver", [HOPPER, Driver((12, 0), (8, 0)), Driver((13, 0), (10, 0))])
@pytest.mark.parametrize("triton", ["3.6.0", "3.10.1", "4.0.0+git1234"])
def test_what_fits_is_available(driver: Driver, triton: str) -> None:
    assert probe(lambda: driver, versions(triton), "12.8").available


class Library:
    """As much of libcuda as is asked; `statuses` are answers other than success."""

    def __init__(self, devices: int = 1, **statuses: int) -> None:
        self.devices, self.statuses, self.calls = devices, statuses, list[str]()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            self.calls.append(name)
            if name == "cuDriverGetVersion":
                args[0]._obj.value = 12080
            elif name == "cuDeviceGetCount":
                args[0]._obj.value = self.devices
            elif name == "cuDeviceGetAttribute":
                args[0]._obj.value = {75: 9, 76: 0}[args[1]]
            return self.statuses.get(name, 0)

        return call


def test_the_driver_is_asked_without_a_context() -> None:
    library = Library()
    assert read_driver(lambda name: library) == HOPPER
    assert not [name for name in library.calls if "Ctx" in name or "Alloc" in name or "Retain" in name]


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        (Library(cuInit=100), "shows no GPU to this process; see CUDA_VISIBLE_DEVICES"),
        (Library(devices=0), "shows no GPU to this process"),
        (Library(cuInit=803), "answers cuInit with error 803"),
        (Library(cuDeviceGetAttribute=1), "answers cuDeviceGetAttribute with error 1"),
    ],
)
def test_a_driver_without_a_gpu_says_so(library: Library, reason: str) -> None:
    with pytest.raises(DriverError, match=reason):
        read_driver(lambda name: library)


def test_a_missing_driver_is_no_traceback() -> None:
    def missing(name: str) -> ctypes.CDLL:
        raise OSError(f"{name}: cannot open shared object file")

    with pytest.raises(DriverError, match="there is no NVIDIA driver: libcuda"):
        read_driver(missing)


@pytest.mark.row("ENG-CUDAGRAPH", "Sizes derive from max_num_seqs")
@pytest.mark.parametrize("most", [1, 2, 7, 8, 9, 31, 64, 256, 1000])
def test_every_number_of_rows_has_a_graph_that_is_not_much_larger(most: int) -> None:
    sizes = graph_sizes(most)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == most and len(sizes) <= 30
    for rows in range(1, most + 1):
        taken = min(size for size in sizes if size >= rows)
        assert taken - rows < max(8, rows // 4 + 1)
