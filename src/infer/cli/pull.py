"""`infer pull [MODEL]`: fetch a model into the cache; list and remove what is there. Starts no engine."""

from __future__ import annotations

import json
import re
from typing import Annotated

import typer
from rich.table import Table

from infer.cli.options import with_model, with_options
from infer.cli.progress import ProgressDisplay
from infer.cli.session import Session
from infer.config.engine import EngineConfig
from infer.config.units import format_bytes
from infer.errors import ConfigError, ModelError
from infer.plugins.manager import build_registry
from infer.plugins.model_cache import CacheEntry, list_entries, remove_entry
from infer.plugins.model_reference import resolve_reference


@with_options(sections=("plugins",))
def pull(
    session: Session,
    *,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Left out: the small default model.")] = None,
    show: Annotated[bool, typer.Option("--list", help="Show what the cache holds.")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Take MODEL out of the cache.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Fetch again what the cache has already.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --list: one JSON array.")] = False,
    config: EngineConfig,
) -> None:
    """Fetch a model, or look after the cache of fetched models."""
    cache_dir = session.environment.cache_dir
    if show:
        _list(session, list_entries(cache_dir), as_json)
        return
    if remove:
        if model is None:
            raise ConfigError("--remove needs the model to remove: infer pull --remove MODEL; --list shows them")
        entries = [entry for entry in list_entries(cache_dir) if _names(entry, model)]
        if not entries:
            raise ModelError(f"{model} is not in the cache {cache_dir}; `infer pull --list` shows what is")
        for entry in entries:
            remove_entry(cache_dir, entry.key)
            session.note(f"removed {entry.reference} ({format_bytes(entry.size)})")
        return
    _fetch(session, with_model(config, model), force)


def _fetch(session: Session, config: EngineConfig, force: bool) -> None:
    environment, reference = session.environment, config.model.ref
    if force:
        for entry in list_entries(environment.cache_dir):
            if _names(entry, reference):
                remove_entry(environment.cache_dir, entry.key)
    registry = build_registry(config.plugins)
    with ProgressDisplay(session) as report:
        found = resolve_reference(
            reference,
            registry,
            environment.cache_dir,
            offline=environment.offline,
            token=environment.hub_token,
            progress=report,
        )
    session.write(f"{found.path}\n")
    session.note(f"{reference}: {found.identity}")


def _list(session: Session, entries: list[CacheEntry], as_json: bool) -> None:
    if as_json:
        rows = [
            {"reference": e.reference, "identity": e.identity, "path": str(e.path), "bytes": e.size} for e in entries
        ]
        session.write(json.dumps(rows, indent=1) + "\n")
        return
    if not entries:
        session.note(f"the cache {session.environment.cache_dir} holds no model yet")
        return
    table = Table("model", "size", "identity", "path", box=None, pad_edge=False)
    for entry in entries:
        table.add_row(entry.reference, format_bytes(entry.size), entry.identity[:24], str(entry.path))
    session.table(table)


def _names(entry: CacheEntry, model: str) -> bool:
    """Whether what the user wrote means this entry: exactly, or without its version or revision."""
    wanted = model if re.match(r"[a-z][a-z0-9+.-]*:", model) else f"hf:{model}"
    if wanted.startswith("pypi:"):
        package, _, version = wanted.removeprefix("pypi:").partition("==")
        name = re.sub(r"[-_.]+", "-", package).lower()
        wanted = f"pypi:{name}=={version}" if version else f"pypi:{name}"
    short = re.split(r"==|@", entry.reference)[0]
    # A key may be less exact than what was fetched under it: hf:org/name@main.
    return wanted in (entry.reference, short) or (entry.key.startswith("hf:") and wanted == entry.key)
