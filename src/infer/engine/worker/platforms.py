"""Which platform computes: the named one, or for "auto" the best that can be opened here.

On the thread that builds the worker; owns nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from infer.errors import ConfigError
from infer.plugins.model_source import ProgressCallback
from infer.plugins.platform import Platform, PlatformSpec
from infer.plugins.registry import Registry

logger = logging.getLogger(__name__)


def open_platform(
    registry: Registry,
    name: str,
    threads: int | None,
    cache_dir: Path | None,
    progress: ProgressCallback | None = None,
    stated: Mapping[str, Any] | None = None,
    numerics: str = "auto",
) -> Platform:
    """`cache_dir` keeps what is compiled for this machine; `progress` is told of a build; `stated` are settings that only some
    platforms take (`PlatformSpec.settings`), where the operator states them; `numerics` is `numerics.mode`.

    Raises `ConfigError` when a named platform cannot be had, or none can, or the best does not take what is stated; for
    "auto" one that fails to open is passed over with a warning that says why.
    """
    stated = stated or {}
    failed: set[str] = set()
    while True:
        spec = choose_platform(registry, name, failed)
        keep: dict[str, Any] = {"cache_dir": cache_dir, "progress": progress} if spec.compiles else {}
        keep |= {key: value for key, value in stated.items() if key in spec.settings}
        if "numerics" in spec.settings:
            keep["numerics"] = numerics
        foreign = [key for key in stated if key not in spec.settings]
        if foreign and not failed:  # after a failure, which was told, the next platform does without
            raise ConfigError(
                f"platform.{foreign[0]}: platform {spec.name!r} does not take it; leave it out or set platform.name to one "
                "that does",
                fields=(f"platform.{foreign[0]}", "platform.name"),
            )
        try:
            platform: Platform = registry.create("platform", spec.name, threads, **keep)
        except ConfigError as error:
            if name != "auto":
                raise
            logger.warning("platform %s cannot be used, a slower one is: %s", spec.name, error)
            failed.add(spec.name)
        else:
            return platform


def choose_platform(registry: Registry, name: str, passed_over: Container[str] = ()) -> PlatformSpec:
    """The named platform, or for "auto" the available one of highest priority. Refusals give every reason."""
    if name != "auto":
        spec = registry.get("platform", name)
        probe = registry.probe("platform", name, named=True)
        if not probe.available:
            raise ConfigError(f"platform.name={name}: not available here ({probe.reason})", fields=("platform.name",))
        return spec
    reasons: list[str] = []
    for spec in sorted(registry.specs("platform"), key=lambda spec: -spec.priority):
        if spec.name in passed_over:
            continue
        probe = registry.probe("platform", spec.name)
        if probe.available:
            for reason in reasons:
                logger.info("platform %s", reason)
            return spec
        reasons.append(f"{spec.name}: {probe.reason}")
    raise ConfigError(
        f"no platform is available here; {'; '.join(reasons) or 'none is installed'}", fields=("platform.name",)
    )
