"""The persistent batch: a row of token ids, block tables and sampling state per slot, and the tensors of each step.

Runs in the worker thread; the only writer of slot rows. A plan carries what is new, everything else stays here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infer.config.model import KVLayout
from infer.engine.sampling.guide import Guide
from infer.engine.sampling.processor_row import Processors
from infer.engine.sampling.row import SAMPLER, STATEFUL, Feature, SamplingRow, make_row
from infer.engine.step import SlotAdmission, StepPlan
from infer.engine.worker.guides import GuidedRows
from infer.engine.worker.resident_batch import ResidentBatch
from infer.errors import InvalidRequestError
from infer.plugins.model import ForwardBatch
from infer.plugins.platform import AttentionMetadata, SupportsStaging

Ints = NDArray[np.int64]
KVTensors = dict[int, tuple[Tensor, Tensor]]


@dataclass(slots=True)
class StepRows:
    """A plan's rows in forward order: rows with one token first. `plan_rows[i]` is row i's place in the plan."""

    plan_rows: Ints
    slots: Ints
    starts: Ints
    counts: Ints
    samples: NDArray[np.bool_]
    query_starts: Ints
    """[R + 1]: row i owns tokens query_starts[i] .. query_starts[i + 1]."""
    num_decode_rows: int
    forks: list[tuple[int, int]]
    """As in the plan: (plan row, slot)."""
    drafts: dict[int, list[int]] = field(default_factory=dict)
    """Place in the plan -> ids of the row's last tokens, which the result brings."""


@dataclass(slots=True)
class Draws:
    """Tokens to draw in a step: of its sampling rows, then of its forks."""

    slots: Ints
    ends: Ints
    """Position the drawn token will have."""
    last_tokens: Ints
    """Index among the step's tokens of the one whose logits are drawn from."""
    results: Ints
    """Index in the result's lists."""
    features: int
    """Of all of them together."""


