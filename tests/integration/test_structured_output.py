"""Constrained output on a real engine over random weights: at temperature 2 every finished output fits, whatever shares its
steps, at both depths, through preemption; and the table in docs/structured_output.md is what the campaign finds."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest

import schema_campaign
from infer import Completion, Engine, EngineConfig, SamplingParams
from infer.grammars.llguidance import LLGuidanceBackend
from integration.engine_support import LLAMA, engine_config, serve, write_checkpoint
from integration.test_docs_pages import load_tool
from schema_cases import accepted_cases

CORE = "TOOLS-STRUCTURED-CORE"
HOT = {"temperature": 2.0, "seed": 11}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("structured") / "llama", LLAMA)


def finished(done: list[Completion]) -> list[tuple[int, str]]:
    """(number of the request, text) of the choices that ended by themselves."""
    return [(i, c.text) for i, one in enumerate(done) for c in one.choices if c.finish_reason == "stop"]


@pytest.mark.row(CORE, "at temperature 2 from random weights every finished output validates for a few hundred schemas")
def test_every_finished_output_validates(checkpoint: Path) -> None:
    cases = accepted_cases()
    assert len(cases) > 200
    params = [
        # Closing brackets and quotes are made likelier: random weights would fill the context with one string.
        SamplingParams(
            max_tokens=150, structured_output={"json_schema": schema, "compact": True}, logit_bias=_closers(), **HOT
        )
        for _, schema, _ in cases
    ]
    with serve(
        checkpoint, scheduler={"max_num_seqs": 32, "max_num_batched_tokens": 256}, cache={"num_blocks": 1024}
    ) as engine:
        done = engine.generate_many([f"case {i}" for i in range(len(cases))], params)
    ended = finished(done)
    assert len(ended) > 0.7 * len(cases), f"only {len(ended)} of {len(cases)} came to an end"
    found = [problem for i, text in ended if (problem := schema_campaign.problem(cases[i][1], text))]
    assert found == []


def _closers() -> dict[int, float]:
    """Byte-level ids of `"`, `}` and `]` in the test tokenizer, whose alphabet begins at id 3 in the order of code points."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return {3 + alphabet.index(character): 4.0 for character in '"}]'}


def balanced(text: str) -> bool:
    depth = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if depth < 0 or character not in "()x":
            return False
    return depth == 0


LANGUAGES: list[tuple[dict[str, Any], Any]] = [
    ({"regex": r"[a-f]{3,9}(-\d{2}){1,3}"}, lambda text: re.fullmatch(r"[a-f]{3,9}(-\d{2}){1,3}", text)),
    ({"regex": r"(?i:yes|no)[.!]+"}, lambda text: re.fullmatch(r"(?i:yes|no)[.!]+", text)),
    ({"choice": ["alpha", "beta", "gamma delta", "é"]}, lambda text: text in ("alpha", "beta", "gamma delta", "é")),
    ({"grammar": 'start: part*\npart: "(" part* ")" | "x"'}, balanced),
    ({"grammar": 'root ::= part*\npart ::= "(" part* ")" | "x"'}, balanced),
    ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
]


