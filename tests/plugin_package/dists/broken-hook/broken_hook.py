"""Raises in its hook."""

from __future__ import annotations

from infer.plugins import ParserSpec, hookimpl


@hookimpl
def infer_parsers() -> list[ParserSpec]:
    raise KeyError("no-such-template")
