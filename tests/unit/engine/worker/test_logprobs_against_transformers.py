"""Log-probabilities of a random Llama through builder and runner against transformers' teacher forcing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from infer.engine.step import PositionLogprobs, SamplingSpec
from infer.engine.worker.runner import Runner
from infer.models.llama import EXAMPLE
from infer.testing.tiny_models import make_checkpoint, random_transformers_model
from unit.engine.worker.built import build
from unit.engine.worker.toy_causal_lm import Blocks, admission, plan

PROMPT = [5, 90, 33, 12, 12, 70, 41, 8, 66, 3, 27, 50, 9]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def oracle() -> Any:
    return random_transformers_model(EXAMPLE, seed=3)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    path = make_checkpoint(EXAMPLE, tmp_path_factory.mktemp("llama"), seed=3)
    return build(path, scheduler={"max_num_seqs": 4, "max_num_batched_tokens": 64})[0]


def teacher_forced(oracle: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = oracle(torch.tensor([ids])).logits[0]
    return torch.log_softmax(logits.double(), dim=-1)


def check(entry: PositionLogprobs, expected: torch.Tensor, top: int) -> None:
    """`expected` [V]. Ranks and alternatives up to near ties."""
    own = float(expected[entry.token_id])
    assert entry.logprob == pytest.approx(own, abs=TOLERANCE)
    surely, possibly = int((expected > own + TOLERANCE).sum()), int((expected > own - TOLERANCE).sum())
    assert surely < entry.rank <= possibly
    assert [value for _, value in entry.top] == pytest.approx(expected.topk(top).values.tolist(), abs=TOLERANCE)
    for token_id, value in entry.top:
        assert value == pytest.approx(float(expected[token_id]), abs=TOLERANCE)


@pytest.mark.row("SAMPLE-PROMPT-LOGPROBS", "equal to transformers teacher forcing within 1e-4, with and without chunks")
@pytest.mark.parametrize("chunks", [[13], [5, 5, 3], [1] * 13, [12, 1]])
def test_prompt_logprobs_equal_teacher_forcing(chunks: list[int], runner: Runner, oracle: Any) -> None:
    spec = SamplingSpec(seed=0, temperature=0.0, prompt_logprobs=4)
    entries, start = [], 0
    for count in chunks:
        new = [admission(0, PROMPT, spec, Blocks())] if start == 0 else []
        result = runner.execute(plan([(0, start, count, int(start + count == len(PROMPT)))], new))
        entries += result.prompt_logprobs.get(0, [])
        start += count
    assert [entry.token_id for entry in entries] == PROMPT[1:]
    for entry, expected in zip(entries, teacher_forced(oracle, PROMPT), strict=False):
        check(entry, expected, 4)


@pytest.mark.row("SAMPLE-LOGPROBS", "values equal log_softmax of transformers logits within 1e-4, raw and processed")
@pytest.mark.parametrize("mode", ["raw", "processed_logits"])
def test_output_logprobs_equal_those_of_transformers(mode: str, runner: Runner, oracle: Any) -> None:
    temperature, count = 0.7, 10
    spec = SamplingSpec(seed=17, temperature=temperature, logprobs=5, logprobs_mode=mode)  # type: ignore[arg-type]
    result = runner.execute(plan([(1, 0, len(PROMPT), 1)], [admission(1, PROMPT, spec, Blocks())]))
    results = [result]
    for i in range(count - 1):
        results.append(runner.execute(plan([(1, len(PROMPT) + i, 1, 1)])))
    entries = [(result.logprobs[0] or [])[0] for result in results]
    assert [entry.token_id for entry in entries] == [result.token_ids[0][0] for result in results]
    ids = PROMPT + [entry.token_id for entry in entries]
    with torch.no_grad():
        logits = oracle(torch.tensor([ids])).logits[0, len(PROMPT) - 1 : -1].double()
    expected = torch.log_softmax(logits, dim=-1) if mode == "raw" else logits / temperature
    for entry, values in zip(entries, expected, strict=True):
        check(entry, values, 5)
