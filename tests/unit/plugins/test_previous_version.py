"""A contract moves on, and a plugin written for the version before still runs: through the table that every contract has."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from infer.config.engine import PluginsSection
from infer.errors import PluginContractError
from infer.plugins import ParserEvent, Probe
from infer.plugins.contracts import CONTRACTS
from infer.plugins.manager import build_registry
from infer.text.output_parsing import choose_parser, open_parser

Plant = Callable[..., None]
OLD = """
    from infer.plugins import *

    class Shouts:
        '''As parsers were: made of nothing, told text alone, and it said (kind, text) pairs, all of them in the end.'''

        def __init__(self):
            self.text = ""

        def parse(self, text):
            self.text += text

        def end(self):
            return [("text", self.text.upper())]

    def probe():
        return "yes"

    @hookimpl
    def infer_parsers():
        return [ParserSpec(name="shouts", api={api}, factory="planted_alpha:Shouts", fingerprints=("<assistant>",),
                           example={{}})]

    @hookimpl
    def infer_grammars():
        return [GrammarSpec(name="old", api={api}, factory="planted_alpha:Shouts", probe="planted_alpha:probe", kinds=("regex",),
                            priority=-1, example={{}})]
"""


class Upgraded:
    """An old parser behind today's contract."""

    def __init__(self, old: Any) -> None:
        self._old = old

    def feed(self, text: str, token_ids: Sequence[int]) -> list[ParserEvent]:
        self._old.parse(text)
        return []

    def finish(self) -> list[ParserEvent]:
        return [ParserEvent(kind, text) for kind, text in self._old.end()]


@pytest.fixture
def moved_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Today's contracts of parsers and grammars are the second ones, and the first took what OLD is."""
    monkeypatch.setitem(
        CONTRACTS,
        "parser",
        CONTRACTS["parser"]._replace(
            version=2,
            previous={"factory": lambda old: lambda tools: Upgraded(old())},
            changes="a parser is made of the tools and says events as it reads",
        ),
    )
    monkeypatch.setitem(
        CONTRACTS,
        "grammar",
        CONTRACTS["grammar"]._replace(version=2, previous={"probe": lambda old: lambda: Probe(old() == "yes")}),
    )
    # The built-in ones are written for today's contract, whatever number it has here.
    monkeypatch.setattr("infer.plugins.manager.builtin_modules", lambda kind: [])


@pytest.mark.usefixtures("moved_on")
@pytest.mark.row(
    "ENG-PLUGIN-SYSTEM", "one built for another plugin-API version is refused with both versions in the message"
)
def test_an_old_plugin_reads_answers_as_the_server_reads_them(plant: Plant, caplog: pytest.LogCaptureFixture) -> None:
    """Chosen by the chat template and opened by what the server opens parsers with, then run by the current calls."""
    plant("alpha", OLD.format(api=1))
    registry = build_registry(PluginsSection())
    spec = choose_parser(registry, "{{ messages }}<assistant>")
    assert spec is not None
    parser = open_parser(registry, spec, [{"type": "function"}], "<assistant>")
    said = [*parser.feed("hel", [1, 2]), *parser.feed("lo", [3]), *parser.finish()]
    assert said == [ParserEvent("text", "HELLO")]
    assert [record.getMessage() for record in caplog.records] == [
        "plugin to be upgraded: parser 'shouts' of alpha 1.0: built for version 1 of the parser contract; the current one is 2 "
        "(a parser is made of the tools and says events as it reads), and 1 is refused when 3 comes; upgrade the plugin",
        "plugin to be upgraded: grammar 'old' of alpha 1.0: built for version 1 of the grammar contract; the current one is 2, "
        "and 1 is refused when 3 comes; upgrade the plugin",
    ]


@pytest.mark.usefixtures("moved_on")
def test_other_functions_that_a_spec_names_are_upgraded_too(plant: Plant) -> None:
    plant("alpha", OLD.format(api=1))
    assert build_registry(PluginsSection()).probe("grammar", "old") == Probe(True)


@pytest.mark.usefixtures("moved_on")
def test_the_list_of_plugins_says_what_to_upgrade(plant: Plant) -> None:
    plant("alpha", OLD.format(api=1))
    [entry] = [entry for entry in build_registry(PluginsSection()).entries() if entry.name == "shouts"]
    assert (entry.state, entry.api) == ("chosen", 1)
    assert entry.reason.startswith("built for version 1 of the parser contract; the current one is 2")


@pytest.mark.usefixtures("moved_on")
def test_a_plugin_of_the_current_version_is_not_wrapped(plant: Plant, caplog: pytest.LogCaptureFixture) -> None:
    plant("alpha", OLD.format(api=2))
    with caplog.at_level(logging.WARNING):
        made = build_registry(PluginsSection()).load("parser", "shouts")
    assert made.__name__ == "Shouts"
    assert caplog.records == []


@pytest.mark.usefixtures("moved_on")
def test_when_the_third_comes_the_first_is_refused(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONTRACTS, "parser", CONTRACTS["parser"]._replace(version=3))
    plant("alpha", OLD.format(api=1))
    with pytest.raises(
        PluginContractError, match="built for version 1 of the parser contract, this infer supports 2 and 3"
    ):
        build_registry(PluginsSection()).get("parser", "shouts")


def test_every_contract_says_its_version_and_upgrades_what_its_spec_names() -> None:
    """An upgrade without an older version, or of a field that there is not, would never run."""
    for kind, contract in CONTRACTS.items():
        assert contract.version >= 1, kind
        assert contract.supported[-1] == contract.version
        fields = set(contract.spec_type.__dataclass_fields__)
        assert set(contract.previous) <= fields
        assert bool(contract.previous or contract.changes) <= (contract.version > 1), kind
