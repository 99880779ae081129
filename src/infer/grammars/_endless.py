"""Whether a value of a JSON schema can ever end: references that lead back to where they began describe no value.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import unquote

Part = dict[str, Any]


def endless(root: Any, parts: Sequence[tuple[str, Part]]) -> str | None:
    """The path of a part of which no value is finite, the outermost first. `parts`: as `subschemas` gives them.

    The least fixed point of "ends": a part ends when each of the things that it must have does. What is not understood ends.
    """
    num_open = {id(part): 0 for _, part in parts}
    askers: list[int] = []
    """Of each need: the part that has it."""
    needs_of: dict[int, list[int]] = {}
    """Part -> the needs that it would fill."""
    for _, part in parts:
        for choices in _needs(root, part):
            members = {id(choice) for choice in choices}
            if members <= num_open.keys():
                for member in members:
                    needs_of.setdefault(member, []).append(len(askers))
                askers.append(id(part))
                num_open[id(part)] += 1
    filled = [False] * len(askers)
    ended = [place for place, count in num_open.items() if not count]
    for place in ended:  # grows
        for need in needs_of.get(place, ()):
            if not filled[need]:
                filled[need] = True
                num_open[askers[need]] -= 1
                if not num_open[askers[need]]:
                    ended.append(askers[need])
    return next((path for path, part in parts if num_open[id(part)]), None)


def _needs(root: Any, part: Part) -> Iterator[list[Any]]:
    """Of each list one must end, for the part to end."""
    reference = part.get("$ref")
    if isinstance(reference, str):
        yield [_target(root, reference)]
    yield from ([one] for one in _listed(part.get("allOf")))
    for word in ("anyOf", "oneOf"):
        if choices := _listed(part.get(word)):
            yield choices
    kind, least = part.get("type"), part.get("minItems")
    properties, required = part.get("properties"), part.get("required")
    if kind == "object" and isinstance(properties, dict):
        yield from ([properties[name]] for name in _listed(required) if isinstance(name, str) and name in properties)
    if kind == "array" and isinstance(least, int):
        first = _listed(part.get("prefixItems"))
        yield from ([one] for one in first[: max(least, 0)])
        if least > len(first):
            yield [part.get("items")]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _target(root: Any, reference: str) -> Any:
    """What a JSON pointer into the schema points to; None for references of other kinds."""
    if not reference.startswith("#/"):
        return root if reference == "#" else None
    found = root
    for word in unquote(reference[2:]).split("/"):
        found = found.get(word.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found
