"""KV blocks outside the engine, scheduler half: what is asked, loaded and saved, and which blocks that holds. No payload.

Runs in the loop task; owns the connector's scheduler half and a reference to every block that is on its way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from infer.engine.aux.coordinator import cap_external_hit
from infer.engine.kv_cache.external_jobs import (
    Answer,
    ExternalStats,
    Job,
    JobState,
    Outages,
    Outcome,
    Verdict,
    free_blocks,
    name_of,
)
from infer.engine.kv_cache.external_saves import Saves
from infer.engine.kv_cache.manager import KVCacheManager, PrefixHit
from infer.engine.step import KVPlan
from infer.plugins.kv_connector import ExternalMatch, KVBlock, KVReport, KVTransfer, SchedulerConnector

if TYPE_CHECKING:
    from infer.engine.aux.coordinator import AuxCoordinator
    from infer.engine.request import Request
    from infer.engine.step import StepResult

IDLE_WAIT = 0.005
"""Seconds that the worker waits for transfers when there is nothing else to do; a new request waits as long."""


class ExternalKV:
    """Between the scheduler and a connector.

    A load gets blocks of its own, which nobody can find until they are there; then the request is admitted with them, or, if
    it cannot be at once, finds them in the prefix cache like any other. A block is saved after the step that computed it has
    come back, under a reference of its own, so that preemption, abort and failure of its request do not matter.
    """

    def __init__(
        self,
        connector: SchedulerConnector,
        kv: KVCacheManager,
        *,
        save: bool = True,
        fail_requests: bool = False,
        timeout: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`fail_requests`: a request whose load fails ends; else it computes the blocks. `timeout`: see `kv_connector`."""
        self.stats = ExternalStats()
        self._connector = connector
        self._kv = kv
        self._fail_requests = fail_requests
        self._timeout = timeout
        self._clock = clock
        self._outages = Outages()
        self._saves = Saves(kv, self.stats)
        self._answers: dict[Request, Answer] = {}
        self._loads: dict[Request, Job] = {}
        """Of waiting requests, and of running ones whose step waits for the load."""
        self._jobs: dict[int, Job] = {}
        """Sent, not reported."""
        self._start: list[KVTransfer] = []
        self._next_id = 0
        self._paused = False
        if save:
            kv.on_registered = self._saves.registered

    @property
    def num_transfers(self) -> int:
        return len(self._jobs)

    @property
    def is_pending(self) -> bool:
        """Something will come of another step even if no request can run in it."""
        asking = any(answer.num_tokens is None for answer in self._answers.values())
        return bool(self._jobs or self._start or self._saves or asking)

    # -- requests ------------------------------------------------------------------------------------------------

    def match(
        self, request: Request, local: Callable[[Request], PrefixHit], aux: AuxCoordinator | None
    ) -> PrefixHit | Verdict:
        """The beginning that a waiting request need not compute: the prefix cache's, as far as `local` finds it, or more."""
        load = self._loads.get(request)
        if load is not None and load.state is JobState.SENT and not self._paused:
            return Verdict.WAIT
        hit = local(request)
        if self._paused or not request.reads_prefix_cache:
            return hit
        if load is not None:  # its rows may have gone meanwhile
            return load.hit if self._allowed(request, 0, load.hit.num_tokens, aux) else hit
        answer = self._ask(request, hit.num_tokens)
        if answer.num_tokens is None:
            return Verdict.WAIT
        external = self._allowed(request, hit.num_tokens, answer.num_tokens - hit.num_tokens, aux)
        if external <= 0:
            return hit
        # A step that waits is planned before the blocks are there, and captured rows must not come of blocks that may fail.
        return self._load(request, hit, hit.num_tokens + external, answer.wait and request.rows is None)

    def admitted(self, request: Request) -> None:
        """The request has what `match` gave and blocks of its own; it runs."""
        self._forget(request)
        load = self._loads.get(request)
        if load is None:
            return
        if load.state is JobState.UNSENT:
            request.blocks.is_provisional = True
            self._send(load)
            return
        del self._loads[request]
        load.request = None
        if load.state is JobState.READY:
            free_blocks(load, self._kv.pools)

    def left(self, request: Request) -> None:
        """The request has ended or gave up its slot. What is on its way for it stays held until it is reported."""
        self._forget(request)
        if request.error is not None:
            self._saves.forget(request)
        load = self._loads.pop(request, None)
        if load is not None:
            load.request = None
            if load.state is not JobState.SENT:
                free_blocks(load, self._kv.pools)

    def decline(self, request: Request) -> None:
        """The request, which waits, computes what the engine does not have; the store is not asked until it is admitted."""
        self._answers[request] = Answer(self._clock(), 0)

    # -- steps ---------------------------------------------------------------------------------------------------

    def begin_step(self, step_id: int) -> Outcome:
        """A step is being planned. Loads that took too long are given up."""
        self._saves.step_id = step_id
        outcome = Outcome()
        limit = self._clock() - self._timeout
        for load in list(self._loads.values()):
            if load.state is JobState.SENT and load.since < limit and not load.transfer.wait:
                self._late(load, outcome)
        return outcome

    def end_step(self, *, idle: bool) -> KVPlan | None:
        """What the plan carries."""
        self.let_go()
        for request_id, blocks in self._saves.take().items():
            held: list[list[int]] = [[] for _ in self._kv.pools]
            for block in blocks:
                held[block.group].append(block.block_id)
            self._send(Job(KVTransfer(self._new_id(), "save", request_id, tuple(blocks)), held))
        start, self._start = self._start, []
        return KVPlan(start, IDLE_WAIT if idle else 0.0) if start or self._jobs or idle else None

    def let_go(self, *, decline: bool = False) -> bool:
        """Blocks that are loaded and whose request could not be admitted are left to the prefix cache: nobody may wait for a
        block that a waiting request holds. Whether there were any. `decline`: those requests are not to load again."""
        idle = [(request, load) for request, load in self._loads.items() if load.state is not JobState.SENT]
        for request, load in idle:
            del self._loads[request]
            free_blocks(load, self._kv.pools)
            if decline:
                self.decline(request)
        return bool(idle)

    def applied(self, result: StepResult) -> Outcome:
        """Book a step's reports; what it and earlier ones computed may be saved now."""
        outcome = Outcome()
        for report in result.kv_reports:
            self._reported(report, outcome)
        for job_id in result.kv_late:
            if (job := self._jobs.get(job_id)) is not None:
                self._late(job, outcome)
        self._saves.applied(result.step_id)
        return outcome

    def failed(self) -> None:
        """A step failed: nothing that has not come back is saved, and nobody waits for a load that would go with blocks which
        that step was to compute. What comes of it is found in the prefix cache."""
        self._saves.failed()
        for request, load in list(self._loads.items()):
            if request.slot < 0:
                del self._loads[request]
                load.request = None
                if load.state is not JobState.SENT:
                    free_blocks(load, self._kv.pools)

    def commit_version(self, version: int) -> None:
        """Other weights than those of the files, which the namespace names: nothing is loaded or saved any more."""
        self._paused = self._saves.paused = version != 0
        if self._paused:
            self._saves.drop()

    def close(self) -> None:
        """May wait for the connector's threads; called from any thread, after the last step."""
        self._connector.close()

    # -- lookups -------------------------------------------------------------------------------------------------

    def _ask(self, request: Request, num_local: int) -> Answer:
        """The definite answer is kept until the request is admitted or leaves, or the engine loses what it was given beside."""
        now = self._clock()
        answer = self._answers.get(request)
        if answer is None or (answer.num_tokens and num_local < answer.num_local):
            answer = self._answers[request] = Answer(now)
        if answer.num_tokens is not None:
            return answer
        found = self._lookup(request, num_local)
        if found.state == "later":
            if now - answer.since <= self._timeout:
                return answer
            self._no_answer(f"no answer came within {self._timeout:g} s")
            self._connector.forget(name_of(request))
        self.stats.queries += 1
        answer.num_tokens, answer.wait, answer.num_local = 0, found.wait, num_local
        if found.state == "hit":
            answer.num_tokens = found.num_tokens
            self.stats.hits += found.num_tokens > num_local
            self.stats.hit_tokens += max(0, found.num_tokens - num_local)
        return answer

    def _lookup(self, request: Request, num_local: int) -> ExternalMatch:
        num_tokens = len(request.token_ids)
        hashes = self._kv.hashes(request, num_tokens // self._kv.block_size)
        try:
            found = self._connector.match(name_of(request), hashes, num_tokens, num_local)
            if found.state == "hit" and not 0 < found.num_tokens <= num_tokens:
                raise ValueError(f"it found {found.num_tokens} tokens of a sequence of {num_tokens}")
        except Exception as error:
            self._no_answer(f"{type(error).__name__}: {error}")
            return ExternalMatch("miss")
        if found.state != "later":
            self._outages.worked("lookup")
        return found

    def _no_answer(self, reason: str) -> None:
        self.stats.lookup_failures += 1
        self._outages.failed("lookup", reason)

    def _forget(self, request: Request) -> None:
        if self._answers.pop(request, None) is not None:
            self._connector.forget(name_of(request))

    def _allowed(self, request: Request, num_local: int, num_external: int, aux: AuxCoordinator | None) -> int:
        """External tokens behind the local ones that may be used: a request whose rows are captured needs those rows."""
        rows = request.rows
        if aux is None or rows is None or rows.failure is not None:
            return num_external
        size = self._kv.block_size
        cap = aux.cap_hit(rows, self._kv.matchable_hashes(request)) * size
        return cap_external_hit(num_local, num_external, cap, size)

    # -- loads ---------------------------------------------------------------------------------------------------

    def _load(self, request: Request, local: PrefixHit, num_tokens: int, wait: bool) -> PrefixHit | Verdict:
        """Take blocks for the first `num_tokens` tokens and order what the engine lacks of them."""
        kv = self._kv
        size = kv.block_size
        computed = min(num_tokens, len(request.token_ids) - 1)  # the last token is computed, to predict the next
        if computed <= local.num_tokens:
            return local
        hashes = kv.hashes(request, num_tokens // size)
        tables: list[list[int]] = []
        lacking: list[list[int]] = []
        for pool, group, mark in zip(kv.pools, kv.groups, kv.watermarks, strict=True):
            first = kv.window_blocks(group, computed)
            table = [0] * first
            for index in range(first, -(-num_tokens // size)):
                # What the request still writes to must be its own.
                table.append((pool.find(hashes[index]) or 0) if index < computed // size else 0)
            missing = [index for index in range(first, len(table)) if not table[index]]
            if len(missing) + pool.num_idle(table) > pool.num_free - mark:
                return self._no_room(request, local)
            tables.append(table)
            lacking.append(missing)
        if not any(lacking):
            return local
        blocks = []
        for number, (pool, table, missing) in enumerate(zip(kv.pools, tables, lacking, strict=True)):
            pool.share(table)
            for index, block_id in zip(missing, pool.allocate(len(missing)), strict=True):
                table[index] = block_id
                blocks.append(KVBlock(hashes[index] if index < len(hashes) else b"", number, block_id, index))
        blocks.sort(key=lambda block: (block.index, block.group))
        transfer = KVTransfer(self._new_id(), "load", name_of(request), tuple(blocks), wait)
        hit = PrefixHit(computed, tuple(tables))
        load = Job(transfer, [list(table) for table in tables], request, hit, self._clock(), JobState.UNSENT)
        self._loads[request] = load
        if wait:
            return hit
        self._send(load)
        return Verdict.WAIT

    def _no_room(self, request: Request, local: PrefixHit) -> PrefixHit | Verdict:
        """Wait for others to give back blocks; when nobody has any, compute in pieces what cannot be loaded as a whole."""
        if any(pool.num_in_use for pool in self._kv.pools):
            return Verdict.FULL
        self.decline(request)
        return local

    def _reported(self, report: KVReport, outcome: Outcome) -> None:
        job = self._jobs.pop(report.job_id, None)
        if job is None:
            self.stats.unknown_reports += 1
            return
        kind, failed = job.transfer.kind, set(report.failed)
        moved = [block for i, block in enumerate(job.transfer.blocks) if i not in failed]
        num_bytes = sum(self._kv.groups[block.group].bytes_per_block for block in moved)
        if report.reason:
            self._outages.failed(kind, report.reason)
        elif not failed:
            self._outages.worked(kind)
        if kind == "save":
            self.stats.saved_blocks += len(moved)
            self.stats.saved_bytes += num_bytes
            self.stats.save_failures += bool(failed)
            self._saves.done(job.transfer.blocks)
        else:
            self.stats.loaded_blocks += len(moved)
            self.stats.loaded_bytes += num_bytes
            self.stats.load_failures += bool(failed)
            if self._loaded(job, moved):
                job.state = JobState.READY
                return
        free_blocks(job, self._kv.pools)
        if job.request is not None and kind == "load":
            self._lost(job, report.reason or f"{len(failed)} of {len(job.transfer.blocks)} blocks are gone", outcome)

    def _loaded(self, job: Job, moved: list[KVBlock]) -> bool:
        """Whether the request, which still waits, is to be admitted with these blocks. What came whole can be found, but for a
        block that the request will write to."""
        if self._paused:
            return False
        for block in moved:
            if block.hash and (block.index + 1) * self._kv.block_size <= job.hit.num_tokens:
                self._kv.pools[block.group].register([block.block_id], [block.hash])
        request = job.request
        if request is None or len(moved) < len(job.transfer.blocks):
            return False
        if not job.transfer.wait:
            return True
        request.blocks.is_provisional = False  # it has them already
        del self._loads[request]
        job.request = None
        return False

    def _late(self, job: Job, outcome: Outcome) -> None:
        """Its blocks stay held: somebody may still write to them."""
        if job.request is not None:
            self.stats.load_failures += 1
            reason = f"nothing came within {self._timeout:g} s"
            self._outages.failed("load", reason)
            self._lost(job, reason, outcome)

    def _lost(self, job: Job, reason: str, outcome: Outcome) -> None:
        """The request goes on without the load: it finds in the prefix cache what came, and computes the rest."""
        request, job.request = job.request, None
        if request is None:
            return
        del self._loads[request]
        if self._fail_requests:
            outcome.failed.append((request, reason))
        elif job.transfer.wait:
            outcome.restart.append(request)
        else:
            self.decline(request)

    # -- parts ---------------------------------------------------------------------------------------------------

    def _send(self, job: Job) -> None:
        job.state = JobState.SENT
        self._jobs[job.transfer.job_id] = job
        self._start.append(job.transfer)

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id
