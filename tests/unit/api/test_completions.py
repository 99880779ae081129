"""Completions over a scripted engine: prompts in every form, echo, log-probabilities, best_of, streams, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import httpx2
import pytest

from api_server import HELLO, MODEL, Server, events, in_process
from infer.api.openai.completion_writer import best
from infer.engine.step import PositionLogprobs, SamplingSpec, StepPlan, StepResult
from infer.types import Choice, TokenLogprob

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"


def ask(prompt: Any = "ab", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, **more}


def chunks(reply: httpx2.Response) -> list[dict[str, Any]]:
    data = events(reply.text)
    assert data[-1] == "[DONE]", reply.text
    return [json.loads(event) for event in data[:-1]]


def refusal(reply: httpx2.Response) -> tuple[int, str | None]:
    return reply.status_code, reply.json()["error"]["param"]


async def test_a_reply_has_sixteen_tokens_unless_asked() -> None:
    async with in_process() as (client, _):
        body = (await client.post(PATH, json=ask())).json()
        null = (await client.post(PATH, json=ask(max_tokens=None))).json()
    [choice] = body["choices"]
    assert choice["text"] == HELLO.encode()[:16].decode("utf-8", "replace")
    assert choice["finish_reason"] == "length" and choice["index"] == 0 and choice["logprobs"] is None
    assert body["object"] == "text_completion" and body["usage"]["completion_tokens"] == 16
    assert null["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("prompt", "echoed"),
    [
        ("ab", ["ab"]),
        ([97, 98], ["ab"]),
        (["ab", "cde"], ["ab", "cde"]),
        ([[97], [98, 99]], ["a", "bc"]),
    ],
)
async def test_prompts_in_every_form_are_echoed(prompt: Any, echoed: list[str]) -> None:
    async with in_process() as (client, _):
        whole = (await client.post(PATH, json=ask(prompt, echo=True, max_tokens=5, n=2))).json()
        got = chunks(await client.post(PATH, json=ask(prompt, echo=True, max_tokens=5, n=2, stream=True)))
    texts = [choice["text"] for choice in whole["choices"]]
    assert texts == [text + HELLO[:5] for text in echoed for _ in range(2)]
    assert [choice["index"] for choice in whole["choices"]] == list(range(len(texts)))
    streamed = dict.fromkeys(range(len(texts)), "")
    for chunk in got:
        [choice] = chunk["choices"]
        streamed[choice["index"]] += choice["text"]
    assert list(streamed.values()) == texts
    assert whole["usage"]["prompt_tokens"] == sum(map(len, echoed))
    assert whole["usage"]["completion_tokens"] == 5 * len(texts)


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], [1, "a"], [-1], [2**40], {}, 7, [[1], "a"], [True], None])
async def test_prompts_that_are_none(prompt: Any) -> None:
    async with in_process() as (client, _):
        reply = await client.post(PATH, json=ask(prompt))
    assert refusal(reply) == (400, "prompt")


async def test_a_token_id_beyond_the_vocabulary_is_refused() -> None:
    async with in_process() as (client, _):
        assert refusal(await client.post(PATH, json=ask([1, 300]))) == (400, "prompt")


class Scored:
    """A worker whose log-probabilities are what a function makes of them."""

    def __init__(self, server: Server, score: Callable[[PositionLogprobs, int], PositionLogprobs]) -> None:
        self._inner = server.worker
        self._score = score
        server.engine._open_parts().executor.worker = self  # type: ignore[attr-defined]

    def execute(self, plan: StepPlan) -> StepResult:
        result = self._inner.execute(plan)
        slots = [*plan.slots, *(slot for _, slot in plan.forks)]
        for index, (slot, entries) in enumerate(zip(slots, result.logprobs, strict=True)):
            asked = self._inner._rows[slot].sampling.logprobs or 0
            if entries:
                result.logprobs[index] = [self._score(entry, asked) for entry in entries]
        return result

    def close(self) -> None:
        self._inner.close()


def with_alternatives(entry: PositionLogprobs, asked: int) -> PositionLogprobs:
    """Ids 65, 66, ... at -2, -3, ..."""
    return PositionLogprobs(entry.token_id, entry.logprob, entry.rank, tuple((65 + k, -2.0 - k) for k in range(asked)))


@pytest.mark.row("SERVE-OAI-BASIC", "behaviour case 58: none / 0 / 5 / 21 log-probabilities, streamed too")
@pytest.mark.parametrize("stream", [False, True])
async def test_numbers_of_alternatives(stream: bool) -> None:
    async with in_process() as (client, server):
        Scored(server, with_alternatives)
        found: dict[int | None, Any] = {}
        for count in (None, 0, 5):
            reply = await client.post(PATH, json=ask(logprobs=count, max_tokens=3, stream=stream))
            found[count] = joined(chunks(reply)) if stream else reply.json()["choices"][0]["logprobs"]
        refused = await client.post(PATH, json=ask(logprobs=21, stream=stream))
        after = await client.post(PATH, json=ask(max_tokens=3))
    assert found[None] is None
    assert [len(top) for top in found[0]["top_logprobs"]] == [1, 1, 1]
    assert [len(top) for top in found[5]["top_logprobs"]] == [6, 6, 6]
    assert found[5]["tokens"] == ["H", "e", "l"] and found[5]["text_offset"] == [0, 1, 2]
    assert list(found[5]["top_logprobs"][0]) == ["A", "B", "C", "D", "E", "H"]
    assert refusal(refused) == (400, "logprobs")
    assert after.status_code == 200


def joined(got: list[dict[str, Any]]) -> dict[str, list[Any]] | None:
    total: dict[str, list[Any]] = {}
    for chunk in got:
        for choice in chunk["choices"]:
            for name, values in (choice["logprobs"] or {}).items():
                total.setdefault(name, []).extend(values)
    return total or None


@pytest.mark.row("SERVE-COMPLETION-LONGTAIL", "echo returns the prompt and its logprobs, streamed too")
async def test_echo_with_logprobs_begins_with_the_prompts() -> None:
    body = ask("abc", echo=True, logprobs=0, max_tokens=2)
    async with in_process() as (client, _):
        choice = (await client.post(PATH, json=body)).json()["choices"][0]
        got = chunks(await client.post(PATH, json={**body, "stream": True}))
    assert choice["text"] == "abcHe"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c", "H", "e"],
        "token_logprobs": [None, -1.0, -1.0, -1.0, -1.0],
        "top_logprobs": [None, {"b": -1.0}, {"c": -1.0}, {"H": -1.0}, {"e": -1.0}],
        "text_offset": [0, 1, 2, 3, 4],
    }
    assert joined(got) == choice["logprobs"]
    assert "prompt_logprobs" not in choice


@pytest.mark.row("SERVE-COMPLETION-LONGTAIL", "a prompt is scored with echo and max_tokens 0")
@pytest.mark.parametrize("stream", [False, True])
async def test_scoring_without_output(stream: bool) -> None:
    body = ask("abc", echo=True, logprobs=0, max_tokens=0, stream=stream)
    async with in_process() as (client, _):
        reply = await client.post(PATH, json=body)
        alone = await client.post(PATH, json=ask(max_tokens=0))
    assert refusal(alone) == (400, "max_tokens")
    if stream:
        got = chunks(reply)
        assert "".join(chunk["choices"][0]["text"] for chunk in got) == "abc"
        assert got[-1]["choices"][0]["finish_reason"] == "length"
        assert joined(got) is not None and joined(got)["tokens"] == ["a", "b", "c"]  # type: ignore[index]
    else:
        choice = reply.json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
        assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
        assert reply.json()["usage"]["completion_tokens"] == 0


@pytest.mark.row("SERVE-OAI-BASIC", "behaviour case 59: truncation to 4 of 8 ids, right keeps the first, left the last")
async def test_truncation() -> None:
    async with in_process() as (client, _):
        for side, kept in (("right", [1, 2, 3, 4]), ("left", [5, 6, 7, 8])):
            body = ask([1, 2, 3, 4, 5, 6, 7, 8], truncate_prompt_tokens=4, truncation_side=side, return_token_ids=True)
            assert (await client.post(PATH, json=body)).json()["choices"][0]["prompt_token_ids"] == kept
        fit = ask([1] * 3000, truncate_prompt_tokens=-1, max_tokens=8)
        usage = (await client.post(PATH, json=fit)).json()["usage"]
        for wrong in (0, -2):
            refused = await client.post(PATH, json=ask(truncate_prompt_tokens=wrong))
            assert refusal(refused) == (400, "truncate_prompt_tokens")
    assert usage["prompt_tokens"] == 2048 - 8


@pytest.mark.row("SERVE-OAI-BASIC", "behaviour case 60: prompt logprobs -1 are refused; every choice carries its own")
async def test_prompt_logprobs_of_two_prompts() -> None:
    async with in_process() as (client, _):
        refused = await client.post(PATH, json=ask(prompt_logprobs=-1))
        for count in (0, 1):
            reply = await client.post(PATH, json=ask(["ab", "cde"], prompt_logprobs=count, max_tokens=1))
            found = [choice["prompt_logprobs"] for choice in reply.json()["choices"]]
            assert [len(entries) for entries in found] == [2, 3]
            assert all(entries[0] is None and entries[1] for entries in found)
        got = chunks(await client.post(PATH, json=ask(["ab", "cde"], prompt_logprobs=0, max_tokens=2, stream=True)))
    told = {c["choices"][0]["index"]: c["choices"][0].get("prompt_logprobs") for c in reversed(got)}
    assert refusal(refused) == (400, "prompt_logprobs")
    assert [len(told[index]) for index in (0, 1)] == [2, 3]


async def test_token_ids_come_back_whole_and_in_pieces() -> None:
    body = ask([97, 98], return_token_ids=True, max_tokens=40, logprobs=0)
    async with in_process() as (client, _):
        choice = (await client.post(PATH, json=body)).json()["choices"][0]
        got = [chunk["choices"][0] for chunk in chunks(await client.post(PATH, json={**body, "stream": True}))]
    assert choice["prompt_token_ids"] == [97, 98]
    assert bytes(choice["token_ids"][:-1]).decode() == HELLO
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])
    assert [i for piece in got for i in piece["token_ids"]] == choice["token_ids"]
    assert [piece["prompt_token_ids"] for piece in got if "prompt_token_ids" in piece] == [[97, 98]]


@pytest.mark.row("SERVE-OAI-BASIC", "behaviour case 61: same text, one finish reason, on the last chunk")
async def test_five_greedy_tokens_streamed_and_not() -> None:
    body = ask(max_tokens=5, temperature=0)
    async with in_process() as (client, _):
        whole = (await client.post(PATH, json=body)).json()["choices"][0]
        got = [chunk["choices"][0] for chunk in chunks(await client.post(PATH, json={**body, "stream": True}))]
    assert "".join(piece["text"] for piece in got) == whole["text"]
    assert [index for index, piece in enumerate(got) if piece["finish_reason"]] == [len(got) - 1]


@pytest.mark.row("SERVE-STREAM-USAGE", "usage of several prompts is that of the whole call")
async def test_stream_usage_of_several_prompts() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = ask(["ab", "cde"], max_tokens=4, n=2, stream=True, stream_options=options)
    async with in_process() as (client, _):
        got = chunks(await client.post(PATH, json=body))
    counts = [chunk["usage"]["completion_tokens"] for chunk in got]
    assert counts == sorted(counts)
    assert got[-1]["choices"] == []
    assert got[-1]["usage"]["prompt_tokens"] == 5 and got[-1]["usage"]["completion_tokens"] == 16


def loglike(token_ids: Sequence[int], sampling: SamplingSpec) -> int:
    """One letter by seed, then EOS."""
    return 257 if token_ids[-1] != 120 else 97 + sampling.seed % 26


def by_letter(entry: PositionLogprobs, asked: int) -> PositionLogprobs:
    """A token's log-probability is minus its place in a list by likelihood."""
    place = {ord(letter): float(index) for index, letter in enumerate("cadb")}
    return PositionLogprobs(entry.token_id, -place.get(entry.token_id, 0.0) - 0.5, 1)


