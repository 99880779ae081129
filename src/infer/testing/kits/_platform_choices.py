"""The optional operations of a platform that choose tokens, over rows whose answer is plain: draws, draws among allowed
tokens, the best of a row.

Part of the kit of platforms; an entry that is None is passed over. On the calling thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from infer.plugins.platform import Platform
from infer.testing.kits import expect

Case = tuple[int, float, int, float, float, float]
"""(row, temperature, top_k, top_p, min_p, number)."""
DTYPES = (torch.int64, torch.float32, torch.int64, torch.float64, torch.float32, torch.float64)


def _columns(cases: Sequence[Case], device: torch.device) -> list[Tensor]:
    return [
        torch.tensor(column, dtype=dtype, device=device)
        for column, dtype in zip(zip(*cases, strict=True), DTYPES, strict=True)
    ]


def _packed(ids: Sequence[int], num_bytes: int) -> list[int]:
    """A mask in which these ids alone are allowed."""
    mask = sum(1 << token_id for token_id in ids)
    return list(mask.to_bytes(num_bytes, "little"))


def _draw(platform: Platform) -> None:
    """Ties, one after the other in the order of ids, and what truncation leaves."""
    draw, device = platform.ops.draw, platform.device
    if draw is None:
        return
    even, steps = torch.zeros(8), torch.tensor([0.0, 3.0, 1.0, 3.0, 2.0, 3.0, -1.0, 0.5])
    masked = torch.where(torch.arange(8) % 2 == 0, -math.inf, 0.0)
    cases: list[tuple[Case, int]] = [
        ((0, 1.0, 0, 1.0, 0.0, 0.99), 7),
        ((0, 1.0, 4, 1.0, 0.0, 0.99), 3),
        ((0, 1.0, 0, 0.5, 0.0, 0.99), 3),
        ((1, 1.0, 1, 1.0, 0.0, 0.99), 1),
        ((1, 1.0, 0, 1.0, 1.0, 0.99), 5),
        ((1, 1.0, 0, 1e-9, 0.0, 0.99), 1),
        ((1, 0.01, 0, 1.0, 0.0, 0.7), 5),
        ((2, 1.0, 0, 1.0, 0.0, 0.0), 1),
        ((2, 1.0, 100, 1.0, 0.0, 0.999), 7),
        ((1, 1e6, 0, 1.0, 0.0, 0.1), 0),
    ]
    with platform.step_context():
        logits = torch.stack((even, steps, masked)).to(device)
        before = logits.clone()
        ids = draw(logits, *_columns([case for case, _ in cases], device)).tolist()
        expect(torch.equal(logits, before), "draw changes the logits")
    for (case, right), found in zip(cases, ids, strict=True):
        expect(found == right, f"draw{case} gives {found}, not {right}")


def _draw_allowed(platform: Platform) -> None:
    """Masks of whole words, of single bits and of none; bits behind the last token; temperature 0."""
    draw, device = platform.ops.draw_allowed, platform.device
    if draw is None:
        return
    width, num_bytes = 70, 12
    steps = torch.arange(width) % 7 / 2.0  # 3.0 at 6, 13, 20, ...
    none = torch.full((width,), -math.inf)
    none[3] = 0.0
    behind, every = range(width, 8 * num_bytes), range(8 * num_bytes)
    cases: list[tuple[Case, Sequence[int], int]] = [
        ((0, 1.0, 0, 1.0, 0.0, 0.999999), every, 69),
        ((0, 1.0, 0, 1.0, 0.0, 0.0), every, 0),
        ((0, 1.0, 0, 1.0, 0.0, 0.999999), [5, 33, 34], 34),
        ((0, 1.0, 0, 1.0, 0.0, 0.0), [33, 34, 69], 33),
        ((0, 1.0, 2, 1.0, 0.0, 0.999999), [0, 6, 13, 20, 69], 13),
        ((0, 1.0, 0, 0.5, 0.0, 0.999999), [6, 13, 20, 27], 13),
        ((0, 1.0, 0, 1.0, 1.0, 0.999999), [*range(6), 64, 68], 68),
        ((0, 0.0, 0, 1.0, 0.0, 0.999999), [1, 8, 12, 26, 68], 12),
        ((0, 0.0, 0, 1.0, 0.0, 0.999999), every, 6),
        ((0, 1.0, 0, 1.0, 0.0, 0.5), [31], 31),
        ((0, 0.0, 0, 1.0, 0.0, 0.5), [32], 32),
        ((1, 1.0, 0, 1.0, 0.0, 0.5), [0, 3, 40], 3),
        ((1, 0.0, 0, 1.0, 0.0, 0.5), [0, 3, 40], 3),
        ((1, 1.0, 0, 1.0, 0.0, 0.5), [0, 40], -1),
        ((1, 0.0, 0, 1.0, 0.0, 0.5), [0, 40], -1),
        ((0, 1.0, 0, 1.0, 0.0, 0.5), behind, -1),
        ((0, 0.0, 0, 1.0, 0.0, 0.5), [], -1),
    ]
    with platform.step_context():
        logits = torch.stack((steps, none)).to(device)
        before = logits.clone()
        masks = torch.tensor([_packed(ids, num_bytes) for _, ids, _ in cases], dtype=torch.uint8, device=device)
        found_ids = draw(logits, *[*_columns([case for case, _, _ in cases], device), masks]).tolist()
        expect(torch.equal(logits, before), "draw_allowed changes the logits")
    for (case, allowed, right), found in zip(cases, found_ids, strict=True):
        expect(found == right, f"draw_allowed{case} among {list(allowed)} gives {found}, not {right}")


def _best(platform: Platform) -> None:
    """Ties, minus infinity alone, and a NaN; over widths around those that vectors have."""
    best, device = platform.ops.best, platform.device
    if best is None:
        return
    with platform.step_context():
        for width in (1, 7, 16, 31, 200, 5000):
            rows = torch.full((5, width), -math.inf)
            rows[1] = 0.0
            rows[2, width // 2 :] = 2.0
            rows[3, width - 1] = -3.0
            rows[4, width // 3 :: 2] = math.nan
            ids, values = best(rows.to(device))
            right = [0, 0, width // 2, width - 1, width // 3]
            expect(ids.tolist() == right, f"best of {width} gives {ids.tolist()}, not {right}")
            expect(
                torch.equal(values.cpu()[:4], rows[range(4), right[:4]]) and bool(values[4].isnan()),
                f"best of {width} has the values {values.tolist()}",
            )


CHOICES: dict[str, Callable[[Platform], None]] = {"draw": _draw, "draw_allowed": _draw_allowed, "best": _best}
