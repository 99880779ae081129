"""`infer plugins`: everything that was found, where it came from, and what became of it."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.table import Table

from infer.cli.options import with_options
from infer.cli.session import Session
from infer.config.engine import EngineConfig
from infer.plugins.manager import build_registry


@with_options(sections=("plugins",))
def plugins(
    session: Session,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array instead of a table.")] = False,
    config: EngineConfig,
) -> None:
    """List plugins of every kind: chosen, or why not."""
    entries = build_registry(config.plugins).entries()
    if as_json:
        session.write(json.dumps([dataclasses.asdict(entry) for entry in entries], indent=1) + "\n")
        return
    table = Table("kind", "name", "distribution", "version", "api", "state", box=None, pad_edge=False)
    for entry in entries:
        state = f"{entry.state}: {entry.reason}" if entry.reason else entry.state
        api = "" if entry.api is None else str(entry.api)
        table.add_row(entry.kind or "", entry.name, entry.distribution, entry.version, api, state)
    session.table(table)
