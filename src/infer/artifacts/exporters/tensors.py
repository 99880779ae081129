"""Arrays of an artifact as torch tensors. Torch is imported here and nowhere else in this package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


def to_torch(values: NDArray[Any] | Sequence[Any], *, device: str = "cpu", pin: bool = False) -> torch.Tensor:
    """What a reader hands out, as a tensor of its own memory. uint16 becomes int32: torch has few CPU kernels for it."""
    import torch  # noqa: PLC0415  optional here, and slow to import

    array = np.asarray(values)
    owned = np.array(array, dtype=np.int32 if array.dtype == np.uint16 else array.dtype.newbyteorder("="))
    tensor = torch.from_numpy(owned)
    return (tensor.pin_memory() if pin else tensor).to(device)
