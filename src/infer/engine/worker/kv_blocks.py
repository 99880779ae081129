"""The KV cache as bytes: what a connector reads and writes of it.

Used from the connector's threads; owns nothing, the tensors are the runner's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from infer.config.model import KVLayout


class TensorKVBlocks:
    """`KVBlocks` over the runner's tensors. A block is, layer by layer, its keys and then its values."""

    def __init__(
        self, tensors: Mapping[int, tuple[Tensor, Tensor]], layout: KVLayout, synchronize: Callable[[], None]
    ) -> None:
        """`synchronize` waits for the device."""
        self.tensors = tensors
        self._parts = [[tensor for layer in group.layer_ids for tensor in tensors[layer]] for group in layout.groups]
        self._sizes = [[part[0].numel() * part.element_size() for part in parts] for parts in self._parts]
        self._synchronize = synchronize

    def num_bytes(self, group: int) -> int:
        """Of one block."""
        return sum(self._sizes[group])

    def read(self, group: int, block_id: int) -> bytes:
        """Copies to the host."""
        self._synchronize()
        parts = [part[block_id].reshape(-1).view(torch.uint8).cpu() for part in self._parts[group]]
        return torch.cat(parts).numpy().tobytes()

    def write(self, group: int, block_id: int, data: bytes) -> None:
        """Is on the device when it returns."""
        if len(data) != self.num_bytes(group):
            raise ValueError(f"{len(data)} bytes are no block of group {group}: {self.num_bytes(group)} are")
        pieces = torch.split(torch.frombuffer(bytearray(data), dtype=torch.uint8), self._sizes[group])
        for part, piece in zip(self._parts[group], pieces, strict=True):
            target = part[block_id]
            target.copy_(piece.view(target.dtype).view(target.shape))
        self._synchronize()
