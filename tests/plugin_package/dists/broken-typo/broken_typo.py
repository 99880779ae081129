"""Implements a hook that does not exist."""

from __future__ import annotations

from infer.plugins import ParserSpec, hookimpl


@hookimpl
def infer_parser() -> list[ParserSpec]:
    return []
