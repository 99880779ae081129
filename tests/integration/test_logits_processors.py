"""Logits processors through the real engine: history with steps in flight and under preemption, failures, names over HTTP.
Random tiny Llama in fp32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest
from torch import Tensor

from infer import Engine, InvalidRequestError, NamedProcessor, SamplingError, SamplingParams
from infer.engine.blocking import BlockingEngine
from processor_samples import registered

from .engine_support import (
    ARCHITECTURES,
    VOCAB,
    Oracle,
    assert_nothing_held,
    engine_config,
    greedy,
    parts_of,
    prompt,
    serve,
    write_checkpoint,
)
from .live_server import live_server

ROW = "SAMPLE-CUSTOM-PROCESSORS"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), ARCHITECTURES["llama"])


@pytest.fixture
def engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BlockingEngine]:
    registered(monkeypatch)
    with serve(model) as engine:
        yield engine


def sampled(max_tokens: int = 24, **more: object) -> SamplingParams:
    return SamplingParams(**({"seed": 7, "max_tokens": max_tokens, "ignore_eos": True} | more))


@pytest.mark.row(
    ROW, "a per-request callable and a batch-level class both see exact token history, steps in flight or not"
)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_history_is_exact_also_after_preemption(model: Path, monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    registered(monkeypatch)
    prompts = [prompt(20 + 7 * i, seed=i) for i in range(6)]
    calls: list[list[Any]] = [[] for _ in prompts]
    batches: list[list[Any]] = [[] for _ in prompts]

    def watcher(place: int) -> Any:
        def watch(given: Sequence[int], output: Sequence[int], values: Tensor) -> None:
            calls[place].append((tuple(given), tuple(output)))

        return watch

    params = [
        sampled(40, logits_processors=[watcher(i), NamedProcessor(name="watches", params={"list": batches[i]})])
        for i in range(len(prompts))
    ]
    with serve(model, scheduler={"in_flight_depth": depth}, cache={"num_blocks": 17}) as engine:
        done = engine.generate_many(prompts, params)
        assert parts_of(engine).scheduler.stats.preemptions > 0
        assert_nothing_held(engine)
    with serve(model) as calm:
        assert [d.token_ids for d in done] == [d.token_ids for d in calm.generate_many(prompts, [sampled(40)] * 6)]
    for i, completion in enumerate(done):
        assert {len(output) for _, output in calls[i]} == set(range(40)), "asked for every token"
        for seen in (calls[i], [call[:2] for call in batches[i]]):
            assert all(given == tuple(prompts[i]) for given, _ in seen)
            assert all(output == completion.token_ids[: len(output)] for _, output in seen)
    assert max(size for batch in batches for *_, size in batch) > 1, "one call serves several requests"


@pytest.mark.row(ROW, "a processor that forces token t yields only t")
def test_forcing_one_token(engine: BlockingEngine) -> None:
    def only(given: Sequence[int], output: Sequence[int], values: Tensor) -> None:
        kept = values[44].item()
        values[:] = float("-inf")
        values[44] = kept

    for processor in (only, {"name": "forces", "params": {"token": 44}}):
        done = engine.generate(prompt(30), sampled(12, n=2, presence_penalty=2.0, logits_processors=processor))
        assert [choice.token_ids for choice in done.choices] == [(44,) * 12] * 2


@pytest.mark.row(ROW, "one that raises fails only its request")
@pytest.mark.parametrize("use", ["function", "plugin"])
def test_one_that_raises_fails_only_its_request(engine: BlockingEngine, use: str) -> None:
    def fails(given: Sequence[int], output: Sequence[int], values: Tensor) -> None:
        if len(output) == 3:
            raise ZeroDivisionError("planted")

    bad: Any = fails if use == "function" else {"name": "fails", "params": {"at": 3}}
    good: Any = (lambda *given: None) if use == "function" else {"name": "fails", "params": {"at": 100}}
    prompts = [prompt(25, seed=i) for i in range(4)]

    async def together() -> list[Any]:
        import anyio

        results: list[Any] = [None] * 4

        async def one(i: int) -> None:
            try:
                results[i] = await engine.engine.generate(
                    prompts[i], sampled(logits_processors=bad if i == 1 else good)
                )
            except SamplingError as error:
                results[i] = error

        async with anyio.create_task_group() as tasks:
            for i in range(4):
                tasks.start_soon(one, i)
        return results

    results = engine._portal.call(together)
    assert isinstance(results[1], SamplingError) and "planted" in str(results[1])
    for i in (0, 2, 3):
        assert results[i].token_ids == engine.generate(prompts[i], sampled()).token_ids
    assert_nothing_held(engine)


def test_no_repeat_ngram_is_that_of_transformers(model: Path, engine: BlockingEngine) -> None:
    import torch

    oracle = Oracle.random(ARCHITECTURES["llama"])
    changed = []
    for length, size in ((12, 1), (30, 2), (50, 2), (40, 3)):
        token_ids = prompt(length, seed=size)
        with torch.inference_mode():
            out = oracle.model.generate(
                torch.tensor([token_ids]),
                attention_mask=torch.ones(1, length, dtype=torch.long),
                max_new_tokens=200,
                do_sample=False,
                no_repeat_ngram_size=size,
            )
        processor = NamedProcessor(name="no_repeat_ngram", params={"size": size})
        done = engine.generate(token_ids, greedy(200, logits_processors=[processor]))
        assert list(done.token_ids) == out[0, length:].tolist()
        changed.append(done.token_ids != engine.generate(token_ids, greedy(200)).token_ids)
    assert sum(changed) >= 2, "it had something to do"


REFUSED: list[tuple[Any, str]] = [
    ("no_such", r"no logits_processor plugin 'no_such'; installed: .*no_repeat_ngram"),
    ("no_repeat_ngrm", "did you mean 'no_repeat_ngram'"),
    ({"name": "no_repeat_ngram", "params": {"size": 0}}, "size=0 is not a positive integer"),
    ({"name": "no_repeat_ngram", "params": {"size": 2, "window": 3}}, "not window"),
    ({"name": "no_repeat_ngram", "params": 3}, "logits_processors"),
    ({"name": "forces", "params": {"token": 9999}}, "token 9999 is not of this vocabulary"),
    ({"name": "forces"}, "refuses these parameters"),
    ({"params": {}}, "logits_processors"),
    ([5], "logits_processors"),
    (["no_repeat_ngram"] * 17, "logits_processors"),
]


@pytest.mark.parametrize(("value", "words"), REFUSED)
def test_what_cannot_apply_is_refused(engine: BlockingEngine, value: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as refused:
        engine.generate(prompt(5), SamplingParams(max_tokens=2, logits_processors=value))
    assert refused.value.parameter == "logits_processors"


@pytest.mark.row(ROW, "over HTTP by registered name only")
def test_over_http(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registered(monkeypatch)
    body = {"prompt": "The fox", "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
    with live_server(lambda config: Engine(engine_config(model, api=config.api.model_dump()))) as server:

        def ask(**more: Any) -> httpx2.Response:
            return httpx2.post(f"{server.url}/v1/completions", json=body | more, timeout=60)

        forces = {"name": "forces", "params": {"token": VOCAB - 1}}
        assert ask(logits_processors=[forces]).json()["choices"][0]["token_ids"] == [VOCAB - 1] * 6
        chat = httpx2.post(
            f"{server.url}/v1/chat/completions",
            json={
                "messages": [{"role": "user", "content": "a"}],
                "max_tokens": 3,
                "ignore_eos": True,
                "return_token_ids": True,
                "logits_processors": [forces],
            },
            timeout=60,
        )
        assert chat.json()["choices"][0]["token_ids"] == [VOCAB - 1] * 3
        for value in (
            "no_such",
            "builtins:eval",
            {"name": "os.system", "params": {"command": "true"}},
            {"function": "x"},
        ):
            reply = ask(logits_processors=value)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "logits_processors"), value
        reply = ask(logits_processors={"name": "no_repeat_ngram", "params": {"size": "2"}})
        assert reply.status_code == 400 and "size='2'" in reply.json()["error"]["message"]
        failed = ask(logits_processors={"name": "fails", "params": {"at": 1}})
        assert failed.status_code == 500 and "planted" in failed.json()["error"]["message"]
        assert ask().status_code == 200
