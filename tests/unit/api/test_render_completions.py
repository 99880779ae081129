"""Completions rendered for the token route: running what was rendered gives what `/v1/completions` gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from api_server import MODEL, in_process
from infer.config.model import GenerationDefaults
from infer.engine.step import SamplingSpec

pytestmark = pytest.mark.anyio
COMPLETIONS, GENERATE = "/v1/completions", "/inference/v1/generate"


def letters(token_ids: Sequence[int], sampling: SamplingSpec) -> int:
    return 97 + (len(token_ids) * 7 + sampling.seed) % 26


SCRIPT: dict[str, dict[str, Any]] = {
    "a text": {"prompt": "hi", "seed": 3},
    "several texts": {"prompt": ["a", "bc"], "seed": 3, "max_tokens": 5, "stop": ["q"]},
    "ids": {"prompt": [104, 105], "seed": 3},
    "several lists of ids, cut": {"prompt": [[1, 2, 3], [4, 5]], "seed": 1, "truncate_prompt_tokens": 2},
    "several choices": {"prompt": "a", "n": 3, "seed": 5, "logprobs": 2, "cache_salt": "mine", "priority": 0},
}


@pytest.mark.row("X-RENDER", "rendered completions, run by the token route, are those of the completions endpoint")
@pytest.mark.parametrize("case", SCRIPT)
async def test_what_was_rendered_runs_as_the_whole(case: str) -> None:
    asked = SCRIPT[case]
    async with in_process(letters, generation=GenerationDefaults(values={"temperature": 0.25})) as (client, _):
        whole = (await client.post(COMPLETIONS, json={**asked, "return_token_ids": True})).json()
        rendered = (await client.post(f"{COMPLETIONS}/render", json=asked)).json()
        choices = []
        for body in rendered:
            reply = await client.post(GENERATE, json={**body, "return_token_ids": True})
            assert reply.status_code == 200, reply.text
            found = reply.json()
            choices += [{**choice, "prompt_token_ids": found["prompt_token_ids"]} for choice in found["choices"]]
    same = ("token_ids", "prompt_token_ids", "finish_reason", "stop_reason", "seed")
    assert [[choice[name] for name in same] for choice in choices] == [
        [choice[name] for name in same] for choice in whole["choices"]
    ]


async def test_what_a_rendered_prompt_looks_like() -> None:
    body = {"prompt": ["a", "bc"], "temperature": 0.5, "deadline": 9.0, "cache_salt": "mine"}
    async with in_process(letters, generation=GenerationDefaults(values={"top_p": 0.5})) as (client, server):
        rendered = (await client.post(f"{COMPLETIONS}/render", json=body, headers={"x-request-id": "r"})).json()
        assert server.engine.statistics().steps == 0
    assert rendered == [
        {
            "request_id": f"cmpl-r-{index}",
            "model": MODEL,
            "prompt_text": text,
            "token_ids": list(text.encode()),
            "sampling_params": {"max_tokens": 16, "temperature": 0.5, "top_p": 0.5},
            "priority": 0,
            "cache_salt": "mine",
            "deadline": 9.0,
        }
        for index, text in enumerate(("a", "bc"))
    ]


async def test_render_refuses_what_completions_refuses_and_best_of() -> None:
    async with in_process() as (client, _):
        for body, parameter in (({}, "prompt"), ({"prompt": "a", "n": 2, "best_of": 1}, "best_of")):
            replies = [await client.post(path, json=body) for path in (COMPLETIONS, f"{COMPLETIONS}/render")]
            assert replies[0].json() == replies[1].json()
            assert replies[1].json()["error"]["param"] == parameter
        ranked = await client.post(f"{COMPLETIONS}/render", json={"prompt": "a", "best_of": 3})
    assert ranked.status_code == 400 and ranked.json()["error"]["param"] == "best_of"
