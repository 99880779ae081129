"""A worker without tensors: it follows plans to the letter, checks them, and makes up tokens from a function.

For tests of the control plane and the API. Models the KV cache by content, so a wrong block is an error, not luck.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import anyio

from infer.config.resolve import CacheGroup
from infer.engine.sampling.guide import Grammars, Guide, is_guided, make_guide
from infer.engine.step import PositionLogprobs, SamplingSpec, SlotAdmission, StepPlan, StepResult

NextToken = Callable[[Sequence[int], SamplingSpec], int]
"""(all tokens so far, the row's sampling spec) -> the sampled id."""


def hashed_token(vocab_size: int = 1000) -> NextToken:
    """A next token that depends on every token before it and on the seed, and on nothing else."""

    def next_token(token_ids: Sequence[int], sampling: SamplingSpec) -> int:
        text = f"{sampling.seed}:{','.join(map(str, token_ids))}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) % vocab_size

    return next_token


_VOID = b"void"
"""In place of KV that a failed step should have computed."""


class PlanViolation(Exception):
    """The plan asked for something a real worker would have computed wrongly."""


@dataclass(slots=True)
class _Row:
    """A slot of the persistent batch."""

    token_ids: list[int]
    prompt_len: int
    sampling: SamplingSpec
    tables: list[list[int]]
    num_computed: int | None = None
    """None until the first step after admission, which may start behind a prefix hit."""
    guide: Guide | None = None
    void: bool = False
    """It was in a failed step, or read what one left behind: what it writes and draws is worth nothing."""


@dataclass(slots=True)
class FakeWorker:
    """Executes plans. KV is modelled as: (group, block, offset) holds the digest of all tokens up to its position."""

    groups: Sequence[CacheGroup]
    block_size: int
    next_token: NextToken = field(default_factory=hashed_token)
    check: bool = True
    """Verify every cache position that attention would read. Off for benchmarks."""
    fail_at: Callable[[StepPlan], Exception | None] = lambda plan: None
    row_error: Callable[[Sequence[int]], str | None] = lambda token_ids: None
    grammars: Grammars | None = None
    """Where grammars and thinking budgets come from; without, a request that has one is a violation."""
    plans: list[StepPlan] = field(default_factory=list)
    closed: bool = False
    _rows: dict[int, _Row] = field(default_factory=dict)
    _kv: dict[tuple[int, int, int], bytes] = field(default_factory=dict)

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        for slot in plan.freed_slots:
            self._rows.pop(slot, None)
        for admission in plan.admissions:
            self._admit(admission)
        for slot, group, blocks in plan.new_blocks:
            self._rows[slot].tables[group] += blocks
        failure = self.fail_at(plan)
        if failure is not None:
            for slot in plan.slots:
                self._rows[slot].void = True
        for index, count in plan.drafts:
            self._feed(self._rows[plan.slots[index]], count)
        if self.check:
            self._write_all(plan)
        result = self._sample_all(plan)
        for group, source, destination in plan.copies:
            for offset in range(self.block_size):
                self._kv[group, destination, offset] = self._kv.get((group, source, offset), b"")
        if failure is not None:
            raise failure
        return result

    def close(self) -> None:
        self.closed = True

    def _admit(self, admission: SlotAdmission) -> None:
        if admission.slot in self._rows:
            raise PlanViolation(f"slot {admission.slot} was admitted while it is taken")
        self._rows[admission.slot] = _Row(
            list(admission.token_ids),
            admission.prompt_len,
            admission.sampling,
            [list(table) for table in admission.block_ids],
        )
        if is_guided(admission.sampling):
            if self.grammars is None:
                raise PlanViolation(f"slot {admission.slot} is guided, and this worker has no grammars")
            outputs = admission.token_ids[admission.prompt_len :]
            self._rows[admission.slot].guide = make_guide(admission.sampling, outputs, self.grammars)

    def _feed(self, row: _Row, count: int) -> None:
        """Drafts are known tokens from here on."""
        drafts = [0] * count if row.void else [] if row.guide is None else row.guide.drafts[:count]
        if len(drafts) < count:
            raise PlanViolation(f"{count} drafts are to be fed and {len(drafts)} were told")
        row.token_ids += drafts
        if row.guide is not None and not row.void:
            for token_id in drafts:
                row.guide.accept(token_id)

    def _write_all(self, plan: StepPlan) -> None:
        """All rows write before any row reads, as in each layer of a model."""
        digests = []
        for slot, start, count in zip(plan.slots, plan.starts, plan.counts, strict=True):
            row = self._rows[slot]
            if row.num_computed is not None and row.num_computed != start:
                raise PlanViolation(f"slot {slot} starts at {start} but has {row.num_computed} computed tokens")
            if count < 1 or start + count > len(row.token_ids):
                raise PlanViolation(f"slot {slot} computes {start}+{count} of {len(row.token_ids)} known tokens")
            row.num_computed = start + count
            digest = _digests(row.token_ids[: start + count])
            digests.append(digest)
            self._write(row, start, start + count, digest)
        for slot, start, count, digest in zip(plan.slots, plan.starts, plan.counts, digests, strict=True):
            self._check_reads(self._rows[slot], slot, start, start + count, digest)

    def _write(self, row: _Row, start: int, end: int, digest: list[bytes]) -> None:
        for group in range(len(self.groups)):
            for position in range(start, end):
                self._kv[self._where(row, group, position)] = _VOID if row.void else digest[position]

    def _check_reads(self, row: _Row, slot: int, start: int, end: int, digest: list[bytes]) -> None:
        for index, group in enumerate(self.groups):
            first = 0 if group.window is None else max(0, start - group.window + 1)
            for position in range(first, end):
                content = self._kv.get(self._where(row, index, position))
                if content == _VOID and not row.void:
                    row.void = True
                    self._write(row, start, end, digest)
                if content != digest[position] and not row.void:
                    raise PlanViolation(f"slot {slot}, group {group.name}: position {position} holds other content")

    def _check_fork(self, plan: StepPlan, fork: _Row, parent_row: int) -> None:
        parent = self._rows[plan.slots[parent_row]]
        end = plan.starts[parent_row] + plan.counts[parent_row]
        if not plan.samples[parent_row] or parent.token_ids[:end] != fork.token_ids:
            raise PlanViolation(f"a fork draws from row {parent_row}, which is not at the end of the fork's prompt")
        fork.num_computed = end
        fork.void = parent.void

    def _where(self, row: _Row, group: int, position: int) -> tuple[int, int, int]:
        table = row.tables[group]
        index = position // self.block_size
        if index >= len(table) or not 0 < table[index] <= self.groups[group].num_blocks:
            raise PlanViolation(f"group {group}: position {position} has no block")
        return group, table[index], position % self.block_size

    def _sample_all(self, plan: StepPlan) -> StepResult:
        result = StepResult(step_id=plan.step_id, token_ids=[], logprobs=[])
        num_rows, num_fed = len(plan.slots), dict(plan.drafts)
        for index, slot in enumerate([*plan.slots, *(slot for _, slot in plan.forks)]):
            row = self._rows[slot]
            fed = num_fed.get(index, 0)
            tokens = row.token_ids[len(row.token_ids) - fed :]
            if index >= num_rows:
                self._check_fork(plan, row, plan.forks[index - num_rows][0])
            if index >= num_rows or plan.samples[index]:
                error = None if row.void else self.row_error(row.token_ids)
                if error is not None:
                    result.errors[index] = error
                    row.token_ids.append(0)  # what a real worker leaves behind: steps in flight build on it
                else:
                    tokens.append(0 if row.void else self._next(row))
                    row.token_ids.append(tokens[-1])
                    if row.guide is not None and not row.void:
                        self._follow(row.guide, tokens[-1], index, result)
            result.token_ids.append(tokens)
            wants = row.sampling.logprobs is not None and tokens
            result.logprobs.append([_told(token, row, drawn=True) for token in tokens] if wants else None)
            if row.sampling.prompt_logprobs is not None and index < num_rows:
                start, end = plan.starts[index], plan.starts[index] + plan.counts[index]
                predicted = row.token_ids[start + 1 : min(end + 1, row.prompt_len)]
                if predicted:
                    result.prompt_logprobs[index] = [_told(token, row, drawn=False) for token in predicted]
        return result

    def _next(self, row: _Row) -> int:
        position, forced = len(row.token_ids) - row.prompt_len, row.sampling.forced_token_ids
        wanted = forced[position] if position < len(forced) else self.next_token(row.token_ids, row.sampling)
        if row.guide is None or position < len(forced):
            return wanted
        row.guide.prepare()
        mask = row.guide.mask
        if mask is None or mask[wanted >> 3] >> (wanted & 7) & 1:
            return wanted
        allowed = [i for i in range(8 * len(mask)) if mask[i >> 3] >> (i & 7) & 1]
        return allowed[wanted % len(allowed)] if allowed else wanted

    def _follow(self, guide: Guide, token_id: int, index: int, result: StepResult) -> None:
        guide.accept(token_id)
        if guide.failure is not None:
            result.errors[index] = guide.failure
        elif guide.is_complete:
            result.complete.add(index)
        else:
            guide.prepare()
            if guide.drafts:
                result.drafts[index] = guide.drafts


def _told(token_id: int, row: _Row, *, drawn: bool) -> PositionLogprobs:
    """Every token has the log-probability -1, candidate i has -2 - i, and only the token itself is kept."""
    scored = tuple(-2.0 - place for place in range(len(row.sampling.logprob_token_ids)))
    entry = PositionLogprobs(token_id, -1.0, 1, candidates=scored)
    if drawn and row.sampling.return_kept_set:
        entry.kept_ids, entry.kept_logmass = array("i", [token_id]), -0.5
    return entry


def _digests(token_ids: Sequence[int]) -> list[bytes]:
    digest, out = b"", []
    for token_id in token_ids:
        digest = hashlib.blake2b(digest + token_id.to_bytes(4, "big"), digest_size=8).digest()
        out.append(digest)
    return out


class _FakePending:
    def __init__(self, result: StepResult | Exception, done_at: float) -> None:
        self._result = result
        self._done_at = done_at

    async def wait(self) -> StepResult:
        await anyio.sleep_until(self._done_at) if self._done_at else await anyio.lowlevel.checkpoint()
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


class FakeExecutor:
    """Runs a `FakeWorker` in order; each step takes `latency` seconds after the one before it."""

    def __init__(self, worker: FakeWorker, *, latency: float = 0.0) -> None:
        self.worker = worker
        self.latency = latency
        self._free_at = 0.0
        self.submitted: deque[StepPlan] = deque(maxlen=4)

    def submit(self, plan: StepPlan) -> _FakePending:
        self.submitted.append(plan)
        result: StepResult | Exception
        try:
            result = self.worker.execute(plan)
        except PlanViolation:
            raise
        except Exception as error:
            result = error
        done_at = 0.0
        if self.latency:
            self._free_at = done_at = max(self._free_at, anyio.current_time()) + self.latency
        return _FakePending(result, done_at)

    async def aclose(self) -> None:
        self.worker.close()
