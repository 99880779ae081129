"""`infer plugins [list|show|check|new]`: what was found and what became of it, one of them closely, its kit, a new one."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
from typing import Annotated, Any

import typer
from rich.table import Table

from infer.cli.options import with_options
from infer.cli.plugin_check import check
from infer.cli.plugin_new import new
from infer.cli.session import Session
from infer.config.engine import EngineConfig
from infer.errors import UnknownPluginError
from infer.plugins.contracts import CONTRACTS
from infer.plugins.manager import build_registry, installed, normal
from infer.plugins.registry import KINDS, Entry, Registry

Json = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]


def build_plugins() -> typer.Typer:
    app = typer.Typer(name="plugins")
    listing = with_options(sections=("plugins",))(listed)

    @functools.wraps(listing)
    def root(ctx: typer.Context, **values: Any) -> None:
        if ctx.invoked_subcommand is None:
            listing(ctx, **values)

    app.callback(invoke_without_command=True, help="List plugins of every kind; look at one, check one, begin one.")(
        root
    )
    app.command("list")(listing)
    for command in (show, check):
        app.command(command.__name__)(with_options(sections=("plugins",))(command))
    app.command("new")(new)
    return app


def listed(session: Session, *, as_json: Json = False, config: EngineConfig) -> None:
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


def show(
    session: Session,
    plugin: Annotated[str, typer.Argument(metavar="PLUGIN", help="KIND:NAME, a name, or a distribution.")],
    *,
    as_json: Json = False,
    config: EngineConfig,
) -> None:
    """Show what a plugin declares, where it comes from, and what became of it."""
    registry = build_registry(config.plugins)
    found = [described(registry, entry) for entry in _meant(registry, plugin)]
    if as_json:
        session.write(json.dumps(found, indent=1, default=str) + "\n")
        return
    for number, facts in enumerate(found):
        if number:
            session.write("\n")
        for name, value in facts.items():
            session.write(f"{name}: {value if isinstance(value, str) else json.dumps(value, default=str)}\n")


def described(registry: Registry, entry: Entry) -> dict[str, Any]:
    """An entry, and the spec behind it where there is one; of an example only its keys."""
    facts: dict[str, Any] = {"plugin": f"{entry.kind}:{entry.name}" if entry.kind else entry.name}
    facts |= {"distribution": f"{entry.distribution} {entry.version}", "state": entry.state}
    if entry.reason:
        facts["reason"] = entry.reason
    if entry.kind is not None:
        contract = CONTRACTS[entry.kind]
        served = " and ".join(map(str, contract.supported))
        facts |= {"hook": contract.hook, "api": f"{entry.api} (served here: {served})"}
    if entry.kind is not None and entry.state == "chosen":
        spec = registry.get(entry.kind, entry.name)
        for field in dataclasses.fields(spec):
            value = getattr(spec, field.name)
            if field.name == "example":
                facts["example"] = f"has {', '.join(value)}" if value else "empty"
            elif field.name not in ("name", "api"):
                facts[field.name] = _plain(value)
    return facts


def _plain(value: Any) -> Any:
    """As JSON has it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return sorted(value) if isinstance(value, frozenset | set) else value


def _meant(registry: Registry, plugin: str) -> list[Entry]:
    """Raises `UnknownPluginError` with what is near."""
    entries = registry.entries()
    kind, _, name = plugin.partition(":")
    if kind in KINDS and name:
        found = [entry for entry in entries if (entry.kind, entry.name) == (kind, name)]
    else:
        found = [entry for entry in entries if normal(entry.distribution) == normal(plugin)]
        found = found or [entry for entry in entries if entry.name == plugin]
    if found:
        return found
    known = {f"{entry.kind}:{entry.name}" for entry in entries} | {entry.distribution for entry in entries}
    near = difflib.get_close_matches(plugin, sorted(known | {entry.name for entry in entries}), n=1)
    hint = f"; did you mean {near[0]!r}" if near else ""
    if normal(plugin) in installed():
        hint = '; that distribution is installed, but has no entry point in the group "infer"'
    raise UnknownPluginError(
        f"no plugin, kind:name or distribution of plugins is called {plugin!r}{hint}; `infer plugins` lists all",
        plugin=plugin,
    )
