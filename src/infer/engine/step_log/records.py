"""The records of a step log, format 1: what a file holds, in the order in which it happened.

Plain data, written in the loop task and read by `replay`. docs/step_log.md describes the file.
"""

from __future__ import annotations

import msgspec

from infer.config.capture import ResolvedCapture
from infer.config.resolve import ResolvedCache, ResolvedScheduler

FORMAT = 1
MAGIC = "infer-step-log"


class Header(msgspec.Struct, tag="header", kw_only=True, omit_defaults=True):
    """Begins every file: what the scheduler was made of."""

    magic: str = MAGIC
    format: int
    infer_version: str
    created: float
    """Unix time, seconds."""
    scheduler: ResolvedScheduler
    cache: ResolvedCache
    capture: ResolvedCapture | None = None
    token_ids: bool = False
    """Records hold token ids."""
    continues: bool = False
    """The scheduler had a past: a `Snapshot` of its state follows."""
    lost: bool = False
    """Records between the file before and this one were not written, because the disk did not keep up."""


class Snapshot(msgspec.Struct, tag="snapshot"):
    """Everything that decisions depend on; see `step_log.snapshot`."""

    state: msgspec.Raw


class Choice(msgspec.Struct, array_like=True):
    """A sequence as it was queued. `key` is its name in this log."""

    key: int
    request_id: str
    choice_index: int
    prompt_len: int
    max_tokens: int
    priority: int
    arrival: int
    min_tokens: int
    num_forced: int
    reads_prefix_cache: bool
    hashes: list[bytes]
    """Of the prompt's full blocks, keyed anew for this log: equal ones are equal content, and nothing else is told."""
    rows: tuple[int, tuple[str, ...]] | None = None
    """Captured rows: position of the first one wanted, and the fields."""
    token_ids: list[int] | None = None


class Added(msgspec.Struct, tag="added"):
    """A request came; further choices of it start when the first has computed the prompt."""

    choices: list[Choice]


class Ended(msgspec.Struct, tag="ended"):
    """A request was ended from outside: by its reader, a stop string, its deadline, or because it can never run."""

    key: int
    reason: str


class Reset(msgspec.Struct, tag="reset"):
    """The prefix cache was to be forgotten."""

    restart_running: bool
    done: bool


class Version(msgspec.Struct, tag="version"):
    """Steps from now on run on other weights."""

    version: int


class Admission(msgspec.Struct, array_like=True):
    key: int
    slot: int
    num_cached: int
    """Tokens that the prefix cache gave."""
    block_ids: list[list[int]]
    """Per KV group."""


class Planned(msgspec.Struct, tag="planned", omit_defaults=True):
    """What `schedule` decided; `step_id` None: that nothing can run now."""

    step_id: int | None = None
    keys: list[int] = []
    """Of the rows, in order."""
    counts: list[int] = []
    samples: list[int] = []
    admissions: list[Admission] = []
    new_blocks: list[tuple[int, int, list[int]]] = []
    """(slot, KV group, block ids)."""
    freed_slots: list[int] = []
    forks: list[tuple[int, int]] = []
    copies: list[tuple[int, int, int]] = []
    drafts: list[tuple[int, int]] = []
    """(row, known tokens at its end that its result brings)."""
    preempted: list[int] = []
    """Keys, in the order in which they lost their blocks."""
    evicted: list[bytes] = []
    """Contents that the prefix cache forgot to make room."""
    aux: int = 0
    """CRC-32 over what the plan says of captured rows; 0: nothing."""


class Rows(msgspec.Struct, array_like=True):
    """Captured rows that came for a sequence: sizes only."""

    start: int
    count: int
    num_cached: int
    versions: list[tuple[int, int]]
    error: str | None = None


class Outcome(msgspec.Struct, array_like=True):
    """One row or fork of a result, where it is more than one token that went on."""

    row: int
    num_ids: int
    num_kept: int
    finish: str = ""
    """Why the sequence ended with it; empty: it did not."""
    failed: bool = False
    complete: bool = False
    """Its grammar is complete."""
    rows: Rows | None = None
    hashes: list[bytes] = []
    """Of the blocks that its tokens completed."""
    token_ids: list[int] = []
    num_drafts: int = 0
    """Tokens that are known to follow."""


class Applied(msgspec.Struct, tag="applied", omit_defaults=True):
    """The result of the oldest step in flight was booked. Rows and forks that are not in `outcomes`: one token each where
    one was drawn, none elsewhere."""

    step_id: int
    outcomes: list[Outcome] = []
    refused: list[tuple[str, bytes, int]] = []
    """Objects of captured rows that the store does not have."""
    finished: list[int] = []
    """Keys of the sequences that ended here, as the scheduler booked them."""


class Failed(msgspec.Struct, tag="failed"):
    """The oldest step in flight failed."""

    step_id: int
    error: str
    """Type of the exception."""


Record = Header | Snapshot | Added | Ended | Reset | Version | Planned | Applied | Failed
