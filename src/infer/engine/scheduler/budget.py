"""The plan of one step while it is being made: the token budget left, the rows taken, and who was preempted.

Lives for one call of `Scheduler.schedule`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from infer.engine.aux.index import Key
from infer.engine.kv_cache.block_pool import BlockPool
from infer.engine.request import Request
from infer.engine.step import SlotAdmission, StepPlan


@dataclass(slots=True)
class ScheduledStep:
    """A plan on its way, with what the loop needs when it comes back."""

    plan: StepPlan
    requests: list[Request]
    forked: list[Request]
    """Requests of `plan.forks`."""
    registered: list[tuple[BlockPool, list[int]]]
    """Blocks made findable on the word that this step computes them."""
    weight_version: int = 0
    published: list[Key] = field(default_factory=list)
    """Objects of captured rows that exist on the word that this step computes them."""

    def outcomes(self) -> Iterator[tuple[int, Request, int]]:
        """(index in the result's lists, request, tokens that it was to bring: drafts and the drawn one), rows first, then
        forks."""
        drafts = dict(self.plan.drafts)
        for row, request in enumerate(self.requests):
            yield row, request, self.plan.samples[row] and 1 + drafts.get(row, 0)
        for index, request in enumerate(self.forked, start=len(self.requests)):
            yield index, request, 1


class StepDraft:
    """Rows of the step being planned, in order."""

    def __init__(self, step_id: int, budget: int) -> None:
        self.step_id = step_id
        self.budget = budget
        self.requests: list[Request] = []
        self.counts: list[int] = []
        self.samples: list[int] = []
        self.drafts: list[int] = []
        self.admissions: list[SlotAdmission] = []
        self.new_blocks: list[tuple[Request, int, list[int]]] = []
        self.forked: list[tuple[Request, Request]] = []
        self.copies: list[tuple[int, int, int]] = []
        self.preempted = False

    def add(self, request: Request, count: int, num_drafts: int = 0) -> None:
        """Take a row: the request's next `count` tokens, which sample when they reach the last known one; then of its drafts
        the next `num_drafts`."""
        sample = request.num_to_compute == count
        request.num_computed += count + num_drafts
        if sample:
            request.num_in_flight += 1 + num_drafts
        self.requests.append(request)
        self.counts.append(count + num_drafts)
        self.samples.append(sample)
        self.drafts.append(num_drafts)
        self.budget -= count + num_drafts

    def fork(self, parent: Request, child: Request, copies: list[tuple[int, int, int]]) -> None:
        """The child draws from the logits of the parent's row. Only after the last preemption of the step."""
        child.num_in_flight += 1
        self.forked.append((parent, child))
        self.copies += copies

    def remove(self, request: Request) -> bool:
        """Give back the row of a request that is preempted after it was planned; False if it has none."""
        if request not in self.requests:
            return False
        index = self.requests.index(request)
        del self.requests[index]
        count = self.counts.pop(index)
        self.budget += count
        request.num_in_flight -= self.samples.pop(index) + self.drafts.pop(index)
        request.num_computed -= count
        self.new_blocks = [item for item in self.new_blocks if item[0] is not request]
        return True

    def finish(self, freed_slots: list[int]) -> StepPlan:
        """The plan. Every row's `num_computed` already includes its count."""
        requests, counts = self.requests, self.counts
        return StepPlan(
            step_id=self.step_id,
            slots=array("i", [request.slot for request in requests]),
            starts=array("i", [r.num_computed - count for r, count in zip(requests, counts, strict=True)]),
            counts=array("i", counts),
            samples=array("b", self.samples),
            admissions=self.admissions,
            new_blocks=[(request.slot, group, blocks) for request, group, blocks in self.new_blocks],
            freed_slots=freed_slots,
            forks=[(requests.index(parent), child.slot) for parent, child in self.forked],
            copies=self.copies,
            drafts=[(row, count) for row, count in enumerate(self.drafts) if count],
        )
