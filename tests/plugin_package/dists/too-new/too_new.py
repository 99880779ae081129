"""Built for a contract that is too new."""

from __future__ import annotations

from infer.plugins import ParserSpec, hookimpl


@hookimpl
def infer_parsers() -> list[ParserSpec]:
    return [ParserSpec(name="too-new", api=7, factory="too_new:make", fingerprints=(), example={})]
