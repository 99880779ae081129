"""Records the library's calls of one piece of work and runs them again natively, without Python between them.

Called on the worker thread; a tape owns its copy of the arguments, the tensors behind them are the arena's and the model's.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Generic, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from infer.backends.cpu.kernels import Kernels
from infer.backends.cpu.library import Library
from infer.backends.reference.scratch import Scratch
from infer.plugins.platform import Made

FACTS = frozenset(
    (
        *("__get__", "__len__", "data_ptr", "dim", "element_size", "is_contiguous", "is_floating_point"),
        *("numel", "size", "storage_offset", "stride", "untyped_storage"),
    )
)
"""What torch says of a tensor without reading it; `__get__` are its properties."""


class Recorder:
    """Stands in for `Library.call` while work is recorded: what writes is executed and kept."""

    def __init__(self, library: Library) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self._library = library

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._library.call, name)
        if not self._library.writes(name):
            return function  # type: ignore[no-any-return]

        def call(*args: Any) -> None:
            self.calls.append((name, args))
            function(*args)

        return call


class OnlyViews(TorchFunctionMode):
    """Notices when torch itself computes or allocates: a tape would leave that out.

    (A dispatch mode would see more, but entering the first one imports 800 modules.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.foreign: str | None = None
        """The first operation that a tape cannot hold."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if self.foreign is None and name not in FACTS and (_writes(name, kwargs) or not _looks_at(args, out)):
            self.foreign = name
        return out


class Arena(Scratch):
    """A buffer for every result of recorded work."""

    def __init__(self) -> None:
        super().__init__(large=0)
        self.overflowed = False
        """Something has been placed elsewhere since this was last set."""

    def place(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        with torch._C.DisableTorchFunction():  # not an allocation that a tape would leave out
            placed = super().place(shape, dtype)
            self.overflowed |= placed is None or not self.holds(placed)
            return placed

    def unowned(self, tensor: Tensor) -> Tensor:
        """The same dense numbers, in a tensor that does not keep later ones away from their place."""
        if self._buffer is None or not self.holds(tensor):
            return tensor
        with torch._C.DisableTorchFunction():
            start = tensor.data_ptr() - self._buffer.ctypes.data
            piece = torch.from_numpy(self._buffer[start : start + tensor.nbytes])
            return piece.view(tensor.dtype).view(tensor.shape)


class Tape(Generic[Made]):
    """`plugins.platform.Graph` over recorded calls."""

    def __init__(self, library: Library, calls: list[tuple[str, tuple[Any, ...]]], output: Made) -> None:
        """Raises `LookupError` for a call that the library cannot repeat."""
        self._library = library
        self._output = output
        self._structures = [value for _, args in calls for value in args if isinstance(value, ctypes.Structure)]
        """What arguments point at must live as long as the tape."""
        self._tape: int | None = library.call.infer_tape_create()
        for name, args in calls:
            slots = (ctypes.c_uint64 * len(args))(*map(_slot, library.arguments(name), args))
            if not library.call.infer_tape_add(self._tape, name.encode(), slots, len(args)):
                raise LookupError(f"{name} with {len(args)} arguments is no operation of a tape")

    def replay(self) -> Made:
        self._library.call.infer_tape_run(self._tape)
        return self._output

    def __del__(self) -> None:
        if self._tape is not None:
            self._library.call.infer_tape_destroy(self._tape)
            self._tape = None


def record(
    library: Library, kernels: Sequence[Kernels], arena: Arena, work: Callable[[], Made]
) -> tuple[Made, Tape[Made] | None]:
    """Do the work once, the results of `kernels` in `arena`. -> what it returned, and the tape; None where not all of it was
    a call of the library."""
    recorder, watch = Recorder(library), OnlyViews()
    arena.overflowed = False
    with ExitStack() as stack:
        for table in kernels:
            stack.enter_context(table.calling(recorder, arena))
        stack.enter_context(watch)
        output = work()
    made = output if isinstance(output, tuple) else (output,)
    unowned = tuple(map(arena.unowned, made))
    output = cast("Made", unowned if isinstance(output, tuple) else unowned[0])
    if watch.foreign is not None or arena.overflowed:
        return output, None
    return output, Tape(library, recorder.calls, output)


def _writes(name: str, kwargs: dict[str, Any] | None) -> bool:
    """Whether a function of torch changes one of its arguments, by the rules that torch names them by."""
    if name.startswith("__"):
        return name.startswith(("__i", "__set", "__del"))  # x += y, x[i] = y
    return name.endswith("_") or (kwargs is not None and kwargs.get("out") is not None)


def _looks_at(args: Any, out: Any) -> bool:
    """Whether a result is nothing but another look at the memory of the arguments."""
    made = out if isinstance(out, tuple | list) else [out]
    memory = {value.untyped_storage().data_ptr() for value in args if isinstance(value, Tensor)}
    return all(isinstance(value, Tensor) and value.untyped_storage().data_ptr() in memory for value in made)


def _slot(kind: type, value: Any) -> int:
    """An argument as 64 bits, see csrc/tape.cpp."""
    if kind is ctypes.c_float:
        return int.from_bytes(struct.pack("<d", value), "little")
    if isinstance(value, ctypes.Structure):
        return ctypes.addressof(value)
    return 0 if value is None else int(value) & 0xFFFF_FFFF_FFFF_FFFF
