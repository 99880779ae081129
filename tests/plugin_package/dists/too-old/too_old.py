"""Built for a contract that is too old."""

from __future__ import annotations

from infer.plugins import ParserSpec, hookimpl


@hookimpl
def infer_parsers() -> list[ParserSpec]:
    return [ParserSpec(name="too-old", api=0, factory="too_old:make", fingerprints=(), example={})]
