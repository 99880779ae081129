"""Options that an operator gives a plugin: its spec declares them with defaults, the settings say which have another value.

Pure; runs when an engine or a server starts, before the plugin's code does. Values are never shown: they may be secrets.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from infer.errors import ConfigError, PluginContractError

if TYPE_CHECKING:
    from infer.plugins.registry import Registry

SETTINGS = {"endpoint": "api.endpoint_options", "stat_logger": "plugins.stat_logger_options"}
"""Where the operator gives options, per kind."""
MAX_DEPTH = 100
"""Of lists and objects in each other."""
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_TYPES: tuple[tuple[type, tuple[type, ...], str], ...] = (
    (bool, (bool,), "true or false"),
    (int, (int,), "a whole number"),
    (float, (int, float), "a number"),
    (str, (str,), "text"),
    (list, (list,), "a list"),
    (dict, (dict,), "an object"),
)
"""Type of a default, the types of values in its place, and what to call them."""


def plugin_options(plugin: str, declared: Mapping[str, Any], given: Mapping[str, Any], setting: str) -> dict[str, Any]:
    """The defaults of `plugin` ("stat_logger 'log'"), and over them what `setting` gives; the caller's to keep. Raises
    `ConfigError` for an option that the plugin does not have, and for a value of another type than its default's or that is
    not plain data; `PluginContractError` for a declaration that cannot be."""
    problem = declaration_problem(declared)
    if problem:
        raise PluginContractError(f"{plugin}: {problem}", plugin=plugin)
    if not isinstance(given, Mapping):
        raise ConfigError(f"{setting}: the options of {plugin} must be an object", fields=(setting,))
    for name, value in given.items():
        if name not in declared:
            raise ConfigError(
                f"{setting}: {plugin} has no option {name!r}; {_known(name, declared)}", fields=(setting,)
            )
        wanted = _wanted(declared[name], value)
        if wanted:
            raise ConfigError(
                f"{setting}: option {name!r} of {plugin} must be {wanted}, not {_called(value)}", fields=(setting,)
            )
        if not _is_plain(value):
            raise ConfigError(
                f"{setting}: option {name!r} of {plugin} is not plain data as JSON has it", fields=(setting,)
            )
    return copy.deepcopy({**declared, **given})


def options_of(
    registry: Registry, kind: Literal["endpoint", "stat_logger"], name: str, options: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Those of one plugin, of what the settings give all of its kind. Raises `PluginError` when it is not there, and as
    `plugin_options` does."""
    declared = registry.get(kind, name).options
    return plugin_options(f"{kind} {name!r}", declared, options.get(name, {}), SETTINGS[kind])


def declaration_problem(declared: Any) -> str:
    """What is wrong with the options of a spec; "" when nothing is."""
    if not isinstance(declared, dict):
        return f"options must be a dict of names and defaults, not {type(declared).__name__}"
    for name, default in declared.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            return f"{name!r} is no name of an option: lower-case letters, digits and underscores, a letter first"
        if not _is_plain(default):
            return f"the default of option {name!r} is not plain data as JSON has it"
    return ""


def _known(name: str, declared: Mapping[str, Any]) -> str:
    if not declared:
        return "it takes none"
    near = difflib.get_close_matches(name, declared, n=1)
    return f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(declared)}"


def _wanted(default: Any, value: Any) -> str:
    """What the value should be; "" when it is that. A default of None stands for anything."""
    for kind, allowed, called in _TYPES:
        if type(default) is kind:
            return "" if type(value) in allowed else called
    return ""


def _called(value: Any) -> str:
    if value is None:
        return "nothing"
    return next((called for kind, _, called in _TYPES if type(value) is kind), f"a Python {type(value).__name__}")


def _is_plain(value: Any, depth: int = MAX_DEPTH) -> bool:
    if type(value) in (dict, list):
        if not depth:
            return False  # also what holds itself
        keys, items = (value, value.values()) if type(value) is dict else ((), value)
        return all(type(key) is str for key in keys) and all(_is_plain(item, depth - 1) for item in items)
    return value is None or type(value) in (bool, int, float, str)
