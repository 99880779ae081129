"""Imports torch in its hook though it is a parser."""

from __future__ import annotations

from infer.plugins import ParserSpec, hookimpl


@hookimpl
def infer_parsers() -> list[ParserSpec]:
    import torch

    version = torch.__version__
    return [ParserSpec(name=f"heavy-{version}", api=1, factory="heavy_hook:make", fingerprints=(), example={})]