@pytest.mark.row(CORE, "every finished output validates: re.fullmatch, own parser, json")
@pytest.mark.parametrize("depth", [1, 2])
def test_languages_among_free_requests(checkpoint: Path, depth: int) -> None:
    """Also: the free ones say what they say alone, and the depth changes nothing."""
    asked = [
        SamplingParams(max_tokens=60, n=3, structured_output=form, **HOT) for form, _ in LANGUAGES for _ in range(2)
    ]
    free = [SamplingParams(max_tokens=20, **HOT)] * 4
    with serve(checkpoint, scheduler={"in_flight_depth": depth, "max_num_seqs": 16}) as engine:
        alone = [engine.generate(f"free {i}", one).token_ids for i, one in enumerate(free)]
        prompts = [f"free {i}" for i in range(4)] + [f"form {i}" for i in range(len(asked))]
        done = engine.generate_many(prompts, [*free, *asked])
        again = engine.generate_many(prompts[4:], asked)
    assert [one.token_ids for one in done[:4]] == alone
    ended = finished(done[4:])
    assert len({i // 2 for i, _ in ended}) == len(LANGUAGES), "each language came to an end at least once"
    wrong = [text for i, text in ended if not LANGUAGES[i // 2][1](text)]
    assert wrong == []
    assert [[c.token_ids for c in one.choices] for one in done[4:]] == [
        [c.token_ids for c in one.choices] for one in again
    ]


def test_both_depths_and_preemption_give_the_same_tokens(checkpoint: Path) -> None:
    asked = SamplingParams(max_tokens=80, structured_output={"regex": "(ab|cd|[e-k]){20,60}!"}, **HOT)
    prompts = [f"prompt {i} " * 4 for i in range(8)]

    def run(**sections: Any) -> tuple[list[tuple[int, ...]], int]:
        with serve(checkpoint, **sections) as engine:
            done = engine.generate_many(prompts, asked)
        return [one.token_ids for one in done], sum(one.timings.num_preemptions for one in done if one.timings)

    plain, none = run(scheduler={"in_flight_depth": 1})
    ahead, _ = run(scheduler={"in_flight_depth": 2})
    tight, some = run(scheduler={"in_flight_depth": 2}, cache={"num_blocks": 22, "watermark": 0.0})
    assert (none, plain) == (0, ahead)
    assert some > 0
    assert tight == plain


def test_settings_that_leave_nothing_fail_alone(checkpoint: Path) -> None:
    from infer import SamplingError

    with serve(checkpoint) as engine:
        nothing = SamplingParams(max_tokens=5, allowed_token_ids=(5,), structured_output={"regex": "[xyz]+"}, **HOT)
        with pytest.raises(SamplingError, match="grammar"):
            engine.generate("a", nothing)
        held = SamplingParams(min_tokens=4, max_tokens=9, structured_output={"regex": "x+"}, **HOT)
        assert re.fullmatch("x{4,}", engine.generate("a", held).text)
        seen = {"logprobs": 3, "logprobs_mode": "processed", "structured_output": {"regex": "[xy]{3}"}}
        processed = SamplingParams(max_tokens=9, **seen, **HOT)
        done = engine.generate("a", processed)
        assert done.logprobs is not None
        assert all(0 < len(entry.top) <= 3 and entry.logprob <= 0 for entry in done.logprobs)
        assert len(engine.generate("a", SamplingParams(max_tokens=4, **HOT)).token_ids) == 4


@pytest.mark.anyio
async def test_no_thread_is_left_behind(checkpoint: Path) -> None:
    async with Engine(engine_config(checkpoint)) as engine:
        await engine.generate("a", SamplingParams(max_tokens=5, structured_output={"regex": "[a-z]{9}"}))
        assert any(thread.name.startswith("infer-masks") for thread in threading.enumerate())
    assert not any(thread.name.startswith("infer-masks") for thread in threading.enumerate())
    assert isinstance(engine.config, EngineConfig)


@pytest.fixture(scope="module")
def campaign() -> dict[str, schema_campaign.Row]:
    return schema_campaign.run(LLGuidanceBackend(schema_campaign.VOCABULARY))


@pytest.mark.row(CORE, "documents that a schema allows are acceptable to the mask, and nothing wrong is")
def test_the_campaign_finds_nothing_wrong(campaign: dict[str, schema_campaign.Row]) -> None:
    assert [complaint for row in campaign.values() for complaint in row.wrong] == []
    assert sum(row.accepted for row in campaign.values()) > 200
    assert sum(row.outputs for row in campaign.values()) > 800


def test_the_table_is_current(campaign: dict[str, schema_campaign.Row]) -> None:
    tool = load_tool("schema_table")
    page = tool.PAGE.read_text("utf-8")
    assert tool.replaced(page, schema_campaign.table(campaign)) == page, "run `make docs` and look at what changed"
