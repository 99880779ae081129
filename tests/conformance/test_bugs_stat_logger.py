"""Planted bugs: the kit of statistics loggers names the promise that a wrong one breaks."""

from __future__ import annotations

import dataclasses
import logging
import sqlite3
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from infer.plugins import EngineFacts, StatLoggerSpec, StepSnapshot
from infer.testing.kits import stat_logger
from planted_bugs import PlantBug, failures, plant_bug

__all__ = ["plant_bug"]


class Good:
    def __init__(self, facts: EngineFacts) -> None:
        self.facts = facts
        self.rates: list[float] = []
        self.last: StepSnapshot | None = None

    def record(self, steps: Sequence[StepSnapshot], dropped: int) -> None:
        for step in steps:
            if self.last is not None and step.at > self.last.at:
                self.rates.append((step.output_tokens - self.last.output_tokens) / (step.at - self.last.at))
            self.last = step

    def close(self) -> None:
        return None


class DividesByTime(Good):
    def record(self, steps: Sequence[StepSnapshot], dropped: int) -> None:
        for step in steps:
            if self.last is not None:
                self.rates.append(step.output_tokens / (step.at - self.last.at))
            self.last = step


class DividesByCounts(Good):
    def record(self, steps: Sequence[StepSnapshot], dropped: int) -> None:
        self.rates += [step.cached_tokens / step.prompt_tokens for step in steps]


class NeedsAscendingTime(Good):
    def record(self, steps: Sequence[StepSnapshot], dropped: int) -> None:
        for step in steps:
            if self.last is not None and step.at < self.last.at:
                raise ValueError("time runs backwards")
            self.last = step


class NeedsEveryStep(Good):
    def record(self, steps: Sequence[StepSnapshot], dropped: int) -> None:
        if dropped:
            raise ValueError("steps are missing")


class PacksNumbers(Good):
    def record(self, steps: Sequence[StepSnapshot], dropped: int) -> None:
        for step in steps:
            step.output_tokens.to_bytes(4, "little")


class NeedsAStep(Good):
    def close(self) -> None:
        if self.last is None:
            raise ValueError("nothing was recorded")


class EmptiesTheList(Good):
    def record(self, steps: Any, dropped: int) -> None:
        while steps:
            steps.pop()


class IsAsync(Good):
    async def record(self, steps: Sequence[StepSnapshot], dropped: int) -> None:  # type: ignore[override]
        return None


class SharesItsFile(Good):
    database: Any = None

    def __init__(self, facts: EngineFacts) -> None:
        super().__init__(facts)
        SharesItsFile.database = sqlite3.connect(":memory:", check_same_thread=False)

    def record(self, steps: Sequence[StepSnapshot], dropped: int) -> None:
        SharesItsFile.database.execute("select 1")

    def close(self) -> None:
        SharesItsFile.database.close()


class LeavesAThread(Good):
    go = threading.Event()

    def __init__(self, facts: EngineFacts) -> None:
        super().__init__(facts)
        threading.Thread(target=self.go.wait, daemon=True).start()


class ConfiguresLogging(Good):
    def __init__(self, facts: EngineFacts) -> None:
        super().__init__(facts)
        logging.getLogger().addHandler(logging.NullHandler())


class Hangs(Good):
    go = threading.Event()

    def close(self) -> None:
        self.go.wait()


@pytest.mark.row("X-PLUGIN-KIT", "the kit fails six planted plugin bugs")
@pytest.mark.parametrize(
    ("bug", "broken"),
    [
        (Good, set()),
        (DividesByTime, {"idle_engine"}),
        (DividesByCounts, {"idle_engine"}),
        (NeedsAscendingTime, {"restart_of_the_clock"}),
        (NeedsEveryStep, {"gaps"}),
        (PacksNumbers, {"large_numbers"}),
        (NeedsAStep, {"no_steps"}),
        (SharesItsFile, {"two_engines"}),
        (LeavesAThread, {"nothing_left"}),
        (ConfiguresLogging, {"nothing_left"}),
    ],
)
def test_the_kit_names_the_broken_promise(plant_bug: PlantBug, bug: type[Good], broken: set[str]) -> None:
    handlers = list(logging.getLogger().handlers)
    LeavesAThread.go.clear()
    try:
        assert failures(stat_logger.checks(spec(plant_bug(bug)))) == broken
    finally:
        LeavesAThread.go.set()
        logging.getLogger().handlers[:] = handlers


@pytest.mark.parametrize("bug", [EmptiesTheList, IsAsync])
def test_what_breaks_every_record_fails_everywhere_but_without_steps(plant_bug: PlantBug, bug: type[Good]) -> None:
    names = {check.name for check in stat_logger.checks(spec(plant_bug(bug)))}
    assert failures(stat_logger.checks(spec(plant_bug(bug)))) == names - {"no_steps"}


def test_one_that_hangs_fails_instead_of_hanging_the_kit(plant_bug: PlantBug, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stat_logger, "SECONDS", 0.2)
    [check] = [check for check in stat_logger.checks(spec(plant_bug(Hangs))) if check.name == "no_steps"]
    with pytest.raises(AssertionError, match=r"has not returned for 0\.2 seconds"):
        check.run()
    Hangs.go.set()


class NeedsAnOption(Good):
    def __init__(self, facts: EngineFacts) -> None:
        super().__init__(facts)
        self.path: str = facts.options["path"].lower()


@pytest.mark.parametrize(
    ("options", "given", "broken"),
    [
        ({"path": "/x"}, {}, set()),
        ({"path": None}, {"path": "/x"}, {"options"}),
        ({"path": "/x", "Bad-Name": 1}, {}, {"options"}),
        ({"path": "/x", "at": (1, 2)}, {}, {"options"}),
    ],
    ids=["correct", "no default that works", "a name", "a default that is no JSON"],
)
def test_options_are_checked(
    plant_bug: PlantBug, options: dict[str, Any], given: dict[str, Any], broken: set[str]
) -> None:
    with_options = dataclasses.replace(spec(plant_bug(NeedsAnOption)), options=options, example={"options": given})
    failed = failures(stat_logger.checks(with_options))
    assert failed >= broken if broken else not failed  # what cannot be declared is not made for other checks either


def test_an_example_gives_only_options_that_are_declared(plant_bug: PlantBug) -> None:
    with_options = dataclasses.replace(spec(plant_bug(Good)), example={"options": {"path": "/x"}})
    assert failures(stat_logger.checks(with_options)) >= {"steps", "no_steps"}


def spec(factory: str) -> StatLoggerSpec:
    return StatLoggerSpec(name="bug", api=1, factory=factory, example={})
