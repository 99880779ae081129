"""What a model thinks and the tools that it calls, told from its answer in `infer chat`, `run` and `complete`."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from infer.cli.app import main
from infer.cli.session import Session
from infer.config.engine import EngineConfig
from infer.config.env import read_environment
from infer.testing.fake_engine import fake_engine, scripted

ROW = "SERVE-CLI-CHAT"
TEMPLATE = "{# <tool_call> <think> #}{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
ANSWER = (
    '<think>\nThey ask.\x1b[2J</think>\n\nParis.<tool_call>\n{"name": "look_up", "arguments": {"q": 1}}\n</tool_call>'
)
Run = Callable[..., tuple[int, str, str]]


def templated(config: EngineConfig) -> EngineConfig:
    """The scripted model, with a chat template that shows the marks of its thoughts and calls."""
    return config.model_copy(update={"model": config.model.model_copy(update={"chat_template": TEMPLATE})})


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """(exit code, stdout, stderr) of a command over an engine that answers `text`."""

    def call(*arguments: str, text: str = ANSWER, typed: str = "", **console: Any) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        err = io.StringIO()
        session = Session(
            make_engine=lambda config, report: fake_engine(scripted(text), templated(config)),
            stated_environment=read_environment({}),
            err=Console(file=err, markup=False, highlight=False, soft_wrap=True, width=300, **console),
        )
        code = main([*arguments, "--cache.num-blocks", "200"], session)
        return code, capsys.readouterr().out, err.getvalue()

    return call


@pytest.mark.row(ROW, "locally, reasoning is no part of the answer and tool calls are shown")
def test_piped_the_answer_alone_is_on_stdout(run: Run) -> None:
    code, out, err = run("chat", typed="hi\n")
    assert (code, out) == (0, "Paris.\n")
    lines = err.splitlines()
    assert "They ask.\\x1b[2J" in lines, "no control character of the model's reaches a terminal"
    assert lines[-1] == '[calls look_up({"q": 1})]' and lines[-2].startswith("[")
    assert "Ctrl-" not in err, "nobody presses keys in a pipe"
    assert "\x1b" not in err


@pytest.mark.row(ROW, "reasoning is dimmed on a terminal, and plain with NO_COLOR")
@pytest.mark.parametrize("no_color", [False, True], ids=["dim", "NO_COLOR"])
def test_on_a_terminal(run: Run, no_color: bool) -> None:
    _, out, err = run("chat", typed="hi\n", force_terminal=True, no_color=no_color, color_system="truecolor")
    assert out == "Paris.\n"
    thought = err[err.index("\n") + 1 :]  # behind the progress bar, which moves the cursor
    styles = re.findall(r"\x1b\[[0-9;]*m", thought)
    assert set(styles) == (set() if no_color else {"\x1b[2m", "\x1b[0m"})
    assert "They ask." in re.sub(r"\x1b\[[0-9;]*m", "", thought)


def test_a_question_and_a_text(run: Run) -> None:
    code, out, err = run("run", "hi")
    assert (code, out) == (0, "Paris.\n") and "They ask." in err and "[calls look_up" in err
    code, out, err = run("complete", "hi")
    assert (code, out) == (0, ANSWER + "\n"), "text is continued as it is"
    assert "[calls" not in err


@pytest.mark.parametrize("text", ["<think>Hm.", "<think>Hm.</think>"], ids=["open", "closed"])
def test_an_answer_that_only_thinks(run: Run, text: str) -> None:
    code, out, err = run("chat", text=text, typed="hi\nagain\n")
    assert code == 0 and out.strip() == ""
    assert [line for line in err.splitlines() if line.startswith("Hm")] == ["Hm.", "Hm."]


def test_marks_stay_where_the_operator_wants_no_reading(run: Run) -> None:
    _, out, err = run("chat", "--structured-output.reasoning-parser", "none", typed="hi\n")
    assert out == ANSWER + "\n" and "They" not in err


def test_what_goes_wrong_has_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    err = io.StringIO()
    session = Session(stated_environment=read_environment({}), err=Console(file=err, soft_wrap=True))
    session.think("Hm")
    assert main(["nonsense"], session) == 2
    thought, error = err.getvalue().splitlines()
    assert thought == "Hm" and error.startswith("infer: error: ")
