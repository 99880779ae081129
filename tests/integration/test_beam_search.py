"""Beam search through the real engine: against transformers at penalty 0, against an independent search at other penalties,
over HTTP, with its cost, its refusals and its end. Random tiny Llama in fp32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
import torch

from infer import BeamSearch, Completion, ContextLengthError, Engine, InvalidRequestError, SamplingParams
from infer.artifacts import ArtifactRequest, SinkTarget
from infer.engine.blocking import BlockingEngine

from .engine_support import (
    ARCHITECTURES,
    VOCAB,
    Oracle,
    assert_nothing_held,
    engine_config,
    greedy,
    prompt,
    record,
    serve,
    write_checkpoint,
)
from .live_server import live_server

ROW = "SAMPLE-BEAM"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), ARCHITECTURES["llama"])


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle.random(ARCHITECTURES["llama"])


@pytest.fixture
def engine(model: Path) -> Iterator[BlockingEngine]:
    with serve(model) as engine:
        yield engine


def beams(width: int, max_tokens: int, penalty: float = 1.0, **more: Any) -> SamplingParams:
    values = {"n": width, "ignore_eos": True, "max_tokens": max_tokens} | more
    return SamplingParams(beam=BeamSearch(width=width, length_penalty=penalty), **values)


def likely_ends(oracle: Oracle, token_ids: Sequence[int]) -> list[int]:
    """Ids that good answers soon come to, so that ending them early has its chance."""
    best = oracle.greedy(token_ids, 6).token_ids
    second = oracle.logits([*token_ids, *best[:2]])[-1].topk(3).indices.tolist()
    return [best[3], next(token for token in second if token not in best[:3])]


def found(done: Completion) -> list[tuple[int, ...]]:
    return [choice.token_ids for choice in done.choices]


@pytest.mark.row(ROW, "equals transformers at penalty 0")
@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_transformers_at_penalty_0(engine: BlockingEngine, oracle: Oracle, width: int) -> None:
    ended = 0
    for seed in range(6):
        token_ids = prompt(23, seed=seed)
        ends = likely_ends(oracle, token_ids)
        with torch.inference_mode():
            out = oracle.model.generate(
                torch.tensor([token_ids]),
                attention_mask=torch.ones(1, len(token_ids), dtype=torch.long),
                max_new_tokens=12,
                do_sample=False,
                num_beams=width,
                num_return_sequences=width,
                length_penalty=0.0,
                early_stopping=False,
                eos_token_id=ends,
                pad_token_id=0,
                output_scores=True,
                return_dict_in_generate=True,
            )
        expected = []
        for row in out.sequences[:, len(token_ids) :].tolist():
            end = next((place for place, token in enumerate(row) if token in ends), len(row) - 1)
            expected.append(tuple(row[: end + 1]))
        done = engine.generate(token_ids, beams(width, 12, 0.0, stop_token_ids=ends))
        assert found(done) == expected
        reasons = [choice.finish_reason for choice in done.choices]
        assert reasons == ["stop" if output[-1] in ends else "length" for output in expected]
        if width > 1:
            scores = [choice.beam_score for choice in done.choices]
            assert scores == pytest.approx(out.sequences_scores.tolist(), abs=1e-4)
        ended += reasons.count("stop")
    assert ended >= 2, "some answers must have ended before the last token"


def search(
    oracle: Oracle, token_ids: Sequence[int], width: int, penalty: float, max_tokens: int, ends: Sequence[int]
) -> list[tuple[tuple[int, ...], float]]:
    """The naive search over transformers' log-probabilities, summed in double precision."""

    def score(output: tuple[int, ...], total: float) -> float:
        seq_len = len(token_ids) + len(output) - (output[-1] in ends)
        return float(total / seq_len**penalty)

    running: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    finished: list[tuple[tuple[int, ...], float]] = []
    for _ in range(max_tokens):
        grown = []
        for output, total in running:
            values = oracle.log_probs([*token_ids, *output])[-1].double().tolist()
            grown += [((*output, token), total + value) for token, value in enumerate(values)]
        grown.sort(key=lambda one: -one[1])
        finished += [one for one in grown[:width] if one[0][-1] in ends]
        running = [one for one in grown if one[0][-1] not in ends][:width]
    ranked = sorted(finished + running, key=lambda one: -score(*one))[:width]
    return [(output, score(output, total)) for output, total in ranked]


