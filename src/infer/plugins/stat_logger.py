"""Contract of a statistics logger (hook `infer_stat_loggers`): what an engine counts, step by step, for whoever keeps it.

Made, called and closed on a thread of its own, one per logger and engine; steps never wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

API_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StatLoggerSpec:
    name: str
    """What `plugins.stat_loggers` calls it."""
    api: int
    factory: str
    """"module:attr", called as `factory(facts: EngineFacts) -> StatLogger` when an engine that names it starts."""
    example: dict[str, Any]
    """{"options": options that the kit gives it, over the defaults}, or {}."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options that `plugins.stat_logger_options` may give it, each with its default, as JSON has them. Values given have the
    default's type; a default of None takes any."""


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What stays the same as long as the engine runs."""

    model: str
    """The reference it was loaded from."""
    platform: str
    dtype: str
    """Compute dtype."""
    max_model_len: int
    """Tokens."""
    max_num_seqs: int
    num_blocks: int
    """KV blocks, of all groups."""
    block_size: int
    """Tokens of a block."""
    version: str
    """Of the engine."""
    options: dict[str, Any] = {}
    """All that the spec declares: the operator's value or the default. A logger raises `ConfigError` for a value that it cannot
    take."""

    def __repr__(self) -> str:
        """Without the values of options: they may be secrets."""
        shown = [f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name != "options"]
        return f"{type(self).__name__}({', '.join(shown)})"


class StepSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The engine behind one step. Counters count since start."""

    at: float
    """Unix seconds."""
    step: int
    """1 for the first; a step that failed counts too."""
    running: int
    waiting: int
    kv_usage: float
    """Share of the fullest KV pool in use, 0 to 1."""
    scheduled_tokens: int
    """Tokens computed, prompt and output."""
    prompt_tokens: int
    """Of requests that got their first token, cached ones included."""
    cached_tokens: int
    """Of those, taken from the prefix cache."""
    output_tokens: int
    finished_requests: int
    """Choices, n of a request counted n times."""
    preemptions: int


class StatLogger(Protocol):
    """May block and may raise: it loses steps by that, nobody else does."""

    def record(self, steps: Sequence[StepSnapshot], dropped: int) -> None:
        """The steps since the last call, oldest first, at least one. `dropped` of those before them were lost since the last
        call, because it was too slow. What it raises is logged with its name; those steps are not given again."""
        ...

    def close(self) -> None:
        """The engine ends; called once, after the last `record`. Must return within seconds."""
        ...
