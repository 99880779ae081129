"""Forgot the marker, so that nothing would ever be found."""

from __future__ import annotations

from infer.plugins import ParserSpec


def infer_parsers() -> list[ParserSpec]:
    return []
