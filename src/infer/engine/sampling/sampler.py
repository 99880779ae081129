"""The sampler: checks logits, processes them in the one documented order, draws, and reports log-probabilities.

Runs in the worker thread; owns nothing. A row that cannot be sampled fails alone, with its reason.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from infer.engine.sampling import (
    allowed_tokens,
    bad_words,
    fused_penalties,
    grammar_mask,
    kept_set,
    logit_bias,
    logits_processors,
    min_p,
    min_tokens,
    output_penalties,
    repetition_penalty,
    temperature,
    top_k,
    top_p,
)
from infer.engine.sampling.draw import FusedDraw, MaskedDraw, Uniforms, draw, draw_fused, draw_masked
from infer.engine.sampling.fused_penalties import FusedPenalties
from infer.engine.sampling.kept_set import KeptSet
from infer.engine.sampling.logprobs import NORMALISED, position_logprobs
from infer.engine.sampling.ranking import argmax, best_of_rows
from infer.engine.sampling.row import NEEDS_COUNTS, PROCESSED, Feature, SamplingRow
from infer.engine.step import PositionLogprobs

Transform = Callable[[Tensor, Sequence[int], Sequence[SamplingRow]], None]

Transforms = tuple[tuple[int, Transform], ...]
"""Features, and what rows with one of them get."""

SHAPING: Transforms = (
    (Feature.GUIDED, grammar_mask.apply),
    (Feature.ALLOWED, allowed_tokens.apply),
    (Feature.BAD_WORDS, bad_words.apply),
    (Feature.BIAS, logit_bias.apply),
    (Feature.MIN_TOKENS, min_tokens.apply),
    (Feature.PROCESSORS, logits_processors.apply),
    (Feature.REPETITION, repetition_penalty.apply),
    (Feature.OUTPUT_PENALTIES, output_penalties.apply),
    (Feature.TEMPERATURE, temperature.apply),
)
TRUNCATION: Transforms = (
    (Feature.TOP_K, top_k.apply),
    (Feature.TOP_P, top_p.apply),
    (Feature.MIN_P, min_p.apply),
)
ORDER = SHAPING + TRUNCATION
"""The order of `SamplingParams`, written once."""

FUSED = Feature.RANDOM | Feature.TEMPERATURE | Feature.TOP_K | Feature.TOP_P | Feature.MIN_P
"""What a platform's own draw does."""
UNFUSED = PROCESSED & ~FUSED
"""What it knows nothing of."""
UNFUSED_GUIDED = UNFUSED & ~Feature.GUIDED
"""The same of its draw among allowed tokens."""

CHUNK_ELEMENTS = 2**17
"""Logits processed at a time: bounds the sampler's memory whatever the batch, and keeps it in the CPU's cache."""
BYTES_PER_ELEMENT = 26
"""Of processing at its widest (a copy, its probabilities, partial sums in double or a sorted copy, masks); measured."""
PROMPT_CHUNKS = 4
"""Chunks of prompt positions whose logits are made together: making them reads the whole head."""
NO_TOKEN = -1


@dataclass(slots=True)
class Sampled:
    """Per row: the id (NO_TOKEN where the row failed) and its log-probabilities where asked for."""

    token_ids: list[int]
    logprobs: dict[int, PositionLogprobs] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    kept: dict[int, KeptSet] = field(default_factory=dict)
    """What `logprobs` says of the rows that ask for it."""


