"""Conformance of a logits processor: it takes and refuses what its spec says, and a row is its own business.

On the calling thread, in plain torch; owns nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from infer.plugins.logits_processor import LogitsProcessor, LogitsProcessorSpec, LogitsRow
from infer.testing.kits import Check, expect, load

VOCAB = 64


def checks(spec: LogitsProcessorSpec) -> Iterator[Check]:
    for body in (_takes, _refuses, _alone_as_in_a_batch, _again_is_the_same, _resumed_is_the_same, _no_output_yet):
        yield Check(body.__name__.strip("_"), partial(body, spec))


def _made(spec: LogitsProcessorSpec) -> LogitsProcessor:
    made: LogitsProcessor = load(spec)(VOCAB)
    return made


def _takes(spec: LogitsProcessorSpec) -> None:
    _made(spec).check(spec.example["params"])


def _refuses(spec: LogitsProcessorSpec) -> None:
    try:
        _made(spec).check(spec.example["refused"])
    except Exception:
        return
    expect(False, f"check() takes {spec.example['refused']!r}, which the example says it refuses")


def _row(params: Any, prompt: Sequence[int], output: Sequence[int]) -> LogitsRow:
    return LogitsRow(params=params, prompt_ids=tuple(prompt), output_ids=list(output))


def _histories() -> list[tuple[list[int], list[int]]]:
    """Prompts and outputs in which tokens and runs of tokens come again."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(0, 8, (length,), generator=generator).tolist() for length in (1, 5, 12, 12, 30, 40)]
    return [(ids, []) for ids in drawn] + [(ids[:1], ids[1:]) for ids in drawn]


def _logits(rows: int) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(1))


def _applied(processor: LogitsProcessor, logits: Tensor, rows: Sequence[LogitsRow]) -> Tensor:
    block = logits.clone()
    with torch.inference_mode():
        processor.apply(block, rows)
    expect(block.shape == logits.shape and block.dtype == logits.dtype, "apply() changed the tensor's shape or dtype")
    expect(not bool(torch.isnan(block).any()), "apply() writes NaN")
    return block


def _alone_as_in_a_batch(spec: LogitsProcessorSpec) -> None:
    params, histories = spec.example["params"], _histories()
    logits = _logits(len(histories))
    together = _applied(_made(spec), logits, [_row(params, *history) for history in histories])
    backwards = _applied(_made(spec), logits.flip(0), [_row(params, *history) for history in reversed(histories)])
    expect(torch.equal(together, backwards.flip(0)), "a row's logits depend on its place in the batch")
    for i, history in enumerate(histories):
        alone = _applied(_made(spec), logits[i : i + 1], [_row(params, *history)])
        expect(torch.equal(together[i], alone[0]), f"row {i} differs when it is alone")


def _again_is_the_same(spec: LogitsProcessorSpec) -> None:
    """A call that another row spoilt is made again."""
    processor, logits = _made(spec), _logits(1)
    for prompt, output in _histories():
        row = _row(spec.example["params"], prompt, output)
        first, second = (_applied(processor, logits, [row]) for _ in range(2))
        expect(torch.equal(first, second), "a second call for the same position gives other logits")


def _resumed_is_the_same(spec: LogitsProcessorSpec) -> None:
    """Token by token, and from a fresh start with all of them, as after preemption."""
    processor, logits = _made(spec), _logits(1)
    for prompt, output in _histories():
        grown = _row(spec.example["params"], prompt, [])
        for token_id in output:
            _applied(processor, logits, [grown])
            grown.output_ids.append(token_id)  # type: ignore[attr-defined]
        fresh = _row(spec.example["params"], prompt, output)
        same = torch.equal(_applied(processor, logits, [grown]), _applied(processor, logits, [fresh]))
        expect(same, "a row that resumes with its tokens gets other logits than one that grew to them")


def _no_output_yet(spec: LogitsProcessorSpec) -> None:
    _applied(_made(spec), _logits(1), [_row(spec.example["params"], [3], [])])
