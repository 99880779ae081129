"""Statistics loggers: every step in order, none waited for, none able to disturb the engine, all ended with it."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer import EngineConfig, SamplingParams
from infer.engine import stat_feed
from infer.engine.engine import Engine
from infer.engine.startup import check_named
from infer.engine.stat_feed import LoggerThread
from infer.errors import ConfigError, PluginContractError, PluginError, PluginLoadError, UnknownPluginError
from infer.plugins import build_registry
from infer.plugins.stat_logger import StepSnapshot
from infer.stat_loggers.log import create
from infer.testing.fake_engine import fake_engine, scripted
from infer.testing.kits.stat_logger import facts as kit_facts
from planted_plugins import Plant, plant

__all__ = ["plant"]
SOURCE = """
    import threading, time
    from infer.plugins import *

    facts, steps, dropped, threads, closed = [], [], [], set(), []
    gate = threading.Event()
    gate.set()

    class Keeps:
        def __init__(self, given):
            facts.append(given)

        def record(self, new, lost):
            gate.wait()
            assert new and not closed
            steps.extend(new)
            dropped.append(lost)
            threads.add(threading.get_ident())

        def close(self):
            closed.append(len(steps))

    class Raises(Keeps):
        def record(self, new, lost):
            raise OSError("disk full")

        def close(self):
            raise SystemExit(1)

    class Waits(Keeps):
        async def record(self, new, lost):
            pass

    class NoClose:
        def __init__(self, given):
            pass

        def record(self, new, lost):
            pass

    class Explodes:
        def __init__(self, given):
            raise OSError("no such host")

    class Hangs(Keeps):
        def close(self):
            gate.clear()
            gate.wait()

    class Slow(Keeps):
        def __init__(self, given):
            super().__init__(given)
            gate.wait()

    @hookimpl
    def infer_stat_loggers():
        return [StatLoggerSpec(name=made.__name__, api=1, factory=f"planted_alpha:{made.__name__}", example={},
                               options={"host": "localhost", "port": 1} if made is Keeps else {})
                for made in (Keeps, Raises, Waits, NoClose, Explodes, Hangs, Slow)]