@pytest.mark.row("SAMPLE-BEST-OF", "the top n by summed logprob; best_of equal to n changes nothing; less is refused")
async def test_best_of_returns_the_likeliest() -> None:
    async with in_process(loglike) as (client, server):
        Scored(server, by_letter)
        best_two = (await client.post(PATH, json=ask("x", seed=0, n=2, best_of=4))).json()
        same = (await client.post(PATH, json=ask("x", seed=0, n=4, best_of=4))).json()
        plain = (await client.post(PATH, json=ask("x", seed=0, n=4))).json()
        shown = (await client.post(PATH, json=ask("x", seed=0, n=1, best_of=4, logprobs=0))).json()
        fewer = await client.post(PATH, json=ask("x", n=3, best_of=2))
        streamed = await client.post(PATH, json=ask("x", n=1, best_of=2, stream=True))
        not_streamed_apart = await client.post(PATH, json=ask("x", n=2, best_of=2, stream=True))
    assert [choice["text"] for choice in best_two["choices"]] == ["c", "a"]
    assert [choice["index"] for choice in best_two["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in best_two["choices"])
    assert best_two["usage"]["completion_tokens"] == 8  # what was dropped was generated too
    assert [choice["text"] for choice in same["choices"]] == [choice["text"] for choice in plain["choices"]]
    assert [choice["text"] for choice in plain["choices"]] == ["a", "b", "c", "d"]
    assert shown["choices"][0]["logprobs"]["token_logprobs"] == [-0.5, -0.5]
    assert refusal(fewer) == (400, "best_of") and refusal(streamed) == (400, "best_of")
    assert not_streamed_apart.status_code == 200


@pytest.mark.row("SAMPLE-BEST-OF", "greedy best_of above 1: equal choices, the first of them are returned")
async def test_greedy_best_of() -> None:
    async with in_process() as (client, _):
        reply = (await client.post(PATH, json=ask(temperature=0, n=2, best_of=3, max_tokens=4))).json()
    assert [choice["text"] for choice in reply["choices"]] == [HELLO[:4]] * 2


def test_ranking_sums_over_tokens_and_keeps_the_order_of_equals() -> None:
    def choice(index: int, *values: float) -> Choice:
        entries = tuple(TokenLogprob(1, value, 1) for value in values)
        return Choice(index, "", (1,) * len(values), "stop", logprobs=entries)

    long, short, equal = choice(0, -0.4, -0.4, -0.4), choice(1, -1.0), choice(2, -0.5, -0.5)
    assert [c.index for c in best([long, short, equal], 2)] == [1, 2]
    assert [c.index for c in best([long, short, equal], 3)] == [0, 1, 2]


@pytest.mark.row("SERVE-COMPLETION-LONGTAIL", "suffix answers a clear 400; a misspelled field is rejected")
@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"max_tokns": 4}, "max_tokns"),
        ({"best_of": 0}, "best_of"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"min_tokens": 99}, "min_tokens"),
        ({"echo": 1}, "echo"),
        ({"n": 1025}, "n"),
        ({"messages": []}, "messages"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
async def test_refusals_name_the_field(body: dict[str, Any], parameter: str) -> None:
    async with in_process() as (client, _):
        reply = await client.post(PATH, json=ask(**body))
    assert refusal(reply) == (400, parameter), reply.text


async def test_one_refused_prompt_refuses_the_call_and_leaves_nothing_running() -> None:
    async with in_process() as (client, server):
        reply = await client.post(PATH, json=ask([[97]] * 5 + [[97] * 3000]))
        assert refusal(reply) == (400, "prompt")
        assert (await client.post(PATH, json=ask())).status_code == 200
        assert server.engine.statistics().running == 0
