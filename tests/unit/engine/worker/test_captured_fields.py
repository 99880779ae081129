"""What artifacts call captured fields: one name for two of them is refused before anything is captured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from infer import ConfigError
from infer.config.capture import CaptureProfile
from infer.engine.worker.captured_fields import captured_fields
from infer.plugins.artifact_field import ArtifactFieldSpec


class Fields:
    """As a registry of fields: name -> distribution."""

    def __init__(self, distributions: dict[str, str]) -> None:
        self._distributions = distributions

    def get(self, kind: str, name: str) -> ArtifactFieldSpec:
        return ArtifactFieldSpec(
            name=name,
            api=1,
            factory="",
            coordinate="executed_token",
            reuse="prefix_block",
            tap="hidden",
            encoding="raw",
            example={},
        )

    def origin(self, kind: str, name: str) -> Any:
        return SimpleNamespace(distribution=self._distributions[name])

    def create(self, kind: str, name: str, facts: object) -> Any:
        profile = CaptureProfile(name=name, dtype="int32", row_shape=(2,), layer_ids=(), model_identity="m")
        return SimpleNamespace(profile=lambda: profile)


def captured(distributions: dict[str, str]) -> list[str]:
    section = SimpleNamespace(
        names=lambda: tuple(distributions), setting=lambda name: "capture.fields", hidden_layers=()
    )
    config = SimpleNamespace(identity="m", vocab_size=9)
    arguments: list[Any] = [Fields(distributions), section, object(), config, "float32"]
    return [found.profile.name for found in captured_fields(*arguments)[1]]


@pytest.mark.parametrize(
    "distributions", [{"norms": "acme", "acme.norms": "other"}, {"a-b.norms": "one", "norms": "A.B"}], ids=str
)
def test_two_fields_that_artifacts_would_call_the_same_are_refused(distributions: dict[str, str]) -> None:
    first, second = distributions
    with pytest.raises(ConfigError, match=f"for the fields '{first}' and '{second}'; leave one of them out") as caught:
        captured(distributions)
    assert caught.value.fields == ("capture.fields",)


def test_the_same_word_in_two_distributions_is_no_conflict() -> None:
    assert captured({"norms": "acme", "other.norms": "other"}) == ["norms", "other.norms"]
