"""The one file between the planes: a `StepPlan` goes down to the worker, a `StepResult` comes up.

Written by the scheduler (loop task) and the runner (worker thread); plain data, no tensors, no requests.
"""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from infer.plugins.grammar import GrammarSource
from infer.plugins.kv_connector import KVReport, KVTransfer
from infer.types import LogprobsMode


class ReasoningSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a model marks its reasoning, and where the prompt leaves it."""

    starts: tuple[bytes, ...]
    """Texts that open it; empty when none does."""
    ends: tuple[bytes, ...]
    """Texts that close it."""
    close_ids: tuple[int, ...]
    """What to write to close it."""
    is_open: bool
    """The output begins inside it; otherwise it may open it first."""


class ProcessorUse(msgspec.Struct, frozen=True, kw_only=True):
    """One logits processor of a request."""

    name: str
    """A plugin's, or what to call the function."""
    params: dict[str, Any] = {}
    function: Any = None
    """(prompt ids, output ids, logits) -> logits or None: the caller's own, which cannot leave this process."""


class SamplingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The numeric half of `SamplingParams` for one choice, all defaults decided. Order of use: see `SamplingParams`."""

    seed: int
    """63-bit; the choice index is already added. With the output position it keys every Philox draw."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_tokens: int = 0
    min_tokens_masked_ids: tuple[int, ...] = ()
    """EOS and stop ids, not to be sampled before `min_tokens` outputs."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences; the last id is masked when the preceding ids are the row's tail."""
    logits_processors: tuple[ProcessorUse, ...] = ()
    """In this order."""
    logprobs: int | None = None
    """None: the row reports nothing, whatever the three below say."""
    prompt_logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw"
    logprob_token_ids: tuple[int, ...] = ()
    """Scored at every reported position, prompt positions included."""
    return_kept_set: bool = False
    forced_token_ids: tuple[int, ...] = ()
    """Output i is the i-th of these; sampling goes on behind them."""
    grammar: GrammarSource | None = None
    """What the output, or the answer behind the reasoning, must be."""
    end_ids: tuple[int, ...] = ()
    """With a grammar: ids that end the answer, to be sampled exactly where the grammar may end."""
    reasoning: ReasoningSpec | None = None
    """With a grammar or a budget, of a model that reasons."""
    thinking_budget: int | None = None
    """So many tokens of reasoning, then it is closed."""


class SlotAdmission(msgspec.Struct):
    """A request takes a slot: at its first step, or again after preemption."""

    slot: int
    token_ids: list[int]
    """Prompt ids, followed by the output ids accepted so far when the request resumes."""
    prompt_len: int
    sampling: SamplingSpec
    block_ids: tuple[list[int], ...]
    """Per KV group, the block table so far, prefix hits included."""


class AuxBegin(msgspec.Struct):
    """Rows of a slot are captured from this step on. One capture is one stay of a request in a slot: a preempted
    request begins another when it resumes."""

    capture_id: int
    """Never used again."""
    slot: int
    fields: tuple[str, ...]
    """Names of the `CaptureProfile`s that the request asked for."""
    start: int
    """Position of the first row the worker will compute: tokens already in the KV cache."""
    emit_from: int
    """First position to emit. Below `start`: the rows between come from the store, under the weight version of this plan.
    Above: rows in front of it are only published."""
    hashes: list[bytes]
    """KV hashes of the sequence's blocks in front of `start`, from block 0; those behind come with `AuxPlan.hashes`."""
    parent: int | None = None
    """Fork of that capture: it takes over the rows of the shared prompt's incomplete last block."""


class AuxPlan(msgspec.Struct):
    """The auxiliary side of a plan. The worker applies ends, begins and hashes before the forward pass, then the store's
    changes in one batch with what the step publishes: discard, retain, release, put. What is retained behind the batch has
    room for all of it. A step that fails applies the changes just the same and publishes nothing. None when nobody captures
    and nothing is to be told."""

    weight_version: int
    """Of the weights this step runs on."""
    ends: list[tuple[int, list[bytes]]]
    """Terminal events in order: (capture id, hashes not sent before). What is complete is published, the rest dropped."""
    begins: list[AuxBegin]
    hashes: list[tuple[int, list[bytes]]]
    """(capture id, next hashes): each exactly once, of blocks that are fully computed by the end of this step. All rows of
    such a block were computed under one weight version, that of the capture's first step: it is the object's."""
    retain: list[tuple[str, bytes, int]]
    """(field, KV hash, weight version): objects that the store must keep, also before they exist. Each is retained once
    and released once, discarded or not."""
    release: list[tuple[str, bytes, int]]
    """Objects that may be evicted from now on, last block of a sequence first."""
    discard: list[tuple[str, bytes, int]]
    """Objects whose rows cannot be trusted (their step failed): the bytes are removed; who retains the key does so still."""


