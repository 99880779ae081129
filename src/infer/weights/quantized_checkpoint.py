"""A checkpoint whose weights were quantised before (GPTQ, AWQ, compressed-tensors, fp8), seen as one with plain names.

Worker thread, blocking. Owns nothing; beside a result are the stored parts of one weight and one piece of its rows.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from infer.errors import WeightError
from infer.layers.parameter import Layer, named_parameters
from infer.plugins.checkpoint_format import CheckpointFormat, StoredWeight
from infer.plugins.model import CausalLM
from infer.plugins.platform import BlockOps
from infer.weights.blocks import keep_stored_blocks
from infer.weights.checkpoint import Checkpoint, TensorInfo
from infer.weights.grouped_blocks import block_type, blocks_of, numbers_of

PIECE = 1 << 18
"""Elements that are unpacked at a time."""


class QuantizedCheckpoint:
    """`weights.checkpoint.Checkpoint` over another; its own tensors pass through."""

    def __init__(self, stored: Checkpoint, form: CheckpointFormat) -> None:
        """Raises `WeightError` where the tensors do not fit the format."""
        self._stored = stored
        self._form = form
        found = stored.tensors()
        self._weights = dict(form.weights(found))
        parts = {n for weight in self._weights.values() for n in (*weight.sources.values(), *weight.unused)}
        self._tensors = {name: info for name, info in found.items() if name not in parts}
        for name, weight in self._weights.items():
            if name in self._tensors:
                raise WeightError(f"the checkpoint holds {name!r} twice: plain and quantised", tensor=name)
            size = sum(found[source].stored_bytes for source in weight.sources.values())
            self._tensors[name] = TensorInfo(name, weight.shape, block_type(weight) or "quantised", size)

    def block_types(self) -> dict[str, str]:
        """Tensor name -> type of the blocks that `read_blocks` gives."""
        return {name: kind for name, weight in self._weights.items() if (kind := block_type(weight)) is not None}

    def stored_bytes(self) -> dict[str, int]:
        """Of every quantised weight."""
        return {name: self._tensors[name].stored_bytes for name in self._weights}

    def tensors(self) -> dict[str, TensorInfo]:
        return dict(self._tensors)

    def read(self, name: str, dtype: torch.dtype | None) -> Tensor:
        weight = self._weights.get(name)
        if weight is None:
            return self._stored.read(name, dtype)
        parts = self._parts(weight)
        out = torch.empty(weight.shape, dtype=dtype or torch.float32)
        for start, stop in _pieces(weight):
            rows = self._form.rows(weight, parts, start, stop)
            out[start:stop] = rows if isinstance(rows, Tensor) else numbers_of(rows, weight)
        return out

    def read_blocks(self, name: str) -> Tensor:
        weight = self._weights.get(name)
        if weight is None or block_type(weight) is None:
            return self._stored.read_blocks(name)
        parts, out = self._parts(weight), None
        for start, stop in _pieces(weight):
            rows = self._form.rows(weight, parts, start, stop)
            if isinstance(rows, Tensor):
                raise WeightError(f"tensor {name!r} has no blocks", tensor=name)
            made = blocks_of(rows, weight, name)
            out = made.new_empty(weight.shape[0], made.shape[1]) if out is None else out
            out[start:stop] = made
        if out is None:
            raise WeightError(f"tensor {name!r} has no rows", tensor=name)
        return out

    def close(self) -> None:
        self._stored.close()

    def metadata(self) -> dict[str, Any]:
        return self._stored.metadata()

    def _parts(self, weight: StoredWeight) -> dict[str, Tensor]:
        return {part: self._stored.read(source, None) for part, source in weight.sources.items()}


def take_forms(
    model: CausalLM, checkpoint: QuantizedCheckpoint, blocks: BlockOps | None, method: str, platform: str
) -> list[str]:
    """Before loading: weights become slots for blocks where the platform (`blocks`, None: it has no such kernels) multiplies
    with these -> what the operator should know."""
    if blocks is not None:
        keep_stored_blocks(model, checkpoint.block_types(), blocks)
    slots, sizes, expanded = named_parameters(cast(Layer, model)), checkpoint.stored_bytes(), 0
    for name, target in model.weight_table().targets.items():
        if name not in sizes or target.path not in slots:
            continue
        slot = slots[target.path]
        expanded += slot.blocks is None
        rows = slot.shape[0] if target.rows is None else target.rows[1] - target.rows[0]
        made = sum(piece.data.nbytes for piece in slot.pieces()) * rows // slot.shape[0]
        for piece in slot.pieces():  # what is stored is there beside what is made of it
            piece.in_flight = max(piece.in_flight or 0, made + sizes[name])
    if not expanded:
        return []
    return [
        f"{expanded} of {len(sizes)} {method} weights are expanded while they are loaded, because platform {platform!r} does not "
        "multiply with them as they are stored or model.expand_quantized is set: they take the memory of plain weights"
    ]


def _pieces(weight: StoredWeight) -> list[tuple[int, int]]:
    """Rows in pieces of whole sixteens, the smallest that formats pack together."""
    rows, columns = weight.shape
    step = max(1, PIECE // columns // 16) * 16
    return [(start, min(rows, start + step)) for start in range(0, rows, step)]
