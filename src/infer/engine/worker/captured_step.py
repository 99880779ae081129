"""What one step captured: whose rows, under which weights, and the rows themselves until they are booked.

Used on the worker thread; plain data, made and filled by `capture`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from infer.engine.step import AuxPlan
from infer.engine.worker.captured_rows import Capture
from infer.engine.worker.taps import Evidence


@dataclass(slots=True)
class CapturedStep:
    """One step's own record, immutable once the snapshot is taken: later plans do not change what it means."""

    aux: AuxPlan | None
    version: int
    begins: list[Capture]
    by_slot: dict[int, Capture]
    """Of the step's rows."""
    forks: list[tuple[int, Capture]]
    """(index in the result's lists, capture of the fork)."""
    rows: list[tuple[int, Capture]] = field(default_factory=list)
    """(row in forward order, its capture), in the order of the snapshot's rows."""
    data: dict[str, Tensor] = field(default_factory=dict)
    """Field -> [captured tokens, *row shape], narrowed."""
    evidence: dict[str, Evidence] = field(default_factory=dict)
    """Field -> whether its rows can be right."""
    problems: dict[str, str] = field(default_factory=dict)
    """Field -> why it could not be selected in this step."""

    def outgoing(self) -> tuple[Tensor, ...]:
        """What will be read on the host."""
        return (*self.data.values(), *(edge for seen in self.evidence.values() for edge in seen.range))

    def arrived(self, tensors: Sequence[Tensor]) -> None:
        """The same tensors, on the host."""
        left = iter(tensors)
        self.data = {name: next(left) for name in self.data}
        for seen in self.evidence.values():
            seen.range = next(left), next(left)
