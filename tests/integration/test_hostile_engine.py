"""Ways to misuse an engine that used to hang or leak: other event loops, forked processes, Ctrl-C, half-entered streams.
Runs engines without a model in the test's own process; owns the children it forks."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence

import anyio
import anyio.to_thread
import pytest

from infer import EngineConfig, SamplingParams
from infer.engine.blocking import BlockingEngine
from infer.engine.step import SamplingSpec
from infer.errors import EngineClosedError, EngineError
from infer.testing.fake_engine import fake_engine

LONG = SamplingParams(max_tokens=1000, ignore_eos=True)
SHORT = SamplingParams(max_tokens=3)


def letter(token_ids: Sequence[int], sampling: SamplingSpec) -> int:
    return 97 + len(token_ids) % 26


@pytest.mark.anyio
async def test_another_event_loop_is_refused_instead_of_never_woken() -> None:
    async with fake_engine(letter) as engine:

        async def elsewhere() -> None:
            with anyio.fail_after(60):
                with pytest.raises(EngineError, match="another event loop"):
                    await engine.generate("hi", SHORT)
                with pytest.raises(EngineError, match="another event loop"):
                    await engine.reset_prefix_cache()

        await anyio.to_thread.run_sync(anyio.run, elsewhere)
        with pytest.raises(EngineError, match="another thread"):
            await anyio.to_thread.run_sync(engine.abort, "request-0")
        assert (await engine.generate("hi", SHORT)).finish_reason == "length"


def forked(child: Callable[[], None]) -> int:
    """The exit status of `child()` in a fork of this process; a hang ends by SIGALRM."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        try:
            child()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_is_refused_instead_of_waiting_for_a_thread_it_does_not_have() -> None:
    engine = BlockingEngine(lambda: fake_engine(letter))
    with engine:
        deltas = engine.stream("hi", LONG)
        next(deltas)

        def child() -> None:
            for use in (lambda: engine.generate("hi", SHORT), lambda: next(deltas), lambda: engine.abort("request-0")):
                with pytest.raises(EngineClosedError, match="fork"):
                    use()
            engine.__exit__(None, None, None)

        assert forked(child) == 0
        assert engine.generate("hi", SHORT).finish_reason == "length"


@pytest.mark.parametrize("many", [False, True])
def test_ctrl_c_ends_the_request_it_interrupts(many: bool) -> None:
    interrupted = threading.Event()

    def press(token_ids: Sequence[int], sampling: SamplingSpec) -> int:
        if len(token_ids) > 20 and not interrupted.is_set():
            interrupted.set()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return letter(token_ids, sampling)

    with BlockingEngine(lambda: fake_engine(press, latency=0.002)) as engine:
        with pytest.raises(KeyboardInterrupt):
            engine.generate_many(["hi", "ho"], LONG) if many else engine.generate("hi", LONG)
        assert engine.generate("after", SHORT).finish_reason == "length"
        assert engine.engine.request_ids == ()


class TestStreams:
    pytestmark = pytest.mark.anyio

    async def test_what_a_stream_knows_before_it_is_entered(self) -> None:
        async with fake_engine(letter) as engine:
            stream = engine.stream("hi", SHORT)
            for name in ("request_id", "prompt_token_ids", "prompt_logprobs", "prefilled", "result"):
                with pytest.raises(EngineError, match="not entered"):
                    getattr(stream, name)

    async def test_a_stream_entered_twice_while_its_long_prompt_is_encoded_runs_once(self) -> None:
        async with fake_engine(letter, EngineConfig(), max_position=40_000) as engine:
            stream = engine.stream("x" * 30_000, SHORT)
            refused: list[str] = []

            async def enter() -> None:
                try:
                    async with stream:
                        await anyio.sleep(0.01)
                except EngineError as error:
                    refused.append(str(error))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(enter)
                tasks.start_soon(enter)
            assert len(refused) == 1 and "entered once" in refused[0]
            assert engine.request_ids == ()
