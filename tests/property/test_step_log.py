"""A step log of any load, replayed without a model: every decision comes out the same, from every file of the log.

The loads are those of test_scheduler and test_captured_rows."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from capture_driver import CaptureDriver, capture_config
from infer.config.capture import ResolvedCapture
from infer.engine.scheduler.budget import StepDraft
from infer.engine.scheduler.scheduler import Scheduler
from infer.engine.step_log import records
from infer.engine.step_log.log_file import LogFile
from infer.engine.step_log.recording import StepLog, recorded
from infer.engine.step_log.replay import ReplayReport, read_records, replay
from infer.errors import StepLogError
from property import test_captured_rows, test_forced_tokens, test_scheduler
from step_driver import StepDriver


def record(
    driver: StepDriver,
    path: Path,
    *,
    capture: ResolvedCapture | None = None,
    token_ids: bool = False,
    files: bool = False,
) -> LogFile:
    """Write down what the driver's scheduler does from now on; `files`: begin another file now and then."""
    scheduler: Any = driver.scheduler
    scheduler.__class__ = recorded(type(scheduler))
    scheduler.preempted, scheduler.retired = [], []
    for pool in driver.kv.pools:
        pool._events = []
    file = LogFile(path, 2**30)
    scheduler.log = StepLog(
        scheduler,
        file,
        cache=driver.cache,
        capture=capture,
        token_ids=token_ids,
    )
    if files:
        chance = random.Random(0)
        go_on = scheduler.log.go_on

        def often(scheduler: Scheduler) -> None:
            file.is_full = file.is_full or chance.random() < 0.02
            go_on(scheduler)

        scheduler.log.go_on = often
    return file


class Recordings:
    """The logs of all loads of one test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        self.directory = directory
        self.files: list[LogFile] = []
        self.monkeypatch = monkeypatch

    def of(self, module: ModuleType, load: Callable[[], Any], **options: Any) -> tuple[Any, Path]:
        """Run a load with its driver recorded; its newest file."""
        path = self.directory / f"{len(self.files)}.log"
        holder: Any = module.Load if hasattr(module.Load, "make_driver") else module
        made = module.make_driver

        def make_driver(*args: Any, **given: Any) -> StepDriver:
            driver: StepDriver = made(*args, **given)
            if not self.files or self.files[-1]._path != path:
                if isinstance(driver, CaptureDriver):
                    options["capture"] = capture_config(args[0]["num_objects"], driver.kv.block_size)
                self.files.append(record(driver, path, **options))
            return driver

        with self.monkeypatch.context() as patched:
            patched.setattr(holder, "make_driver", staticmethod(make_driver) if holder is not module else make_driver)
            done = load()
        self.files[-1].close()
        return done, path


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Recordings:
    monkeypatch.setattr(test_captured_rows.Load, "preempt", lambda self, index: None)  # not a call of the scheduler's
    return Recordings(monkeypatch, tmp_path)


def check(path: Path) -> ReplayReport:
    """Both files of a log, each by itself."""
    before = path.with_name(f"{path.name}.1")
    if before.exists():
        assert replay(before).differences == []
    report = replay(path)
    assert report.differences == [] and not report.lost
    return report


@pytest.mark.row("X-STEPLOG", "replay of random traces reproduces every scheduling decision with no model loaded")
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_every_decision_comes_out_the_same(recordings: Recordings, first: int) -> None:
    preemptions = evictions = 0
    for seed in range(first, first + 20):
        load, path = recordings.of(
            test_scheduler, lambda seed=seed: test_scheduler.random_load(seed), files=seed % 2 == 1
        )
        report = check(path)
        preemptions += report.preemptions
        evictions += report.evictions
        if seed % 2 == 0:
            assert report.steps == load.driver.scheduler.stats.steps
            assert report.preemptions == load.driver.scheduler.stats.preemptions
            assert report.requests == len(load.driver.requests)
    assert preemptions > 20 and evictions > 20


@pytest.mark.parametrize("first", range(0, 40, 20))
def test_captured_rows_too(recordings: Recordings, first: int) -> None:
    with_rows = 0
    for seed in range(first, first + 20):
        _, path = recordings.of(
            test_captured_rows, lambda seed=seed: test_captured_rows.random_load(seed), files=seed % 2 == 1
        )
        check(path)
        with_rows += any(isinstance(one, records.Planned) and one.aux != 0 for one in read_records(path))
    assert with_rows > 10


@pytest.mark.row("X-STEPLOG", "tokens that a grammar forces are fed in the same steps")
def test_drafts_come_out_the_same(recordings: Recordings) -> None:
    for seed in range(12):
        load, path = recordings.of(
            test_forced_tokens, lambda seed=seed: test_forced_tokens.crowded(seed, skip=True), files=seed % 2 == 1
        )
        check(path)
        assert load.driver.scheduler.stats.draft_tokens > 0


@pytest.mark.heavy
@pytest.mark.row("X-STEPLOG", "replay of random traces reproduces every scheduling decision with no model loaded")
@pytest.mark.parametrize("first", range(1000, 2000, 100))
def test_a_thousand_traces(recordings: Recordings, first: int) -> None:
    for seed in range(first, first + 100):
        module: Any = (test_scheduler, test_captured_rows)[seed % 2]
        _, path = recordings.of(module, lambda seed=seed, module=module: module.random_load(seed), files=seed % 3 == 0)
        check(path)


class SpendsLess(Scheduler):
    def _schedule_running(self, draft: StepDraft) -> None:
        draft.budget -= 1
        super()._schedule_running(draft)


class RememberNothing(Scheduler):
    """Looks for no prefix."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._match = lambda request: self.kv.match(request, 0)