"""


@pytest.fixture
def planted(plant: Plant) -> Iterator[Any]:
    plant("alpha", SOURCE)
    import planted_alpha  # type: ignore[import-not-found]

    yield planted_alpha
    planted_alpha.gate.set()


def engine(*names: str) -> Engine:
    config = EngineConfig(cache={"num_blocks": 64}, plugins={"stat_loggers": names})
    return fake_engine(scripted("Hello!"), config)


def stray() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "stat logger" in thread.name]


@pytest.mark.anyio
async def test_every_step_comes_once_in_order_on_another_thread(planted: Any) -> None:
    async with engine("Keeps") as one:
        for _ in range(5):
            await one.generate("hi", SamplingParams(max_tokens=4, temperature=0))
        now, metrics = one.statistics(), one.metrics
        expected = (now.finished_requests, now.scheduled_tokens, metrics.output_tokens, metrics.prompt_tokens)
    steps: Sequence[StepSnapshot] = planted.steps
    assert [step.step for step in steps] == list(range(1, len(steps) + 1))
    assert set(planted.dropped) == {0}
    last = steps[-1]
    assert (last.finished_requests, last.scheduled_tokens, last.output_tokens, last.prompt_tokens) == expected
    assert sorted(step.at for step in steps) == [step.at for step in steps]
    assert all(step.running <= 1 and 0 <= step.kv_usage <= 1 for step in steps)
    assert planted.closed == [len(steps)]
    assert threading.get_ident() not in planted.threads
    assert len(planted.threads) == 1
    assert stray() == []
    [facts] = planted.facts
    assert (facts.platform, facts.num_blocks, facts.max_num_seqs) == ("fake", 64, 64)


@pytest.mark.anyio
async def test_a_logger_that_is_not_named_is_not_even_made(planted: Any) -> None:
    async with engine() as one:
        await one.generate("hi", SamplingParams(max_tokens=2))
        assert stray() == []
    assert planted.facts == []


@pytest.mark.anyio
async def test_one_that_raises_is_named_and_disturbs_nobody(planted: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with engine("Raises", "Keeps") as one:
        done = await one.generate("hi", SamplingParams(max_tokens=6, temperature=0))
    assert done.text == "Hello!"
    assert planted.closed == [len(planted.steps)]
    said = [record.getMessage() for record in caplog.records]
    assert "stat logger 'Raises' of alpha 1.0 raised OSError in record: disk full (1 times so far)" in said
    assert "stat logger 'Raises' of alpha 1.0 raised SystemExit in close: 1 (1 times so far)" in said
    assert not any("Keeps" in message for message in said)


@pytest.mark.anyio
async def test_one_that_is_async_is_told_what_it_should_be(
    planted: Any, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    async with engine("Waits") as one:
        await one.generate("hi", SamplingParams(max_tokens=1))
    assert "record is a plain method without a result" in caplog.text
    assert [str(warning.message) for warning in recwarn if "never awaited" in str(warning.message)] == []


@pytest.mark.anyio
async def test_one_that_blocks_holds_up_no_step_and_is_told_what_it_lost(
    planted: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stat_feed.LoggerThread.__init__, "__kwdefaults__", {"capacity": 8, "interval": 0.0})
    planted.gate.clear()
    async with engine("Keeps") as one:
        for _ in range(10):
            await one.generate("hi", SamplingParams(max_tokens=6, temperature=0))
        planted.gate.set()
    total = planted.steps[-1].step
    assert len(planted.steps) + sum(planted.dropped) == total
    assert sum(planted.dropped) >= total - 20
    assert "stat logger 'Keeps' of alpha 1.0 is too slow: " in caplog.text


@pytest.mark.anyio
async def test_one_that_does_not_end_is_left_behind_and_named(
    planted: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stat_feed.StatFeed.aclose, "__defaults__", (0.2,))
    async with engine("Hangs") as one:
        await one.generate("hi", SamplingParams(max_tokens=1))
    assert "stat logger 'Hangs' of alpha 1.0 does not end; its thread is left behind after 0.2 seconds" in caplog.text
    planted.gate.set()


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("Kepes", UnknownPluginError, "there is no stat_logger plugin 'Kepes'; .*did you mean 'Keeps'"),
        ("Explodes", PluginLoadError, "stat_logger 'Explodes' of alpha 1.0: its factory raised OSError: no such host"),
        ("NoClose", PluginContractError, "its factory returned NoClose, which has no method close"),
    ],
)
async def test_one_that_cannot_be_made_is_fatal_because_it_is_named(
    planted: Any, name: str, error: type[PluginError], said: str
) -> None:
    with pytest.raises(error, match=said):
        async with engine("Keeps", name):
            raise AssertionError("the engine started")
    await _until(lambda: stray() == [])
    assert planted.closed == [0]


@pytest.mark.anyio
async def test_a_start_that_is_cancelled_while_a_logger_is_made_ends_it(planted: Any) -> None:
    planted.gate.clear()
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:

            async def cancel() -> None:
                await _until(lambda: planted.facts != [])
                scope.cancel()

            tasks.start_soon(cancel)
            async with engine("Slow"):
                raise AssertionError("the engine started")
    planted.gate.set()
    await _until(lambda: stray() == [])
    assert planted.closed == [0]


async def _until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(60):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.01)


def snapshot(step: int, **values: int) -> StepSnapshot:
    zeros = dict.fromkeys(set(StepSnapshot.__struct_fields__) - {"step", "at", "kv_usage"}, 0)
    return StepSnapshot(step=step, at=float(step), kv_usage=0.0, **{**zeros, **values})


@given(
    bursts=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    capacity=st.integers(1, 10),
    fails=st.sets(st.integers(0, 6)),
)
def test_what_is_given_and_what_is_dropped_is_everything(bursts: list[int], capacity: int, fails: set[int]) -> None:
    """A logger that is stuck during each burst, and raises now and then."""
    taken: list[tuple[list[int], int]] = []
    entered, go = threading.Semaphore(0), threading.Semaphore(0)

    class Stuck:
        def record(self, steps: Sequence[StepSnapshot], dropped: int) -> None:
            entered.release()
            go.acquire()
            taken.append(([step.step for step in steps], dropped))
            if len(taken) in fails:
                raise ValueError

        def close(self) -> None:
            return None

    thread = LoggerThread(Stuck, "stuck", capacity=capacity, interval=0.0)
    thread.opened()
    number = 0
    thread.put(snapshot(number := number + 1))
    for burst in bursts:
        entered.acquire()
        for _ in range(burst):
            thread.put(snapshot(number := number + 1))
        go.release()
    thread.stop()
    go.release(len(bursts) + 2)
    thread.join(60)
    seen = [step for steps, _ in taken for step in steps]
    assert seen == sorted(set(seen))
    assert seen[-1] == number
    assert len(seen) + sum(dropped for _, dropped in taken) == number
    assert all(len(steps) <= capacity for steps, _ in taken)


@pytest.mark.anyio
async def test_the_built_in_one_writes_a_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "infer.stats"):
        async with engine("log") as one:
            await one.generate("hi", SamplingParams(max_tokens=6, temperature=0))
    [line] = [record.getMessage() for record in caplog.records if record.name == "infer.stats"]
    assert " 2 prompt tokens (0.0 % of them cached) and 6 output tokens in 6 steps" in line
    assert "running 0, waiting 0" in line


def test_its_lines_come_every_ten_seconds_and_leave_no_token_out(caplog: pytest.LogCaptureFixture) -> None:
    made = create(kit_facts(options={"seconds": 10.0}))
    with caplog.at_level(logging.INFO, "infer.stats"):
        for step in range(1, 26):
            made.record([snapshot(step, output_tokens=3 * step)], 0)
        made.close()
        made.close()
    lines = [record.getMessage() for record in caplog.records]
    assert [int(line.split(" output tokens")[0].rsplit(" ", 1)[1]) for line in lines] == [33, 33, 9]
    assert [line.split(" steps, ")[1].split(" s;")[0] for line in lines] == ["10.0", "10.0", "2.0"]


@pytest.mark.anyio
async def test_options_reach_their_logger_over_its_defaults(planted: Any) -> None:
    named = {"stat_loggers": ("Keeps", "Raises"), "stat_logger_options": {"Keeps": {"port": 9125}}}
    config = EngineConfig(cache={"num_blocks": 64}, plugins=named)
    async with fake_engine(scripted("Hello!"), config):
        assert stray()
    assert [facts.options for facts in planted.facts] == [{"host": "localhost", "port": 9125}, {}]
    for options, said in (({"Keeps": {"prot": 1}}, "did you mean 'port'"), ({"Raises": {"port": 1}}, "it takes none")):
        wrong = EngineConfig(cache={"num_blocks": 64}, plugins={**named, "stat_logger_options": options})
        with pytest.raises(ConfigError, match=said):
            async with fake_engine(scripted("Hello!"), wrong):
                pass
    with anyio.fail_after(30):
        while stray():  # noqa: ASYNC110 - a thread ends when it ends
            await anyio.sleep(0.01)


@pytest.mark.anyio
@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
async def test_the_built_in_one_refuses_times_that_are_none(seconds: float) -> None:
    named = {"stat_loggers": ("log",), "stat_logger_options": {"log": {"seconds": seconds}}}
    with pytest.raises(ConfigError, match="write a number above 0"):
        async with fake_engine(scripted("Hello!"), EngineConfig(cache={"num_blocks": 64}, plugins=named)):
            pass
    assert stray() == []


def test_wrong_options_are_told_before_weights_are_read(planted: Any) -> None:
    """Also of endpoints, which are made much later."""
    config = EngineConfig(plugins={"stat_loggers": "log", "stat_logger_options": {"log": {"minutes": 1}}})
    with pytest.raises(ConfigError, match="stat_logger 'log' has no option 'minutes'; it takes seconds"):
        check_named(config, build_registry(config.plugins))
