"""What the command `infer` decides for its own process, and no library does."""

from __future__ import annotations

import os

import pytest

from infer import __main__ as command
from infer.config.env import let_idle_threads_sleep


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("OMP_WAIT_POLICY", "placeholder")  # whatever the test sets is undone
    monkeypatch.delenv("OMP_WAIT_POLICY")
    return monkeypatch


def test_the_command_lets_idle_threads_sleep(policy: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []
    policy.setattr(command.app, "main", lambda: seen.append(os.environ.get("OMP_WAIT_POLICY")) or 0)
    with pytest.raises(SystemExit):
        command.main()
    assert seen == ["PASSIVE"]


def test_the_environment_wins(policy: pytest.MonkeyPatch) -> None:
    policy.setenv("OMP_WAIT_POLICY", "ACTIVE")
    let_idle_threads_sleep()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
