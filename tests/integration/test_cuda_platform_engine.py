"""An engine on the platform "cuda" over a GPU that is not there: the same tokens as on the reference platform, and every use of
streams, events, page-locked memory and graphs in an order that a real GPU needs."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from fakes.cuda_device import FakeDevice, FakeMemory
from fakes.cuda_table import table_of
from infer import Completion, SamplingParams
from infer.backends.cuda import cuda_platform, platform
from infer.plugins.platform import Probe
from integration.engine_support import ARCHITECTURES, serve, write_checkpoint
from integration.test_route_scenarios import MOE

Fakes = list[FakeDevice]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    """The devices of the platforms that are made from now on. Results are late or not as a coin says."""
    made: Fakes = []
    coin = random.Random(7)

    def create(threads: int | None = None, numerics: str = "auto") -> cuda_platform.CudaPlatform:
        device = FakeDevice(lambda: coin.random() < 0.5)
        made.append(device)
        return cuda_platform.CudaPlatform(device, invariant=numerics == "invariant", table=table_of(device))

    monkeypatch.setattr(cuda_platform, "create", create)
    monkeypatch.setattr(platform, "probe", lambda: Probe(True))
    return made


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("gemma3"), ARCHITECTURES["gemma3"])


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("moe"), MOE)


def params(k: int, **more: Any) -> SamplingParams:
    """Greedy and drawn rows, with and without log-probabilities; one that needs the host in every step."""
    return SamplingParams(
        max_tokens=4 + 3 * k,
        temperature=0.8 if k % 2 else 0.0,
        top_p=0.9,
        top_k=20 if k == 3 else 0,
        seed=k,
        logprobs=(0, None, 3)[k % 3],
        logprob_token_ids=(5, 9) if k == 3 else (),
        prompt_logprobs=1 if k == 5 else None,
        frequency_penalty=0.5 if k == 4 else 0.0,
        ignore_eos=True,
        **more,
    )


def generate(path: Path, name: str, *, graphs: bool = True, depth: int = 2, **sections: Any) -> list[Any]:
    """Prompts longer than a step, more requests than blocks: chunks, preemption, decode steps of every size."""
    more = {"return_routed_experts": True} if "capture" in sections else {}
    prompts = [[3 + k, 4, 5, 6 + k] * (k + 1) for k in range(6)]
    with serve(
        path,
        platform={"name": name, "graphs": graphs},
        cache={"num_blocks": 22, "block_size": 4},
        scheduler={"max_num_seqs": 6, "max_num_batched_tokens": 16, "in_flight_depth": depth},
        **sections,
    ) as engine:
        done = engine.generate_many(prompts, [params(k, **more) for k in range(6)])
        return [facts(one) for one in done]


def facts(done: Completion) -> tuple[Any, ...]:
    """Numbers last."""
    entries = [entry for entry in (*(done.logprobs or ()), *(done.prompt_logprobs or ())) if entry is not None]
    rows = done.choices[0].routed_experts
    return (
        done.token_ids,
        [(entry.token_id, entry.rank, [token_id for token_id, _ in entry.top]) for entry in entries],
        None if rows is None else rows.data,
        [value for entry in entries for value in (entry.logprob, *entry.candidates)],
    )


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert [one[:-1] for one in found] == [one[:-1] for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one[-1] == pytest.approx(other[-1], abs=1e-4)


def check(device: FakeDevice) -> None:
    device.check()
    assert device.memory.num_pinned < 32, "page-locked buffers are not used again"


@pytest.mark.row("ENG-ASYNC-SCHED", "identical tokens with it on and off")
@pytest.mark.row("ENG-CUDAGRAPH", "graphed and eager greedy tokens are identical, replay count is above zero")
def test_tokens_are_those_of_the_reference(dense: Path, fakes: Fakes) -> None:
    expected = generate(dense, "reference", depth=1)
    for graphs, depth in ((True, 2), (False, 2), (True, 1)):
        assert_same(generate(dense, "cuda", graphs=graphs, depth=depth), expected)
        check(fakes[-1])
        assert (fakes[-1].num_replays > 0) == graphs


@pytest.mark.row("ENG-ASYNC-SCHED", "identical tokens with it on and off")
def test_captured_rows_are_those_of_the_reference(
    moe: Path, fakes: Fakes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows cross with the tokens: they wait for nothing, and nothing waits for them. A step that took more memory than was
    planned is told of."""
    taken = itertools.count(1)
    monkeypatch.setattr(FakeMemory, "in_use", lambda memory: next(taken) << 30)
    capture = {"capture": {"routed_experts": True}}
    expected = generate(moe, "reference", depth=1, **capture)
    assert all(one[2] for one in expected)
    assert_same(generate(moe, "cuda", **capture), expected)
    check(fakes[-1])
    assert fakes[-1].num_replays > 0
    assert "the widest step took 1.0 GiB" in caplog.text


def test_no_token_and_no_captured_row_makes_the_host_wait(moe: Path, fakes: Fakes) -> None:
    """Greedy and drawn rows with log-probabilities and routes: the host looks at events, and at nothing that is on the device."""
    with serve(
        moe,
        platform={"name": "cuda"},
        cache={"num_blocks": 22, "block_size": 4},
        scheduler={"max_num_seqs": 6, "max_num_batched_tokens": 16},
        capture={"routed_experts": True},
    ) as engine:
        device = fakes[-1]
        started, replays, pinned = len(device.waits), device.num_replays, device.memory.num_pinned
        asked = [
            SamplingParams(
                max_tokens=8,
                temperature=k / 4,
                top_p=0.9,
                seed=k,
                logprobs=k,
                ignore_eos=True,
                return_routed_experts=True,
            )
            for k in range(4)
        ]
        done = engine.generate_many([[3 + k, 4, 5] * (2 + k) for k in range(4)], asked)
        assert [len(one.token_ids) for one in done] == [8] * 4
        assert all(one.choices[0].routed_experts is not None for one in done)
        assert device.waits[started:] == []
        assert device.num_replays > replays and device.memory.num_pinned < pinned + 12
    device.check()