@pytest.mark.parametrize("planted", [SpendsLess, RememberNothing])
def test_another_scheduler_is_found_out(recordings: Recordings, planted: type[Scheduler]) -> None:
    _, path = recordings.of(test_scheduler, lambda: test_scheduler.random_load(4))
    assert check(path).matches
    report = replay(path, planted)
    assert len(report.differences) == 1 and report.differences[0].what in records.Planned.__struct_fields__


@pytest.mark.row("X-STEPLOG", "ids and sizes only unless asked for text")
def test_no_token_is_in_it_unless_asked_for(recordings: Recordings) -> None:
    _, path = recordings.of(test_scheduler, lambda: test_scheduler.random_load(2), files=True)
    _, told = recordings.of(test_scheduler, lambda: test_scheduler.random_load(2), token_ids=True)
    quiet = [*read_records(path.with_name(f"{path.name}.1")), *read_records(path)]
    choices = [choice for one in quiet if isinstance(one, records.Added) for choice in one.choices]
    outcomes = [outcome for one in quiet if isinstance(one, records.Applied) for outcome in one.outcomes]
    states = [one.state for one in quiet if isinstance(one, records.Snapshot)]
    assert choices and outcomes and states
    assert all(choice.token_ids is None for choice in choices) and not any(outcome.token_ids for outcome in outcomes)
    for state in states:
        assert all(isinstance(ids, int) for ids in _values(msgspec.msgpack.decode(state), "token_ids"))
    check(told)
    spoken = [choice for one in read_records(told) if isinstance(one, records.Added) for choice in one.choices]
    assert all(choice.token_ids and len(choice.token_ids) == choice.prompt_len for choice in spoken)


def _values(state: Any, name: str) -> list[Any]:
    """Everything that is called so, however deep."""
    if isinstance(state, dict):
        return [state[key] for key in state if key == name] + [
            one for item in state.values() for one in _values(item, name)
        ]
    return [one for item in state for one in _values(item, name)] if isinstance(state, list) else []


def test_contents_have_other_names_in_every_log(recordings: Recordings) -> None:
    paths = [recordings.of(test_scheduler, lambda: test_scheduler.random_load(0))[1] for _ in range(2)]
    named = [
        {
            content
            for one in read_records(path)
            if isinstance(one, records.Added)
            for c in one.choices
            for content in c.hashes
        }
        for path in paths
    ]
    assert len(named[0]) == len(named[1]) > 5 and not named[0] & named[1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a log with several files."""
    with pytest.MonkeyPatch.context() as patched:
        _, path = Recordings(patched, tmp_path_factory.mktemp("log")).of(
            test_scheduler, lambda: test_scheduler.random_load(6), files=True
        )
    return path.read_bytes()


@given(data=st.data())
def test_a_damaged_file_is_told(whole: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whatever was done to its bytes or records: an error that names the file, or a difference; nothing else."""
    path = tmp_path_factory.mktemp("damaged") / "a.log"
    if data.draw(st.booleans()):
        plain = bytearray(zstandard.ZstdDecompressor().stream_reader(whole, read_across_frames=True).read())
        for _ in range(data.draw(st.integers(1, 4))):
            plain[data.draw(st.integers(0, len(plain) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(zstandard.ZstdCompressor().compress(bytes(plain)))
    else:
        damaged = bytearray(whole)
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
    try:
        replay(path)
    except StepLogError as error:
        assert str(path) in str(error)


def test_a_file_that_was_cut_off_is_good_up_to_there(whole: bytes, tmp_path: Path) -> None:
    (tmp_path / "whole.log").write_bytes(whole)
    all_steps = replay(tmp_path / "whole.log").steps
    plain = zstandard.ZstdDecompressor().stream_reader(whole, read_across_frames=True).read()
    (tmp_path / "cut.log").write_bytes(zstandard.ZstdCompressor().compress(plain[: len(plain) * 2 // 3]))
    report = replay(tmp_path / "cut.log")
    assert report.matches and 0 < report.steps < all_steps
