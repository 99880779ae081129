"""Lists of CPUs as people write them. Any thread; pure."""

from __future__ import annotations

MOST_CPUS = 8192
LONGEST = 16
"""Characters of one CPU or range."""


def parse_cpus(value: object) -> object:
    """ "0-3,8" is (0, 1, 2, 3, 8)."""
    if not isinstance(value, str):
        return value
    cpus: list[int] = []
    for part in filter(None, (part.strip() for part in value.split(","))):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(part) > LONGEST:
            raise ValueError(f"{part!r} is neither a CPU nor a range like 0-3")
        bounds = int(first), int(last or first)
        if bounds[0] > bounds[1] or bounds[1] >= MOST_CPUS:
            raise ValueError(f"{part!r} is no range of CPUs below {MOST_CPUS}")
        cpus.extend(range(bounds[0], bounds[1] + 1))
    return tuple(cpus)
