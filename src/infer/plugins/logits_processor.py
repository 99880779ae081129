"""Contract of a logits processor (hook `infer_logits_processors`): a plugin that edits the logits of the requests that name it.

Checked in the request's task, applied on the worker thread; one object each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

API_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsProcessorSpec:
    name: str
    """What requests call it."""
    api: int
    factory: str
    """"module:attr", called as `factory(vocab_size: int) -> LogitsProcessor`; not before a request names it."""
    example: dict[str, Any]
    """{"params": parameters it takes, "refused": parameters it must refuse}."""


@dataclass(slots=True, kw_only=True)
class LogitsRow:
    """One answer of which the next token is about to be drawn."""

    params: Mapping[str, Any]
    """What the request gave; they passed `check`."""
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    """Exactly the tokens drawn so far, also with steps in flight and after preemption. The engine's own: read only."""
    state: Any = None
    """The processor's own. None at first, and again when a preempted answer resumes with its tokens."""


class LogitsProcessor(Protocol):
    """One object serves all requests of an engine. What it does to a row depends on nothing but that row."""

    def check(self, params: Mapping[str, Any]) -> None:
        """Refuse what cannot be applied: raise `InvalidRequestError` or `ValueError`, saying which value and why."""
        ...

    def apply(self, logits: Tensor, rows: Sequence[LogitsRow]) -> None:
        """logits float32 [N, V], one row for each of `rows`, in place; -inf forbids a token.

        After allowed ids, bad words, bias and min_tokens, before the penalties. May be called again for the same position:
        when it raises, each row is tried alone, and only those that raise again fail.
        """
        ...
