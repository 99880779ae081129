"""Options of plugins: defaults under what the settings give, and no word that nobody reads."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer import ConfigError, EngineConfig, PluginContractError
from infer.plugins.endpoint import EndpointServer
from infer.plugins.options import declaration_problem, plugin_options
from infer.plugins.stat_logger import EngineFacts

DECLARED: dict[str, Any] = {
    "seconds": 10.0,
    "lines": 3,
    "loud": False,
    "path": "/x",
    "tags": [],
    "more": {"a": 1},
    "token": None,
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
HOLDS_ITSELF: list[Any] = []
HOLDS_ITSELF.append(HOLDS_ITSELF)


def merged(given: dict[str, Any]) -> dict[str, Any]:
    return plugin_options("stat_logger 'one'", DECLARED, given, "plugins.stat_logger_options")


@given(st.dictionaries(st.sampled_from(sorted(DECLARED)), JSON))
def test_what_is_taken_is_of_the_defaults_type_and_the_rest_is_the_default(given: dict[str, Any]) -> None:
    try:
        found = merged(given)
    except ConfigError as error:
        assert error.fields == ("plugins.stat_logger_options",)
        assert any(type(given[name]) is not type(default) for name, default in DECLARED.items() if name in given)
        return
    assert found.keys() == DECLARED.keys()
    for name, default in DECLARED.items():
        assert repr(found[name]) == repr(given.get(name, default)), "NaN is not equal to itself"
        same = type(found[name]) is type(default) or (name == "seconds" and type(found[name]) is int)
        assert same or name == "token"


def test_what_a_plugin_does_to_its_options_stays_with_it() -> None:
    settings = {"tags": ["a"]}
    found = merged(settings)
    found["tags"].append("b")
    found["more"]["a"] = 2
    assert settings == {"tags": ["a"]} and merged({})["more"] == {"a": 1} and DECLARED["tags"] == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"second": 1}, "has no option 'second'; did you mean 'seconds'?"),
        ({"zzz": 1}, "has no option 'zzz'; it takes seconds, lines, loud, path, tags, more, token"),
        ({"seconds": "S3CRET"}, "option 'seconds' of stat_logger 'one' must be a number, not text"),
        ({"lines": True}, "must be a whole number, not true or false"),
        ({"lines": 1.0}, "must be a whole number, not a number"),
        ({"loud": 1}, "must be true or false, not a whole number"),
        ({"path": None}, "must be text, not nothing"),
        ({"tags": {"a": 1}}, "must be a list, not an object"),
        ({"more": ["a"]}, "must be an object, not a list"),
        ({"tags": ("S3CRET",)}, "must be a list, not a Python tuple"),
        ({"tags": [("S3CRET",)]}, "option 'tags' of stat_logger 'one' is not plain data"),
        ({"token": threading.Lock()}, "option 'token' of stat_logger 'one' is not plain data"),
        ({"more": {1: "S3CRET"}}, "option 'more' of stat_logger 'one' is not plain data"),
        ({"tags": HOLDS_ITSELF}, "option 'tags' of stat_logger 'one' is not plain data"),
    ],
    ids=range(14),
)
def test_what_does_not_fit_is_told_without_its_value(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        merged(given)
    assert str(caught.value).startswith("plugins.stat_logger_options: ") and said in str(caught.value)
    assert "S3CRET" not in str(caught.value)


def test_a_plugin_without_options_says_so() -> None:
    with pytest.raises(ConfigError, match="endpoint 'x' has no option 'a'; it takes none"):
        plugin_options("endpoint 'x'", {}, {"a": 1}, "api.endpoint_options")


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        (DECLARED, ""),
        ({}, ""),
        (("a",), "options must be a dict of names and defaults, not tuple"),
        ({"Bad": 1}, "'Bad' is no name of an option"),
        ({"a-b": 1}, "'a-b' is no name of an option"),
        ({"a": (1,)}, "the default of option 'a' is not plain data"),
        ({"a": {"b": {1}}}, "the default of option 'a' is not plain data"),
        ({"a": {1: "b"}}, "the default of option 'a' is not plain data"),
    ],
)
def test_declarations(declared: Any, said: str) -> None:
    assert declaration_problem(declared).startswith(said) and bool(declaration_problem(declared)) == bool(said)


@pytest.mark.parametrize(
    ("section", "names", "options"),
    [("plugins", "stat_loggers", "stat_logger_options"), ("api", "endpoints", "endpoint_options")],
)
def test_settings(section: str, names: str, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From JSON in the environment; of a plugin that is on; and never shown."""
    monkeypatch.setenv(f"INFER_{section.upper()}__{names.upper()}", "one")
    monkeypatch.setenv(f"INFER_{section.upper()}__{options.upper()}", '{"one": {"token": "S3CRET"}}')
    config = EngineConfig.from_env()
    assert getattr(getattr(config, section), options) == {"one": {"token": "S3CRET"}}
    assert "S3CRET" not in repr(config)
    with pytest.raises(ConfigError, match=f"{section}.{options} has options of 'two', which {section}.{names}='one'"):
        EngineConfig(**{section: {names: "one", options: {"two": {}}}})
    for wrong in ("one=1", "[1]", '{"one": 5}', '{"one": "S3CRET"}'):
        with pytest.raises(ConfigError, match=f"{section}.{options}") as caught:
            EngineConfig(**{section: {names: "one", options: wrong}})
        assert "S3CRET" not in str(caught.value)


@pytest.mark.parametrize("declared", [None, ["a"], {"a": (1,)}, {1: 2}], ids=repr)
def test_a_spec_whose_options_cannot_be_is_refused_by_name(declared: Any) -> None:
    with pytest.raises(PluginContractError, match="endpoint 'x': "):
        plugin_options("endpoint 'x'", declared, {}, "api.endpoint_options")


def test_what_plugins_are_given_shows_no_option() -> None:
    engine: Any = None
    server = EndpointServer(engine=engine, model_names=("m",), options={"token": "S3CRET"})
    numbers = {"max_model_len": 1, "max_num_seqs": 1, "num_blocks": 1, "block_size": 1}
    facts = EngineFacts(model="m", platform="cpu", dtype="float32", version="1", options={"token": "S3CRET"}, **numbers)
    assert "S3CRET" not in repr(server) + repr(facts) and "block_size=1" in repr(facts)
