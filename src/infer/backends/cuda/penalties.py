"""Repetition, frequency and presence penalties on the ids that a request has seen, in one pass over those alone.

Called on the worker thread; changes the logits in place.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from infer.backends.cuda.launch import Launch, ceil_div

BLOCK = 512


@triton.jit
def penalties_kernel(
    logits: tl.tensor,
    places: tl.tensor,
    counts: tl.tensor,
    rows: tl.tensor,
    repetition: tl.tensor,
    frequency: tl.tensor,
    presence: tl.tensor,
    num_places: int,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num_places
    place = tl.load(places + at, mask=mask, other=0)
    count = tl.load(counts + at, mask=mask, other=0.0)
    row = tl.load(rows + at, mask=mask, other=0)
    value = tl.load(logits + place, mask=mask, other=0.0)
    factor = tl.load(repetition + row, mask=mask, other=1.0)
    value = tl.where(value > 0, tl.div_rn(value, factor), value * factor)
    seen = tl.where(count > 0, tl.load(presence + row, mask=mask, other=0.0), 0.0)
    value = value - count * tl.load(frequency + row, mask=mask, other=0.0) - seen
    tl.store(logits + place, value, mask=mask)


def penalties(
    launch: Launch,
    logits: Tensor,
    places: Tensor,
    counts: Tensor,
    rows: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """In place on dense fp32 [M, V]. Element i is the logit at `places[i]` of the flat tensor, no place twice, an id that
    was sampled `counts[i]` times (0: it is in the prompt) by the request whose settings are number `rows[i]` of
    `repetition`, `frequency` and `presence` [n] fp32. places and rows int64, counts fp32."""
    if not logits.is_contiguous():
        raise ValueError("penalties change logits in place and need them dense")
    launch(
        penalties_kernel,
        (ceil_div(len(places), BLOCK),),
        logits,
        places.contiguous(),
        counts.contiguous(),
        rows.contiguous(),
        repetition.contiguous(),
        frequency.contiguous(),
        presence.contiguous(),
        len(places),
        BLOCK=BLOCK,
        num_warps=4,
        num_stages=1,
    )