def chunk_rows(vocab_size: int) -> int:
    """Rows processed at a time."""
    return max(1, CHUNK_ELEMENTS // vocab_size)


def prompt_rows(vocab_size: int) -> int:
    """Prompt positions whose logits are in memory at a time."""
    return PROMPT_CHUNKS * chunk_rows(vocab_size)


def workspace_bytes(vocab_size: int) -> int:
    """Most memory the sampler takes beside the logits it is given."""
    return chunk_rows(vocab_size) * vocab_size * BYTES_PER_ELEMENT


def sample(
    logits: Tensor,
    rows: Sequence[SamplingRow] | None,
    fused: FusedDraw | None = None,
    best: tuple[Tensor, Tensor] | None = None,
    *,
    masked: MaskedDraw | None = None,
    uniforms: Uniforms | None = None,
    penalties: FusedPenalties | None = None,
) -> Sampled:
    """(raw float32 [M, V], a row each or None when every row is plain greedy, the platform's own draw if it has one, the best
    of these logits as of `Ops.best` if they are known; its draw among allowed tokens, its own random numbers and penalties
    if it has them) -> ids. `logits` stay as they are."""
    if best is not None:
        chosen, highest = best[0].tolist(), best[1].tolist()
        if rows is not None:
            chosen = [NO_TOKEN if row.features & PROCESSED else i for row, i in zip(rows, chosen, strict=True)]
        result = Sampled(chosen)
    elif rows is None or any(not row.features & PROCESSED for row in rows):
        chosen, highest = best_of_rows(logits)
        result = Sampled(chosen)
    else:
        result = Sampled([NO_TOKEN] * len(logits))
        highest = logits.amax(dim=-1).tolist()
    for i, value in enumerate(highest):
        if not math.isfinite(value):
            fail_row(result, i, value)
    if rows is not None:
        size = chunk_rows(logits.shape[-1])
        settled = _force(rows, result)
        if fused is not None:
            settled |= _draw_fused(fused, uniforms, logits, rows, settled, result)
        if masked is not None:
            settled |= _draw_masked(masked, uniforms, logits, rows, settled, result)
        shaping = None if penalties is None else with_penalties(penalties)
        for index in _chunks(rows, PROCESSED, settled, size):
            _sample_chunk(logits, index, rows, result, shaping)
        for index in _chunks(rows, Feature.LOGPROBS, result.errors, size):
            _report_raw(logits, index, rows, result)
        for i, (ids, logmass) in result.kept.items():
            result.logprobs[i].kept_ids, result.logprobs[i].kept_logmass = ids, logmass
    return result


def with_penalties(fused: FusedPenalties) -> Transforms:
    """`SHAPING` with a platform's own penalties, which are neighbours in it."""
    own = NEEDS_COUNTS, functools.partial(fused_penalties.apply, fused)
    apart = (Feature.REPETITION, Feature.OUTPUT_PENALTIES)
    first = next(i for i, (feature, _) in enumerate(SHAPING) if feature in apart)
    others = [entry for entry in SHAPING if entry[0] not in apart]
    return (*others[:first], own, *others[first:])


def _draw_fused(
    fused: FusedDraw,
    uniforms: Uniforms | None,
    logits: Tensor,
    rows: Sequence[SamplingRow],
    skip: Container[int],
    result: Sampled,
) -> set[int]:
    """Draw for rows of which nobody wants to see more than the id. Returns them."""
    index = [
        i
        for i, row in enumerate(rows)
        if row.features & Feature.RANDOM and not row.features & UNFUSED and i not in skip and not _wants_processed(row)
    ]
    return _drawn(lambda own: draw_fused(fused, logits, index, own, uniforms), index, rows, result)


def _draw_masked(
    masked: MaskedDraw,
    uniforms: Uniforms | None,
    logits: Tensor,
    rows: Sequence[SamplingRow],
    skip: Container[int],
    result: Sampled,
) -> set[int]:
    """The same for rows with a guide, also greedy ones. One whose guide has failed is left to `grammar_mask`, which says so."""
    index = [
        i
        for i, row in enumerate(rows)
        if row.features & Feature.GUIDED
        and not row.features & UNFUSED_GUIDED
        and i not in skip
        and not _wants_processed(row)
        and (row.guide is None or row.guide.failure is None)
    ]
    return _drawn(lambda own: draw_masked(masked, logits, index, own, uniforms), index, rows, result)


def _drawn(
    own_draw: Callable[[list[SamplingRow]], Tensor], index: list[int], rows: Sequence[SamplingRow], result: Sampled
) -> set[int]:
    """Take over what a platform's own draw gives for the rows `index`. Returns them; none where it failed."""
    if not index:
        return set()
    try:
        ids = own_draw([rows[i] for i in index]).tolist()
    except Exception:  # one by one only the culprit will fail
        return set()
    for i, token_id in zip(index, ids, strict=True):
        if token_id == NO_TOKEN:
            _fail(result, i, _diagnose_processed(-math.inf, rows[i]))
        else:
            result.token_ids[i] = token_id
    return set(index)


def process(logits: Tensor, rows: Sequence[SamplingRow], shaping: Transforms | None = None) -> None:
    """Apply every transform the rows ask for, in place, in `ORDER`; `shaping` in place of its first part."""
    _apply(ORDER if shaping is None else shaping + TRUNCATION, logits, rows)


def _apply(order: Transforms, logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    features = [row.features for row in rows]
    wanted = functools.reduce(operator.or_, features, 0)
    for feature, transform in order:
        if wanted & feature:
            transform(logits, [i for i, own in enumerate(features) if own & feature], rows)


def _force(rows: Sequence[SamplingRow], result: Sampled) -> set[int]:
    """Write the ids that are given instead of drawn. Returns the rows that need no processing any more: the failed ones,
    and forced ones whose processed logits nobody wants to see."""
    settled = set(result.errors)
    for i in [i for i, row in enumerate(rows) if row.features & Feature.FORCED and i not in result.errors]:
        forced = rows[i].forced_id
        if forced is not None:
            result.token_ids[i] = forced
            if not (rows[i].features & Feature.KEPT_SET or _wants_processed(rows[i])):
                settled.add(i)
    return settled


def _chunks(rows: Sequence[SamplingRow], feature: int, skip: Container[int], size: int) -> Iterator[list[int]]:
    index = [i for i, row in enumerate(rows) if row.features & feature and i not in skip]
    for start in range(0, len(index), size):
        yield index[start : start + size]


def _sample_chunk(
    logits: Tensor, index: list[int], rows: Sequence[SamplingRow], result: Sampled, shaping: Transforms | None
) -> None:
    """Process and draw the rows `index`. When that raises, each row is tried alone so that only the culprit fails."""
    try:
        _process_and_draw(logits, index, rows, result, shaping)
    except Exception as error:  # whatever it is, it must not reach the neighbours
        if len(index) == 1:
            _fail(result, index[0], f"sampling failed: {type(error).__name__}: {error}")
            return
        for i in index:
            _sample_chunk(logits, [i], rows, result, shaping)


def _process_and_draw(
    logits: Tensor, index: list[int], rows: Sequence[SamplingRow], result: Sampled, shaping: Transforms | None
) -> None:
    chosen_rows = [rows[i] for i in index]
    processed = logits[index]
    asking = [k for k, row in enumerate(chosen_rows) if row.features & Feature.KEPT_SET]
    if asking:
        _apply(shaping or SHAPING, processed, chosen_rows)
        before = kept_set.weights(processed, asking)
        _apply(TRUNCATION, processed, chosen_rows)
    else:
        process(processed, chosen_rows, shaping)
    best = processed.amax(dim=-1).tolist()
    dead = {k for k, value in enumerate(best) if not math.isfinite(value)}
    for k in dead:
        _fail(result, index[k], _diagnose_processed(best[k], chosen_rows[k]))
    tokens = _choose(processed, chosen_rows, dead)
    reported = [k for k, row in enumerate(chosen_rows) if _wants_processed(row) and k not in dead]
    for k, entry in _entries(processed, reported, chosen_rows, tokens):
        result.logprobs[index[k]] = entry
    for k, token_id in enumerate(tokens):
        if k not in dead:
            result.token_ids[index[k]] = token_id
    if asking:
        drawing = [bool(chosen_rows[k].features & Feature.RANDOM) for k in asking]
        for k, kept in zip(asking, kept_set.kept_sets(processed, asking, before, drawing), strict=True):
            if k not in dead:
                result.kept[index[k]] = kept


def _choose(processed: Tensor, rows: Sequence[SamplingRow], dead: Container[int]) -> list[int]:
    """The id of each row: given, drawn, or the best."""
    forced = {k: row.forced_id for k, row in enumerate(rows) if row.features & Feature.FORCED}
    given = {k: token_id for k, token_id in forced.items() if token_id is not None}
    random = [k for k, row in enumerate(rows) if row.features & Feature.RANDOM and k not in dead and k not in given]
    tokens = argmax(processed) if len(random) < len(rows) else [NO_TOKEN] * len(rows)
    if random:
        whole = len(random) == len(rows)
        drawn = draw(processed if whole else processed[random], [rows[k] for k in random])
        for k, token_id in zip(random, drawn.tolist(), strict=True):
            tokens[k] = token_id
    for k, token_id in given.items():
        tokens[k] = token_id
    return tokens


def _report_raw(logits: Tensor, index: list[int], rows: Sequence[SamplingRow], result: Sampled) -> None:
    index = [i for i in index if i not in result.logprobs]  # the processed ones are already there
    result.logprobs.update(_entries(logits, index, rows, result.token_ids))


def _entries(
    logits: Tensor, index: list[int], rows: Sequence[SamplingRow], tokens: list[int]
) -> Iterator[tuple[int, PositionLogprobs]]:
    """(row, its entry) for the rows `index`."""
    for normalise in (True, False):
        part = [i for i in index if (rows[i].spec.logprobs_mode in NORMALISED) == normalise]
        if not part:
            continue
        values = logits if len(part) == len(logits) else logits[part]
        entries = position_logprobs(
            values,
            [tokens[i] for i in part],
            [rows[i].spec.logprobs or 0 for i in part],
            normalise=normalise,
            candidates=[rows[i].candidate_ids for i in part],
        )
        yield from zip(part, entries, strict=True)


def _wants_processed(row: SamplingRow) -> bool:
    return bool(row.features & Feature.LOGPROBS) and row.spec.logprobs_mode in ("processed", "processed_logits")


def fail_row(result: Sampled, row: int, highest: float) -> None:
    """Its best logit is no number."""
    _fail(result, row, _diagnose(highest))


def _fail(result: Sampled, row: int, reason: str) -> None:
    result.token_ids[row] = NO_TOKEN
    result.errors[row] = reason
    result.logprobs.pop(row, None)


def _diagnose(best: float) -> str:
    if best != best:
        return "logits hold NaN"
    return "logits hold +inf" if best > 0 else "all logits are -inf"


def _diagnose_processed(best: float, row: SamplingRow) -> str:
    if row.processors is not None and row.processors.failure is not None:
        return row.processors.failure
    if best == -math.inf:
        return "no token is left to sample after the grammar, allowed_token_ids, bad_words and min_tokens"
    return f"the processed logits hold {best}: penalties, bias and temperature together overflow"
