"""The fixture that plants distributions."""

from __future__ import annotations

from planted_plugins import plant

__all__ = ["plant"]
