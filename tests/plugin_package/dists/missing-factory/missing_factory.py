"""Names a factory that does not exist."""

from __future__ import annotations

from infer.plugins import ParserSpec, hookimpl


@hookimpl
def infer_parsers() -> list[ParserSpec]:
    return [ParserSpec(name="missing-factory", api=1, factory="missing_factory:gone", fingerprints=(), example={})]
