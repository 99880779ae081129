"""`infer plugins check`: the conformance kits over one distribution or module, in this process, as a report.

The one place where the product reaches its test kits, and only when the command runs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import pkgutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pluggy
import typer

from infer.cli.session import Session
from infer.config.engine import EngineConfig, PluginsSection
from infer.errors import PluginError, UnknownPluginError
from infer.plugins.manager import build_registry, installed, normal
from infer.plugins.registry import KINDS, Kind, describe

if TYPE_CHECKING:
    from infer.testing.kits import Check

Declared = list[tuple[Kind, Any]]


@dataclass(frozen=True, slots=True)
class Result:
    """Of one check."""

    plugin: str
    """kind:name; of what cannot be loaded the argument of the command."""
    check: str
    error: str
    """"": it passed."""


def check(
    session: Session,
    plugin: Annotated[str, typer.Argument(metavar="PLUGIN", help="A distribution, a module, or a module's .py file.")],
    *,
    network: Annotated[
        bool, typer.Option("--network", help="Let model sources fetch the reference of their example.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array instead of a report.")] = False,
    config: EngineConfig,
) -> None:
    """Run the conformance kits of all that a plugin declares. The exit code is 1 if anything fails."""
    results: list[Result] = []
    for result in _results(plugin, network, quiet=session.log_level is None):
        results.append(result)
        if not as_json:
            told = f": {' '.join(result.error.split())}" if result.error else ""
            session.write(f"{'FAILED' if result.error else 'passed'} {result.plugin} {result.check}{told}\n")
    failed = sum(1 for result in results if result.error)
    if as_json:
        session.write(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    else:
        count = len({result.plugin for result in results})
        plugins = "1 plugin" if count == 1 else f"{count} plugins"
        session.write(f"{plugins}: {len(results) - failed} checks passed, {failed} failed\n")
    if failed:
        raise typer.Exit(1)


def _results(plugin: str, network: bool, *, quiet: bool) -> Iterator[Result]:
    from infer.testing.conformance import checks  # noqa: PLC0415  torch, and the kits

    with _imports(plugin) as module:
        try:
            found = _distribution(plugin) if normal(plugin) in installed(only_plugins=True) else _module(module)
        except UnknownPluginError:
            raise
        except PluginError as failure:  # its message has the cure
            yield Result(plugin, "loads", str(failure))
            return
        if not found:
            yield Result(plugin, "declares", "its hooks return no spec; return one from a function marked `@hookimpl`")
        for kind, spec in found:
            with tempfile.TemporaryDirectory() as directory, _without_logs(quiet):
                for each in checks(kind, spec, Path(directory), network=network):
                    yield Result(f"{kind}:{spec.name}", each.name, _error(each))


def _error(check: Check) -> str:
    """Of a check that fails; "" of one that passes."""
    try:
        check.run()
    except AssertionError as failure:
        return str(failure) or "AssertionError"
    except (Exception, SystemExit) as failure:
        return describe(failure)
    return ""


@contextlib.contextmanager
def _imports(plugin: str) -> Iterator[str]:
    """The module's name, importable inside: a file's directory, else the current one, is searched first."""
    path = Path(plugin)
    is_file = path.suffix == ".py"
    if is_file and not path.is_file():
        raise UnknownPluginError(f"there is no file {plugin!r}", plugin=plugin)
    directory = str(path.resolve().parent if is_file else Path.cwd())
    sys.path.insert(0, directory)
    try:
        yield path.stem if is_file else plugin
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(directory)


@contextlib.contextmanager
def _without_logs(quiet: bool) -> Iterator[None]:
    """Kits make things fail, and what the engine logs of that is no news. With --log-level it is shown."""
    before = logging.root.manager.disable
    if quiet:
        logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _distribution(name: str) -> Declared:
    """What an installed distribution declares. Raises `PluginError` for what is broken: it is named, so that is fatal."""
    registry = build_registry(PluginsSection(allow=(name,)))
    return [
        (kind, spec)
        for kind in KINDS
        for spec in registry.specs(kind)
        if normal(registry.origin(kind, spec.name).distribution) == normal(name)
    ]


def _module(name: str) -> Declared:
    """What a module declares. Raises `PluginError`."""
    from infer.testing.conformance import declared  # noqa: PLC0415

    if not all(part.isidentifier() for part in name.split(".")):
        raise UnknownPluginError(
            f"{name!r} is neither a module's name nor a distribution with plugins; `infer plugins` lists those",
            plugin=name,
        )
    try:
        module = pkgutil.resolve_name(name)
    except ModuleNotFoundError as error:
        if error.name is not None and name.startswith(error.name):
            raise UnknownPluginError(
                f"there is no module {name!r} here, nor a distribution of that name with plugins; install it, or name "
                "its .py file",
                plugin=name,
            ) from error
        raise PluginError(
            f"{name} cannot be imported: {describe(error)}; install what it needs", plugin=name
        ) from error
    except (Exception, SystemExit) as error:
        raise PluginError(f"{name} cannot be imported: {describe(error)}", plugin=name) from error
    try:
        return declared(module)
    except pluggy.PluginValidationError as error:
        raise PluginError(f"{name}: {error}; the hooks are on the page docs/api.md", plugin=name) from error
    except (Exception, SystemExit) as error:
        raise PluginError(f"{name}: a hook raised {describe(error)}", plugin=name) from error
