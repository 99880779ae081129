"""Sizes for people: bytes to "1.5 GiB" and back. Pure; used by messages, flags and configuration files."""

from __future__ import annotations

import re

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_FACTORS = {
    "": 1,
    "b": 1,
    "k": 1000,
    "kb": 1000,
    "m": 1000**2,
    "mb": 1000**2,
    "g": 1000**3,
    "gb": 1000**3,
    "t": 1000**4,
    "tb": 1000**4,
    "ki": 2**10,
    "kib": 2**10,
    "mi": 2**20,
    "mib": 2**20,
    "gi": 2**30,
    "gib": 2**30,
    "ti": 2**40,
    "tib": 2**40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def format_bytes(count: int) -> str:
    """1536 -> "1.5 KiB"."""
    value, unit = float(count), 0
    while abs(value) >= 1024 and unit < len(_BINARY) - 1:
        value, unit = value / 1024, unit + 1
    if unit == 0:
        return f"{count} B"
    return f"{value:.1f} {_BINARY[unit]}" if value < 100 else f"{value:.0f} {_BINARY[unit]}"


def parse_bytes(value: object) -> object:
    """ "2GiB" -> 2**31, "1.5 GB" -> 1_500_000_000; what is no text comes back as it is, for the validator."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value)
    if match is None or match[2].lower() not in _FACTORS:
        raise ValueError("write a number of bytes, or a number with a unit such as 512MiB, 2GiB or 1.5GB")
    factor = _FACTORS[match[2].lower()]
    return int(match[1]) * factor if match[1].isdigit() else int(float(match[1]) * factor)
