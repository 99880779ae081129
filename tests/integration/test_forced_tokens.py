"""Tokens that a grammar forces, skipped or not, on real engines: same tokens, log-probabilities, routes and ends, fewer steps."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from infer import Choice, Completion, SamplingError, SamplingParams, TokenLogprob
from infer.engine.worker.runner import MAX_AWAITED
from integration.engine_support import LLAMA, arrive_together, parts_of, record, serve, write_checkpoint
from integration.test_route_scenarios import MOE

ROW = "ENG-SGLANG-BEHAVIOR-FLAG"
SCHEMA = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 0, "maximum": 99},
        "q": {"enum": ["ÄÖÜ", "~~"]},
        "y": {"type": "boolean"},
    },
    "required": ["x", "q", "y"],
    "additionalProperties": False,
}
KEYS: dict[str, Any] = {"json_schema": SCHEMA, "compact": True}
"""In the test tokenizer, bytes beyond ASCII and `":` have one spelling, words have several."""
COLON = 28
"""Its id."""
HOT = {"temperature": 2.0, "seed": 5, "max_tokens": 60}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("forced") / "llama", LLAMA)


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("forced") / "moe", MOE)


def facts(choice: Choice, exact: bool = True) -> Any:
    """Of all that is compared. Without `exact` log-probabilities equal those that differ in the last bits."""
    rows = choice.routed_experts
    routes = None if rows is None else (rows.start, rows.count, bytes(rows.data), rows.error)
    logprobs = choice.logprobs if exact else choice.logprobs and [nearly(entry) for entry in choice.logprobs]
    return choice.token_ids, choice.text, choice.finish_reason, choice.stop_reason, logprobs and list(logprobs), routes


def nearly(entry: TokenLogprob) -> TokenLogprob:
    """Two ids that nearly tie may swap ranks."""
    near: dict[str, Any] = {
        "rank": pytest.approx(entry.rank, abs=1),
        "logprob": pytest.approx(entry.logprob, abs=1e-4),
        "top": tuple((token_id, pytest.approx(value, abs=1e-4)) for token_id, value in entry.top),
        "candidates": tuple(pytest.approx(value, abs=1e-4) for value in entry.candidates),
    }
    return dataclasses.replace(entry, **near)


def both_ways(
    path: Path, prompts: list[str], params: SamplingParams | list[SamplingParams], **sections: Any
) -> tuple[list[Completion], int, int, int]:
    """The same requests with skipping off and on: what they answered, steps of each, and tokens that took no step."""
    answers, steps, skipped = [], [], 0
    for skip in (False, True):
        with serve(path, **sections, structured_output={"skip_forced_tokens": skip}) as engine:
            trace = record(engine)
            arrive_together(engine, len(prompts))
            answers.append(engine.generate_many(prompts, params))
            steps.append(len(trace.plans))
            skipped = parts_of(engine).scheduler.stats.draft_tokens
            exact = engine.engine.resolved.numerics == "invariant"  # other tokens are beside them in a step
    assert [[facts(c) for c in one.choices] for one in answers[0]] == [
        [facts(c, exact) for c in one.choices] for one in answers[1]
    ]
    return answers[1], steps[0], steps[1], skipped


@pytest.mark.row(
    ROW, "with forced-token skipping a schema with fixed keys takes fewer model steps with identical tokens"
)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"logprobs": 3, "prompt_logprobs": 1},
        {"logprobs": 0, "logprobs_mode": "raw_logits", "logprob_token_ids": (5, 7)},
        {"n": 3, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
        {"stop": ["ÖÜ"], "min_tokens": 6},
        {"max_tokens": 9},
    ],
    ids=["plain", "logprobs", "raw_logits", "penalties", "stop", "length"],
)
def test_fixed_keys_take_fewer_steps(checkpoint: Path, depth: int, more: dict[str, Any]) -> None:
    params = SamplingParams(**(HOT | {"structured_output": KEYS} | more))
    done, plain, fewer, skipped = both_ways(
        checkpoint, [f"one {i}" for i in range(3)], params, scheduler={"in_flight_depth": depth}
    )
    assert skipped > 0
    assert fewer < plain
    if params.logprobs is not None:
        for one in done:
            assert one.logprobs is not None
            assert [entry.token_id for entry in one.logprobs] == list(one.token_ids)


@pytest.mark.parametrize("depth", [1, 2])
def test_penalties_count_what_was_skipped(checkpoint: Path, depth: int) -> None:
    """The letter that is forced is one of two at the next place."""
    asked = SamplingParams(
        max_tokens=60,
        seed=1,
        structured_output={"regex": "(ÄÖ[ab]a){12}"},
        frequency_penalty=1.5,
        repetition_penalty=1.2,
    )
    done, *_, skipped = both_ways(checkpoint, ["x", "y"], asked, scheduler={"in_flight_depth": depth})
    assert skipped > 0
    assert all("b" in one.text and one.text.count("a") > one.text.count("b") for one in done)


@pytest.mark.row(ROW, "a span that could tokenize two ways is not skipped")
def test_two_spellings_are_the_models_choice(checkpoint: Path) -> None:
    """`the` is a token of its own and three letters: the model may write either."""
    asked = SamplingParams(**HOT, structured_output={"regex": "the the the the the"}, n=8)
    done, plain, fewer, skipped = both_ways(checkpoint, ["go"], asked)
    assert len({choice.token_ids for choice in done[0].choices}) > 1, "the same text in several spellings"
    assert {choice.text for choice in done[0].choices} == {"the the the the the"}
    assert (plain, skipped) == (fewer, 0)


@pytest.mark.parametrize("depth", [1, 2])
def test_beside_many_rows_runs_are_told_one_token_later(checkpoint: Path, depth: int) -> None:
    """A step does not wait for many masks: of runs that begin then one token less is skipped, and no answer differs."""
    asked = SamplingParams(max_tokens=90, seed=3, structured_output={"regex": "(ÄÖÜ[ab]){9}"})
    few, many = [f"{i}" for i in range(2)], [f"{i}" for i in range(2 * MAX_AWAITED)]
    sections = {"scheduler": {"in_flight_depth": depth, "max_num_seqs": len(many), "max_num_batched_tokens": 512}}
    awaited, *_, skipped_of_few = both_ways(checkpoint, few, asked, **sections)
    done, plain, fewer, skipped = both_ways(checkpoint, many, asked, **sections)
    assert [one.token_ids for one in done[:2]] == [one.token_ids for one in awaited]
    assert fewer < plain
    assert 0 < skipped / len(many) < skipped_of_few / len(few)


def test_preemption_and_neighbours_change_nothing(checkpoint: Path) -> None:
    asked = SamplingParams(**(HOT | {"max_tokens": 90}), structured_output={"regex": "((ÄÖ|[a-k])Ü~){20,60}!"})
    free = SamplingParams(max_tokens=30, seed=2)
    prompts = [f"prompt {i} " * 4 for i in range(8)]
    tight = {"num_blocks": 22, "watermark": 0.0}
    mixed = [asked if i % 3 else free for i in range(8)]
    done, *_, skipped = both_ways(checkpoint, prompts, mixed, cache=tight)
    assert skipped > 0
    assert sum(one.timings.num_preemptions for one in done if one.timings) > 0
    with serve(checkpoint) as engine:
        assert [one.token_ids for one in engine.generate_many(prompts, mixed)] == [one.token_ids for one in done]


@pytest.mark.parametrize("depth", [1, 2])
def test_captured_routes_are_the_same_rows(routed: Path, depth: int) -> None:
    params = SamplingParams(**HOT, structured_output=KEYS, return_routed_experts=True, logprobs=0, n=2)
    done, _, _, skipped = both_ways(
        routed,
        [f"longer than one block {i}" * 2 for i in range(3)],
        params,
        scheduler={"in_flight_depth": depth},
        capture={"routed_experts": True},
    )
    assert skipped > 0
    for choice in (choice for one in done for choice in one.choices):
        rows = choice.routed_experts
        assert rows is not None
        assert rows.error is None
        assert rows.start + rows.count == len(done[0].prompt_token_ids) + len(choice.token_ids) - 1


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"logprobs": 2, "logprobs_mode": "processed"}, None),
        ({"return_kept_set": True, "top_k": 5}, None),
        ({"allowed_token_ids": tuple(range(3, 200))}, "no token is left"),
        ({"bad_words": [":"]}, "no token is left"),
        ({"stop_token_ids": (COLON,), "min_tokens": 40}, "no token is left"),
        ({"stop_token_ids": (COLON,)}, None),
    ],
    ids=["processed", "kept", "allowed", "bad_words", "stop_id_too_early", "stop_id"],
)
def test_what_could_see_a_difference_is_computed_step_by_step(
    checkpoint: Path, more: dict[str, Any], word: str | None
) -> None:
    params = SamplingParams(**(HOT | {"structured_output": KEYS} | more))
    seen = []
    for skip in (False, True):
        with serve(checkpoint, structured_output={"skip_forced_tokens": skip}) as engine:
            try:
                seen.append(repr(facts(engine.generate("x", params).choices[0])))
            except SamplingError as error:
                seen.append(str(error))
            if "stop_token_ids" not in more:
                assert parts_of(engine).scheduler.stats.draft_tokens == 0
    assert seen[0] == seen[1]
    assert word is None or word in seen[0]