class KVPlan(msgspec.Struct):
    """Transfers with the external KV store. The worker starts them before anything else; then it waits for those that say
    so. None when there is nothing to start and nothing on its way."""

    start: list[KVTransfer]
    wait: float = 0.0
    """Seconds to wait for a report when none is there. Only in a plan without rows."""


class StepPlan(msgspec.Struct):
    """What the worker does in one step. Row i is `slots[i]`; rows keep the scheduler's order (running before new).

    The worker applies `freed_slots`, then `admissions`, then `new_blocks`, then runs one forward pass over all rows.
    The token ids of a decode row are not sent: the sampled id was written into the slot's row on the device.
    """

    step_id: int
    slots: array[int]
    starts: array[int]
    """Absolute position of the row's first token in this step (= tokens computed before it)."""
    counts: array[int]
    """Tokens of the row in this step, >= 1."""
    samples: array[int]
    """1 where the row's last token yields a sampled token, 0 for a prefill chunk that emits none."""
    admissions: list[SlotAdmission]
    new_blocks: list[tuple[int, int, list[int]]]
    """(slot, KV group, block ids appended to its table). Admissions bring their own."""
    freed_slots: list[int]
    """Slots whose rows are void from this step on; a slot may be freed and admitted in one plan."""
    forks: list[tuple[int, int]] = msgspec.field(default_factory=list)
    """(row, slot): the slot, admitted in this plan, draws its first token from that row's logits (n > 1: the prompt is
    computed once). The result's lists continue with the forks, in this order."""
    copies: list[tuple[int, int, int]] = msgspec.field(default_factory=list)
    """(KV group, source block, destination block), copied after the forward pass: the last prompt block of a fork."""
    drafts: list[tuple[int, int]] = msgspec.field(default_factory=list)
    """(row, n): the row's last n tokens are the first n of the drafts that the worker told of its slot. The result brings
    them, and one more that is drawn behind them."""

    aux: AuxPlan | None = None
    kv: KVPlan | None = None

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)


class PositionLogprobs(msgspec.Struct):
    """Log-probabilities at one predicted position. Chosen token first, then the alternatives, best first."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()
    candidates: tuple[float, ...] = ()
    """Of `SamplingSpec.logprob_token_ids`, in their order."""
    kept_ids: array[int] | None = None
    """Ascending; None with a `kept_logmass`: nothing was excluded."""
    kept_logmass: float | None = None


class AuxRows(msgspec.Struct):
    """Captured rows of one request, emitted with the tokens of a step that sampled for it. Row i describes position
    `start + i`, which was fed to the model."""

    start: int
    count: int
    num_cached: int
    """Of these, how many (the first) came from the store."""
    data: dict[str, bytes]
    """Field -> rows in C order, `CaptureProfile.row_bytes` each."""
    versions: list[tuple[int, int]]
    """(rows, weight version under which they were computed), together `count`."""
    error: str | None = None
    """Why the rows of this request cannot be complete any more; its tokens go on."""


class StepResult(msgspec.Struct):
    """What came of a plan: its rows in order, then its forks."""

    step_id: int
    token_ids: list[list[int]]
    """Per row: its drafts that were accepted, then the sampled id; nothing for a prefill chunk."""
    logprobs: list[list[PositionLogprobs] | None]
    """Per row: one entry per sampled id where the row asked for logprobs."""
    prompt_logprobs: dict[int, list[PositionLogprobs]] = msgspec.field(default_factory=dict)
    """Row index -> entries for the prompt positions predicted in this step, in order (positions start+1 ...)."""
    errors: dict[int, str] = msgspec.field(default_factory=dict)
    """Row index -> why that row alone failed (for example "logits hold NaN"). Such a row has no token but its drafts, or the
    one that its grammar could not take."""
    complete: set[int] = msgspec.field(default_factory=set)
    """Indices of rows whose grammar is complete with the token of this step: nothing may follow."""
    drafts: dict[int, list[int]] = msgspec.field(default_factory=dict)
    """Index in the result's lists -> ids that come behind the row's last one, as all steps so far have left it. A later plan
    may feed them (`StepPlan.drafts`); none is accepted before it was fed."""
    aux: dict[int, AuxRows] = msgspec.field(default_factory=dict)
    """Index in the result's lists -> captured rows of that request."""
    aux_refused: list[tuple[str, bytes, int]] = msgspec.field(default_factory=list)
    """Objects that are not in the store, though their hash was sent: it had no room, or the rows are not to be trusted.
    Their blocks count as missing. May be told some steps later."""
    aux_uniform_blocks: int = 0
    """Captured blocks whose cells are all equal: legal, and a sign of a broken router."""
    kv_reports: list[KVReport] = msgspec.field(default_factory=list)
    """Transfers that are over, of this plan and earlier ones, failed ones included: each exactly once."""
    kv_late: list[int] = msgspec.field(default_factory=list)
    """Loads that this step waited for in vain. Their rows are worth nothing; the transfers are still to be reported."""
    seconds: float = 0.0
    """Worker wall time of the step."""
