"""Perplexity and KL divergence of the accuracy table, against torch's own losses in double precision."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from bench.accuracy import Scores, candidates, text


def test_scores_agree_with_losses_in_double_precision() -> None:
    torch.manual_seed(0)
    reference, ours, targets = torch.randn(20, 50) * 3, torch.randn(20, 50) * 3, torch.randint(50, (20,))
    expected = functional.kl_div(
        ours.double().log_softmax(-1), reference.double().log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    scores, theirs = Scores(weights=3_000_000), reference.log_softmax(-1)
    for part in (slice(0, 7), slice(7, 20)):
        scores.add(theirs[part], theirs[part].exp(), ours[part], targets[part])
    assert scores.kl == pytest.approx(expected.tolist(), abs=1e-5)
    loss = functional.cross_entropy(ours.double(), targets)
    assert math.exp(sum(scores.nll) / 20) == pytest.approx(math.exp(loss), rel=1e-5)
    assert scores.same == (reference.argmax(-1) == ours.argmax(-1)).tolist()
    cells = scores.row("x", 2.0).split("|")
    assert cells[2].strip() == "3"
    assert float(cells[3]) == pytest.approx(math.exp(loss), abs=1e-2)


def test_a_reference_does_not_differ_from_itself() -> None:
    theirs = (torch.randn(9, 30) * 5).log_softmax(-1)
    scores = Scores()
    scores.add(theirs, theirs.exp(), theirs, torch.randint(30, (9,)))
    assert scores.kl == pytest.approx([0.0] * 9, abs=1e-6)
    assert all(scores.same)


def test_the_text_is_long_enough_and_the_files_that_are_there_are_compared(tmp_path: Path) -> None:
    assert len(text().split()) > 50_000, "words, and a token is not longer than one"
    assert set(candidates(tmp_path)) == {"bf16", "int8", "int4"}
    (tmp_path / "q4_1.gguf").touch()
    assert candidates(tmp_path)["Q4_1"] == {"ref": str(tmp_path / "q4_1.gguf")}
