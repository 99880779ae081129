"""Recorded decode steps in an engine: they are used, and change nothing that a request can see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from infer import Engine, EngineConfig, SamplingParams
from infer.backends.cpu.platform import NativePlatform
from infer.backends.cpu.tape import Tape
from infer.config.engine import PluginsSection
from infer.plugins.manager import build_registry
from infer.testing.tiny_models import make_checkpoint

from .engine_support import ARCHITECTURES, write_checkpoint

pytestmark = pytest.mark.anyio


def config(model: Path, *, graphs: bool) -> EngineConfig:
    return EngineConfig(
        model={"ref": str(model), "skip_tokenizer": True, "dtype": "bfloat16"},
        platform={"name": "cpu", "graphs": graphs},
        cache={"num_blocks": 200},
        capture={"hidden_layers": (0, 1)},
    )


async def generations(engine: Engine) -> list[Any]:
    """Requests of several lengths that come and go, so that steps have one to six rows."""
    found: dict[int, Any] = {}

    async def one(k: int) -> None:
        params = SamplingParams(max_tokens=5 + 7 * k, temperature=0.8, seed=k, logprobs=2, ignore_eos=True)
        done = await engine.generate([3 + k, 4, 5, 6 + k] * (k + 1), params)
        found[k] = (done.token_ids, done.logprobs)

    async with anyio.create_task_group() as tasks:
        for k in range(6):
            tasks.start_soon(one, k)
    return [found[k] for k in range(6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), ARCHITECTURES["llama"])


async def test_recorded_steps_change_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replays = 0
    replay = Tape.replay

    def counted(tape: Tape) -> Any:
        nonlocal replays
        replays += 1
        return replay(tape)

    monkeypatch.setattr(Tape, "replay", counted)
    async with Engine(config(model, graphs=False)) as engine:
        expected = await generations(engine)
    assert replays == 0
    async with Engine(config(model, graphs=True)) as engine:
        assert await generations(engine) == expected
        first, longest = replays, 5 + 7 * 5
        assert 0 < first < longest  # each number of rows is recorded when it first occurs
        assert await generations(engine) == expected
        assert replays - first >= longest - 6


LATENT = {"deepseek_v2", "deepseek_v3"}
"""Their keys are put together by torch."""
CAPPED = ("gemma3",)
"""Models whose logits are squashed by torch."""


@pytest.mark.parametrize("name", sorted(spec.name for spec in build_registry(PluginsSection(allow=())).specs("model")))
async def test_decode_steps_of_every_model_are_recorded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operation that torch computes in a model's layers would quietly cost its users the recording."""
    recorded: list[bool] = []
    record = NativePlatform.record

    def watched(platform: NativePlatform, work: Any) -> Any:
        result = record(platform, work)
        recorded.append(result[1] is not None)
        return result

    monkeypatch.setattr(NativePlatform, "record", watched)
    example = build_registry(PluginsSection(allow=())).get("model", name).example
    async with Engine(config(make_checkpoint(example, tmp_path), graphs=True)) as engine:
        await engine.generate([3, 4, 5], SamplingParams(max_tokens=4, ignore_eos=True))
    if name in CAPPED:
        assert recorded == [False, True], "the head has an operation of torch's own: the rest is recorded without it"
    else:
        assert recorded and set(recorded) == {name not in LATENT}
