"""The whole run: every case, every refusal, and the page that says what was found. Used by the tests and by
`tools/combination_table.py`; owns the directory it is given."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from combinations import covering, installed, running
from combinations.checkpoints import Shelf
from combinations.covering import Case
from combinations.declared import Choice, Feature, Row
from combinations.features import DEAR, SPACE
from infer import EngineConfig
from infer.errors import ConfigError, InferError, InvalidRequestError

SHORTEST = 10
"""Characters of a message that says anything."""


@dataclass
class Found:
    """Outcomes so far."""

    passed: set[frozenset[Choice]] = field(default_factory=set)
    refused: dict[tuple[Choice, ...], str] = field(default_factory=dict)
    """What is refused together -> the sentence."""
    num_engines: int = 0
    num_requests: int = 0


def all_cases() -> list[Case]:
    return covering.cases(SPACE, DEAR)


class Campaign:
    """Runs below one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._shelf = Shelf(directory / "checkpoints")
        self._count = 0
        self.found = Found()

    def run_case(self, number: int, case: Case) -> str | None:
        """-> what was wrong, if anything; also when something was refused that is not declared."""
        try:
            self._run(case.row, case.requests, number)
        except (InferError, AssertionError, TimeoutError) as error:
            told = f"case {number}: {type(error).__name__}: {error}"
            rows = "\n".join(f"    {short(row)}" for row in (case.row, *case.requests))
            return f"{told}\n{rows}"
        self.found.num_engines += 1
        self.found.num_requests += len(case.requests)
        self.found.passed.update(map(frozenset, case.pairs(SPACE)))
        return None

    def run_refusal(self, group: tuple[Choice, ...]) -> str | None:
        """Whether these values, beside plain ones, are refused by an error that names each of them."""
        whole = SPACE.completed(dict(group), SPACE.features)
        if whole is None:
            return f"{group} cannot be tried: no value of some feature goes with them"
        engine, request = ({f.name: whole[f.name] for f in SPACE.of(scope)} for scope in ("engine", "request"))
        try:
            self._run(engine, [request], 0)
        except InferError as error:
            sentence = clean(str(error), self._directory)
            fields = (*getattr(error, "fields", ()), getattr(error, "parameter", ""))
            silent = [choice for choice in group if not _is_named(choice, sentence, fields)]
            self.found.refused[group] = sentence
            return f"{group}: {sentence!r} does not name {silent}" if silent or len(sentence) < SHORTEST else None
        except Exception as error:
            return f"{group}: {type(error).__name__}: {error}"
        return f"{group} is not refused"

    def _run(self, engine: Row, requests: tuple[Row, ...] | list[Row], seed: int) -> None:
        self._count += 1
        directory = self._directory / f"run-{self._count}"
        directory.mkdir()
        try:
            with installed.plugins(self._directory / "plugins"):
                running.run(engine, requests, self._shelf, directory, seed)
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def _is_named(choice: Choice, sentence: str, fields: tuple[str, ...]) -> bool:
    feature = SPACE.feature(choice[0])
    names = feature.value(choice[1]).named or feature.named
    return any(name in sentence or name in fields for name in names)


def clean(message: str, directory: Path) -> str:
    """Without what differs from run to run."""
    message = message.replace(str(directory), "").replace("/checkpoints/", "")
    message = re.sub(r" at 0x[0-9a-f]+|/run-\d+", "", message)
    return re.sub(r"StructuredOutput\(.*?\)(?= does)", "...", re.sub(r"request '[^']*'", "the request", message))


def short(row: Row) -> dict[str, str]:
    """What is not plain."""
    return {name: value for name, value in row.items() if SPACE.feature(name).values[0].name != value}


# -- what does not exist yet --------------------------------------------------------------------------------------------


def missing_features() -> Iterator[tuple[str, str]]:
    """(feature, the sentence) of what is refused beside everything, because it does not exist."""
    from infer.engine.admission import refuse_unavailable

    try:
        EngineConfig(speculation={"drafter": "ngram"})
    except ConfigError as error:
        yield "speculation", str(error)
    try:
        refuse_unavailable(lora="adapter")
    except InvalidRequestError as error:
        yield "lora", str(error)


