"""A GPU through torch.cuda: the only module that touches it.

Made by the platform's factory, used on the worker thread; owns a stream and memory for graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, Generic

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infer.backends.cuda.device import CaptureError, DeviceFacts, DeviceMemory, Event, Stream
from infer.plugins.platform import Made

cuda: Any = torch.cuda
"""Half of it has no types."""


class TorchEvent:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.raw: Any = cuda.Event()
        self.raw.record(stream)

    def done(self) -> bool:
        return bool(self.raw.query())

    def wait(self) -> None:
        self.raw.synchronize()


class TorchStream:
    def __init__(self, raw: torch.cuda.Stream) -> None:
        self.raw = raw

    def mark(self) -> TorchEvent:
        return TorchEvent(self.raw)

    def follow(self, event: Event) -> None:
        if not isinstance(event, TorchEvent):
            raise TypeError(f"{type(event).__name__} is no event of this device")
        self.raw.wait_event(event.raw)


class TorchGraph(Generic[Made]):
    def __init__(self, raw: torch.cuda.CUDAGraph, made: Made) -> None:
        self._raw, self._made = raw, made

    def replay(self) -> Made:
        self._raw.replay()
        return self._made


class TorchMemory:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def on_host(self, pinned: Tensor) -> NDArray[np.uint8]:
        return pinned.numpy()

    def empty(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def free(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self._device)
        return total, free

    def in_use(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def return_free(self) -> None:
        torch.cuda.empty_cache()


class TorchDevice:
    """The process's current GPU; CUDA_VISIBLE_DEVICES chooses which one that is.

    The main stream is torch's default one: weights that were loaded before, and copies that a KV connector makes from its
    own threads, are in order with the steps without a word.
    """

    def __init__(self) -> None:
        cuda.init()
        index = torch.cuda.current_device()
        self.torch_device = torch.device("cuda", index)
        self.memory: DeviceMemory = TorchMemory(self.torch_device)
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        self.name = f"{properties.name} sm_{properties.major}{properties.minor}"
        self.facts = DeviceFacts(
            multiprocessors=properties.multi_processor_count,
            shared_memory=int(getattr(properties, "shared_memory_per_block_optin", 1 << 16)),
            native_fp8=capability >= (8, 9),
            asynchronous_products=capability >= (9, 0),
        )
        self.main: Stream = TorchStream(torch.cuda.default_stream(index))
        self._captures = cuda.Stream(index)
        self._pool: Any = torch.cuda.graph_pool_handle()

    def new_stream(self) -> TorchStream:
        return TorchStream(cuda.Stream(self.torch_device))

    def current_stream(self) -> TorchStream:
        return TorchStream(torch.cuda.current_stream(self.torch_device))

    def using(self, stream: Stream) -> AbstractContextManager[Any]:
        if not isinstance(stream, TorchStream):
            raise TypeError(f"{type(stream).__name__} is no stream of this device")
        return torch.cuda.stream(stream.raw)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def capture(self, work: Callable[[], Made]) -> TorchGraph[Made]:
        """(`torch.cuda.graph` would collect garbage and empty the allocator's cache before each of them.)"""
        graph = torch.cuda.CUDAGraph()
        self._captures.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(self._captures):
            # Other threads may go on using the device: only this one is watched.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                made = work()
            except RuntimeError as error:
                with suppress(RuntimeError):  # it says once more that the capture is broken
                    graph.capture_end()
                raise CaptureError(str(error)) from error
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            try:
                graph.capture_end()
            except RuntimeError as error:
                raise CaptureError(str(error)) from error
        return TorchGraph(graph, made)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)
