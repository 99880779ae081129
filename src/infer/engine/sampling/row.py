"""What the sampler knows of one request: its settings as tensors, penalty counts, and the tail that bad words look at.

Made at admission and kept per slot in the worker thread; `accept` is its only change.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor

from infer.engine.sampling.guide import Guide, is_guided
from infer.engine.sampling.processor_row import RowProcessors
from infer.engine.sampling.token_counts import TokenCounts
from infer.engine.step import SamplingSpec
from infer.errors import InvalidRequestError

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them could overflow, and the limit is the same token."""


class Feature(IntEnum):
    """What a row needs beside one argmax, as bits; 0 is the fast path. (Not `IntFlag`: its `&` costs ten times an int's.)"""

    ALLOWED = 1
    BAD_WORDS = 2
    BIAS = 4
    MIN_TOKENS = 8
    REPETITION = 16
    OUTPUT_PENALTIES = 32
    RANDOM = 64
    TEMPERATURE = 128
    TOP_K = 256
    TOP_P = 512
    MIN_P = 1024
    FORCED = 2048
    KEPT_SET = 4096
    GUIDED = 8192
    PROCESSORS = 16384
    LOGPROBS = 32768
    PROMPT_LOGPROBS = 65536


NEEDS_COUNTS = Feature.REPETITION | Feature.OUTPUT_PENALTIES
STATEFUL = NEEDS_COUNTS | Feature.BAD_WORDS | Feature.GUIDED | Feature.PROCESSORS
"""Rows that must hear of each sampled token."""
PROCESSED = Feature.LOGPROBS - 1
"""Rows whose token is not simply the best of the model's logits: everything before LOGPROBS."""
SAMPLER = PROCESSED | Feature.LOGPROBS
"""Rows that the sampler must know more of than their logits."""


@dataclass(slots=True)
class SamplingRow:
    """One request's half of the sampler. Tensors are on the logits' device; ids are int64."""

    spec: SamplingSpec
    features: int
    output_position: int = 0
    """Index of the output token about to be sampled; set by the runner before each draw."""
    allowed: Tensor | None = None
    bias_ids: Tensor | None = None
    bias_values: Tensor | None = None
    masked_until_min: Tensor | None = None
    candidate_ids: Tensor | None = None
    """Scored at every reported position."""
    counts: TokenCounts | None = None
    """Only for rows with a penalty."""
    tail: list[int] = field(default_factory=list)
    """The last ids of prompt and output, as many as the longest bad word can match."""
    tail_len: int = 0
    guide: Guide | None = None
    """Of a row with a grammar or a thinking budget."""
    processors: RowProcessors | None = None
    """Of a row with logits processors."""

    @property
    def forced_id(self) -> int | None:
        """The id that the next output must be; None when it is sampled."""
        forced = self.spec.forced_token_ids
        return forced[self.output_position] if self.output_position < len(forced) else None

    @property
    def token_counts(self) -> TokenCounts:
        """Of a row that has a penalty."""
        if self.counts is None:
            raise ValueError("a row without penalties counts no tokens")
        return self.counts

    def accept(self, token_id: int) -> None:
        """Take a sampled id into counts, tail, guide and the history that processors see."""
        if self.processors is not None:
            self.processors.output_ids.append(token_id)
        if self.guide is not None:
            self.guide.accept(token_id)
        if self.counts is not None:
            self.counts.add(token_id)
        if self.tail_len:
            self.tail.append(token_id)
            del self.tail[: -self.tail_len]