# -- the page ----------------------------------------------------------------------------------------------------------

INTRODUCTION = """\
# What goes with what

Built by `tools/combination_table.py` from a run of every pair of the values below, on models of a few thousand random weights;
never edited by hand. A test makes the same run and compares.

Of every two values of two features there is an engine, and a request in it, that had both: {engines} engines with {requests}
requests, which shared steps. Each value was seen to be at work, and each answer was compared with that of a plain engine
which ran the request alone: bit for bit on the native CPU platform, within the rounding of the dtype elsewhere. Or the two are
refused together, by a sentence that names both.

"""


def page(found: Found) -> str:
    """docs/combinations.md."""
    lines = [INTRODUCTION.format(engines=found.num_engines, requests=found.num_requests)]
    lines += ["## Features", "", "| | feature | values | seen by |", "| --- | --- | --- | --- |"]
    for number, feature in enumerate(SPACE.features, 1):
        values = ", ".join(f"`{value.name}`" for value in feature.values)
        lines.append(f"| {number} | {feature.name} | {values} | {feature.shown} |")
    lines += [
        "",
        "## Pairs",
        "",
        "A dot: all pairs of values of the two features work together. A number: so many are refused.",
        "",
    ]
    lines += _matrix()
    lines += ["", "## Refused", "", "| | with | sentence |", "| --- | --- | --- |"]
    lines += _sentences(found)
    lines += [
        "",
        "Pairs that follow from these, because each needs a value of a third feature that the other rules out:",
        "",
    ]
    lines += _implied()
    lines += ["", "## Not there yet", "", "Refused beside everything:", ""]
    lines += [f"* {name}: {_cell(sentence)}" for name, sentence in missing_features()]
    return "\n".join(lines) + "\n"


def _matrix() -> Iterator[str]:
    refused = {group for group in SPACE.refused if len(group) == 2} | set(covering.implied(SPACE))
    numbers = range(1, len(SPACE.features))
    yield "| |" + "".join(f" {number} |" for number in numbers)
    yield "| --- |" + " --- |" * len(numbers)
    for place, second in enumerate(SPACE.features[1:], 1):
        cells = [_count(refused, first, second) for first in SPACE.features[:place]]
        yield f"| {place + 1} {second.name} |" + "".join(f" {cell} |" for cell in cells) + " |" * (len(numbers) - place)


def _count(refused: set[tuple[Choice, Choice]], first: Feature, second: Feature) -> str:
    count = sum((one[0], other[0]) == (first.name, second.name) for one, other in refused)
    return str(count) if count else "·"


def _sentences(found: Found) -> Iterator[str]:
    """Values that are refused by the same sentence share a line."""
    lines: dict[tuple[Choice, str], list[str]] = {}
    for group, sentence in found.refused.items():
        first, *rest = group
        lines.setdefault((first, sentence), []).append(" and ".join(f"{name} `{value}`" for name, value in rest))
    for ((name, value), sentence), others in lines.items():
        yield f"| {name} `{value}` | {', '.join(others)} | {_cell(sentence)} |"


def _implied() -> Iterator[str]:
    lines: dict[tuple[Choice, str, str], list[str]] = {}
    for (one, other), third in covering.implied(SPACE).items():
        lines.setdefault((one, other[0], third), []).append(f"`{other[1]}`")
    for ((name, value), second, third), values in lines.items():
        yield f"* {name} `{value}` and {second} {', '.join(values)}: no {third} goes with both"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def uncovered(found: Found) -> list[tuple[Choice, Choice]]:
    """Pairs that neither passed nor are refused."""
    known = {frozenset(group) for group in SPACE.refused} | {frozenset(pair) for pair in covering.implied(SPACE)}
    return [pair for pair in SPACE.pairs() if frozenset(pair) not in known and frozenset(pair) not in found.passed]
