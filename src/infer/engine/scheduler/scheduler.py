"""Decides which tokens of which requests run in the next step, and books what comes back. No tensors, no waiting.

Runs in the loop task; owns the waiting queue, the running list and the slots.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from infer.config.capture import ResolvedCapture
from infer.config.resolve import ResolvedScheduler
from infer.engine.aux.coordinator import AuxCoordinator
from infer.engine.history import Admission, Histories, PreemptReason
from infer.engine.kv_cache.external import ExternalKV
from infer.engine.kv_cache.external_jobs import Outcome, Verdict
from infer.engine.kv_cache.lineage import PrefixEnd
from infer.engine.kv_cache.manager import KVCacheManager
from infer.engine.metrics import EngineMetrics
from infer.engine.request import Request, Status
from infer.engine.scheduler.budget import ScheduledStep, StepDraft
from infer.engine.scheduler.policy import WaitingQueue, victim
from infer.engine.scheduler.prefill_limits import PrefillLimits
from infer.engine.scheduler.stats import SchedulerStats
from infer.engine.step import SlotAdmission, StepResult
from infer.errors import KVLoadError, SamplingError, StepError
from infer.types import FinishReason


class Scheduler:
    """One token budget per step, spent on running requests first, then on waiting ones in the policy's order.

    A request is running from admission to its end or preemption; prefill and decode differ only in how many of its
    tokens are still to be computed. `schedule` may be called again before earlier steps have come back.
    """

    def __init__(
        self,
        config: ResolvedScheduler,
        kv: KVCacheManager,
        *,
        capture: ResolvedCapture | None = None,
        external: ExternalKV | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.kv = kv
        self.aux = None if capture is None else AuxCoordinator(capture, kv)
        self.external = external
        self.weight_version = 0
        self.running: list[Request] = []
        self.stats = SchedulerStats()
        self.metrics = EngineMetrics()
        self.histories = Histories()
        self._match = kv.match if self.aux is None else self.aux.match
        self.waiting = WaitingQueue(config.policy, lambda request: self._match(request).num_tokens)
        self._clock = clock
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._freed_slots: list[int] = []
        self._in_flight: deque[ScheduledStep] = deque()
        self._step_id = 0

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    @property
    def next_step_id(self) -> int:
        return self._step_id

    # -- requests come and go ------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a new request. That it can ever fit was checked by the caller."""
        self.histories.begin((request, *request.siblings), self._step_id)
        self.waiting.push(request)

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        error: Exception | None = None,
    ) -> None:
        """End a request from outside (abort, deadline, stop string, engine death); a finished one is left alone."""
        if request.status is Status.FINISHED:
            return
        request.finish(reason, stop_reason, error)
        self._retire([request])
        request.deliver()

    def reset_prefix_cache(self, *, restart_running: bool = False) -> bool:
        """Forget cached blocks. With requests running: refused, or (restart) they drop what is in flight and start over."""
        if restart_running:
            for request in list(self.running):
                request.discard_in_flight()
                self._preempt(request, "prefix cache reset")
        return self.kv.reset_prefix_cache()

    def commit_version(self, version: int) -> None:
        """Steps planned from now on run on other weights; those in flight ran on the old ones."""
        self.weight_version = version
        if self.aux is not None:
            self.aux.commit_version(version)
        if self.external is not None:
            self.external.commit_version(version)

    # -- down ----------------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledStep | None:
        """Plan one step; None when nothing can run before a step in flight comes back or a request arrives."""
        draft = StepDraft(self._step_id, self.config.max_num_batched_tokens)
        if self.external is not None:
            self._settle(self.external.begin_step(draft.step_id))
        self._schedule_running(draft)
        for request in draft.requests:
            self.kv.computed(request)
        if self.aux is not None:
            for request in draft.requests:
                self.aux.computed(request)
        if not draft.preempted:
            self._schedule_waiting(draft)
        elif len(self.waiting):
            self.waiting[0].history.wait("preemption in this step", draft.step_id)
        self._start_siblings(draft)
        idle, external = not draft.requests, self.external
        if idle and external is not None and external.let_go(decline=True):
            return self.schedule()  # there is room now
        if idle and (external is None or self._in_flight or not external.is_pending):
            return None  # what ended requests made findable stays noted for the next step, or for `fail`
        registered = self.kv.end_step()
        forked = [child for _, child in draft.forked]
        step = ScheduledStep(draft.finish(self._freed_slots), draft.requests, forked, registered, self.weight_version)
        if self.aux is not None:
            step.plan.aux, step.published = self.aux.end_step(step.plan.step_id)
        step.plan.kv = None if external is None else external.end_step(idle=idle)
        self._freed_slots = []
        self._step_id += 1
        self._in_flight.append(step)
        if idle:
            return step
        self.stats.steps += 1
        num_tokens = self.config.max_num_batched_tokens - draft.budget
        self.stats.scheduled_tokens += num_tokens
        self.stats.draft_tokens += sum(draft.drafts)
        self.metrics.step_tokens.observe(num_tokens)
        return step

    def _schedule_running(self, draft: StepDraft) -> None:
        limits = PrefillLimits(self.config, (), self.num_unfinished)
        for request in list(self.running):
            if draft.budget <= 0:
                break
            if request.status is not Status.RUNNING:
                continue  # it gave its blocks to a request before it
            count = request.num_to_compute
            if count <= 0 or request.num_output + request.num_pending >= request.max_tokens:
                continue  # its last token is in flight
            num_drafts = 0
            if count > 1:
                count = min(limits.chunk(count), draft.budget)
            elif request.drafts:  # they must not take the budget of those behind it
                num_drafts = max(0, min(request.num_drafts, draft.budget - len(self.running)))
            target = request.num_computed + count + num_drafts
            if self.kv.has_room(request, target) or self._grow(request, target, draft):
                draft.add(request, count, num_drafts)

    def _grow(self, request: Request, target: int, draft: StepDraft) -> bool:
        """Blocks for the request, at the cost of the policy's victims; False when it was a victim itself."""
        while (new := self.kv.grow(request, target)) is None:
            loser = victim(self.running, spare_prefilling=self.config.reserve_full_prompt)
            draft.remove(loser)
            draft.preempted = True
            self._preempt(loser, "no free blocks", request.request_id)
            if loser is request:
                return False
        draft.new_blocks += [(request, group, blocks) for group, blocks in enumerate(new) if blocks]
        return True

    def _schedule_waiting(self, draft: StepDraft) -> None:
        config, step_id, index = self.config, draft.step_id, 0
        limits = PrefillLimits(config, self.running, self.num_unfinished)
        while draft.budget > 0 and index < len(self.waiting) and len(self.running) < config.max_num_active_seqs:
            request = self.waiting.next_up(index)
            history = request.history
            if request.num_pending:
                history.wait("token in flight", step_id)
                break  # preempted; its next token is still on the way
            hit = self._match(request) if self.external is None else self.external.match(request, self._match, self.aux)
            if isinstance(hit, Verdict):
                history.wait("the KV store", step_id)
                if hit is not Verdict.WAIT:
                    break
                index += 1  # it keeps its place; others may pass meanwhile
                continue
            remaining = len(request.token_ids) - hit.num_tokens
            count = min(limits.chunk(remaining), draft.budget)
            if count < remaining and (reason := limits.refuse(request)) is not None:
                history.wait(reason, step_id, remaining, draft.budget)
                if reason != "too many long prefills":
                    break
                index += 1  # shorter prompts behind it may pass
                continue
            reserve = len(request.token_ids) if config.reserve_full_prompt else 0
            if not self.kv.admit(request, hit, hit.num_tokens + count, reserve_tokens=reserve):
                short = self.kv.shortage(hit, hit.num_tokens + count, reserve_tokens=reserve)
                history.wait("no free blocks", step_id, *(short or ()))
                break
            self.waiting.admit(request)
            if self.external is not None:
                self.external.admitted(request)
            capped = request.rows is not None and self.kv.match(request).num_tokens > hit.num_tokens
            end = self.kv.prefix_end(request, hit.num_tokens, cap_reached=capped)
            history.admitted(Admission(step_id, len(request.token_ids), hit.num_tokens, end))
            self._start(request, hit.num_tokens, draft)
            draft.add(request, count)
            self.kv.computed(request)
            if self.aux is not None:
                self.aux.computed(request)
            if count < remaining:
                limits.started_partly()
        else:
            if index < len(self.waiting):
                self.waiting[index].history.wait("token budget" if draft.budget <= 0 else "no free slot", step_id)

    def _start_siblings(self, draft: StepDraft) -> None:
        """Choices whose prompt this step completes: they share its blocks and logits if there is room, else they queue."""
        for request, sample in zip(draft.requests, draft.samples, strict=True):
            if not (sample and request.siblings):
                continue
            siblings, request.siblings = request.siblings, ()
            for sibling in siblings:
                if sibling.status is Status.FINISHED:
                    continue
                room = len(self.running) < self.config.max_num_active_seqs and not request.blocks.is_provisional
                copies = self.kv.fork(request, sibling) if room and not draft.preempted else None
                if copies is None:
                    self.waiting.push(sibling)
                    continue
                self._start(sibling, request.prompt_len, draft, parent=request)
                shared = PrefixEnd(cause="shared prompt")
                sibling.history.admitted(Admission(draft.step_id, request.prompt_len, request.prompt_len, shared))
                draft.fork(request, sibling, copies)

    def _start(self, request: Request, num_cached: int, draft: StepDraft, parent: Request | None = None) -> None:
        request.start(self._free_slots.pop(), num_cached, draft.step_id, self._clock())
        if self.aux is not None:
            self.aux.began(request, parent)
        self.running.append(request)
        draft.admissions.append(
            SlotAdmission(
                slot=request.slot,
                token_ids=list(request.token_ids),
                prompt_len=request.prompt_len,
                sampling=request.sampling,
                block_ids=tuple(list(table) for table in request.blocks.tables),
            )
        )

    def _settle(self, outcome: Outcome) -> None:
        """Requests whose blocks could not be loaded: they end, or start over with what is there."""
        for request, reason in outcome.failed:
            error = KVLoadError(f"request {request.request_id!r}: its KV blocks could not be loaded: {reason}")
            self.finish(request, "error", error=error)
        for request in outcome.restart:
            request.history.preempted("blocks not loaded", self._step_id, None)
            self._requeue(request)
            if self.external is not None:
                self.external.decline(request)

    def _preempt(self, request: Request, reason: PreemptReason = "no free blocks", by: str | None = None) -> None:
        request.history.preempted(reason, self._step_id, by)
        self._requeue(request)
        self.stats.preemptions += 1

    def _requeue(self, request: Request) -> None:
        """It gives up its slot and its blocks and waits in its old place."""
        self.running.remove(request)
        if request.blocks.is_provisional:
            request.discard_in_flight()  # drawn from blocks that may turn out not to have come
        if self.external is not None:
            self.external.left(request)
        if self.aux is not None:
            self.aux.ended(request)
        self.kv.release(request)
        self._give_back_slot(request)
        request.preempt()
        self.waiting.push(request)

    # -- up ------------------------------------------------------------------------------------------------------

    def apply(self, result: StepResult) -> None:
        """Book the oldest step's result: accept tokens, end what is over, deliver. Late rows of ended requests are void."""
        step = self._in_flight.popleft()
        ended: list[Request] = []
        now = self._clock()
        if self.external is not None:
            self._settle(self.external.applied(result))
        for row, request, drawn in step.outcomes():
            if drawn:
                request.num_in_flight -= drawn
                if request.num_discarded:
                    request.num_discarded -= drawn
                    continue
            if request.status is Status.FINISHED:
                continue
            token_ids = result.token_ids[row]
            reason = result.errors.get(row) or ("the step drew no token for it" if drawn and not token_ids else None)
            if reason is not None:
                request.finish("error", error=SamplingError(f"request {request.request_id!r}: {reason}"))
                request.accept(token_ids, step.weight_version)  # the last may be the one its grammar could not take
                ended.append(request)
                request.deliver(token_ids, result.logprobs[row])
                continue
            entries = result.prompt_logprobs.get(row) if result.prompt_logprobs else None
            prompt_logprobs = request.new_prompt_logprobs(entries, step.plan.starts[row]) if entries else ()
            if not token_ids and not prompt_logprobs:
                continue
            kept = request.accept(token_ids, step.weight_version, complete=row in result.complete)
            if kept:
                self.metrics.produced(request, kept, now)
                if self.aux is not None:
                    self.aux.accept(request, row, step, result)
                request.expect(result.drafts.get(row, ()))
            logprobs = result.logprobs[row]
            request.deliver(
                token_ids if kept == len(token_ids) else token_ids[:kept],
                logprobs[:kept] if logprobs else None,
                prompt_logprobs,
            )
            if request.finish_reason is not None:
                ended.append(request)
        if self.aux is not None:
            self.aux.applied(result)
        if ended:
            self._retire(ended)

    def fail(self, error: BaseException) -> None:
        """The oldest step failed: its requests end with `StepError`; what was started later may have built on its
        blocks and starts over."""
        step = self._in_flight.popleft()
        tainted = [*step.registered, *self.kv.end_step()]
        for later in self._in_flight:
            tainted += later.registered
        for pool, block_ids in tainted:
            pool.unregister(block_ids)
        if self.external is not None:
            self.external.failed()
        if self.aux is not None:
            self.aux.failed([key for one in (step, *self._in_flight) for key in one.published])
        failed: list[Request] = []
        for _, request, drawn in step.outcomes():
            if drawn:
                request.num_in_flight -= drawn
                request.num_discarded = max(0, request.num_discarded - drawn)
            if request.status is not Status.FINISHED:
                reason = StepError(f"step {step.plan.step_id} failed: {type(error).__name__}: {error}")
                reason.__cause__ = error
                request.finish("error", error=reason)
                failed.append(request)
                request.deliver()
        self._retire(failed)
        for request in self.waiting:
            request.discard_in_flight()
        for request in [r for r in self.running if r.started_step > step.plan.step_id]:
            request.discard_in_flight()
            self._preempt(request, "failed step")

    def _retire(self, ended: list[Request]) -> None:
        """Free what ended requests hold. A request that failed leaves nothing in the prefix cache."""
        now = self._clock()
        for request in ended:
            self.metrics.ended(request, now)
            self.histories.end(request, self._step_id)
            for sibling in request.siblings:  # it ended before it computed the prompt for them
                if sibling.status is not Status.FINISHED:
                    self.waiting.push(sibling)
            request.siblings = ()
            if self.external is not None:
                self.external.left(request)
            if request.slot < 0:
                self.waiting.discard(request)
                continue
            if request.error is None:
                self.kv.register(request)
            else:
                self.kv.forget(request)
            if self.aux is not None:
                self.aux.ended(request, failed=request.error is not None)
            self.kv.release(request)
            self._give_back_slot(request)
        self.running = [request for request in self.running if request.status is not Status.FINISHED]
        self.stats.finished += len(ended)

    def _give_back_slot(self, request: Request) -> None:
        self._free_slots.append(request.slot)
        self._freed_slots.append(request.slot)
        request.slot = -1