class InputBatch:
    """Slot rows. Positions are absolute; the null block 0 fills what a block table does not hold."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        layout: KVLayout,
        vocab_size: int,
        device: torch.device,
        guides: GuidedRows,
        processors: Processors | None = None,
        staging: SupportsStaging | None = None,
    ) -> None:
        """With `staging` ids and tables stay on the device and steps upload what is new; without, the host's are read."""
        self._guides = guides
        self._processors = processors or Processors()
        self._width = max_model_len + 1
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._device = device
        self._numbers = np.arange(max_num_seqs + 1, dtype=np.int64)
        self._ones = np.ones(max_num_seqs, dtype=np.int64)
        self._prompt_lens = np.zeros(max_num_seqs, dtype=np.int64)
        self._features = np.zeros(max_num_seqs, dtype=np.int64)
        self._rows: list[SamplingRow | None] = [None] * max_num_seqs
        self._poison: dict[int, str] = {}
        self._prompts_scored: set[int] = set()
        """Slots that ask for log-probabilities of their prompt: few, and every step asks."""
        self.max_blocks = -(-self._width // block_size)
        """Of a row, in each group."""
        self._windows = [group.window for group in layout.groups]
        self._tables = [np.zeros((max_num_seqs, self.max_blocks), dtype=np.int32) for _ in layout.groups]
        self._num_blocks = np.zeros((len(layout.groups), max_num_seqs), dtype=np.int64)
        self._resident: ResidentBatch | None = None
        if staging is not None:
            sizes = {"max_model_len": max_model_len, "block_size": block_size, "vocab_size": vocab_size}
            self._resident = ResidentBatch(staging, self._tables, layout, **sizes, device=device)
        # Untouched pages of an empty tensor cost nothing; only ids that were written are ever read.
        self._tokens = (
            torch.empty(max_num_seqs, self._width, dtype=torch.int32, device=device)
            if self._resident is None
            else self._resident.tokens
        )
        on_host = device.type == "cpu" and self._resident is None
        self._host_tokens = self._tokens.numpy() if on_host else None
        """The same memory: an index into an array costs a tenth of one into a tensor."""
        self.group_of_layer = {layer: g for g, group in enumerate(layout.groups) for layer in group.layer_ids}

    def apply(self, plan: StepPlan) -> None:
        """Freed slots, then admissions, then new blocks."""
        for slot in plan.freed_slots:
            self._free(slot)
        for admission in plan.admissions:
            self._admit(admission)
        for slot, group, block_ids in plan.new_blocks:
            self._append_blocks(slot, group, block_ids)

    def arrange(self, plan: StepPlan) -> StepRows:
        """Order the plan's rows for the forward pass, and write the drafts that it feeds."""
        slots, starts, counts = (np.array(values, dtype=np.int64) for values in (plan.slots, plan.starts, plan.counts))
        samples = np.array(plan.samples, dtype=np.bool_)
        num_rows = len(slots)
        if max(plan.counts) == 1:  # the steady state: nothing to order
            return StepRows(
                plan_rows=self._numbers[:num_rows],
                slots=slots,
                starts=starts,
                counts=self._ones[:num_rows],
                samples=samples,
                query_starts=self._numbers[: num_rows + 1],
                num_decode_rows=num_rows,
                forks=plan.forks,
            )
        order = np.argsort(counts != 1, kind="stable")
        counts = counts[order]
        return StepRows(
            plan_rows=order,
            slots=slots[order],
            starts=starts[order],
            counts=counts,
            samples=samples[order],
            query_starts=np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts))),
            num_decode_rows=int((counts == 1).sum()),
            forks=plan.forks,
            drafts={row: self._feed(plan, row, count) for row, count in plan.drafts},
        )

    def draws(self, rows: StepRows, errors: dict[int, str]) -> Draws:
        """What to draw, rows in `errors` (and forks of them) left out."""
        index = np.flatnonzero(rows.samples)
        if errors:
            index = np.array([i for i in index.tolist() if i not in errors], dtype=np.int64)
        slots, results = rows.slots[index], rows.plan_rows[index]
        if rows.forks:
            row_of_plan = np.argsort(rows.plan_rows)
            good = [
                (f, int(row_of_plan[row]), slot)
                for f, (row, slot) in enumerate(rows.forks)
                if int(row_of_plan[row]) not in errors and slot not in self._poison
            ]
            index = np.concatenate((index, np.array([i for _, i, _ in good], dtype=np.int64)))
            slots = np.concatenate((slots, np.array([slot for _, _, slot in good], dtype=np.int64)))
            results = np.concatenate((results, np.array([len(rows.slots) + f for f, _, _ in good], dtype=np.int64)))
        ends, last_tokens = (rows.starts + rows.counts)[index], rows.query_starts[index + 1] - 1
        return Draws(slots, ends, last_tokens, results, int(np.bitwise_or.reduce(self._features[slots], initial=0)))

    def fork_errors(self, rows: StepRows, row_errors: dict[int, str]) -> dict[int, str]:
        """Index in the result -> reason, for forks that cannot draw: their row failed, or they could not be taken in."""
        failed = {}
        for index, (row, slot) in enumerate(rows.forks, start=len(rows.slots)):
            reason = row_errors.get(row) or self._poison.get(slot)
            if reason is not None:
                failed[index] = reason
        return failed

    def forward_batch(self, rows: StepRows, kv: KVTensors) -> ForwardBatch:
        """The model's input for these rows."""
        if self._resident is not None:
            facts = rows.slots, rows.starts, rows.counts, rows.query_starts, rows.num_decode_rows
            ids, own_positions, attention = self._resident.rows(*facts)
            return ForwardBatch(ids, own_positions, attention, kv, self.group_of_layer)
        slot_of_token, positions = rows.slots, rows.starts
        if rows.num_decode_rows < len(rows.slots):
            row_of_token = np.repeat(self._numbers[: len(rows.slots)], rows.counts)
            slot_of_token = rows.slots[row_of_token]
            positions = rows.starts[row_of_token] + np.arange(rows.query_starts[-1]) - rows.query_starts[row_of_token]
        return ForwardBatch(
            token_ids=self._token_ids(slot_of_token, positions),
            positions=self._upload(positions),
            attention=tuple(
                self._attention(group, rows, slot_of_token, positions) for group in range(len(self._tables))
            ),
            kv=kv,
            group_of_layer=self.group_of_layer,
        )

    def sampling_rows(self, draws: Draws) -> list[SamplingRow] | None:
        """Sampling state of the draws, output positions set; None when all of them are plain greedy."""
        slots = draws.slots
        if not draws.features & SAMPLER:
            return None
        output_positions = draws.ends - self._prompt_lens[slots]
        chosen = []
        for slot, output_position in zip(slots.tolist(), output_positions.tolist(), strict=True):
            row = self.row(slot)
            row.output_position = output_position
            chosen.append(row)
        return chosen

    def prompt_logprob_rows(self, rows: StepRows) -> list[tuple[int, Tensor]]:
        """(row, [n] the prompt ids predicted in this step) of each row that asked for them; the row's first n tokens
        predict them."""
        found: list[tuple[int, Tensor]] = []
        if not self._prompts_scored:
            return found
        for i in np.flatnonzero(self._features[rows.slots] & Feature.PROMPT_LOGPROBS).tolist():
            slot, start = int(rows.slots[i]), int(rows.starts[i])
            stop = min(start + int(rows.counts[i]), int(self._prompt_lens[slot]) - 1)
            if start < stop and slot not in self._poison:
                found.append((i, self._tokens[slot, start + 1 : stop + 1].to(torch.int64)))
        return found

    def draft_logprob_rows(self, rows: StepRows) -> list[tuple[int, int, Tensor]]:
        """(row, place of its first, [n] the drafts) of each row whose drafts' log-probabilities were asked for; the step's n
        tokens from that place on predict them."""
        found: list[tuple[int, int, Tensor]] = []
        for i in [i for i, place in enumerate(rows.plan_rows.tolist()) if place in rows.drafts]:
            if self._features[rows.slots[i]] & Feature.LOGPROBS:
                drafts = torch.tensor(rows.drafts[int(rows.plan_rows[i])], device=self._device)
                found.append((i, int(rows.query_starts[i + 1]) - 1 - len(drafts), drafts))
        return found

    def row(self, slot: int) -> SamplingRow:
        """The sampling state of an occupied slot."""
        row = self._rows[slot]
        if row is None:
            raise IndexError(f"slot {slot} is not occupied")
        return row

    def poisoned(self, rows: StepRows) -> dict[int, str]:
        """Row -> reason, for rows whose request could not be taken in."""
        if not self._poison:
            return {}
        return {i: self._poison[slot] for i, slot in enumerate(rows.slots.tolist()) if slot in self._poison}

    def write(self, draws: Draws, good: Sequence[int], token_ids: Sequence[int]) -> None:
        """Store the ids of the draws `good` where the next step reads them, and tell rows that count."""
        slots, drawn = draws.slots, token_ids
        ends = draws.ends
        if len(good) < len(slots):
            slots, ends, drawn = slots[good], ends[good], [token_ids[k] for k in good]
        if self._resident is not None:
            (ids,) = self._resident.upload([np.array(drawn, dtype=np.int64)])
            self._resident.write(slots, ends, ids)
        elif self._host_tokens is not None:
            self._host_tokens[slots, ends] = drawn
        else:
            flat = self._upload(slots * self._width + ends)
            self._tokens.view(-1)[flat] = self._upload(np.array(drawn, dtype=np.int32))
        if draws.features & STATEFUL:
            for i in np.flatnonzero(self._features[slots] & STATEFUL).tolist():
                self.row(int(slots[i])).accept(drawn[i])

    def write_queued(self, draws: Draws, ids: Tensor) -> None:
        """Store ids [n] that the host does not know yet, of all the draws; none of their rows counts."""
        if self._resident is None:
            raise RuntimeError("ids are queued on a platform without staging")
        self._resident.write(draws.slots, draws.ends, ids)

    def guided(self, draws: Draws) -> list[tuple[int, Guide]]:
        """(index among the draws, its guide) of the guided ones."""
        found: list[tuple[int, Guide]] = []
        if not draws.features & Feature.GUIDED:
            return found
        for k in np.flatnonzero(self._features[draws.slots] & Feature.GUIDED).tolist():
            guide = self.row(int(draws.slots[k])).guide
            if guide is not None:
                found.append((k, guide))
        return found

    def _feed(self, plan: StepPlan, plan_row: int, count: int) -> list[int]:
        """Accept the first drafts of a row and store them where the forward pass reads them."""
        slot, end = plan.slots[plan_row], plan.starts[plan_row] + plan.counts[plan_row]
        row = self.row(slot)
        drafts = [] if row.guide is None else row.guide.drafts[:count]
        if len(drafts) < count:
            raise IndexError(f"slot {slot} is to be fed {count} drafts and has {len(drafts)}")
        for token_id in drafts:
            row.accept(token_id)
        self._tokens[slot, end - count : end] = torch.tensor(drafts, dtype=torch.int32)
        return drafts

    def _attention(self, group: int, rows: StepRows, slot_of_token: Ints, positions: Ints) -> AttentionMetadata:
        table, size = self._tables[group], self._block_size
        seq_lens = rows.starts + rows.counts
        width = -(-int(seq_lens.max()) // size)
        block_table = table[rows.slots, :width]
        window = self._windows[group]
        if window is not None:  # blocks before the window may belong to others by now
            first_block = np.maximum(rows.starts - window + 1, 0) // size
            block_table[np.arange(width)[None, :] < first_block[:, None]] = 0
        blocks = table[slot_of_token, positions // size].astype(np.int64)
        return AttentionMetadata(
            query_starts=self._upload(rows.query_starts.astype(np.int32)),
            seq_lens=self._upload(seq_lens.astype(np.int32)),
            block_table=self._upload(block_table),
            slot_mapping=self._upload(blocks * size + positions % size),
            query_lens_host=rows.counts.tolist(),
            seq_lens_host=seq_lens.tolist(),
            num_decode_rows=rows.num_decode_rows,
        )

    def _token_ids(self, slots: Ints, positions: Ints) -> Tensor:
        """[T] int64. A row that failed left no id behind, and a step in flight may still read there: any id will do."""
        most = self._vocab_size - 1
        if self._host_tokens is None:
            flat = self._upload(slots * self._width + positions)
            return self._tokens.view(-1)[flat].to(torch.int64).clamp_(0, most)
        ids = self._host_tokens[slots, positions].astype(np.int64)
        return torch.from_numpy(ids.clip(0, most, out=ids))

    def _upload(self, values: NDArray[Any]) -> Tensor:
        """On the device; on CPU the same memory."""
        tensor = torch.from_numpy(values)
        return tensor if self._host_tokens is not None else tensor.to(self._device)

    def _free(self, slot: int) -> None:
        self._rows[slot] = None
        self._features[slot] = 0
        self._poison.pop(slot, None)
        self._prompts_scored.discard(slot)
        for group, table in enumerate(self._tables):
            table[slot, : self._num_blocks[group, slot]] = 0
            if self._resident is not None:
                self._resident.table_changed(group, slot, 0, int(self._num_blocks[group, slot]))
            self._num_blocks[group, slot] = 0

    def _admit(self, admission: SlotAdmission) -> None:
        slot = admission.slot
        self._free(slot)
        for group, block_ids in enumerate(admission.block_ids):
            self._append_blocks(slot, group, block_ids)
        self._prompt_lens[slot] = admission.prompt_len
        try:
            ids = self._checked_ids(admission.token_ids)
            guide = self._guides.make(admission.sampling, admission.token_ids[admission.prompt_len :])
            history = admission.sampling, admission.token_ids, admission.prompt_len
            row = make_row(*history, self._vocab_size, self._device, guide, self._processors.of_row(*history))
        except Exception as error:  # a request that cannot be taken in fails alone
            self._poison[slot] = str(error) or type(error).__name__
            self._set_tokens(slot, np.zeros(self._width, dtype=np.int32))
            return
        self._set_tokens(slot, ids)
        self._rows[slot] = row
        self._features[slot] = row.features
        if row.features & Feature.PROMPT_LOGPROBS:
            self._prompts_scored.add(slot)

    def _set_tokens(self, slot: int, ids: NDArray[np.int32]) -> None:
        if self._resident is not None:
            self._resident.set_tokens(slot, ids)
        else:
            self._tokens[slot, : len(ids)] = torch.from_numpy(ids).to(self._device)

    def _checked_ids(self, token_ids: list[int]) -> NDArray[np.int32]:
        if not 0 < len(token_ids) <= self._width:
            raise InvalidRequestError(
                f"{len(token_ids)} tokens do not fit a row of {self._width}", parameter="prompt", value=len(token_ids)
            )
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self._vocab_size:
            wrong = low if low < 0 else high
            raise InvalidRequestError(
                f"prompt token id {wrong} is outside the vocabulary of {self._vocab_size}",
                parameter="prompt",
                value=wrong,
            )
        return np.array(token_ids, dtype=np.int32)

    def _append_blocks(self, slot: int, group: int, block_ids: list[int]) -> None:
        first = int(self._num_blocks[group, slot])
        self._tables[group][slot, first : first + len(block_ids)] = block_ids
        self._num_blocks[group, slot] = first + len(block_ids)
        if self._resident is not None:
            self._resident.table_changed(group, slot, first, first + len(block_ids))
