"""Environment, files and flags become one configuration; messages say where a wrong value came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infer.config.engine import EngineConfig
from infer.config.env import cache_directory, read_environment
from infer.config.files import load_config, read_config_file
from infer.config.units import format_bytes, parse_bytes
from infer.errors import ConfigError


def test_environment_names_are_nested_and_typed() -> None:
    environment = read_environment(
        {
            "INFER_MODEL": "org/name",
            "INFER_SCHEDULER__MAX_NUM_SEQS": "8",
            "INFER_CACHE__PREFIX_CACHING": "false",
            "INFER_CACHE__MEMORY": "1.5GiB",
            "INFER_PLUGINS__BLOCK": "a, b",
            "INFER_PLUGINS__PREFER": '{"model:x": "dist"}',
            "INFER_CACHE__DTYPE": "",
            "INFER_TEST_CACHE": "/elsewhere",
            "PATH": "/bin",
        }
    )
    config = EngineConfig(**environment.settings)
    assert (config.model.ref, config.scheduler.max_num_seqs) == ("org/name", 8)
    assert (config.cache.prefix_caching, config.cache.memory, config.cache.dtype) == (False, 3 * 2**29, "auto")
    assert (config.plugins.block, config.plugins.prefer) == (("a", "b"), {"model:x": "dist"})
    assert environment.names["scheduler.max_num_seqs"] == "INFER_SCHEDULER__MAX_NUM_SEQS"


def test_two_settings_have_short_names() -> None:
    environment = read_environment({"INFER_MODEL": "org/name", "INFER_PLATFORM": "reference"})
    assert environment.settings == {"model": {"ref": "org/name"}, "platform": {"name": "reference"}}
    assert environment.names == {"model.ref": "INFER_MODEL", "platform.name": "INFER_PLATFORM"}
    both = read_environment({"INFER_PLATFORM": "cpu", "INFER_PLATFORM__NAME": "cpu", "INFER_PLATFORM__THREADS": "2"})
    assert both.settings == {"platform": {"name": "cpu", "threads": "2"}}


def test_from_env_reads_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFER_SCHEDULER__MAX_NUM_SEQS", "5")
    assert EngineConfig.from_env().scheduler.max_num_seqs == 5
    assert EngineConfig().scheduler.max_num_seqs == 64  # nobody else reads it


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"INFER_OFLINE": "1"}, "INFER_OFFLINE"),
        ({"INFER_OFFLINE": "perhaps"}, "write 1 or 0"),
        ({"INFER_SCHEDULER__": "1"}, "INFER_SECTION__FIELD"),
        ({"INFER_PLATFORMS": "cpu"}, "did you mean INFER_PLATFORM?"),
        (
            {"INFER_PLATFORM": "cpu", "INFER_PLATFORM__NAME": "reference"},
            "INFER_PLATFORM__NAME contradicts INFER_PLATFORM: both set platform.name",
        ),
        (
            {"INFER_CACHE__OPTIONS__SIZE": "1", "INFER_CACHE__options": "2"},
            "INFER_CACHE__options contradicts INFER_CACHE__OPTIONS__SIZE: both set cache.options",
        ),
        ({"INFER_PLUGINS__PREFER": "{oops"}, "INFER_PLUGINS__PREFER"),
    ],
)
def test_wrong_variables_are_named(variables: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_environment(variables)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"INFER_CACHE_DIR": "/c"}, "/c"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/infer"),
        ({"XDG_CACHE_HOME": "relative"}, str(Path("~/.cache/infer").expanduser())),
    ],
)
def test_cache_directory(variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    assert str(cache_directory(variables)) == expected


@pytest.mark.parametrize("value", ["1", "true", "YES"])
def test_offline_from_either_name(value: str) -> None:
    assert read_environment({"INFER_OFFLINE": value}).offline
    assert read_environment({"HF_HUB_OFFLINE": value}).offline
    assert not read_environment({}).offline
    assert read_environment({"HF_TOKEN": "t"}).hub_token == "t"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.yaml", "model: org/name\ncache: {memory: 2GiB}\n"),
        ("c.yml", "model: {ref: org/name}\ncache:\n  memory: 2147483648\n"),
        ("c.toml", 'model = "org/name"\n[cache]\nmemory = "2GiB"\n'),
        ("c.json", '{"model": "org/name", "cache": {"memory": 2147483648}}'),
    ],
)
def test_file_formats_say_the_same(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    config = load_config({}, tmp_path / name, read_environment({}))
    assert (config.model.ref, config.cache.memory) == ("org/name", 2**31)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("c.yaml", "a: [", "not valid YAML"),
        ("c.toml", "a = ", "not valid TOML"),
        ("c.yaml", "- a\n", "mapping of sections"),
        ("c.ini", "", r"\.yaml, \.yml, \.toml or \.json"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        read_config_file(tmp_path / name)
    assert name in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read"):
        read_config_file(tmp_path / "none.yaml")


def test_precedence_flag_file_environment_default(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("scheduler: {max_num_seqs: 2, max_num_batched_tokens: 200}\n")
    environment = read_environment(
        {
            "INFER_SCHEDULER__MAX_NUM_SEQS": "1",
            "INFER_SCHEDULER__MAX_NUM_BATCHED_TOKENS": "100",
            "INFER_SCHEDULER__STREAM_INTERVAL": "7",
        }
    )
    chosen = load_config({"scheduler": {"max_num_seqs": "3"}}, file, environment).scheduler
    assert (chosen.max_num_seqs, chosen.max_num_batched_tokens) == (3, 200)
    assert (chosen.stream_interval, chosen.policy) == (7, "fcfs")


def test_a_size_given_higher_up_replaces_one_of_another_kind() -> None:
    environment = read_environment({"INFER_CACHE__MEMORY": "1GiB", "INFER_CACHE__RADIX_CACHE": "0"})
    config = load_config({"cache": {"num_blocks": "10", "prefix_caching": True}}, None, environment)
    assert (config.cache.memory, config.cache.num_blocks, config.cache.prefix_caching) == (None, 10, True)


@pytest.mark.row("LOAD-CONFIG-SURFACE", "unknown keys fail before load")
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"scheduler": {"max_num_seq": 1}},
            r"unknown setting 'scheduler\.max_num_seq'; did you mean 'scheduler\.max_num_seqs'",
        ),
        ({"schduler": {}}, r"unknown setting 'schduler'; did you mean 'scheduler'"),
        ({"cache": {"max_num_seqs": 1}}, r"did you mean 'scheduler\.max_num_seqs'"),
        ({"scheduler": {"in_flight_depth": 0}}, r"in_flight_depth=0: .*'auto'.* or: .*greater than or equal to 1"),
        ({"cache": {"memory": "lots"}}, r"cache\.memory='lots': write a number of bytes, or .* 2GiB"),
        ({"cache": 3}, r"cache=3"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig(**settings)


def test_messages_say_where_a_value_came_from(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("cache: {block_size: 0}\n")
    environment = read_environment({"INFER_SCHEDULER__MAX_NUM_SEQS": "none"})
    names = {"platform.threads": "--platform.threads"}
    with pytest.raises(ConfigError) as caught:
        load_config({"platform": {"threads": "x"}}, file, environment, names)
    for origin in ("INFER_SCHEDULER__MAX_NUM_SEQS", "c.yaml", "--platform.threads"):
        assert origin in str(caught.value)


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 0), ("512", 512), ("1k", 1000), ("1 KiB", 1024), ("1.5GiB", 3 * 2**29), ("2TB", 2 * 10**12)],
)
def test_sizes_in_words(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (200 * 2**20, "200 MiB"), (2**31, "2.0 GiB")]
)
def test_bytes_in_words(count: int, text: str) -> None:
    assert format_bytes(count) == text
    assert parse_bytes(text) == count
