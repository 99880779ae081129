"""Sampling on a device that nobody waits for: the ids are there for the next step at once, and for the host with the results.

Runs in the worker thread; owns nothing. Rows that need the host between logits and token are `sampler.sample`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infer.engine.sampling.draw import FusedDraw, Uniforms, numbers_of, seeds_of, settings
from infer.engine.sampling.logprobs import NORMALISED
from infer.engine.sampling.row import Feature, SamplingRow
from infer.engine.sampling.sampler import FUSED, Sampled, chunk_rows, fail_row
from infer.engine.step import PositionLogprobs

Upload = Callable[[Sequence[NDArray[Any]]], tuple[Tensor, ...]]
"""`plugins.platform.SupportsStaging.upload`."""

QUEUED = FUSED | Feature.LOGPROBS | Feature.PROMPT_LOGPROBS
"""Log-probabilities of prompts are made before anything is drawn."""
LARGER_CHUNKS = 16
"""As many times the rows that a CPU takes at a time: a GPU wants to be full."""


def can_queue(rows: Sequence[SamplingRow] | None, fused: FusedDraw | None) -> bool:
    """Whether none of the rows needs the host. `rows` as for `sample`."""
    if rows is None:
        return True
    if any(row.features & ~QUEUED for row in rows):
        return False
    if fused is None and any(row.features & Feature.RANDOM for row in rows):
        return False
    return all(row.spec.logprobs_mode in ("raw", "raw_logits") for row in rows if row.features & Feature.LOGPROBS)


@dataclass(slots=True)
class Reported:
    """Rows whose log-probabilities were asked for, some at a time."""

    rows: list[int]
    top: list[int]
    """Alternatives of each."""
    candidates: list[int]
    """How many ids of its own each has scored."""
    tensors: tuple[Tensor, ...]
    """Of the chosen tokens value and rank [n], ids and values of the best [n, k], and values of all candidates."""


@dataclass(slots=True)
class Queued:
    """What was drawn, on its way. `tensors` are to be fetched, `settle` takes them back."""

    ids: Tensor
    """[M] int64, on the device; where a row failed any id."""
    highest: Tensor
    reported: list[Reported]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.ids, self.highest, *(tensor for part in self.reported for tensor in part.tensors))

    def settle(self, fetched: Sequence[Tensor]) -> Sampled:
        """(what `tensors` held, on the host) -> as `sample` gives it."""
        left = iter(fetched)
        sampled = Sampled(next(left).tolist())
        failed = [(i, value) for i, value in enumerate(next(left).tolist()) if not math.isfinite(value)]
        for part in self.reported:
            for i, entry in _entries(part, sampled.token_ids, [next(left).tolist() for _ in part.tensors]):
                sampled.logprobs[i] = entry
        for i, value in failed:
            fail_row(sampled, i, value)
        return sampled


def queue_sampling(
    logits: Tensor,
    rows: Sequence[SamplingRow] | None,
    upload: Upload,
    fused: FusedDraw | None,
    best: tuple[Tensor, Tensor] | None,
    uniforms: Uniforms | None = None,
) -> Queued:
    """As `sample`, for rows of which `can_queue` says yes. Logits without a finite highest one may be overwritten."""
    if best is None:
        ids = logits.argmax(dim=-1)
        best = ids, logits.gather(-1, ids[:, None])[:, 0]
    ids, highest = best
    if rows is None:
        return Queued(ids, highest, [])
    drawing = [i for i, row in enumerate(rows) if row.features & Feature.RANDOM]
    if drawing and fused is not None:
        # Which rows fail is not known here, and a draw is made for finite ones: from the others it takes any id.
        logits.masked_fill_(highest.isfinite().logical_not_()[:, None], 0.0)
        chosen = [rows[i] for i in drawing]
        random = [numbers_of(chosen)] if uniforms is None else [given.view(np.int64) for given in seeds_of(chosen)]
        index, heat, top_k, top_p, min_p, *numbers = upload([*settings(drawing, chosen), *random])
        number = numbers[0] if uniforms is None else uniforms(*numbers)
        drawn = fused(logits, index, heat, top_k, top_p, min_p, number)
        ids = drawn if len(drawing) == len(rows) else ids.index_copy(0, index, drawn)
    asking = [i for i, row in enumerate(rows) if row.features & Feature.LOGPROBS]
    size, reported = LARGER_CHUNKS * chunk_rows(logits.shape[-1]), []
    for normalise in (True, False):
        part = [i for i in asking if (rows[i].spec.logprobs_mode in NORMALISED) == normalise]
        for first in range(0, len(part), size):
            reported.append(_report(logits, ids, part[first : first + size], rows, upload, normalise=normalise))
    return Queued(ids, highest, reported)


def _report(
    logits: Tensor, ids: Tensor, index: list[int], rows: Sequence[SamplingRow], upload: Upload, *, normalise: bool
) -> Reported:
    top = [min(rows[i].spec.logprobs or 0, logits.shape[-1]) for i in index]
    candidates = [rows[i].candidate_ids for i in index]
    counts = [0 if own is None else len(own) for own in candidates]
    scored = np.repeat(np.arange(len(index), dtype=np.int64), counts)
    if len(index) < len(logits):
        chosen_rows, scored_rows = upload([np.array(index, dtype=np.int64), scored])
        logits, ids = logits[chosen_rows], ids[chosen_rows]
    elif len(scored):
        (scored_rows,) = upload([scored])
    values = torch.log_softmax(logits, dim=-1) if normalise else logits
    chosen = logits.gather(-1, ids[:, None])
    tensors = [values.gather(-1, ids[:, None])[:, 0], (logits > chosen).sum(dim=-1) + 1]
    if max(top):
        # A stable sort: of equal values the lowest id first. (`ranking.best_ids` is faster and looks at values to be so.)
        best = values.sort(dim=-1, descending=True, stable=True)
        tensors += [best.indices[:, : max(top)], best.values[:, : max(top)]]
    if len(scored):
        tensors.append(values[scored_rows, torch.cat([own for own in candidates if own is not None])])
    return Reported(index, top, counts, tuple(tensors))


def _entries(part: Reported, token_ids: list[int], values: list[list[Any]]) -> list[tuple[int, PositionLogprobs]]:
    chosen, ranks, *more = values
    top_ids, top_values = (more.pop(0), more.pop(0)) if max(part.top) else ([], [])
    left = iter(more[0] if more else ())
    entries = []
    for k, i in enumerate(part.rows):
        entry = PositionLogprobs(token_ids[i], chosen[k], ranks[k])
        if part.top[k]:
            pairs = zip(top_ids[k][: part.top[k]], top_values[k], strict=False)
            entry.top = tuple((token_id, value) for token_id, value in pairs if value != -math.inf)
        if part.candidates[k]:
            entry.candidates = tuple(next(left) for _ in range(part.candidates[k]))
        entries.append((i, entry))
    return entries