@pytest.mark.row(ROW, "equals an independent implementation of cum_logprob / seq_len^length_penalty, for widths 1 to 4")
@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("penalty", [0.5, 1.0, 2.0])
def test_an_independent_search(engine: BlockingEngine, oracle: Oracle, width: int, penalty: float) -> None:
    token_ids = prompt(9, seed=width)
    ends = likely_ends(oracle, token_ids)
    expected = search(oracle, token_ids, width, penalty, 10, ends)
    done = engine.generate(token_ids, beams(width, 10, penalty, stop_token_ids=ends, logprobs=2))
    assert found(done) == [output for output, _ in expected]
    assert [choice.beam_score for choice in done.choices] == pytest.approx([score for _, score in expected], abs=1e-4)
    for choice in done.choices:
        assert choice.logprobs is not None
        log_probs = oracle.log_probs([*token_ids, *choice.token_ids])[len(token_ids) - 1 : -1]
        for entry, values in zip(choice.logprobs, log_probs, strict=True):
            assert entry.logprob == pytest.approx(values[entry.token_id].item(), abs=1e-4)
            assert entry.rank == int((values > values[entry.token_id]).sum()) + 1
            assert [token for token, _ in entry.top] == values.topk(2).indices.tolist()


def test_one_beam_is_greedy_and_only_the_asked_number_is_returned(engine: BlockingEngine) -> None:
    token_ids = prompt(30)
    plain = engine.generate(token_ids, greedy(10))
    done = engine.generate(token_ids, beams(1, 10))
    assert (done.token_ids, done.text, done.finish_reason) == (plain.token_ids, plain.text, "length")
    assert done.usage.prompt_tokens == 30 and done.usage.output_tokens == 10
    wide, best = engine.generate(token_ids, beams(4, 10)), engine.generate(token_ids, beams(4, 10, n=1))
    assert found(best) == found(wide)[:1] and len(wide.choices) == 4
    assert [choice.index for choice in wide.choices] == [0, 1, 2, 3]
    scores = [choice.beam_score for choice in wide.choices]
    assert scores == sorted(scores, reverse=True)  # type: ignore[type-var]
    assert done.timings is not None and done.timings.first_token is not None
    assert done.timings.total >= done.timings.first_token >= done.timings.queued


@pytest.mark.parametrize(
    "shaping",
    [
        {"allowed_token_ids": tuple(range(10, 60))},
        {"logit_bias": {40: 3.0, 41: 5.0}},
        {"repetition_penalty": 1.8},
        {"bad_words": ("the", "e")},
    ],
    ids=lambda shaping: next(iter(shaping)),
)
def test_what_shapes_a_token_shapes_the_search(engine: BlockingEngine, shaping: dict[str, Any]) -> None:
    """With one beam it is greedy under the same shaping; with more, every answer keeps to it."""
    token_ids = prompt(20, seed=4)
    assert found(engine.generate(token_ids, beams(1, 8, **shaping))) == [
        engine.generate(token_ids, greedy(8, **shaping)).token_ids
    ]
    wide = engine.generate(token_ids, beams(3, 8, **shaping))
    if "allowed_token_ids" in shaping:
        assert {token for output in found(wide) for token in output} <= set(shaping["allowed_token_ids"])
    elif "bad_words" not in shaping:  # which these answers may not have anyway
        assert found(wide) != found(engine.generate(token_ids, beams(3, 8)))


@pytest.mark.row(ROW, "the prefix cache makes it cheap")
def test_a_step_computes_the_last_block_of_each_beam_only(model: Path) -> None:
    token_ids, width, steps = prompt(320), 4, 20
    tokens = {}
    for caching in (True, False):
        with serve(model, cache={"prefix_caching": caching}) as engine:
            trace = record(engine)
            tokens[caching] = found(engine.generate(token_ids, beams(width, steps))), trace.num_tokens
            assert_nothing_held(engine)
    assert tokens[True][0] == tokens[False][0]
    assert tokens[False][1] > width * (steps - 1) * 320
    assert tokens[True][1] <= 320 + width * (steps - 1) * 17


