"""Executes step plans: one forward pass over all rows, logits where needed, sampling, and the ids written back.

Runs in the worker thread; owns the model, the KV tensors and the persistent batch. A row that cannot be served fails
alone; `execute` raises only when the step itself failed.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from infer.config.resolve import ResolvedConfig
from infer.config.units import format_bytes
from infer.engine.executor.executor import RunningStep
from infer.engine.sampling.guide import Grammars, Guide
from infer.engine.sampling.logprobs import NORMALISED, position_logprobs
from infer.engine.sampling.processor_row import Processors
from infer.engine.sampling.queued import Queued, can_queue, queue_sampling
from infer.engine.sampling.row import SamplingRow
from infer.engine.sampling.sampler import NO_TOKEN, Sampled, chunk_rows, prompt_rows, sample
from infer.engine.step import PositionLogprobs, SamplingSpec, SlotAdmission, StepPlan, StepResult
from infer.engine.worker.capture import RowCapture
from infer.engine.worker.captured_step import CapturedStep
from infer.engine.worker.graphs import Decoded, DecodeGraphs
from infer.engine.worker.guides import GuidedRows
from infer.engine.worker.input_batch import Draws, InputBatch, Ints, KVTensors, StepRows
from infer.engine.worker.kv_transfers import KVTransfers
from infer.engine.worker.step_flight import Finished, StepFlight, book
from infer.plugins.model import CausalLM
from infer.plugins.platform import Platform, SupportsGraphs, SupportsStaging, SupportsWorkspace

MAX_AWAITED = 8
"""Rows whose masks a step waits for at its end, to tell what they leave no choice about. With more the next step tells it, one
token later: a mask takes as long as a step saves where about one token in a hundred begins a run of forced ones."""

logger = logging.getLogger("infer.engine.worker")


class Runner:
    """One model on one platform. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        model: CausalLM,
        platform: Platform,
        resolved: ResolvedConfig,
        kv: KVTensors,
        vocab_size: int,
        weight_bytes: int,
        capture: RowCapture | None = None,
        grammars: Grammars | None = None,
        processors: Processors | None = None,
        transfers: KVTransfers | None = None,
    ) -> None:
        self._model: CausalLM | None = model
        self._platform = platform
        self._resolved = resolved
        self._kv = kv
        self._vocab_size = vocab_size
        self._weight_bytes = weight_bytes
        self._workspace_bytes = 0
        self._capture = capture
        self._transfers = transfers
        self._guides = GuidedRows(grammars)
        self._processors = processors
        self._staging = platform if isinstance(platform, SupportsStaging) else None
        if capture is not None and self._staging is not None:
            capture.upload = self._staging.upload
        self._batch = self._new_batch()
        self._graphs: DecodeGraphs | None = None
        if isinstance(platform, SupportsGraphs) and resolved.graphs:
            limits = resolved.scheduler
            self._graphs = DecodeGraphs(
                platform,
                min(limits.max_num_seqs, limits.max_num_batched_tokens),
                self._batch.max_blocks,
                platform.device,
                vocab_size=vocab_size,
                best=platform.ops.best,
                max_model_len=limits.max_model_len,
                on_host=None if self._staging is None else False,
            )

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a plan. Rows come back in the plan's order."""
        return self.begin(plan).finish()

    def begin(self, plan: StepPlan) -> RunningStep:
        """Run a plan, but for what a platform with staging does by itself: then the next step may begin before this one is
        finished. A KV connector moves blocks that steps have written, so with one nothing overlaps."""
        num_results = len(plan.slots) + len(plan.forks)
        result = StepResult(plan.step_id, [[] for _ in range(num_results)], [None] * num_results)
        flight = StepFlight(plan, result, self._platform.step_context, self._capture, self._transfers)
        if self._transfers is not None:
            self._transfers.begin(plan.kv)
        with self._platform.step_context():
            if self._capture is not None:
                flight.captured = self._capture.begin_step(plan)
            try:
                self._batch.apply(plan)
                self._guides.ahead()
                if len(plan.slots):
                    flight.rows = self._batch.arrange(plan)
                    flight.drawn = self._run(flight.rows, result, flight.captured)
                self._copy_blocks(plan.copies)
                if self._staging is not None:
                    flight.fetch(self._staging)
            except Exception as error:
                flight.error = error
            if self._staging is None:
                flight.conclude()
        if self._transfers is not None:
            return Finished(flight.finish())
        return flight

    def measured(self) -> dict[str, int]:
        """Bytes of live tensor storages: weights and kv_cache; workspace is the memory the warm-up step added; capture is
        taps and stores (whose pages are used when they are first written)."""
        return {
            "weights": self._weight_bytes,
            "kv_cache": storage_bytes(tensor for pair in self._kv.values() for tensor in pair),
            "workspace": self._workspace_bytes,
            "capture": 0 if self._capture is None else self._capture.num_bytes(),
        }

    def warm_up(self) -> None:
        """Run the widest step once, all of it on the null block, so that the first request meets no first-time cost.

        It is not the worst that is planned for, whose long sequences take seconds. Its memory is given back, but for what
        libraries have set up for these shapes. See docs/decisions/004-workspace.md.
        """
        before = self._platform.memory_in_use()
        limits = self._resolved.scheduler
        rows = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        counts = [1] * (rows - 1) + [min(limits.max_num_batched_tokens - rows + 1, limits.max_model_len)]
        specs = [SamplingSpec(seed=0, top_p=0.5, logprobs=1)] * rows
        prompt = 1 + prompt_rows(self._vocab_size)
        if rows > 1 and counts[-1] > prompt:  # one row has a prompt whose log-probabilities are asked for
            counts[-2:] = [prompt, counts[-1] - prompt + 1]
            specs[-2] = SamplingSpec(seed=0, prompt_logprobs=1)
        plan = null_plan([(0, count) for count in counts], len(self._resolved.cache.groups), specs)
        if self._capture is None:
            self.execute(plan)
        else:
            self._capture.probe(plan.num_tokens, lambda: self.execute(plan))
        self._record_sizes()
        self._platform.synchronize()
        self._workspace_bytes = max(0, self._platform.memory_in_use() - before)
        planned = self._resolved.memory.workspace
        if self._staging is not None and self._workspace_bytes > planned:
            logger.warning(
                "the widest step took %s and %s were planned for it; should memory run out, lower cache.memory or "
                "scheduler.max_num_batched_tokens",
                format_bytes(self._workspace_bytes),
                format_bytes(planned),
            )
        self._batch = self._new_batch()
        for tensor in (tensor for pair in self._kv.values() for tensor in pair):
            tensor[0] = 0
        if isinstance(self._platform, SupportsWorkspace):
            self._platform.trim()

    def _record_sizes(self) -> None:
        """Record what a platform wants recorded before the first request, the largest first: the others fit in its memory.
        Rows of captured requests write into taps, which is another recording."""
        if self._graphs is None or self._graphs.sizes is None:
            return
        num_groups = len(self._resolved.cache.groups)
        for size in reversed(self._graphs.sizes):
            plan = null_plan([(0, 1)] * size, num_groups, [SamplingSpec(seed=0, temperature=0.0)] * size)
            self.execute(plan)
            if self._capture is not None:
                self._capture.probe(size, partial(self.execute, plan))

    def close(self) -> None:
        """Drop model, cache and platform. A second call does nothing."""
        if self._model is not None:
            if self._transfers is not None:
                self._transfers.close()
            if self._capture is not None:
                self._capture.close()
            self._guides.close()
            if self._graphs is not None:
                self._graphs.close()
            self._model = None
            self._kv = {}
            self._platform.close()

    def _new_batch(self) -> InputBatch:
        model = self._loaded()
        return InputBatch(
            max_num_seqs=self._resolved.scheduler.max_num_seqs,
            max_model_len=self._resolved.scheduler.max_model_len,
            block_size=self._resolved.cache.block_size,
            layout=model.kv_layout(),
            vocab_size=self._vocab_size,
            device=self._platform.device,
            guides=self._guides,
            processors=self._processors,
            staging=self._staging,
        )

    def _loaded(self) -> CausalLM:
        if self._model is None:
            raise RuntimeError("the runner is closed")
        return self._model

    def _run(self, rows: StepRows, result: StepResult, step: CapturedStep | None) -> tuple[Draws, Queued] | None:
        """-> what was drawn without waiting for it, if anything was."""
        model = self._loaded()
        batch, graphs = self._batch.forward_batch(rows, self._kv), self._graphs
        if graphs is not None and graphs.takes(batch):
            tapped = self._capture is not None and self._capture.is_tapping
            scored = not rows.forks and bool(rows.samples.all())
            decoded = graphs.forward(model, batch, tapped=tapped, scored=scored)
        else:
            decoded = Decoded(model.forward(batch))
        hidden = decoded.hidden
        if self._capture is not None and step is not None:
            self._capture.snapshot(step, rows, hidden)
        errors = self._batch.poisoned(rows)
        entries, failed = self._prompt_logprobs(rows, hidden)
        errors.update(failed)
        for i, values in entries.items():
            if i not in errors:
                result.prompt_logprobs[int(rows.plan_rows[i])] = values
        errors.update(self._take_drafts(rows, hidden, result))
        result.errors.update((int(rows.plan_rows[i]), reason) for i, reason in errors.items())
        result.errors.update(self._batch.fork_errors(rows, result.errors))
        draws = self._batch.draws(rows, errors)
        return self._sample(draws, decoded, result) if len(draws.slots) else None

    def _sample(self, draws: Draws, decoded: Decoded, result: StepResult) -> tuple[Draws, Queued] | None:
        hidden, logits, best, ops = decoded.hidden, decoded.logits, decoded.best, self._platform.ops
        if logits is None or len(draws.slots) < len(logits):  # a row that failed is not drawn for
            logits = self._loaded().logits(hidden, self._on_device(draws.last_tokens))
            best = None if ops.best is None else ops.best(logits)
        self._guides.wait()
        rows = self._batch.sampling_rows(draws)
        if self._staging is not None and can_queue(rows, ops.draw):
            queued = queue_sampling(logits, rows, self._staging.upload, ops.draw, best, ops.uniforms)
            self._batch.write_queued(draws, queued.ids)
            return draws, queued
        sampled = sample(
            logits,
            rows,
            ops.draw,
            best,
            masked=ops.draw_allowed,
            uniforms=ops.uniforms,
            penalties=ops.penalties,
        )
        self._batch.write(draws, self._good(sampled), sampled.token_ids)
        book(result, draws, sampled)
        self._follow(draws, sampled, result)
        return None

    def _on_device(self, places: Ints) -> Tensor:
        if self._staging is not None:
            return self._staging.upload([places])[0]
        return torch.from_numpy(places).to(self._platform.device)

    def _follow(self, draws: Draws, sampled: Sampled, result: StepResult) -> None:
        """What the guided rows' tokens mean to their grammars; their next masks are begun, and the drafts told."""
        known: list[tuple[int, Guide]] = []
        looking: list[tuple[int, Guide]] = []
        for k, guide in self._batch.guided(draws):
            index = int(draws.results[k])
            if k in sampled.errors:
                continue
            if guide.failure is not None:
                result.errors[index] = guide.failure
            elif guide.is_complete:
                result.complete.add(index)
            elif guide.knows_next:
                known.append((index, guide))
            else:
                self._guides.drawn(guide)
                if guide.looks_ahead:
                    looking.append((index, guide))
        self._guides.ahead()
        if 0 < len(looking) <= MAX_AWAITED:
            self._guides.wait()
            known += looking
        result.drafts = {index: drafts for index, guide in known if (drafts := guide.drafts)}

    def _copy_blocks(self, copies: list[tuple[int, int, int]]) -> None:
        """Blocks that forks own: the incomplete last block of a shared prompt."""
        for group, source, destination in copies:
            for layer, (keys, values) in self._kv.items():
                if self._batch.group_of_layer[layer] == group:
                    keys[destination].copy_(keys[source])
                    values[destination].copy_(values[source])

    @staticmethod
    def _good(sampled: Sampled) -> list[int]:
        return [k for k, token_id in enumerate(sampled.token_ids) if token_id != NO_TOKEN]

    def _take_drafts(self, rows: StepRows, hidden: Tensor, result: StepResult) -> dict[int, str]:
        """The drafts that were fed are part of the result. Returns the rows whose log-probabilities cannot be told."""
        failed: dict[int, str] = {}
        for plan_row, drafts in rows.drafts.items():
            result.token_ids[plan_row] = list(drafts)
        for i, first, targets in self._batch.draft_logprob_rows(rows):
            row, plan_row = self._batch.row(int(rows.slots[i])), int(rows.plan_rows[i])
            entries = self._scored(hidden, first, targets, row, row.spec.logprobs or 0)
            if entries is None:
                failed[i] = "logits hold NaN or no finite value"
                result.token_ids[plan_row] = []
            result.logprobs[plan_row] = entries
        return failed

    def _prompt_logprobs(
        self, rows: StepRows, hidden: Tensor
    ) -> tuple[dict[int, list[PositionLogprobs]], dict[int, str]]:
        """Entries per row, and rows that failed."""
        entries: dict[int, list[PositionLogprobs]] = {}
        failed: dict[int, str] = {}
        for i, targets in self._batch.prompt_logprob_rows(rows):
            row = self._batch.row(int(rows.slots[i]))
            scored = self._scored(hidden, int(rows.query_starts[i]), targets, row, row.spec.prompt_logprobs or 0)
            if scored is None:
                failed[i] = "logits of a prompt position hold NaN or no finite value"
            entries[i] = scored or []
        return entries, failed

    def _scored(
        self, hidden: Tensor, first: int, targets: Tensor, row: SamplingRow, top: int
    ) -> list[PositionLogprobs] | None:
        """Entries of tokens that are known ([n] `targets`), predicted by the step's n tokens from `first` on; None where the
        model's logits are no numbers. A fixed number of logits rows is in memory at a time."""
        entries: list[PositionLogprobs] = []
        step, size = prompt_rows(self._vocab_size), chunk_rows(self._vocab_size)
        for begin in range(0, len(targets), step):
            part = targets[begin : begin + step]
            tokens = torch.arange(first + begin, first + begin + len(part), device=hidden.device)
            logits = self._loaded().logits(hidden, tokens)
            if not bool(torch.isfinite(logits.amax(dim=-1)).all()):
                return None
            for k in range(0, len(part), size):
                entries += _raw_entries(logits[k : k + size], part[k : k + size], row, top)
        return entries


def _raw_entries(logits: Tensor, targets: Tensor, row: SamplingRow, top: int) -> list[PositionLogprobs]:
    count = len(targets)
    return position_logprobs(
        logits,
        targets.tolist(),
        [top] * count,
        normalise=row.spec.logprobs_mode in NORMALISED,  # no processor applies to a prompt: before and after are equal
        candidates=[row.candidate_ids] * count,
    )


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind tensors."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def null_plan(rows: Sequence[tuple[int, int]], num_groups: int, specs: Sequence[SamplingSpec]) -> StepPlan:
    """A step of rows (tokens before, tokens in the step) that reads and writes the null block alone."""
    return StepPlan(
        step_id=-1,
        slots=array("q", range(len(rows))),
        starts=array("q", [before for before, _ in rows]),
        counts=array("q", [count for _, count in rows]),
        samples=array("q", [1] * len(rows)),
        admissions=[
            SlotAdmission(slot, [0] * (before + count), before + count, spec, tuple([] for _ in range(num_groups)))
            for slot, ((before, count), spec) in enumerate(zip(rows, specs, strict=True))
        ],
        new_blocks=[],
        freed_slots=[],
    )
