"""Weight slots and the base of layers: what the loader fills and walks.

Built and filled on the worker thread; a `Parameter` owns its tensor, a `Layer` owns nothing but its attributes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from infer.errors import WeightError

if TYPE_CHECKING:
    from infer.plugins.platform import Ops
    from infer.plugins.quant_method import WeightRole

CONVERTED = 1 << 14
"""Elements that torch converts at a time while a tensor is loaded: they stay in the cache, and torch does not call its threads
for so few, which would wait for each other many thousand times."""
ADOPT_BYTES = 32 * 2**20
"""Tensors of this size are taken over instead of copied. Smaller ones are copied into the slot, which was allocated with
all others: keeping them would leave holes in the heap (malloc maps only allocations above 32 MiB for sure), and those
cost more than the copy."""


class Parameter:
    """A slot for one weight: knows its shape and dtype from the start, and remembers which rows have been filled."""

    __slots__ = (
        "_filled",
        "blocks",
        "convert",
        "data",
        "in_flight",
        "packed",
        "parts",
        "piece",
        "placed",
        "role",
        "shape",
        "unit",
    )

    def __init__(self, data: Tensor, *, role: WeightRole | None = None, unit: int | None = None) -> None:
        """`data` is uninitialised storage of the final shape (on the meta device while planning)."""
        self.data = data
        self.role = role
        """Of a weight that may be quantised; None: it stays as it is."""
        self.unit = len(data) if unit is None else unit
        """Rows that are used together, those of one expert: what is packed side by side never crosses them."""
        self.shape = tuple(data.shape)
        """Of the weight, however it is stored."""
        self.blocks: str | None = None
        """Block type, where the weight stays quantised as in its GGUF: then `data` is uint8."""
        self.parts: tuple[Parameter, ...] = ()
        """Where neighbouring rows are in blocks of different types: each a parameter of its own, and `data` is empty."""
        self.packed = False
        self.placed = False
        """`data` lies where it shall be read from: a tensor is copied into it, however large."""
        self.convert: Callable[[Tensor], Tensor] | None = None
        """Makes rows of `data` out of rows as the checkpoint stores them."""
        self.piece = CONVERTED
        """Elements that are converted at a time."""
        self.in_flight: int | None = None
        """Bytes that are there beside `data` at most while it is loaded; None: those of one unit, before or after packing."""
        self._filled: list[tuple[int, int]] = []

    def keep_blocks(self, kind: str, row_bytes: int) -> None:
        """Before loading: hold the stored blocks instead of numbers, [rows, bytes of a row]."""
        self.blocks = kind
        self.data = torch.empty(self.shape[0], row_bytes, dtype=torch.uint8, device=self.data.device)

    def divide(self, kinds: Sequence[tuple[int, str, int]]) -> None:
        """Before loading: hold stored blocks of several types, (rows, type, bytes of a row) one after the other."""
        self.blocks = "+".join(dict.fromkeys(kind for _, kind, _ in kinds))
        device, parts = self.data.device, []
        for count, kind, row_bytes in kinds:
            part = Parameter(torch.empty(0, dtype=torch.uint8, device=device), role=self.role, unit=count)
            part.shape = (count, *self.shape[1:])
            part.keep_blocks(kind, row_bytes)
            parts.append(part)
        self.parts, self.data = tuple(parts), torch.empty(0, dtype=torch.uint8, device=device)

    def pieces(self) -> tuple[Parameter, ...]:
        """What owns the memory: the parts, or the parameter itself."""
        return self.parts or (self,)

    def place(self, data: Tensor) -> None:
        """Before loading: other uninitialised storage of the same shape and dtype, which the weight is to lie in."""
        self.data = data
        self.placed = True

    def pack(self, ops: Ops) -> None:
        """After loading: into the order of the platform's kernels. A shared parameter is packed once."""
        if self.packed:
            return
        self.packed = True
        if self.parts:
            for part in self.parts:
                part.pack(ops)
            return
        if self.blocks is not None and ops.blocks is not None:
            pack, kind = ops.blocks.pack, self.blocks
            self._pack(lambda stored: pack(stored, kind))
        elif ops.pack is not None:
            self._pack(ops.pack)

    def _pack(self, pack: Callable[[Tensor], Tensor]) -> None:
        """One unit at a time, so that only one is there twice."""
        count = self.shape[0] // self.unit
        if count == 1 or self.data.is_meta:
            self.data = moved_into(self.data, pack(self.data))
            return
        units = [self.data[start : start + self.unit] for start in range(0, self.shape[0], self.unit)]
        made = [moved_into(unit, pack(unit)) for unit in units]
        shape = (count * made[0].shape[0], *made[0].shape[1:])
        in_place = all(new.data_ptr() == old.data_ptr() for new, old in zip(made, units, strict=True))
        self.data = self.data.view(shape) if in_place else torch.cat(made)

    def load(self, tensor: Tensor, rows: tuple[int, int] | None = None) -> None:
        """Fill all rows, or rows[0] .. rows[1]. A large tensor that is the whole slot is adopted."""
        start, stop = rows if rows is not None else (0, self.shape[0])
        if self.parts:
            self._load_part(tensor, start, stop)
            return
        expected = (stop - start, *(self.data if self.convert is None else self).shape[1:])
        if tuple(tensor.shape) != expected:
            raise WeightError(f"shape {tuple(tensor.shape)} does not fit {expected}")
        for first, last in self._filled:
            if start < last and first < stop:
                raise WeightError(f"rows {start}..{stop} overlap rows {first}..{last}, which were filled before")
        self._filled.append((start, stop))
        if self.convert is not None:
            step = max(1, self.piece // max(1, math.prod(expected[1:])))
            with torch.no_grad():
                for row in range(0, stop - start, step):
                    made = self.convert(tensor[row : row + step].contiguous())  # it may be a transposed view
                    self.data[start + row : start + row + len(made)] = made
            return
        same_kind = tensor.dtype == self.data.dtype and tensor.device == self.data.device
        large = tensor.numel() * tensor.element_size() >= ADOPT_BYTES
        if not self.placed and large and expected == tuple(self.data.shape) and same_kind and tensor.is_contiguous():
            self.data = tensor
        else:
            with torch.no_grad():
                self.data[start:stop].copy_(tensor)

    def _load_part(self, tensor: Tensor, start: int, stop: int) -> None:
        first = 0
        for part in self.parts:
            last = first + part.shape[0]
            if first <= start and stop <= last:
                part.load(tensor, (start - first, stop - first))
                return
            first = last
        raise WeightError(f"rows {start}..{stop} lie in parts with blocks of different types ({self.blocks})")


def moved_into(old: Tensor, new: Tensor) -> Tensor:
    """What became of `old`, in its memory where it fits: weights were allocated together, and a second place for each
    would leave holes in the heap as large as the model."""
    fits = new.dtype == old.dtype and new.numel() == old.numel() and new.device == old.device and old.is_contiguous()
    if not fits or new.untyped_storage().data_ptr() == old.untyped_storage().data_ptr():
        return new
    with torch.no_grad():
        return old.view(-1).view(new.shape).copy_(new)


class Layer:
    """Base of everything that holds parameters. Deliberately not `nn.Module`: no hooks, no modes, no state dict."""

    def children(self) -> Iterator[tuple[str, Parameter | Layer]]:
        """Direct parts as (name relative to this layer, part), lists expanded as "name.0", "name.1", ..."""
        for name, value in vars(self).items():
            if isinstance(value, Parameter | Layer):
                yield name, value
            elif isinstance(value, list | tuple):
                yield from ((f"{name}.{i}", item) for i, item in enumerate(value) if isinstance(item, Layer))

    def load_scalar(self, name: str, value: float) -> None:
        """A number that the checkpoint may have for this layer (`WeightTable.add_scalar`). Raises `WeightError`."""
        raise WeightError(f"{type(self).__name__} takes no {name}")

    def finalize(self) -> None:
        """Called once when all of the layer's own parameters are filled."""

    def tensors(self) -> Iterator[Tensor]:
        """The layer's own weight tensors as they live in memory now."""
        for _, part in self.children():
            if isinstance(part, Parameter):
                yield from (piece.data for piece in part.pieces())


def named_layers(root: Layer, prefix: str = "") -> Iterator[tuple[str, Layer]]:
    """The layer and all layers below it, each once per path, parents first."""
    yield prefix, root
    for name, part in root.children():
        if isinstance(part, Layer):
            yield from named_layers(part, f"{prefix}.{name}" if prefix else name)


def named_parameters(root: Layer) -> dict[str, Parameter]:
    """Dotted path -> parameter. A shared parameter (tied embedding) appears under its first path only."""
    found: dict[str, Parameter] = {}
    seen: set[int] = set()
    for prefix, layer in named_layers(root):
        for name, part in layer.children():
            if isinstance(part, Parameter) and id(part) not in seen:
                seen.add(id(part))
                found[f"{prefix}.{name}" if prefix else name] = part
    return found
