"""Sees every operation that Python asks of torch, tells the order what it reads and writes, and keeps it on a tape.

For tests; active on the worker thread under `FakeDevice.using`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fakes.order import Memory, Order, Queue, flatten

if TYPE_CHECKING:
    from fakes.cuda_device import FakeDevice

FACTS = frozenset(
    (
        *(
            "__get__",
            "__len__",
            "data_ptr",
            "dim",
            "element_size",
            "is_contiguous",
            "is_floating_point",
            "is_inference",
        ),
        *(
            "numel",
            "size",
            "storage_offset",
            "stride",
            "untyped_storage",
            "__hash__",
            "is_complex",
            "is_pinned",
            "nelement",
        ),
    )
)
"""What torch says of a tensor without reading it."""
NUMBERS = frozenset(
    (
        *("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "nonzero", "__iter__"),
        "equal",
    )
)
"""What a real device is waited for."""
HOST_MADE = frozenset(("tensor", "as_tensor", "from_numpy", "frombuffer"))
"""Tensors of the host. Where the device reads one, a real program had it copied, and waited for the copy."""


@dataclass(frozen=True, slots=True)
class Outside:
    """A tensor that a graph reads or writes and does not own: an address, as in a real graph."""

    storage: weakref.ref[Any]
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Outside:
        return cls(
            weakref.ref(tensor.untyped_storage()),
            tensor.dtype,
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
        )

    def tensor(self, order: Order) -> Tensor:
        storage = self.storage()
        if storage is None:
            order.fail("a graph is replayed on memory that was freed since it was captured")
        with torch.inference_mode():
            empty: Any = torch.empty(0, dtype=self.dtype)
            found: Tensor = empty.set_(storage, self.offset, self.shape, self.stride)
            return found


@dataclass(slots=True)
class Entry:
    name: str
    function: Callable[..., Any]
    args: Any
    kwargs: Any
    made: list[Tensor]
    writes: list[int]
    """Which tensors among the arguments it changes."""


class Tape:
    """Operations of a capture, in order; the memory of their results is the tape's."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.results: list[Tensor] = []
        self._own: set[int] = set()

    def add(self, entry: Entry) -> None:
        given = {tensor.untyped_storage()._cdata for tensor in flatten((entry.args, entry.kwargs))}
        self._own |= {tensor.untyped_storage()._cdata for tensor in entry.made} - given
        self.entries.append(entry)

    def close(self, made: Any, order: Order) -> None:
        """Let go of what is not the graph's. Its results hold nothing yet: a capture computes nothing."""
        for entry in self.entries:
            entry.args, entry.kwargs = self._outside(entry.args), self._outside(entry.kwargs)
        self.results = [one for one in flatten(made) if one.untyped_storage()._cdata in self._own]
        for one in self.results:
            order.memory(one, "a graph's result")
            spoil(one)

    def replay(self, order: Order, queue: Queue) -> None:
        reads: list[Memory] = []
        writes = [order.memory(one, "a graph's result") for one in self.results]
        calls = []
        with torch._C.DisableTorchFunction():
            for entry in self.entries:
                args, kwargs = self._inside(entry.args, order), self._inside(entry.kwargs, order)
                tensors = flatten((args, kwargs))
                outside = [order.memory(one) for one in tensors if one.untyped_storage()._cdata not in self._own]
                reads += outside
                writes += [order.memory(tensors[k]) for k in entry.writes]
                calls.append((entry, args, kwargs))
        order.operation(queue, "a replay", once(reads), once(writes))
        with torch._C.DisableTorchFunction(), torch.inference_mode():
            for entry, args, kwargs in calls:
                given = {tensor.untyped_storage()._cdata for tensor in flatten((args, kwargs))}
                for old, new in zip(entry.made, flatten(entry.function(*args, **kwargs)), strict=True):
                    if old.untyped_storage()._cdata not in given:
                        old.copy_(new)

    def _outside(self, value: Any) -> Any:
        return _mapped(
            value,
            lambda one: (
                one if isinstance(one, Tensor) and one.untyped_storage()._cdata in self._own else Outside.of(one)
            ),
            Tensor,
        )

    def _inside(self, value: Any, order: Order) -> Any:
        return _mapped(value, lambda one: one.tensor(order), Outside)


class Watch(TorchFunctionMode):
    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device
        self._host: weakref.WeakSet[Any] = weakref.WeakSet()
        """Storages of the host's own tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name in FACTS:
            return func(*args, **kwargs)
        device, order = self._device, self._device.order
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        ours = [tensor for tensor in given if tensor.untyped_storage() not in self._host]
        if name in NUMBERS and ours:
            if any(order.knows(tensor) for tensor in ours):  # others came from an array: `from_numpy` is not seen
                device.host_waits_for_current(name)
            out = func(*args, **kwargs)
            self._keep_on_host(out)
            return out
        out = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if name in HOST_MADE or (given and not ours):
            self._keep_on_host(made)
            return out
        if given and len(ours) < len(given) and any(tensor.dim() for tensor in given):
            device.host_waits_for_current(f"{name} with a tensor of the host")
        writes = _written(name, args, kwargs)
        memory = {tensor.untyped_storage()._cdata for tensor in given}
        new = [tensor for tensor in made if tensor.untyped_storage()._cdata not in memory]
        if device.tape is not None:
            places = [k for k, tensor in enumerate(flatten((args, kwargs))) if any(tensor is one for one in writes)]
            device.tape.add(Entry(name, func, args, kwargs, made, places))
            return out
        if not new and not writes:
            return out  # another look at the same memory
        order.operation(
            device.current,
            name,
            once([order.memory(one) for one in ours]),
            once([order.memory(one) for one in (*new, *writes)]),
        )
        return out

    def _keep_on_host(self, made: Any) -> None:
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self._host.add(leaf.untyped_storage())


def _written(name: str, args: Any, kwargs: Any) -> list[Tensor]:
    """By the rules that torch names functions by."""
    out = kwargs.get("out")
    if out is not None:
        return flatten(out)
    inplace = name.startswith(("__i", "__set")) if name.startswith("__") else name.endswith("_")
    return [args[0]] if inplace and args and isinstance(args[0], Tensor) else []


def once(found: list[Memory]) -> list[Memory]:
    return list({id(memory): memory for memory in found}.values())


def _mapped(value: Any, change: Callable[[Any], Any], kind: type) -> Any:
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(item, change, kind) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_mapped(item, change, kind) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{name: _mapped(getattr(value, name), change, kind) for name in value.__dataclass_fields__}
        )
    return value


def spoil(tensor: Tensor) -> None:
    with torch._C.DisableTorchFunction(), torch.inference_mode():
        tensor.fill_(torch.nan if tensor.is_floating_point() else 77)
