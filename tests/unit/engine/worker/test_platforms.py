"""Which platform is taken, and what happens when it cannot be opened."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infer.engine.worker.platforms import choose_platform, open_platform
from infer.errors import ConfigError
from infer.plugins.platform import Probe


class Plugins:
    """A registry of platforms: spec, what its probe says, and what its factory does."""

    def __init__(self, *entries: tuple[Any, Probe, Any]) -> None:
        self.entries = entries

    def specs(self, kind: str) -> tuple[Any, ...]:
        return tuple(spec for spec, _, _ in self.entries)

    def get(self, kind: str, name: str) -> Any:
        return next(spec for spec in self.specs(kind) if spec.name == name)

    def probe(self, kind: str, name: str, *, named: bool = False) -> Probe:
        return next(probe for spec, probe, _ in self.entries if spec.name == name)

    def create(self, kind: str, name: str, *args: Any, **kwargs: Any) -> Any:
        _, _, factory = next(entry for entry in self.entries if entry[0].name == name)
        return factory(*args, **kwargs)


def platform(
    name: str,
    priority: int,
    reason: str = "",
    *,
    compiles: bool = False,
    factory: Any = None,
    settings: tuple[str, ...] = (),
) -> tuple[Any, Probe, Any]:
    spec = SimpleNamespace(name=name, priority=priority, compiles=compiles, settings=settings)
    return spec, Probe(not reason, reason), factory or (lambda *args, **kwargs: (name, args, kwargs))


def broken(*args: Any, **kwargs: Any) -> Any:
    raise ConfigError("the compiler says no", fields=("platform.name",))


def test_auto_takes_the_available_platform_of_highest_priority() -> None:
    plugins: Any = Plugins(platform("a", 1), platform("b", 9, "no driver"), platform("c", 5))
    assert choose_platform(plugins, "auto").name == "c"
    assert choose_platform(plugins, "a").name == "a"
    with pytest.raises(ConfigError, match=r"platform\.name=b.*no driver") as raised:
        choose_platform(plugins, "b")
    assert raised.value.fields == ("platform.name",)


def test_no_platform_at_all_gives_every_reason() -> None:
    plugins: Any = Plugins(platform("a", 1, "no card"), platform("b", 9, "no driver"))
    with pytest.raises(ConfigError, match="b: no driver; a: no card"):
        choose_platform(plugins, "auto")


def test_one_that_compiles_is_told_where_to_keep_it() -> None:
    plugins: Any = Plugins(platform("a", 1), platform("b", 9, compiles=True))
    told: Any = object()
    keep = {"cache_dir": Path("/cache"), "progress": told}
    assert open_platform(plugins, "auto", 3, Path("/cache"), told) == ("b", (3,), keep)
    assert open_platform(plugins, "a", None, Path("/cache"), told) == ("a", (None,), {})


def test_auto_passes_over_what_does_not_open_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    plugins: Any = Plugins(platform("a", 1), platform("b", 9, factory=broken))
    with caplog.at_level(logging.WARNING, "infer"):
        assert open_platform(plugins, "auto", 1, None)[0] == "a"
    assert "platform b" in caplog.text and "the compiler says no" in caplog.text
    with pytest.raises(ConfigError, match="the compiler says no"):
        open_platform(plugins, "b", 1, None)
    alone: Any = Plugins(platform("b", 9, factory=broken))
    with pytest.raises(ConfigError, match="no platform is available"):
        open_platform(alone, "auto", 1, None)


def test_stated_settings_go_to_platforms_that_take_them() -> None:
    plugins: Any = Plugins(platform("a", 1), platform("b", 9, settings=("cpus", "kernels")))
    assert open_platform(plugins, "auto", 2, None, None, {"cpus": (0, 1)}) == ("b", (2,), {"cpus": (0, 1)})
    with pytest.raises(ConfigError, match=r"platform\.cpus: platform 'a' does not take it") as caught:
        open_platform(plugins, "a", 2, None, None, {"cpus": (0, 1)})
    assert caught.value.fields == ("platform.cpus", "platform.name")


def test_the_numerics_mode_goes_to_platforms_that_have_other_kernels_for_it() -> None:
    plugins: Any = Plugins(platform("a", 1), platform("b", 9, settings=("numerics",)))
    for mode in ("auto", "invariant"):
        assert open_platform(plugins, "b", None, None, numerics=mode) == ("b", (None,), {"numerics": mode})
        assert open_platform(plugins, "a", None, None, numerics=mode) == ("a", (None,), {})


def test_after_a_failure_the_next_platform_does_without_what_was_stated(caplog: pytest.LogCaptureFixture) -> None:
    plugins: Any = Plugins(platform("a", 1), platform("b", 9, factory=broken, settings=("kernels",)))
    with caplog.at_level(logging.WARNING, "infer"):
        assert open_platform(plugins, "auto", 1, None, None, {"kernels": Path("/k")}) == ("a", (1,), {})
    assert "the compiler says no" in caplog.text
