"""Returns a spec that is not in a list."""

from __future__ import annotations

from infer.plugins import ParserSpec, hookimpl


@hookimpl
def infer_parsers() -> ParserSpec:
    return ParserSpec(name="alone", api=1, factory="broken_return:make", fingerprints=(), example={})
