"""Which tokens top_k, top_p and min_p left, and how much probability those had together. Runs in the worker thread; owns nothing.

A trainer needs both: truncated sampling draws from p / mass, and a ratio of probabilities without the mass is off by it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from infer.engine.sampling.draw import BLOCK
from infer.engine.sampling.ranking import argmax

KeptSet = tuple["array[int] | None", float]
"""(ids in ascending order, as int32, or None for the whole vocabulary; log of their mass before truncation). There may be
thousands in every position of a batch, and an array takes a tenth of a tuple's memory."""


def weights(logits: Tensor, index: Sequence[int]) -> Tensor:
    """(logits float32 [M, V], rows) -> [len(index)] double: sum of each row's exp(logit - best logit).

    Block by block, so that neither the batch nor the number of threads moves a bit.
    """
    chosen = logits[list(index)]
    chosen.sub_(chosen.amax(dim=-1, keepdim=True)).exp_()
    blocks = torch.nn.functional.pad(chosen, (0, -chosen.shape[-1] % BLOCK)).view(len(chosen), -1, BLOCK)
    return blocks.sum(dim=-1, dtype=torch.float64).sum(dim=-1)


def kept_sets(logits: Tensor, index: Sequence[int], before: Tensor, drawing: Sequence[bool]) -> list[KeptSet]:
    """(truncated logits float32 [M, V], rows, their `weights` before truncation, which of them draw) -> one set per row.

    The best token is never truncated, so both sums are in the same unit. What is -inf was excluded, by truncation or by an
    earlier processor; the latter's had no mass. A row that does not draw takes the best id and keeps nothing else.
    """
    chosen = logits[list(index)]
    masses = weights(logits, index)
    masses[[not draws for draws in drawing]] = 1.0  # exp(best - best)
    kept = chosen > float("-inf")
    counts = kept.sum(dim=-1).tolist()
    found: list[KeptSet] = []
    for row, logmass in enumerate((masses / before).log().tolist()):
        if not drawing[row]:
            found.append((array("i", argmax(chosen[row : row + 1])), logmass))
        elif counts[row] == kept.shape[-1]:
            found.append((None, logmass))
        else:
            ids = kept[row].nonzero()[:, 0].to(torch.int32).cpu().numpy()
            found.append((array("i", ids.tobytes()), logmass))
    return found
