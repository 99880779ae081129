"""What the sections of the configuration share: their base, and how flags and the environment write lists. Pure."""

from __future__ import annotations

import json

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of the settings: unknown keys are errors, values never change after construction."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def listed(value: object) -> object:
    """Flags and the environment write lists as "a,b"."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def paired(value: object) -> object:
    """Flags and the environment write mappings as "key=value,key=value"."""
    pairs = listed(value) if isinstance(value, str) else None
    if isinstance(pairs, tuple) and all("=" in pair for pair in pairs):
        return dict(pair.split("=", 1) for pair in pairs)
    return value


def by_plugin(value: object) -> object:
    """Flags and the environment write the options of several plugins as JSON: {"plugin": {"option": value}}."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else {}
        except (ValueError, RecursionError):
            raise ValueError('write a JSON object: {"plugin": {"option": value}}') from None
    return value
