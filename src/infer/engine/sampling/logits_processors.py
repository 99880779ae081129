"""Transform: the caller's and the plugins' own edits of the logits. Runs in the worker thread; owns nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from infer.engine.sampling.processor_row import RowProcessors
from infer.engine.sampling.row import SamplingRow
from infer.plugins.logits_processor import LogitsProcessor, LogitsRow


def apply(logits: Tensor, index: Sequence[int], rows: Sequence[SamplingRow]) -> None:
    """In place on rows `index` of float32 [M, V], in the order in which each request names its processors.

    A row whose processor raises becomes -inf, with the reason in its `RowProcessors.failure`: nobody else's business.
    """
    asking = [(i, own) for i in index if (own := rows[i].processors) is not None]
    for place in range(max((len(own.uses) for _, own in asking), default=0)):
        groups: dict[int, list[tuple[int, RowProcessors, LogitsRow]]] = {}
        objects: dict[int, LogitsProcessor] = {}
        for i, own in asking:
            if own.failure is not None or place >= len(own.uses):
                continue
            _, processor, row = own.uses[place]
            if processor is None or row is None:
                _call(logits, i, own, place)
            else:
                groups.setdefault(id(processor), []).append((i, own, row))
                objects[id(processor)] = processor
        for key, members in groups.items():
            _apply_batch(objects[key], logits, members)
    for i in (i for i, own in asking if own.failure is not None):
        logits[i] = float("-inf")


def _call(logits: Tensor, i: int, own: RowProcessors, place: int) -> None:
    """A function of the caller's: (prompt ids, output ids, logits [V]) -> new logits, or None when it edited them."""
    use = own.uses[place][0]
    try:
        returned = use.function(own.prompt_ids, tuple(own.output_ids), logits[i])
        if returned is not None:
            if not isinstance(returned, Tensor) or returned.shape != logits[i].shape:
                raise TypeError(
                    f"it returned {_described(returned)} instead of a tensor {list(logits[i].shape)} or None"
                )
            logits[i] = returned
    except Exception as error:
        own.failure = _reason(use.name, error)


def _apply_batch(
    processor: LogitsProcessor, logits: Tensor, members: Sequence[tuple[int, RowProcessors, LogitsRow]]
) -> None:
    """One call for all rows; when that raises, one for each, so that only the culprit fails."""
    index = torch.tensor([i for i, _, _ in members], device=logits.device)
    block = logits[index]
    try:
        processor.apply(block, [row for _, _, row in members])
    except Exception as error:
        if len(members) > 1:
            for member in members:
                _apply_batch(processor, logits, [member])
        else:
            own = members[0][1]
            names: Iterable[str] = (use.name for use, used, _ in own.uses if used is processor)
            own.failure = _reason(next(iter(names)), error)
        return
    logits[index] = block


def _reason(name: str, error: Exception) -> str:
    return f"the logits processor {name} failed: {type(error).__name__}: {error}"


def _described(value: object) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
