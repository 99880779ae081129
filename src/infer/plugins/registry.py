"""What plugins declared, by kind and name, for one engine.

Asked at start and when a component is built, from any thread; owns the scanned specs, which never change.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, overload

from infer.errors import InferError, PluginContractError, PluginError, PluginLoadError, UnknownPluginError
from infer.plugins.artifact_field import ArtifactFieldSpec
from infer.plugins.endpoint import EndpointSpec
from infer.plugins.grammar import GrammarSpec
from infer.plugins.kv_connector import KVConnectorSpec
from infer.plugins.logits_processor import LogitsProcessorSpec
from infer.plugins.model import ModelSpec
from infer.plugins.model_source import ModelSourceSpec
from infer.plugins.parser import ParserSpec
from infer.plugins.platform import PlatformSpec, Probe
from infer.plugins.quant_method import QuantMethodSpec
from infer.plugins.stat_logger import StatLoggerSpec
from infer.plugins.storage_target import StorageTargetSpec
from infer.plugins.tokenizer import TokenizerSpec

Kind = Literal[
    "platform",
    "model",
    "quant_method",
    "kv_connector",
    "artifact_field",
    "storage_target",
    "parser",
    "tokenizer",
    "model_source",
    "grammar",
    "logits_processor",
    "endpoint",
    "stat_logger",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
Spec = (
    PlatformSpec
    | ModelSpec
    | QuantMethodSpec
    | KVConnectorSpec
    | ArtifactFieldSpec
    | StorageTargetSpec
    | ParserSpec
    | TokenizerSpec
    | ModelSourceSpec
    | GrammarSpec
    | LogitsProcessorSpec
    | EndpointSpec
    | StatLoggerSpec
)
BUILTIN = "infer-engine"
"""The distribution of the built-in plugins."""
logger = logging.getLogger("infer.plugins")
State = Literal["chosen", "available", "refused", "failed", "blocked"]


@dataclass(frozen=True, slots=True)
class Origin:
    """The installed distribution something came from."""

    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of `infer plugins`. `kind` and `api` are None when the plugin failed before it declared anything."""

    kind: Kind | None
    name: str
    """Spec name, or the entry point's while there is no spec."""
    distribution: str
    version: str
    api: int | None
    state: State
    """chosen: answers to its name. available: works, but the config prefers another distribution's.
    refused: against the contract. failed: raised. blocked: excluded by the config."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class KindScan:
    """Everything found for one kind; `chosen` is sorted by name."""

    chosen: dict[str, tuple[Spec, Origin]]
    entries: tuple[Entry, ...]
    upgrades: Mapping[str, Mapping[str, Callable[[Any], Any]]] = field(default_factory=dict)
    """Name of a spec of the contract's previous version -> its field -> what makes the field's object fit the current one."""


class Registry:
    """Specs by kind and name. Kinds are scanned when first asked for; what a scan found stays.

    `specs`, `get`, `load` and `create` may raise `PluginError` on the first use of a kind.
    """

    def __init__(
        self,
        scan: Callable[[Kind], KindScan],
        entries: tuple[Entry, ...],
        is_named: Callable[[Origin], bool] = lambda origin: False,
    ) -> None:
        """`entries` are the distributions that never came as far as declaring a kind; `is_named` says whether the config
        asks for a distribution."""
        self._is_named = is_named
        self._scan = scan
        self._entries = entries
        self._kinds: dict[Kind, KindScan] = {}
        self._lock = threading.RLock()

    @overload
    def specs(self, kind: Literal["platform"]) -> tuple[PlatformSpec, ...]: ...
    @overload
    def specs(self, kind: Literal["model"]) -> tuple[ModelSpec, ...]: ...
    @overload
    def specs(self, kind: Literal["quant_method"]) -> tuple[QuantMethodSpec, ...]: ...
    @overload
    def specs(self, kind: Literal["kv_connector"]) -> tuple[KVConnectorSpec, ...]: ...
    @overload
    def specs(self, kind: Literal["artifact_field"]) -> tuple[ArtifactFieldSpec, ...]: ...
    @overload
    def specs(self, kind: Literal["storage_target"]) -> tuple[StorageTargetSpec, ...]: ...
    @overload
    def specs(self, kind: Literal["parser"]) -> tuple[ParserSpec, ...]: ...
    @overload
    def specs(self, kind: Literal["tokenizer"]) -> tuple[TokenizerSpec, ...]: ...
    @overload
    def specs(self, kind: Literal["model_source"]) -> tuple[ModelSourceSpec, ...]: ...
    @overload
    def specs(self, kind: Literal["grammar"]) -> tuple[GrammarSpec, ...]: ...
    @overload
    def specs(self, kind: Literal["logits_processor"]) -> tuple[LogitsProcessorSpec, ...]: ...
    @overload
    def specs(self, kind: Literal["endpoint"]) -> tuple[EndpointSpec, ...]: ...
    @overload
    def specs(self, kind: Literal["stat_logger"]) -> tuple[StatLoggerSpec, ...]: ...
    @overload
    def specs(self, kind: Kind) -> tuple[Spec, ...]: ...
    def specs(self, kind: Kind) -> tuple[Any, ...]:
        """All specs of a kind, sorted by name."""
        return tuple(spec for spec, _ in self._kind(kind).chosen.values())

    @overload
    def get(self, kind: Literal["platform"], name: str) -> PlatformSpec: ...
    @overload
    def get(self, kind: Literal["model"], name: str) -> ModelSpec: ...
    @overload
    def get(self, kind: Literal["quant_method"], name: str) -> QuantMethodSpec: ...
    @overload
    def get(self, kind: Literal["kv_connector"], name: str) -> KVConnectorSpec: ...
    @overload
    def get(self, kind: Literal["artifact_field"], name: str) -> ArtifactFieldSpec: ...
    @overload
    def get(self, kind: Literal["storage_target"], name: str) -> StorageTargetSpec: ...
    @overload
    def get(self, kind: Literal["parser"], name: str) -> ParserSpec: ...
    @overload
    def get(self, kind: Literal["tokenizer"], name: str) -> TokenizerSpec: ...
    @overload
    def get(self, kind: Literal["model_source"], name: str) -> ModelSourceSpec: ...
    @overload
    def get(self, kind: Literal["grammar"], name: str) -> GrammarSpec: ...
    @overload
    def get(self, kind: Literal["logits_processor"], name: str) -> LogitsProcessorSpec: ...
    @overload
    def get(self, kind: Literal["endpoint"], name: str) -> EndpointSpec: ...
    @overload
    def get(self, kind: Literal["stat_logger"], name: str) -> StatLoggerSpec: ...
    def get(self, kind: Kind, name: str) -> Any:
        """The spec of that name. Raises `UnknownPluginError`, or `PluginContractError` when it was refused."""
        return self._find(kind, name)[0]

    def load(self, kind: Kind, name: str, field: str = "factory") -> Any:
        """Import the object that a spec's `field` ("module:attr") names. Raises `PluginLoadError`."""
        spec, origin = self._find(kind, name)
        reference: str = getattr(spec, field)
        upgrade = self._kind(kind).upgrades.get(name, {}).get(field)
        try:
            found = import_reference(reference)
            return found if upgrade is None else upgrade(found)
        except (Exception, SystemExit) as error:
            raise PluginLoadError(
                f"{kind} {name!r} of {origin}: {field} {reference!r} cannot be imported ({describe(error)}); "
                f"{cure(error, origin, reference)}",
                plugin=origin.distribution,
            ) from error

    def create(self, kind: Kind, name: str, *args: Any, field: str = "factory", **kwargs: Any) -> Any:
        """Load and call. What the callee raises beside our own errors becomes a `PluginLoadError` that names it."""
        made = self.load(kind, name, field)
        try:
            return made(*args, **kwargs)
        except InferError:
            raise
        except Exception as error:
            spec, origin = self._find(kind, name)
            advice = cure(error, origin, getattr(spec, field))
            raise PluginLoadError(
                f"{kind} {name!r} of {origin}: its {field} raised {describe(error)}; {advice}",
                plugin=origin.distribution,
            ) from error

    def probe(self, kind: Kind, name: str, *args: Any, named: bool = False) -> Probe:
        """What its probe says of this machine or file; True and False count as a `Probe`.

        One that raises or returns something else is not available, and a warning says so; where the config names the plugin
        or its distribution that is a `PluginError`.
        """
        try:
            said = self.create(kind, name, *args, field="probe")
            if isinstance(said, Probe | bool):
                return said if isinstance(said, Probe) else Probe(said)
            raise PluginContractError(
                f"{kind} {name!r} of {self.origin(kind, name)}: its probe returned {said!r:.80}; it must return True, False or "
                "an infer.plugins.Probe",
                plugin=name,
            )
        except PluginError as error:
            if named or self._is_named(self.origin(kind, name)):
                raise
            logger.warning("plugin left out: %s", error)
            return Probe(False, str(error))

    def origin(self, kind: Kind, name: str) -> Origin:
        """The distribution that a spec came from."""
        return self._find(kind, name)[1]

    def entries(self) -> list[Entry]:
        """Everything that was found, of every kind, with what became of it."""
        return [*(entry for kind in KINDS for entry in self._kind(kind).entries), *self._entries]

    def _kind(self, kind: Kind) -> KindScan:
        if kind not in KINDS:
            raise UnknownPluginError(f"there is no plugin kind {kind!r}; the kinds are {', '.join(KINDS)}")
        with self._lock:
            if kind not in self._kinds:
                self._kinds[kind] = self._scan(kind)
            return self._kinds[kind]

    def _find(self, kind: Kind, name: str) -> tuple[Spec, Origin]:
        scan = self._kind(kind)
        if name in scan.chosen:
            return scan.chosen[name]
        for entry in scan.entries:
            if entry.name == name and entry.state == "refused":
                raise PluginContractError(entry.reason, plugin=entry.distribution)
        known = ", ".join(scan.chosen) or "none"
        near = difflib.get_close_matches(name, scan.chosen, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        lost = [entry for entry in (*scan.entries, *self._entries) if entry.state in ("failed", "refused", "blocked")]
        if lost:
            hint += "; not loaded: " + "; ".join(_account(entry) for entry in lost)
        raise UnknownPluginError(f"there is no {kind} plugin {name!r}; installed: {known}{hint}", plugin=name)


def _account(entry: Entry) -> str:
    """Reasons of failed and refused plugins are whole sentences; those of blocked ones need a subject."""
    subject = f"{entry.name!r} of {entry.distribution} {entry.version}"
    return f"{subject} is {entry.reason}" if entry.state == "blocked" else entry.reason


def import_reference(reference: str) -> Any:
    """The object that "module:attr" names."""
    module, _, attribute = reference.partition(":")
    value: Any = importlib.import_module(module)
    for part in attribute.split("."):
        value = getattr(value, part)
    return value


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def cure(error: BaseException, origin: Origin, reference: str) -> str:
    """What the operator can do about a plugin that does not load. `reference` is the module it lives in."""
    if origin.distribution == BUILTIN:
        exclude = f"reinstall {BUILTIN}"
    else:
        exclude = f"exclude it with plugins.block=[{origin.distribution!r}]"
    missing = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    if missing and missing.partition(".")[0] != reference.partition(".")[0]:
        return f"install the package that provides {missing!r}, or {exclude}"
    return exclude if origin.distribution == BUILTIN else f"upgrade or repair {origin.distribution}, or {exclude}"
