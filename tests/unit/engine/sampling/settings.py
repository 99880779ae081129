"""Random sampling settings and their oracle: the transformers chain in our documented order. Test-only."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from infer.engine.sampling.row import SamplingRow, make_row
from infer.engine.sampling.sampler import process
from infer.engine.step import SamplingSpec

CPU = torch.device("cpu")


class OutputPenalties(LogitsProcessor):
    """The formula of the OpenAI API reference; transformers has none."""

    def __init__(self, prompt_len: int, frequency: float, presence: float) -> None:
        self.prompt_len, self.frequency, self.presence = prompt_len, frequency, presence

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for token_id, count in Counter(input_ids[0, self.prompt_len :].tolist()).items():
            scores[0, token_id] -= count * self.frequency + (count > 0) * self.presence
        return scores


def transformers_chain(spec: SamplingSpec, prompt_len: int) -> LogitsProcessorList:
    chain: list[LogitsProcessor] = []
    if spec.allowed_token_ids is not None:
        allowed = list(spec.allowed_token_ids)
        chain.append(PrefixConstrainedLogitsProcessor(lambda batch, ids: allowed, num_beams=1))
    if spec.bad_words:
        chain.append(NoBadWordsLogitsProcessor([list(word) for word in spec.bad_words]))
    if spec.logit_bias:
        chain.append(SequenceBiasLogitsProcessor([[[i], float(bias)] for i, bias in spec.logit_bias]))
    if spec.min_tokens and spec.min_tokens_masked_ids:
        chain.append(MinNewTokensLengthLogitsProcessor(prompt_len, spec.min_tokens, list(spec.min_tokens_masked_ids)))
    if spec.repetition_penalty != 1.0:
        chain.append(RepetitionPenaltyLogitsProcessor(spec.repetition_penalty))
    chain.append(OutputPenalties(prompt_len, spec.frequency_penalty, spec.presence_penalty))
    if spec.temperature:
        chain.append(TemperatureLogitsWarper(spec.temperature))
        if spec.top_k:
            chain.append(TopKLogitsWarper(spec.top_k))
        if spec.top_p < 1:
            chain.append(TopPLogitsWarper(spec.top_p))
        if spec.min_p:
            chain.append(MinPLogitsWarper(spec.min_p))
    return LogitsProcessorList(chain)


def oracle(spec: SamplingSpec, token_ids: Sequence[int], prompt_len: int, logits: Tensor) -> Tensor:
    """(logits [V]) -> processed logits [V], by transformers."""
    ids = torch.tensor([list(token_ids)])
    scores: Tensor = transformers_chain(spec, prompt_len)(ids, logits[None].clone())
    return scores[0]


def row_of(spec: SamplingSpec, token_ids: Sequence[int], prompt_len: int, vocab: int) -> SamplingRow:
    row = make_row(spec, list(token_ids), prompt_len, vocab, CPU)
    row.output_position = len(token_ids) - prompt_len
    return row


def processed(spec: SamplingSpec, token_ids: Sequence[int], prompt_len: int, logits: Tensor) -> Tensor:
    """The same, by us."""
    out = logits[None].clone()
    process(out, [row_of(spec, token_ids, prompt_len, logits.shape[-1])])
    return out[0]


def random_case(rng: random.Random, vocab: int) -> tuple[SamplingSpec, list[int], int]:
    """A spec, the row's token ids and its prompt length. Each setting is on about half the time."""
    prompt_len = rng.randrange(1, 12)
    ids = [rng.randrange(vocab) for _ in range(prompt_len + rng.randrange(12))]
    values: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.1, 0.7, 1.3, 2.5]),
        "top_p": rng.choice([0.05, 0.5, 0.9, 0.99]),
        "top_k": rng.choice([1, 2, 7, 40, vocab - 1, vocab, vocab + 9]),
        "min_p": rng.choice([0.01, 0.1, 0.5]),
        "repetition_penalty": rng.choice([0.6, 1.1, 2.0]),
        "frequency_penalty": rng.uniform(-2, 2),
        "presence_penalty": rng.uniform(-2, 2),
        "logit_bias": tuple((i, rng.uniform(-100, 100)) for i in rng.sample(range(vocab), 3)),
        "allowed_token_ids": tuple(rng.sample(range(vocab), rng.randrange(vocab // 3, vocab))),
        "bad_words": random_bad_words(rng, ids, vocab),
    }
    spec = {name: value for name, value in values.items() if rng.random() < 0.5}
    if rng.random() < 0.5:
        spec |= {"min_tokens": rng.randrange(1, 12), "min_tokens_masked_ids": tuple(rng.sample(range(vocab), 2))}
    return SamplingSpec(seed=rng.getrandbits(63), **spec), ids, prompt_len


def random_bad_words(rng: random.Random, ids: list[int], vocab: int) -> tuple[tuple[int, ...], ...]:
    """Single ids, words that complete the tail and words that nearly do."""
    words = [(rng.randrange(vocab),)]
    for length in (1, 2, 3):
        tail = ids[-length:]
        words.append((*tail, rng.randrange(vocab)))
        words.append((*tail[:-1], (tail[-1] + 1) % vocab, rng.randrange(vocab)))
    return tuple(words)