@pytest.mark.row(ROW, "cancellation, abort and deadline end all beams")
@pytest.mark.parametrize("how", ["cancel", "abort", "deadline"])
def test_its_end_is_the_end_of_all_its_beams(engine: BlockingEngine, how: str) -> None:
    inner = engine.engine
    params = beams(4, 400)

    async def run() -> Completion | None:
        result: list[Completion] = []

        async def generate() -> None:
            deadline = 0.3 if how == "deadline" else None
            result.append(await inner.generate(prompt(40), params, request_id="mine", deadline=deadline))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generate)
            with anyio.fail_after(60):
                while "mine/3" not in inner.request_ids and not result:
                    await anyio.lowlevel.checkpoint()
            assert "mine" in inner.request_ids or how == "deadline"
            if how == "cancel":
                tasks.cancel_scope.cancel()
            elif how == "abort":
                assert inner.abort("mine")
        with anyio.fail_after(60):
            while inner.statistics().running or inner.statistics().waiting:  # noqa: ASYNC110 - its own state
                await anyio.sleep(0.01)
        assert inner.request_ids == () and not inner.abort("mine")
        return result[0] if result else None

    done = engine._portal.call(run)
    assert_nothing_held(engine)
    if how == "cancel":
        assert done is None
    else:
        assert done is not None and {choice.finish_reason for choice in done.choices} == {how}
        lengths = {len(choice.token_ids) for choice in done.choices}
        assert len(lengths) == 1 and max(lengths) < 400
    assert engine.generate(prompt(40), beams(2, 5)).finish_reason == "length"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0.7}, "temperature"),
    ({"top_p": 0.9}, "top_p"),
    ({"stop": ["x"]}, "stop"),
    ({"presence_penalty": 1.0}, "presence_penalty"),
    ({"min_tokens": 2}, "min_tokens"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"logits_processors": ["no_repeat_ngram"]}, "logits_processors"),
    ({"repetition_detection": {"max_pattern_size": 2, "min_count": 2}}, "repetition_detection"),
    ({"return_routed_experts": True}, "return_routed_experts"),
    ({"n": 5}, "n"),
    ({"beam": {"width": 0}}, "beam"),
    ({"beam": {"width": 65}}, "beam"),
    ({"beam": {"width": 2, "length_penalty": float("nan")}}, "beam"),
    ({"beam": {"length_penalty": 1.0}}, "beam"),
]


@pytest.mark.parametrize(("values", "parameter"), REFUSED)
def test_what_does_not_apply_is_refused_by_name(values: dict[str, Any], parameter: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        SamplingParams(**({"beam": BeamSearch(width=4)} | values))
    assert refused.value.parameter == parameter


def test_what_asks_for_nothing_passes_and_what_cannot_be_is_refused(engine: BlockingEngine) -> None:
    assert SamplingParams(beam=BeamSearch(width=2), temperature=0, top_p=1.0, stop=(), seed=3).beam is not None
    with pytest.raises(InvalidRequestError, match="cannot be streamed"):
        for _ in engine.stream(prompt(5), beams(2, 3)):
            pass

    async def sink(data: bytes) -> str:
        return "never"

    with pytest.raises(InvalidRequestError, match="artifact is not available with beam search"):
        engine.generate(prompt(5), beams(2, 3), artifact=ArtifactRequest(target=SinkTarget(sink)))
    with pytest.raises(ContextLengthError):
        engine.generate(prompt(600), beams(2, 100))
    with pytest.raises(InvalidRequestError, match="stop_token_ids"):
        engine.generate(prompt(5), beams(2, 3, stop_token_ids=[VOCAB]))
    assert_nothing_held(engine)


@pytest.mark.row(ROW, "both drivers agree: in process and over HTTP")
def test_over_http(model: Path, engine: BlockingEngine) -> None:
    with live_server(lambda config: Engine(engine_config(model, api=config.api.model_dump()))) as server:

        def ask(path: str, **body: Any) -> httpx2.Response:
            return httpx2.post(f"{server.url}{path}", json=body, timeout=60)

        base: dict[str, Any] = {"use_beam_search": True, "max_tokens": 9, "ignore_eos": True, "return_token_ids": True}
        for width in (1, 2, 3, 4):
            reply = ask("/v1/completions", **base, prompt="The quick fox", n=width, length_penalty=0.7).json()
            done = engine.generate("The quick fox", beams(width, 9, 0.7))
            assert [tuple(choice["token_ids"]) for choice in reply["choices"]] == found(done)
            assert [choice["text"] for choice in reply["choices"]] == [choice.text for choice in done.choices]
        messages = [{"role": "user", "content": "The dog"}]
        reply = ask("/v1/chat/completions", **base, messages=messages, beam_width=4, n=2, temperature=0).json()
        done = engine.generate(messages, beams(4, 9, n=2))
        assert [tuple(choice["token_ids"]) for choice in reply["choices"]] == found(done)
        for more, parameter in (
            ({"stream": True}, "stream"),
            ({"temperature": 0.5}, "temperature"),
            ({"beam_width": 2, "n": 3}, "n"),
            ({"best_of": 3}, "best_of"),
            ({"n": 65}, "n"),
            ({"n": "two"}, "n"),
            ({"beam_width": 0}, "beam_width"),
            ({"length_penalty": 99}, "length_penalty"),
            ({"use_beam_search": False, "beam_width": 2}, "beam_width"),
            ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
        ):
            refused = ask("/v1/completions", **(base | {"prompt": "a"} | more))
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, parameter), more
