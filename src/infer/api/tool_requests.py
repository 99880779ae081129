"""`tools`, `tool_choice` and `parallel_tool_calls` of a chat request, checked.

Pure; knows OpenAI's shapes, not how a model writes calls.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from infer.errors import InvalidRequestError, shown

MAX_TOOLS = 128
NAME = re.compile(r"[a-zA-Z0-9_.\-]{1,64}")
Mode = Literal["none", "auto", "required"]
ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRequest:
    """What a request says of tools. `mode` none: no calls, whether or not there are tools."""

    mode: Mode = "none"
    tools: tuple[dict[str, Any], ...] = ()
    """As the client sent them; with a named choice all of them still."""
    named: str | None = None
    """The only one that may, and must, be called."""
    schemas: Mapping[str, Any] = field(default_factory=dict)
    """Callable name -> JSON schema of its arguments."""
    strict: frozenset[str] = frozenset()
    """Names whose schema holds with mode auto, too."""
    parallel: bool = True


NO_TOOLS = ToolRequest()


def read_tools(tools: Any, tool_choice: Any, parallel_tool_calls: bool | None) -> ToolRequest:
    """Raises `InvalidRequestError` naming the field."""
    listed = _listed(tools)
    mode, named = _choice(tool_choice, bool(listed))
    if mode == "none" or not listed:
        if mode == "required":
            raise _bad("tool_choice", f"tool_choice={shown(tool_choice)} needs tools")
        return NO_TOOLS
    schemas = {name: _schema(function.get("parameters")) for name, function in listed.items()}
    if named is not None:
        if named not in schemas:
            raise _bad("tool_choice", f"tool_choice names {shown(named)}, and tools has {', '.join(schemas)}")
        schemas = {named: schemas[named]}
    return ToolRequest(
        mode=mode,
        tools=tuple(tools),
        named=named,
        schemas=schemas,
        strict=frozenset(name for name in schemas if listed[name].get("strict")),
        parallel=parallel_tool_calls is not False and named is None,
    )


def _schema(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Of an object in any case: that is what arguments are."""
    if not parameters:
        return ANY_OBJECT
    return {"type": "object", **parameters} if "properties" in parameters else parameters


def _listed(tools: Any) -> dict[str, Mapping[str, Any]]:
    """Name -> function."""
    found: dict[str, Mapping[str, Any]] = {}
    if tools is None:
        return found
    if len(tools) > MAX_TOOLS:
        raise _bad("tools", f"tools has {len(tools)} entries, more than {MAX_TOOLS}")
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            kind = tool.get("type") if isinstance(tool, Mapping) else tool
            raise _bad("tools", f'{where} has type {shown(kind)}; only "function" is known')
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise _bad("tools", f"{where}.function is not an object")
        name, schema, told = (function.get(key) for key in ("name", "parameters", "description"))
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise _bad(
                "tools",
                f"{where}.function.name={shown(name)} is not 1 to 64 letters, digits, underscores, dots, dashes",
            )
        if name in found:
            raise _bad("tools", f"{where}.function.name={shown(name)} is there twice")
        if not isinstance(told, str | None):
            raise _bad("tools", f"{where}.function.description={shown(told)} is not text")
        if schema is not None and not isinstance(schema, dict):
            raise _bad("tools", f"{where}.function.parameters is not a JSON schema")
        if not isinstance(function.get("strict"), bool | None):
            raise _bad("tools", f"{where}.function.strict={shown(function['strict'])} is not true or false")
        found[name] = function
    return found


def _choice(value: Any, has_tools: bool) -> tuple[Mode, str | None]:
    if value is None:
        return ("auto" if has_tools else "none"), None
    if value in ("none", "auto", "required"):
        mode: Mode = value
        return mode, None
    if isinstance(value, Mapping) and value.get("type") == "function":
        function = value.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str):
            return "required", name
    raise _bad(
        "tool_choice",
        f'tool_choice={shown(value)} is not "none", "auto", "required" or {{"type": "function", "function": {{"name": ...}}}}',
    )


def _bad(parameter: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(message, parameter=parameter)
