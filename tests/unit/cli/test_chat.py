"""`infer chat`: history, commands, an interrupted answer, errors inside a conversation."""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import Any

import anyio
import pytest

from infer.errors import ContextLengthError, EngineDeadError


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Any:
    def type_lines(*lines: str) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))

    return type_lines


def test_history_grows_and_reset_forgets(infer: Any, engine: Any, typed: Any) -> None:
    typed("hello", "and now?", "/reset", "again")
    done = infer("chat", "org/name", "--system", "Be brief.", "--seed", "3")
    assert (done.code, done.out) == (0, "Paris.\nParis.\nParis.\n")
    assert engine.configs[0].model.ref == "org/name"
    roles = [[turn["role"] for turn in prompt] for prompt in engine.asked]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"], ["system", "user"]]
    assert engine.asked[1][2]["content"] == "Paris."
    assert engine.params[0].seed == 3
    assert engine.closed == 1


def test_exit_help_and_unknown_commands(infer: Any, engine: Any, typed: Any) -> None:
    typed("/help", "/nonsense", "", "/exit", "never asked")
    done = infer("chat")
    assert (done.code, engine.asked) == (0, [])
    assert "/reset forgets" in done.err and "no command /nonsense" in done.err


def test_ctrl_c_stops_the_answer_not_the_program(infer: Any, engine: Any, typed: Any) -> None:
    interrupted = []

    async def first_time_interrupt(piece: str) -> None:
        if not interrupted and piece == "is":
            interrupted.append(piece)
            os.kill(os.getpid(), signal.SIGINT)  # arrives in the main thread, as from a terminal
            await anyio.sleep(30)

    engine.on_piece = first_time_interrupt
    typed("first", "second")
    done = infer("chat")
    assert done.code == 0
    assert done.out == "Par\nParis.\n" and "[stopped]" in done.err
    assert engine.left[0] is not None and engine.left[1] is None  # the first stream was left by cancellation
    assert engine.asked[1][1] == {"role": "assistant", "content": "Par"}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_refused_turn_is_taken_back(infer: Any, engine: Any, typed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.fails = ContextLengthError("too long; shorten it", parameter="prompt", value=9)
    typed("long", "longer")
    done = infer("chat")
    assert done.code == 0 and done.err.count("infer: error: too long; shorten it") == 2
    assert [len(prompt) for prompt in engine.asked] == [1, 1]


def test_a_dead_engine_ends_the_program(infer: Any, engine: Any, typed: Any) -> None:
    engine.fails = EngineDeadError("the worker is gone")
    typed("hello", "again")
    done = infer("chat")
    assert (done.code, len(engine.asked), engine.closed) == (1, 1, 1)
    assert done.err.strip().endswith("infer: error: the worker is gone")


def test_at_a_terminal_ctrl_c_and_ctrl_d(infer: Any, engine: Any, monkeypatch: pytest.MonkeyPatch, typed: Any) -> None:
    typed()
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    answers: list[Any] = [KeyboardInterrupt(), "hello", EOFError()]

    def fake_input(prompt: str) -> str:
        answer = answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return str(answer)

    monkeypatch.setattr("builtins.input", fake_input)
    done = infer("chat")
    assert (done.code, len(engine.asked)) == (0, 1)
    assert "Ctrl-D) leaves" in done.err
