"""Regular expressions as users write them, for a library whose Unicode tables are newer than theirs. Pure."""

from __future__ import annotations

ASCII = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\r\f\v"}


def ascii_classes(pattern: str) -> str:
    r"""The pattern with \d, \w and \s meaning ASCII: what every program agrees on. \D, \W and \S stay as they are,
    and so does a pair such as [\s\S], which all agree is any character."""
    out: list[str] = []
    in_class = False
    paired: set[str] = set()
    position = 0
    while position < len(pattern):
        character = pattern[position]
        if character == "\\" and position + 1 < len(pattern):
            name = pattern[position + 1]
            if name in ASCII and not (in_class and name in paired):
                out.append(ASCII[name] if in_class else f"[{ASCII[name]}]")
            else:
                out.append(character + name)
            position += 2
            continue
        if character == "[" and not in_class:
            in_class = True
            head = 2 if pattern[position + 1 : position + 2] == "^" else 1
            # A bracket that comes first is a member, not the end.
            head += pattern[position + head : position + head + 1] == "]"
            out.append(pattern[position : position + head])
            position += head
            paired = _pairs(pattern, position)
            continue
        if character == "]" and in_class:
            in_class = False
        out.append(character)
        position += 1
    return "".join(out)


def _pairs(pattern: str, position: int) -> set[str]:
    """Names of which the class whose members begin there has both the lower and the upper one."""
    names: set[str] = set()
    while position < len(pattern) and pattern[position] != "]":
        if pattern[position] == "\\":
            position += 1
            names.add(pattern[position : position + 1])
        position += 1
    return {name for name in ASCII if {name, name.upper()} <= names}
