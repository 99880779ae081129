"""Finds plugins, calls their hooks once, checks what they return, and makes a registry of it.

Runs while an engine (or `infer plugins`) starts; all state belongs to the registry that is returned.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.metadata
import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import pluggy

from infer.config.engine import PluginsSection
from infer.errors import (
    ConfigError,
    PluginConflictError,
    PluginContractError,
    PluginError,
    PluginLoadError,
    UnknownPluginError,
)
from infer.plugins import hookspecs
from infer.plugins.builtins import builtin_modules
from infer.plugins.contracts import CONTRACTS
from infer.plugins.registry import BUILTIN, KINDS, Entry, Kind, KindScan, Origin, Registry, Spec, State, cure, describe

ENTRY_POINT_GROUP = "infer"
DATA_PLANE: frozenset[Kind] = frozenset({"platform", "model", "quant_method"})
"""Kinds whose declaration may import torch; they are scanned when first asked for."""
_REFERENCE_FIELDS = ("factory", "worker_factory", "config_view", "probe", "matches")
_REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")

logger = logging.getLogger("infer.plugins")


def build_registry(section: PluginsSection) -> Registry:
    """Load installed plugins and declare everything. Raises `PluginError` when a plugin that the config names fails,
    `PluginConflictError` when two register one name, `ConfigError` when the config names what is not installed."""
    scanner = _Scanner(section)
    scanner.load_entry_points()
    registry = Registry(scanner.scan, tuple(scanner.entries), scanner.is_named)
    for kind in KINDS:
        if kind not in DATA_PLANE:
            registry.specs(kind)
    return registry


class _Scanner:
    """One pluggy manager and where each of its plugins came from."""

    def __init__(self, section: PluginsSection) -> None:
        self._section = section
        self._allow = None if section.allow is None else {normal(name) for name in section.allow}
        self._block = {normal(name) for name in section.block}
        self._prefer = {key: normal(name) for key, name in section.prefer.items()}
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._origins: dict[str, Origin] = {}
        self._builtin = Origin(BUILTIN, importlib.metadata.version(BUILTIN))
        self.entries: list[Entry] = []

    def load_entry_points(self) -> None:
        """Import and register the distributions that the config lets in."""
        found = sorted(
            importlib.metadata.entry_points(group=ENTRY_POINT_GROUP),
            key=lambda point: (_origin(point).distribution, point.name),
        )
        self._check_named({normal(_origin(point).distribution) for point in found})
        for point in found:
            origin = _origin(point)
            reason = self._excluded(origin)
            if reason:
                self.entries.append(_entry(None, point.name, origin, "blocked", reason))
                continue
            try:
                self._load(point, origin)
            except PluginError as error:
                self._report(error, None, point.name, origin, self.entries)

    def scan(self, kind: Kind) -> KindScan:
        """Call the hook of one kind in every plugin and keep what is sound."""
        entries: list[Entry] = []
        for module in builtin_modules(kind):
            if not self._manager.has_plugin(module):
                try:
                    self._register(importlib.import_module(module), module, self._builtin)
                except Exception as error:
                    failure = _load_error(error, module, self._builtin, module)
                    self._report(failure, kind, module, self._builtin, entries)
        found: list[tuple[Spec, Origin]] = []
        for impl in getattr(self._manager.hook, CONTRACTS[kind].hook).get_hookimpls():
            origin = self._origins[impl.plugin_name]
            try:
                declared = self._declare(kind, impl.function, origin)
            except PluginError as error:
                self._report(error, kind, impl.plugin_name.rpartition("/")[2], origin, entries)
                continue
            for spec in declared:
                if not {spec.name, f"{kind}:{spec.name}"}.isdisjoint(self._section.block):
                    entries.append(_entry(kind, spec.name, origin, "blocked", "named in plugins.block", spec.api))
                elif problem := contract_problem(kind, spec):
                    message = f"{kind} {spec.name!r} of {origin}: {problem}"
                    refusal = PluginContractError(message, plugin=origin.distribution)
                    self._report(refusal, kind, str(spec.name), origin, entries, api=spec.api)
                else:
                    found.append((spec, origin))
        return self._choose(kind, found, entries)

    def _load(self, point: importlib.metadata.EntryPoint, origin: Origin) -> None:
        had_torch = "torch" in sys.modules
        try:
            plugin = point.load()
        except (Exception, SystemExit) as error:
            raise _load_error(error, point.value, origin, f"entry point {point.name!r}") from error
        name = f"{origin.distribution}/{point.name}"
        self._register(plugin, name, origin)
        callers = self._manager.get_hookcallers(plugin) or []
        if not callers:
            self._manager.unregister(plugin)
            raise PluginContractError(
                f"{origin}: {point.value} declares no hooks; mark functions such as `infer_models` with "
                "`@infer.plugins.hookimpl`",
                plugin=origin.distribution,
            )
        data_plane = {CONTRACTS[kind].hook for kind in DATA_PLANE}
        if not data_plane & {caller.name for caller in callers}:
            try:
                _check_no_torch(had_torch, origin, point.value)
            except PluginContractError:
                self._manager.unregister(plugin)
                raise

    def _register(self, plugin: Any, name: str, origin: Origin) -> None:
        try:
            self._manager.register(plugin, name)
            self._manager.check_pending()
        except ValueError as error:
            raise PluginContractError(
                f"{origin}: {name} registers twice: {error}", plugin=origin.distribution
            ) from error
        except pluggy.PluginValidationError as error:
            if self._manager.is_registered(plugin):
                self._manager.unregister(plugin)
            raise PluginContractError(
                f"{origin}: {_hook_problem(str(error))}; upgrade {origin.distribution}, or exclude it with "
                f"plugins.block=[{origin.distribution!r}]",
                plugin=origin.distribution,
            ) from error
        self._origins[name] = origin

    def _declare(self, kind: Kind, function: Callable[[], Any], origin: Origin) -> list[Any]:
        """Call one hook; the specs it returned, each of the right type (their values are not checked yet)."""
        hook, spec_type = CONTRACTS[kind].hook, CONTRACTS[kind].spec_type
        had_torch = "torch" in sys.modules
        try:
            returned = function()
        except (Exception, SystemExit) as error:
            raise _load_error(error, function.__module__, origin, f"hook {hook}") from error
        if kind not in DATA_PLANE and origin.distribution != BUILTIN:
            _check_no_torch(had_torch, origin, hook)
        if inspect.iscoroutine(returned):
            returned.close()  # it will never run; Python would complain about that elsewhere
        specs = returned if isinstance(returned, list | tuple) else [returned]
        wrong = [spec for spec in specs if not isinstance(spec, spec_type)]
        if wrong or specs is not returned:
            raise PluginContractError(
                f"{origin}: hook {hook} returned {_short(wrong[0] if wrong else returned)}; it must be a plain function "
                f"that returns a list of {spec_type.__name__}",
                plugin=origin.distribution,
            )
        return list(specs)

    def _choose(self, kind: Kind, found: list[tuple[Spec, Origin]], entries: list[Entry]) -> KindScan:
        """One distribution per name; more is a conflict that only the config can decide."""
        chosen: dict[str, tuple[Spec, Origin]] = {}
        for name in sorted({spec.name for spec, _ in found}):
            rivals = [(spec, origin) for spec, origin in found if spec.name == name]
            preferred = self._prefer.get(f"{kind}:{name}")
            if preferred is not None:
                winners = [(spec, origin) for spec, origin in rivals if normal(origin.distribution) == preferred]
                for spec, origin in rivals:
                    if normal(origin.distribution) != preferred:
                        reason = f"plugins.prefer chooses {preferred}"
                        entries.append(_entry(kind, name, origin, "available", reason, spec.api))
                rivals = winners
            if len(rivals) > 1:
                owners = sorted(str(origin) for _, origin in rivals)
                raise PluginConflictError(
                    f"{kind} {name!r} is registered by {' and by '.join(owners)}; choose one with "
                    f"plugins.prefer={{'{kind}:{name}': '{rivals[-1][1].distribution}'}} or exclude one with plugins.block",
                    plugin=name,
                )
            for spec, origin in rivals:
                chosen[name] = (spec, origin)
                if reason := deprecation(kind, spec):
                    logger.warning("plugin to be upgraded: %s %r of %s: %s", kind, name, origin, reason)
                entries.append(_entry(kind, name, origin, "chosen", reason, spec.api))
        for key, distribution in self._prefer.items():
            if key.startswith(f"{kind}:") and key.partition(":")[2] not in chosen:
                raise UnknownPluginError(
                    f"plugins.prefer names {key!r} of {distribution}, which does not provide it; "
                    f"{kind} names found: {', '.join(sorted({spec.name for spec, _ in found})) or 'none'}",
                    plugin=key,
                )
        _check_claims(kind, chosen)
        contract = CONTRACTS[kind]
        upgrades = {name: contract.previous for name, (spec, _) in chosen.items() if spec.api < contract.version}
        return KindScan(chosen, tuple(sorted(entries, key=lambda entry: (entry.name, entry.distribution))), upgrades)

    def _check_named(self, installed: set[str]) -> None:
        """Distributions and kinds that the config names must be there."""
        for key in self._prefer:
            if key.partition(":")[0] not in KINDS:
                raise ConfigError(
                    f"plugins.prefer key {key!r} is not of the form 'kind:name'; the kinds are {', '.join(KINDS)}",
                    fields=("plugins.prefer",),
                )
        for field, names in (("allow", self._allow or ()), ("prefer", self._prefer.values())):
            for name in names:
                if name not in installed and name != BUILTIN:
                    near = difflib.get_close_matches(name, installed, n=1)
                    raise ConfigError(
                        f"plugins.{field} names distribution {name!r}, which is not installed or has no entry point in group "
                        f"{ENTRY_POINT_GROUP!r}; found: {', '.join(sorted(installed)) or 'none'}"
                        + (f"; did you mean {near[0]!r}?" if near else ""),
                        fields=(f"plugins.{field}",),
                    )

    def _excluded(self, origin: Origin) -> str:
        name = normal(origin.distribution)
        if name in self._block:
            return "named in plugins.block"
        return "not named in plugins.allow" if self._allow is not None and name not in self._allow else ""

    def is_named(self, origin: Origin) -> bool:
        """Whether the config asks for this distribution."""
        distribution = normal(origin.distribution)
        return distribution in self._prefer.values() or (self._allow is not None and distribution in self._allow)

    def _report(
        self, error: PluginError, kind: Kind | None, name: str, origin: Origin, entries: list[Entry], api: Any = None
    ) -> None:
        """Fatal when the config names the distribution; otherwise one warning and an entry."""
        if self.is_named(origin):
            raise error
        state: State = "failed" if isinstance(error, PluginLoadError) else "refused"
        entries.append(_entry(kind, name, origin, state, str(error), api if isinstance(api, int) else None))
        logger.warning("plugin left out: %s", error)


def installed(*, only_plugins: bool = False) -> set[str]:
    """Names of installed distributions, as `normal` writes them; with `only_plugins` those with an entry point of ours."""
    if only_plugins:
        return {
            normal(_origin(point).distribution) for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
        }
    return {normal(dist.name) for dist in importlib.metadata.distributions() if dist.name}


def _origin(point: importlib.metadata.EntryPoint) -> Origin:
    dist = point.dist
    return (
        Origin(dist.name or "unknown", dist.version or "unknown") if dist is not None else Origin("unknown", "unknown")
    )


def normal(distribution: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _entry(kind: Kind | None, name: str, origin: Origin, state: State, reason: str, api: int | None = None) -> Entry:
    return Entry(
        kind=kind,
        name=name,
        distribution=origin.distribution,
        version=origin.version,
        api=api,
        state=state,
        reason=reason,
    )


def _load_error(error: BaseException, reference: str, origin: Origin, what: str) -> PluginError:
    if isinstance(error, PluginError):
        return error
    message = f"{origin}: {what} raised {describe(error)}; {cure(error, origin, reference)}"
    return PluginLoadError(message, plugin=origin.distribution)


def _short(value: object) -> str:
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) <= 100 else text[:97] + "..."


def _hook_problem(message: str) -> str:
    """pluggy's complaint without its object's address, and with the hook that was probably meant."""
    match = re.search(r"'(\w+)'", message)
    near = difflib.get_close_matches(match[1], [contract.hook for contract in CONTRACTS.values()], n=1) if match else []
    return re.sub(r" (in|for) plugin <.*>", "", message.replace("\n", " ")) + (
        f"; did you mean {near[0]!r}?" if near and match and near[0] != match[1] else ""
    )


def _check_no_torch(had_torch: bool, origin: Origin, what: str) -> None:
    if not had_torch and "torch" in sys.modules:
        raise PluginContractError(
            f"{origin}: {what} imports torch while declaring its specs, which only platforms, models and quantization "
            f"methods may; import it in the factory, or exclude the plugin with plugins.block=[{origin.distribution!r}]",
            plugin=origin.distribution,
        )


def contract_problem(kind: Kind, spec: Any) -> str:
    """What is wrong with the values of a spec; "" when nothing is."""
    contract = CONTRACTS[kind]
    if type(spec.api) is int and spec.api not in contract.supported:
        newer = spec.api > contract.version
        served = " and ".join(map(str, contract.supported))
        return (
            f"built for version {spec.api} of the {kind} contract, this infer supports {served}; "
            f"{'upgrade ' + BUILTIN if newer else 'upgrade the plugin'}"
        )
    try:
        msgspec.convert(dataclasses.asdict(spec), contract.spec_type)
    except (msgspec.ValidationError, TypeError) as error:
        return f"a field of its {contract.spec_type.__name__} is wrong: {error}"
    if not spec.name:
        return "its name is empty"
    for field in _REFERENCE_FIELDS:
        value = getattr(spec, field, None)
        if value is not None and not _REFERENCE.fullmatch(value):
            return f'{field} {value!r} is not of the form "package.module:attribute"'
    return ""


def deprecation(kind: Kind, spec: Spec) -> str:
    """What its author should hear; "" for the current version."""
    contract = CONTRACTS[kind]
    if spec.api == contract.version:
        return ""
    changes = f" ({contract.changes})" if contract.changes else ""
    return (
        f"built for version {spec.api} of the {kind} contract; the current one is {contract.version}{changes}, and "
        f"{spec.api} is refused when {contract.version + 1} comes; upgrade the plugin"
    )


def _check_claims(kind: Kind, chosen: dict[str, tuple[Spec, Origin]]) -> None:
    """An architecture or a storage scheme has one owner, under whatever names the specs go."""
    owners: dict[str, tuple[str, Origin]] = {}
    for name, (spec, origin) in chosen.items():
        claims: Iterable[str] = getattr(spec, "architectures", ())
        if kind == "storage_target":
            claims = getattr(spec, "schemes", ())
        for claim in claims:
            if claim in owners:
                other, other_origin = owners[claim]
                raise PluginConflictError(
                    f"{claim!r} is claimed by {kind} {other!r} of {other_origin} and by {kind} {name!r} of {origin}; "
                    f"exclude one with plugins.block=['{kind}:{other}'] or plugins.block=['{kind}:{name}']",
                    plugin=name,
                )
            owners[claim] = (name, origin)
