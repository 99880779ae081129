"""Imports torch at module level though it is a parser."""

from __future__ import annotations

import torch

from infer.plugins import ParserSpec, hookimpl

EMPTY = torch.zeros(0)


@hookimpl
def infer_parsers() -> list[ParserSpec]:
    return [ParserSpec(name="heavy-import", api=1, factory="heavy_import:make", fingerprints=(), example={})]
