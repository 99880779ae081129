"""An external store of KV blocks: which plugin, and what happens when it fails. Plain data, parsed once."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from infer.config.section import Section, paired
from infer.errors import ConfigError


class KVConnectorSection(Section):
    """Nothing of it exists unless a connector is named."""

    name: str | None = None
    """Connector plugin that keeps KV blocks outside the engine: "directory" is built in. A name that cannot be had stops the
    start."""
    options: Annotated[dict[str, Any], BeforeValidator(paired), Field(repr=False)] = Field(default_factory=dict)
    """What the plugin asks for. Never logged: it may hold a password."""
    save: bool = True
    """Give computed blocks to the store; False only reads it."""
    on_failure: Literal["recompute", "fail"] = "recompute"
    """What a request does whose blocks could not be loaded though the store had said it has them: compute them, or end with
    `KVLoadError`."""
    timeout: Annotated[float, Field(gt=0)] = 10.0
    """Seconds that a request waits for an answer of the store, and again for its blocks; then it computes them."""


def check_kv_connector(section: KVConnectorSection, prefix_caching: bool, step_log: object) -> None:
    """What a connector needs and what it rules out. Raises `ConfigError` naming both settings."""
    setting = f"kv_connector.name={section.name!r}"
    if section.name is not None and not prefix_caching:
        raise ConfigError(
            f"{setting} needs cache.prefix_caching=True: blocks are kept under the prefix cache's hashes; set one of them back",
            fields=("kv_connector.name", "cache.prefix_caching"),
        )
    if section.name is not None and step_log is not None:
        raise ConfigError(
            f"{setting} and step_log.path={str(step_log)!r}: what a store answers and when is not in the step log, so that it "
            "could not be replayed; leave one of them out",
            fields=("kv_connector.name", "step_log.path"),
        )