def make_row(
    spec: SamplingSpec,
    token_ids: Sequence[int],
    prompt_len: int,
    vocab_size: int,
    device: torch.device,
    guide: Guide | None = None,
    processors: RowProcessors | None = None,
) -> SamplingRow:
    """Prepare a request that owns `token_ids` (prompt, then outputs so far).

    Raises `InvalidRequestError` for a setting that would spoil the step: not finite, or an id outside the vocabulary.
    """
    _check_numbers(spec)
    features = features_of(spec)
    row = SamplingRow(spec, features, guide=guide, processors=processors)
    if spec.allowed_token_ids is not None:
        row.allowed = _ids("allowed_token_ids", spec.allowed_token_ids, vocab_size, device)
    if spec.logit_bias:
        row.bias_ids = _ids("logit_bias", (i for i, _ in spec.logit_bias), vocab_size, device)
        row.bias_values = torch.tensor([v for _, v in spec.logit_bias], dtype=torch.float32, device=device)
    if spec.min_tokens_masked_ids:
        row.masked_until_min = _ids("stop_token_ids", spec.min_tokens_masked_ids, vocab_size, device)
    if spec.logprob_token_ids:
        row.candidate_ids = _ids("logprob_token_ids", spec.logprob_token_ids, vocab_size, device)
    _ids("forced_token_ids", spec.forced_token_ids, vocab_size, torch.device("cpu"))
    for word in spec.bad_words:
        _ids("bad_words", word, vocab_size, torch.device("cpu"))
    row.tail_len = max((len(word) - 1 for word in spec.bad_words), default=0)
    row.tail = list(token_ids[-row.tail_len :]) if row.tail_len else []
    if features & NEEDS_COUNTS:
        row.counts = TokenCounts(token_ids, prompt_len)
    return row


def features_of(spec: SamplingSpec) -> int:
    """Flags of a spec. A greedy row needs no temperature and no truncation: neither moves the maximum."""
    random = spec.temperature >= GREEDY_BELOW
    wants = {
        Feature.ALLOWED: spec.allowed_token_ids is not None,
        Feature.BAD_WORDS: bool(spec.bad_words),
        Feature.BIAS: bool(spec.logit_bias),
        Feature.MIN_TOKENS: spec.min_tokens > 0 and bool(spec.min_tokens_masked_ids),
        Feature.REPETITION: spec.repetition_penalty != 1.0,
        Feature.OUTPUT_PENALTIES: spec.frequency_penalty != 0.0 or spec.presence_penalty != 0.0,
        Feature.RANDOM: random,
        Feature.TEMPERATURE: random and spec.temperature != 1.0,
        Feature.TOP_K: random and spec.top_k > 0,
        Feature.TOP_P: random and spec.top_p < 1.0,
        Feature.MIN_P: random and spec.min_p > 0.0,
        Feature.FORCED: bool(spec.forced_token_ids),
        Feature.KEPT_SET: spec.return_kept_set and spec.logprobs is not None,
        Feature.GUIDED: is_guided(spec),
        Feature.PROCESSORS: bool(spec.logits_processors),
        Feature.LOGPROBS: spec.logprobs is not None,
        Feature.PROMPT_LOGPROBS: spec.prompt_logprobs is not None,
    }
    return int(sum(flag for flag, wanted in wants.items() if wanted))


def _check_numbers(spec: SamplingSpec) -> None:
    for name, low, high in (
        ("temperature", 0.0, math.inf),
        ("top_p", 0.0, 1.0),
        ("min_p", 0.0, 1.0),
        ("repetition_penalty", 0.0, math.inf),
        ("frequency_penalty", -math.inf, math.inf),
        ("presence_penalty", -math.inf, math.inf),
    ):
        value = getattr(spec, name)
        exclusive = name in ("repetition_penalty", "top_p")
        if not math.isfinite(value) or not low <= value <= high or (exclusive and value == 0):
            raise InvalidRequestError(f"{name}={value!r} cannot be sampled with", parameter=name, value=value)
    for _, bias in spec.logit_bias:
        if not math.isfinite(bias):
            raise InvalidRequestError(f"logit_bias holds {bias!r}", parameter="logit_bias", value=bias)
    if not 0 <= spec.seed < 2**64:
        raise InvalidRequestError(f"seed={spec.seed!r} is not a 64-bit number", parameter="seed", value=spec.seed)


def _ids(parameter: str, ids: Iterable[int], vocab_size: int, device: torch.device) -> Tensor:
    wanted = list(ids)
    wrong = next((i for i in wanted if not 0 <= i < vocab_size), None)
    if wrong is not None:
        raise InvalidRequestError(
            f"{parameter} names token id {wrong}; the vocabulary has ids 0 to {vocab_size - 1}",
            parameter=parameter,
            value=wrong,
        )
    return torch.tensor(wanted, dtype=torch.int64, device=device)
