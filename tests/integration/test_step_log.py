"""Step logs of whole engines: written while they serve, replayed by the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest

from infer import EngineConfig, SamplingParams
from infer.cli.app import main
from infer.engine.engine import Engine
from infer.errors import ConfigError
from infer.testing.fake_engine import fake_engine, scripted

pytestmark = pytest.mark.anyio


async def serve(config: EngineConfig, prompts: list[str]) -> None:
    async with fake_engine(scripted("an answer of some length"), config) as engine:
        async with anyio.create_task_group() as tasks:
            for index, prompt in enumerate(prompts):
                tasks.start_soon(
                    lambda prompt=prompt, index=index: engine.generate(
                        prompt, SamplingParams(max_tokens=20, n=1 + index % 2), request_id=f"r{index}"
                    )
                )
        await engine.reset_prefix_cache()


@pytest.mark.row("X-STEPLOG", "EngineConfig(step_log=PATH) writes a record; infer steplog replay FILE must match")
async def test_an_engine_that_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "steps.log"
    config = EngineConfig(step_log=str(path), scheduler={"max_num_seqs": 4}, cache={"num_blocks": 12})
    assert config.step_log.path == str(path)
    await serve(config, ["one and the same beginning " + str(i) for i in range(12)])
    assert main(["steplog", "replay", str(path)]) == 0
    said = capsys.readouterr().out
    assert "18 requests" in said and said.endswith("every decision came out the same\n")
    assert main(["steplog", "show", str(path), "--request", "r3"]) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["type"] for one in shown[:2]] == ["header", "added"]
    assert {one["type"] for one in shown} >= {"planned", "applied"}
    (added,) = (one for one in shown if one["type"] == "added")
    assert [choice[1] for choice in added["choices"]] == ["r3", "r3"]


@pytest.mark.row("X-EXPLAIN", "in scripted scenarios the first differing token index and cause are exactly right")
@pytest.mark.parametrize("told", [False, True])
async def test_a_log_explains(tmp_path: Path, capsys: pytest.CaptureFixture[str], told: bool) -> None:
    """What the engine would have said; the token itself only where the log has token ids."""
    path = tmp_path / "steps.log"
    async with fake_engine(
        scripted("yes"), EngineConfig(step_log={"path": str(path), "token_ids": told}, cache={"num_blocks": 40})
    ) as engine:
        for name, tail in (("a", "one"), ("b", "two")):
            await engine.generate("x" * 32 + tail * 9, SamplingParams(max_tokens=4), request_id=name)
        live = str(engine.explain("b"))
    assert main(["steplog", "explain", str(path), "b"]) == 0
    said = capsys.readouterr().out
    if told:
        assert said.splitlines()[1:] == live.splitlines()[1:]
    else:
        assert "32 of 59 tokens from the prefix cache: what is cached goes on otherwise\n" in said
    assert main(["steplog", "explain", str(path), "nobody"]) == 1
    assert "holds no request 'nobody'" in capsys.readouterr().err


async def test_a_small_log_of_a_busy_engine_goes_on_in_a_second_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "steps.log"
    config = EngineConfig(step_log={"path": str(path), "max_bytes": 2**16}, cache={"num_blocks": 40})
    async with fake_engine(scripted("an answer"), config) as engine:
        for index in range(2000):
            await engine.generate(f"{index:06} is a number {index * 7919 % 10007:06}", SamplingParams(max_tokens=4))
            if path.with_name("steps.log.1").exists():
                break
    for name in ("steps.log.1", "steps.log"):
        assert main(["steplog", "replay", str(tmp_path / name)]) == 0
    assert capsys.readouterr().out.count("every decision came out the same\n") == 2


async def test_state_that_cannot_be_written_ends_the_log_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "steps.log"
    config = EngineConfig(
        step_log={"path": str(path), "max_bytes": 2**16}, scheduler={"scheduler_class": "schedulers:KeepsMore"}
    )
    async with fake_engine(scripted("an answer"), config) as engine:
        for index in range(2000):
            await engine.generate(f"{index:06} is a number {index * 7919 % 10007:06}", SamplingParams(max_tokens=4))
            if "stops here" in caplog.text:
                break
        done = await engine.generate("and on", SamplingParams(max_tokens=4))
    assert done.finish_reason == "length"
    assert "the step log cannot write the state of a scheduler that holds a object" in caplog.text
    assert not path.with_name("steps.log.1").exists()


async def test_a_wrong_path_is_told_before_the_model_is_read(tmp_path: Path) -> None:
    config = EngineConfig(model=str(tmp_path / "no model"), step_log=str(tmp_path / "nowhere" / "steps.log"))
    with pytest.raises(ConfigError, match=r"step_log\.path"):
        async with Engine(config):
            pass


async def test_a_start_that_fails_lets_go_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "steps.log"
    for _ in range(2):
        with pytest.raises(Exception, match="no model"):
            async with Engine(EngineConfig(model=str(tmp_path / "no model"), step_log=str(path))):
                pass


async def test_a_scheduler_of_the_users_is_only_used_when_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "steps.log"
    config: Any = {"step_log": str(path), "scheduler": {"scheduler_class": "schedulers:LastComeFirstServed"}}
    await serve(EngineConfig(**config), ["a", "b", "c"])
    assert main(["steplog", "replay", str(path)]) == 1
    assert "give --scheduler schedulers:LastComeFirstServed if you trust it" in capsys.readouterr().err
    assert main(["steplog", "replay", str(path), "--scheduler", "schedulers:LastComeFirstServed"]) == 0


async def test_what_is_no_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").write_bytes(b"hello")
    (tmp_path / "empty").touch()
    for name, said in (("a", "is damaged or no step log"), ("empty", "it holds no record"), ("none", "No such file")):
        assert main(["steplog", "replay", str(tmp_path / name)]) == 1
        assert said in capsys.readouterr().err
