"""Sampling that cannot work is a 400 that names the fields as the route calls them; what only the logits show is the
failure of that request alone, and says so."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import anyio
import httpx2
import pytest

from api_server import MODEL, events, in_process, on_loopback
from infer.engine.step import SamplingSpec
from infer.testing.fake_engine import EOS

pytestmark = pytest.mark.anyio
CHAT, COMPLETIONS, GENERATE, SGLANG = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate", "/generate"


def endless(token_ids: Sequence[int], sampling: SamplingSpec) -> int:
    return 97


IMPOSSIBLE: dict[str, tuple[dict[str, Any], str]] = {
    "allowed and bad": ({"allowed_token_ids": [97], "bad_words": ["a"]}, "allowed_token_ids"),
    "bad after the prompt": ({"allowed_token_ids": [97], "bad_words": ["aa"]}, "allowed_token_ids"),
    "only the end, not yet": ({"allowed_token_ids": [EOS], "min_tokens": 1}, "allowed_token_ids"),
    "every token is a stop": ({"stop_token_ids": list(range(258)), "min_tokens": 1}, "min_tokens"),
    "a vanishing penalty": ({"repetition_penalty": 1e-40}, "repetition_penalty"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", IMPOSSIBLE)
async def test_impossible_mixes_are_refused_by_name(case: str, stream: bool) -> None:
    fields, parameter = IMPOSSIBLE[case]
    async with in_process(endless) as (client, server):
        for path, body, prefix in (
            (CHAT, {"messages": [{"role": "user", "content": "hi"}], **fields}, ""),
            (COMPLETIONS, {"prompt": "xa", **fields}, ""),
            (GENERATE, {"token_ids": [120, 97], "sampling_params": fields}, "sampling_params."),
        ):
            reply = await client.post(path, json={**body, "stream": stream})
            error = reply.json()["error"]
            assert (reply.status_code, error["param"]) == (400, prefix + parameter), (path, reply.text)
            assert error["type"] == "invalid_request_error"
            assert all(name in error["message"] for name in fields if name != "stop_token_ids"), error
        assert server.engine.statistics().steps == 0


async def test_sglang_names_it_as_its_own_field() -> None:
    fields = {"stop_token_ids": list(range(258)), "min_new_tokens": 1}
    async with in_process(endless) as (client, _):
        reply = await client.post(SGLANG, json={"input_ids": [1], "sampling_params": fields})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "sampling_params.min_new_tokens")


async def test_what_only_the_logits_show_fails_that_request_alone() -> None:
    """A row of the step has nothing left to sample; its neighbour goes on."""
    reason = "no token is left to sample after allowed_token_ids, bad_words and min_tokens"

    def row_error(token_ids: Sequence[int]) -> str | None:
        return reason if token_ids[0] == ord("b") and len(token_ids) > 3 else None

    async with (
        on_loopback(endless, latency=0.02) as server,
        httpx2.AsyncClient(base_url=server.address, timeout=30) as client,
    ):
        server.worker.row_error = row_error
        replies: dict[str, httpx2.Response] = {}

        async def one(name: str, **more: Any) -> None:
            body = {"model": MODEL, "prompt": name, "max_tokens": 8, **more}
            replies[name] = await client.post(COMPLETIONS, json=body)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one, "good")
            tasks.start_soon(one, "bad")
            tasks.start_soon(lambda: one("bad, streamed", stream=True))
    assert replies["good"].status_code == 200 and replies["good"].json()["usage"]["completion_tokens"] == 8
    error = replies["bad"].json()["error"]
    assert (replies["bad"].status_code, error["code"], error["type"]) == (500, "sampling_failed", "server_error")
    assert reason in error["message"]
    streamed = events(replies["bad, streamed"].text)
    assert streamed[-1] == "[DONE]" and json.loads(streamed[-2])["error"]["code"] == "sampling_failed"
