"""Settings of artifacts: parsed once, and a bad value stops the start with its field's name and without its secrets."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from infer.config.artifacts import check_object_key
from infer.config.engine import EngineConfig
from infer.config.env import read_environment
from infer.config.flags import flags
from infer.errors import ConfigError

PROFILE: dict[str, Any] = {
    "url": "s3://bucket/root",
    "storage_options": {"secret": "SECRET"},
    "allowed_prefixes": [" runs/ ", "a/b"],
    "create_only": True,
}


def from_env(**variables: str) -> Any:
    return EngineConfig(
        **read_environment({f"INFER_ARTIFACTS__{k}": v for k, v in variables.items()}).settings
    ).artifacts


def test_defaults() -> None:
    section = EngineConfig().artifacts
    assert (section.presigned_hosts, section.enable_managed_fsspec, section.allow_insecure_http) == ((), False, False)
    assert (section.max_presigned_ttl_seconds, section.max_bytes, section.max_decoded_bytes) == (3600, 2**26, 2**26)
    assert (section.managed_timeout_seconds, section.pipeline_concurrency, section.process_bytes) == (60, 2, 2**30)
    assert (section.queue_timeout_seconds, section.queue_limit, section.expiry_margin_seconds) == (30, 256, 15)
    assert (section.presigned_connect_timeout_seconds, section.presigned_timeout_seconds) == (10, 60)
    assert section.drain_timeout_seconds == 60


def test_from_the_environment() -> None:
    section = from_env(
        PRESIGNED_HOSTS="Bucket.example, other.example:8443,",
        ENABLE_MANAGED_FSSPEC="yes",
        STORAGE_PROFILES='{"runs": {"url": "memory://x", "allowed_prefixes": ["runs"], "create_only": true}}',
        MAX_BYTES="1",
    )
    assert section.presigned_hosts == ("bucket.example", "other.example:8443")
    assert section.storage_profiles["runs"].url == "memory://x"
    assert section.max_bytes == 1


def test_a_profile() -> None:
    """M6, M7."""
    section = EngineConfig(artifacts={"storage_profiles": {"runs": PROFILE}}).artifacts
    assert section.storage_profiles["runs"].allowed_prefixes == ("runs", "a/b")
    assert "SECRET" not in repr(section) and "SECRET" not in repr(section.storage_profiles["runs"])


@pytest.mark.parametrize(
    "change",
    [
        {"create_only": False},
        {"create_only": 1},
        {"create_only": "true"},
        {"allowed_prefixes": []},
        {"allowed_prefixes": "runs"},
        {"allowed_prefixes": ["../x"]},
        {"allowed_prefixes": [""]},
        {"url": ""},
        {"url": None},
        {"more": "SECRET"},
        {"storage_options": "SECRET"},
    ],
)
def test_profiles_that_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(artifacts={"storage_profiles": {"runs": PROFILE | change}})
    assert "storage_profiles" in str(caught.value) and "SECRET" not in str(caught.value)


def test_an_incomplete_profile_shows_nothing_of_itself() -> None:
    for missing in ("url", "allowed_prefixes", "create_only"):
        profile = {key: value for key, value in PROFILE.items() if key != missing}
        with pytest.raises(ConfigError) as caught:
            EngineConfig(artifacts={"storage_profiles": {"runs": profile}})
        assert "SECRET" not in str(caught.value)
        assert f"artifacts.storage_profiles.runs.{missing}: Field required" in str(caught.value)
        assert caught.value.fields == ("artifacts.storage_profiles",)


@pytest.mark.parametrize("url", ["SECRET", "/SECRET/directory", "s3:/SECRET"])
def test_a_profile_without_a_scheme_is_refused_at_start(url: str) -> None:
    with pytest.raises(ConfigError, match=r"storage_profiles\.runs\.url: write a URL with a scheme") as caught:
        EngineConfig(artifacts={"storage_profiles": {"runs": PROFILE | {"url": url}}})
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    "profiles", [{"../x": PROFILE}, {"": PROFILE}, {"a" * 65: PROFILE}, "[]", "{", {"a": {"url": "x" * 2**20}}]
)
def test_names_and_size_of_profiles(profiles: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(artifacts={"storage_profiles": profiles})
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("text", ["abc", "3600.0", "0x10", "1e5", "-1", "1_000", " 5", "64MiB"])
@pytest.mark.parametrize("name", ["MAX_PRESIGNED_TTL_SECONDS", "MAX_BYTES", "PIPELINE_CONCURRENCY", "PROCESS_BYTES"])
def test_numbers_are_decimal_digits(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"artifacts.{name.lower()}"):
        from_env(**{name: text})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_bytes", 2**26 + 1), ("max_bytes", 0), ("max_decoded_bytes", 0), ("max_decoded_bytes", 2**26 + 1)),
        *(("managed_timeout_seconds", 0), ("pipeline_concurrency", 0), ("queue_limit", -1), ("max_bytes", "")),
    ],
)
def test_limits(name: str, value: object) -> None:
    """T43, T44, T64, M8, M9, BR-14."""
    with pytest.raises(ConfigError, match=f"artifacts.{name}"):
        EngineConfig(artifacts={name: value})


@pytest.mark.parametrize("key", ["a", "a/b", "a.b/c-d_e", " a/b ", "ä/é", "...", "a" * 1024])
def test_object_keys(key: str) -> None:
    assert check_object_key(key) == key.strip()


@pytest.mark.parametrize(
    "key",
    ["", " ", "/a", "a/", "a//b", ".", "..", "./a", "a/.", "../escape", "a/../b", "a\\b", "a\nb", "a\x00b", "a" * 1025],
)
def test_object_keys_that_are_refused(key: str) -> None:
    """T42, M3, M4."""
    with pytest.raises(ValueError, match="object key"):
        check_object_key(key)


def test_variables_of_the_reference_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    read_environment({"DYN_GENERATION_ARTIFACT_MAX_BYTES": "5"})
    assert "DYN_GENERATION_ARTIFACT_MAX_BYTES" in caplog.text and "INFER_ARTIFACTS__MAX_BYTES" in caplog.text


def test_the_flag_of_the_profiles_takes_json() -> None:
    values = {flag.setting: flag.values for flag in flags()}
    assert values["artifacts.storage_profiles"] == "JSON"
    assert values["artifacts.presigned_hosts"] == "A,B,..."
