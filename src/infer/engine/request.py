"""One choice of a request as the control plane sees it: tokens, cursors, status. The only writer of status.

Lives in the loop task; the request's own task reads its results from the outbox.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

from infer.engine.history import History
from infer.engine.kv_cache.manager import RequestBlocks

if TYPE_CHECKING:
    from infer.engine.aux.rows import RequestRows
    from infer.engine.outputs import Outbox
    from infer.engine.repetition import RepetitionDetector
    from infer.engine.step import PositionLogprobs, SamplingSpec
    from infer.types import FinishReason


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """A sequence being generated.

    `token_ids` are the prompt and the accepted output. `num_computed` counts positions handed to the worker, those in
    flight included; `num_in_flight` counts output tokens that will come back. Between steps
    num_computed <= len(token_ids) + num_in_flight.
    """

    __slots__ = (
        "arrival",
        "arrived_at",
        "blocks",
        "cache_salt",
        "capture_id",
        "choice_index",
        "deadline",
        "drafts",
        "ended_at",
        "error",
        "finish_reason",
        "first_scheduled_at",
        "first_token_at",
        "history",
        "last_token_at",
        "max_tokens",
        "num_cached_tokens",
        "num_computed",
        "num_discarded",
        "num_in_flight",
        "num_overtaken",
        "num_preemptions",
        "num_prompt_logprobs",
        "outbox",
        "priority",
        "prompt_len",
        "repetition",
        "request_id",
        "rows",
        "sampling",
        "siblings",
        "slot",
        "sort_key",
        "started_step",
        "status",
        "stop_ids",
        "stop_reason",
        "token_ids",
        "versions",
        "weight_version",
    )

    def __init__(
        self,
        *,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingSpec,
        max_tokens: int,
        stop_ids: dict[int, int | None],
        outbox: Outbox,
        choice_index: int = 0,
        priority: int = 0,
        arrival: int = 0,
        cache_salt: str | None = None,
        deadline: float | None = None,
        arrived_at: float = 0.0,
        rows: RequestRows | None = None,
        repetition: RepetitionDetector | None = None,
    ) -> None:
        self.request_id = request_id
        self.choice_index = choice_index
        self.token_ids = list(prompt_ids)
        self.prompt_len = len(prompt_ids)
        self.sampling = sampling
        self.max_tokens = max_tokens
        self.stop_ids = stop_ids
        """Token id -> stop reason (None for EOS)."""
        self.outbox = outbox
        self.priority = priority
        self.arrival = arrival
        self.sort_key: tuple[int, int] = (0, arrival)
        """Set by the scheduling policy on arrival."""
        self.num_overtaken = 0
        """How many that came later were admitted before it; counted by the waiting queue."""
        self.cache_salt = cache_salt
        self.deadline = deadline
        self.status = Status.WAITING
        self.slot = -1
        self.num_computed = 0
        self.num_in_flight = 0
        self.num_discarded = 0
        """Of the tokens in flight, how many (the oldest) are void."""
        self.drafts: Sequence[int] = ()
        """Ids that the worker knows to come behind `token_ids`; none is accepted before its own step is back."""
        self.num_preemptions = 0
        self.num_cached_tokens: int | None = None
        self.num_prompt_logprobs = 0
        self.started_step = -1
        self.arrived_at = arrived_at
        self.first_scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.ended_at: float | None = None
        self.siblings: tuple[Request, ...] = ()
        """The other choices of the same prompt, to be started when this one has computed it."""
        self.rows = rows
        """Captured rows, of a request that asked for some; each sibling has its own (`RequestRows.sibling`)."""
        self.repetition = repetition
        """Of a request that is to end when its answer loops."""
        self.capture_id = -1
        """Of the stay in a slot in which they are captured."""
        self.weight_version = -1
        """Of the last token; -1 before the first."""
        self.versions: list[tuple[int, int]] = []
        """(output token, weight version): under which version it and those behind it were sampled."""
        self.blocks = RequestBlocks()
        self.history = History(choice_index)
        """What happened to it and why."""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: Exception | None = None

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def num_pending(self) -> int:
        """Tokens in flight that will be accepted."""
        return self.num_in_flight - self.num_discarded

    @property
    def num_drafts(self) -> int:
        """Drafts that the next step can feed behind the tokens in flight, with room for the one it draws."""
        room = self.max_tokens - self.num_output - self.num_pending - 1
        return max(0, min(len(self.drafts) - self.num_pending, room))

    @property
    def num_to_compute(self) -> int:
        """Tokens that can be computed now: known or in flight, not yet handed out."""
        return len(self.token_ids) + self.num_in_flight - self.num_discarded - self.num_computed

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < self.prompt_len

    @property
    def reads_prefix_cache(self) -> bool:
        """Prompt logprobs need every prompt position computed."""
        return self.sampling.prompt_logprobs is None

    @property
    def capture_fields(self) -> tuple[str, ...]:
        """Artifact fields whose rows were asked for."""
        return () if self.rows is None else self.rows.fields

    def weight_versions(self, num_output: int) -> tuple[tuple[int, int, int], ...]:
        """(first output token, end, weight version) spans over the first `num_output` output tokens."""
        ends = [first for first, _ in self.versions[1:]] + [num_output]
        spans = ((first, min(end, num_output), v) for (first, v), end in zip(self.versions, ends, strict=False))
        return tuple(span for span in spans if span[0] < span[1])

    def start(self, slot: int, num_cached: int, step_id: int, now: float) -> None:
        """WAITING -> RUNNING: the request holds a slot and `num_cached` computed tokens."""
        self.status = Status.RUNNING
        self.slot = slot
        self.drafts = ()
        self.num_computed = num_cached
        self.started_step = step_id
        if self.num_cached_tokens is None:
            self.num_cached_tokens = num_cached
            self.first_scheduled_at = now

    def preempt(self) -> None:
        """RUNNING -> WAITING: everything is to be computed again; tokens in flight still count."""
        self.status = Status.WAITING
        self.slot = -1
        self.num_computed = 0
        self.num_preemptions += 1

    def discard_in_flight(self) -> None:
        """Tokens in flight are void (their input was)."""
        self.num_discarded = self.num_in_flight

    def accept(self, token_ids: Sequence[int], weight_version: int = 0, *, complete: bool = False) -> int:
        """Append the ids of one step up to the first that ends the request; returns how many were kept. `complete`: the
        last of them completes its grammar."""
        if weight_version != self.weight_version and token_ids:
            self.weight_version = weight_version
            self.versions.append((self.num_output, weight_version))
        for count, token_id in enumerate(token_ids, start=1):
            self.token_ids.append(token_id)
            loops = self.repetition is not None and self.repetition.feed(token_id)
            if token_id in self.stop_ids and self.num_output >= len(self.sampling.forced_token_ids):
                self.finish("stop", self.stop_ids[token_id])
                return count
            if complete and count == len(token_ids):
                self.finish("stop")
                return count
            if loops and self.num_output >= max(self.sampling.min_tokens, len(self.sampling.forced_token_ids)):
                self.finish("repetition")
                return count
            if len(self.token_ids) - self.prompt_len >= self.max_tokens:
                self.finish("length")
                return count
        return len(token_ids)

    def expect(self, drafts: Sequence[int]) -> None:
        """What the worker knows to come next. Behind an id that may end the request nothing is worth a computation."""
        if not drafts:  # nearly always: it is told after every token
            self.drafts = ()
            return
        end = next((place for place, token_id in enumerate(drafts) if token_id in self.stop_ids), None)
        self.drafts = drafts if end is None else drafts[:end]

    def new_prompt_logprobs(self, entries: Sequence[PositionLogprobs], start: int) -> Sequence[PositionLogprobs]:
        """Of entries that follow position `start`, those beyond the cursor: a prompt computed again after preemption repeats
        earlier ones."""
        known = self.num_prompt_logprobs - start
        fresh = entries[known:] if known >= 0 else ()
        self.num_prompt_logprobs += len(fresh)
        return fresh

    def finish(
        self, reason: FinishReason, stop_reason: int | str | None = None, error: Exception | None = None
    ) -> None:
        """-> FINISHED, once; later calls change nothing."""
        if self.status is not Status.FINISHED:
            self.status = Status.FINISHED
            self.finish_reason = reason
            self.stop_reason = stop_reason
            self.error = error

    def deliver(
        self,
        token_ids: Sequence[int] = (),
        logprobs: Sequence[PositionLogprobs] | None = None,
        prompt_logprobs: Sequence[PositionLogprobs] = (),
    ) -> None:
        """Hand accepted facts to the reader; never waits."""
        self.outbox.put(self, token_ids, logprobs, prompt_logprobs)
