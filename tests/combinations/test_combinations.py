"""Every pair of features works together or is refused by name: the run, the refusals, and docs/combinations.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from combinations.campaign import Campaign, all_cases, missing_features, page, uncovered
from combinations.covering import Case, random_cases
from combinations.declared import Feature, Space, Value
from combinations.features import DEAR, SPACE

PAGE = Path(__file__).parents[2] / "docs" / "combinations.md"
ROW = "X-COMBO"
PARTS = 8


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    return Campaign(tmp_path_factory.mktemp("combinations"))


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return all_cases()


@pytest.fixture(scope="module")
def done() -> set[int]:
    return set()


def run_part(campaign: Campaign, cases: list[Case], done: set[int], part: int) -> list[str]:
    """A part of the cases and of the refusals, each once."""
    if part in done:
        return []
    done.add(part)
    wrong = [campaign.run_case(number, case) for number, case in enumerate(cases) if number % PARTS == part]
    wrong += [campaign.run_refusal(group) for number, group in enumerate(SPACE.refused) if number % PARTS == part]
    return [told for told in wrong if told is not None]


def test_an_eighth_of_the_pairs(campaign: Campaign, cases: list[Case], done: set[int]) -> None:
    """The rest takes a minute, with the heavy tests."""
    wrong = run_part(campaign, cases, done, 0)
    assert not wrong, "\n".join(wrong)


@pytest.mark.heavy
@pytest.mark.row(ROW, "each pair is pass or refused-by-name")
@pytest.mark.parametrize("part", range(PARTS))
def test_pairs(campaign: Campaign, cases: list[Case], done: set[int], part: int) -> None:
    wrong = run_part(campaign, cases, done, part)
    assert not wrong, "\n".join(wrong)


@pytest.mark.heavy
@pytest.mark.row(ROW, "CI produces the table")
def test_the_table_is_what_was_found(campaign: Campaign, cases: list[Case], done: set[int]) -> None:
    wrong = [told for part in range(PARTS) for told in run_part(campaign, cases, done, part)]
    assert not wrong, "\n".join(wrong)
    assert uncovered(campaign.found) == []
    campaign.found.refused = {group: campaign.found.refused[group] for group in SPACE.refused}
    assert PAGE.read_text("utf-8") == page(campaign.found), "run tools/combination_table.py"


@pytest.mark.row(ROW, "what does not exist yet is refused by name")
def test_what_does_not_exist_is_refused_by_its_name() -> None:
    said = dict(missing_features())
    assert said.keys() == {"speculation", "lora"}
    assert "unknown setting 'speculation'" in said["speculation"] and "lora is not available" in said["lora"]


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.row(ROW, "combinations of many features")
def test_combinations_beyond_pairs(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path)
    wrong = [
        told
        for number, case in enumerate(random_cases(SPACE, DEAR, count=150, seed=1))
        if (told := campaign.run_case(number, case)) is not None
    ]
    assert not wrong, "\n".join(wrong)


def small_space() -> Space:
    def feature(name: str, scope: str, count: int) -> Feature:
        values = tuple(Value(name=str(number)) for number in range(count))
        return Feature(name=name, scope=scope, values=values, named=(name,), shown="")  # type: ignore[arg-type]

    features = [
        feature("a", "engine", 3),
        feature("b", "engine", 2),
        feature("c", "request", 3),
        feature("d", "request", 2),
    ]
    # a=0 needs b=0, and c=2 needs b=1.
    return Space(
        features, [{"a": ("0",), "b": ("1",)}, {"b": ("0",), "c": ("2",)}, {"a": ("1",), "c": ("1",), "d": ("1",)}]
    )


def test_cases_hold_every_pair_that_can_be_and_nothing_refused() -> None:
    from combinations.covering import cases, implied

    space = small_space()
    assert implied(space) == {(("a", "0"), ("c", "2")): "b"}
    for seed in range(20):
        found = cases(space, seed=seed)
        rows = [{**case.row, **request} for case in found for request in case.requests]
        assert all(not set(group) <= row.items() for row in rows for group in space.refused)
        covered = {pair for case in found for pair in case.pairs(space)}
        refused = {group for group in space.refused if len(group) == 2}
        assert covered == set(space.pairs()) - refused - implied(space).keys()


def test_a_mistake_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: an engine that forgets a request's processor, and a refusal that is none."""
    from infer.engine.processor_admission import ProcessorAdmission

    campaign = Campaign(tmp_path)
    case = next(_with(all_cases(), processors="function", grammar="none", bans="none", thinking="free", forced="none"))
    assert campaign.run_case(0, case) is None
    monkeypatch.setattr(ProcessorAdmission, "uses", lambda self, processors: ())
    told = campaign.run_case(0, case)
    assert told is not None and "processors=function" in told
    fine = (("graphs", "off"), ("threads", "2"))
    assert campaign.run_refusal(fine) == f"{fine} is not refused"


def _with(cases: list[Case], **values: str) -> Iterator[Case]:
    """Cases with one request that has these values."""
    for case in cases:
        requests = tuple(one for one in case.requests if values.items() <= one.items())
        if requests and case.row["platform"] == "cpu":
            yield Case(case.row, requests[:1])
