"""Where an output stands in its reasoning: finds its end in the text, counts its tokens, and says what closes it at the budget.

Runs in the worker thread; one per guided row, told of every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from infer.engine.step import ReasoningSpec


class Phase(Enum):
    BEFORE = "before"
    """Nothing but white space so far; reasoning may open."""
    INSIDE = "inside"
    OVER = "over"
    """The answer is being written."""


class Thinking:
    """Reasoning of one output, from its first token on.

    `budget`: so many tokens between what opens and what closes it. When the model has begun to close it by itself at
    that point, only the rest is written.
    """

    def __init__(self, spec: ReasoningSpec, budget: int | None, tokens: Sequence[bytes]) -> None:
        self.phase = Phase.INSIDE if spec.is_open else Phase.BEFORE
        self.num_tokens = 0
        """Inside, the closing ones included."""
        self._spec = spec
        self._budget = budget
        self._tokens = tokens
        self._text = b""
        self._recent: list[int] = []
        self._forced: int | None = None
        self._reach = max((len(end) for end in spec.ends), default=1) - 1
        if not spec.starts and self.phase is Phase.BEFORE:
            self.phase = Phase.OVER

    @property
    def forced_id(self) -> int | None:
        """The id that must come next; None while the model is free."""
        if self.phase is not Phase.INSIDE or self._budget is None or self.num_tokens < self._budget:
            return None
        if self._forced is None:
            self._forced = self._begun()
        return self._spec.close_ids[self._forced]

    def opening_ids(self) -> list[int]:
        """Single tokens that open reasoning as the very first one."""
        if self.phase is not Phase.BEFORE or self._text:
            return []
        return [token_id for token_id, text in enumerate(self._tokens) if text in self._spec.starts]

    def accept(self, token_id: int) -> bytes | None:
        """Take a token in. When the reasoning is over with it: what of its text belongs to the answer; else None."""
        piece = self._tokens[token_id] if token_id < len(self._tokens) else b""
        if self.phase is Phase.BEFORE:
            return self._open(piece)
        if self.phase is Phase.OVER:
            return piece
        forcing = self.forced_id is not None
        self.num_tokens += 1
        self._recent = [*self._recent, token_id][-len(self._spec.close_ids) :]
        self._text += piece
        if forcing and self._forced is not None:
            self._forced += 1
            if self._forced < len(self._spec.close_ids):
                return None  # also when the mark is complete: what belongs to it may follow
            self.phase = Phase.OVER
            return b""
        found = min((at for end in self._spec.ends if (at := self._text.find(end)) >= 0), default=-1)
        if found >= 0:
            self.phase = Phase.OVER
            end = next(end for end in self._spec.ends if self._text.startswith(end, found))
            return self._text[found + len(end) :]
        self._text = self._text[-self._reach :] if self._reach else b""
        return None

    def _open(self, piece: bytes) -> bytes | None:
        self._text += piece
        text = self._text.lstrip()
        for start in self._spec.starts:
            if text.startswith(start):
                self.phase = Phase.INSIDE
                self._text = text[len(start) :]
                return None
        if any(start.startswith(text) for start in self._spec.starts):
            return None
        self.phase = Phase.OVER
        return self._text

    def _begun(self) -> int:
        """How much of the closing ids the output ends with."""
        close = self._spec.close_ids
        return next((size for size in range(len(close) - 1, 0, -1) if tuple(self._recent[-size:]) == close[:size]), 0)
