"""Configuration files, and the one place where flags, file and environment become an `EngineConfig`.

Runs when a command starts. Precedence: flag, file, environment, default.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from infer.config.engine import EngineConfig
from infer.config.env import Environment
from infer.errors import ConfigError

_ONE_OF = (("cache", ("memory", "num_blocks", "memory_fraction")), ("cache", ("prefix_caching", "radix_cache")))
"""Settings that state the same thing: one of them given higher up replaces the others given below."""


def read_config_file(path: Path) -> dict[str, Any]:
    """Settings as nested mappings from YAML, TOML or JSON, chosen by the name's ending. Raises `ConfigError`."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {path} cannot be read: {error}") from error
    kind = path.suffix.lower()
    try:
        if kind == ".toml":
            data: Any = tomllib.loads(text)
        elif kind in (".yaml", ".yml"):
            data = yaml.safe_load(text)
        elif kind == ".json":
            data = json.loads(text)
        else:
            raise ConfigError(f"configuration file {path}: the name must end in .yaml, .yml, .toml or .json")
    except (tomllib.TOMLDecodeError, yaml.YAMLError, json.JSONDecodeError) as error:
        where = " ".join(str(error).split())
        raise ConfigError(f"configuration file {path} is not valid {kind[1:].upper()}: {where}") from error
    if data is None:
        return {}
    if not isinstance(data, dict) or any(not isinstance(key, str) for key in data):
        raise ConfigError(f"configuration file {path} must hold a mapping of sections, such as cache: {{memory: 1GiB}}")
    return data


def load_config(
    flags: Mapping[str, Any], file: Path | None, environment: Environment, names: Mapping[str, str] | None = None
) -> EngineConfig:
    """One configuration from all three. `flags` are nested settings, `names` the flag each came from, for messages."""
    layers: list[tuple[Mapping[str, Any], str]] = [(_sections(environment.settings), "environment")]
    if file is not None:
        layers.append((_sections(read_config_file(file)), str(file)))
    layers.append((_sections(flags), "command line"))
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for layer, origin in layers:
        _lay_over(merged, origins, layer, origin)
    try:
        return EngineConfig(**merged)
    except ConfigError as error:
        where = [
            _told(field, origins[field], environment.names, names or {}) for field in error.fields if field in origins
        ]
        told = f" (from {', '.join(where)})" if where else ""
        raise ConfigError(f"{error}{told}", fields=error.fields) from None


def _sections(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`model: NAME` is short for `model: {ref: NAME}`."""
    return {
        key: {"ref": value} if key == "model" and isinstance(value, str) else value for key, value in settings.items()
    }


def _lay_over(merged: dict[str, Any], origins: dict[str, str], layer: Mapping[str, Any], origin: str) -> None:
    for section, members in _ONE_OF:
        given = layer.get(section)
        if isinstance(given, Mapping) and any(given.get(member) is not None for member in members):
            below = merged.get(section)
            if isinstance(below, dict):
                for member in members:
                    below.pop(member, None)
    for section, values in layer.items():
        if isinstance(values, Mapping) and isinstance(merged.get(section, {}), dict):
            merged.setdefault(section, {}).update(values)
            origins.update({f"{section}.{name}": origin for name in values})
        else:
            merged[section] = values
            origins[section] = origin


def _told(field: str, origin: str, variables: Mapping[str, str], names: Mapping[str, str]) -> str:
    """The place where an operator finds the setting: a variable, a flag, a file."""
    if origin == "environment":
        return variables.get(field, origin)
    return names.get(field, origin) if origin == "command line" else f"{field} in {origin}"
