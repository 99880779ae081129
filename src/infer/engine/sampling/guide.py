"""What one output may go on with: its reasoning, its thinking budget and its grammar, as a mask over the vocabulary.

Told of each token in the worker thread right after it was drawn; the next mask is made on the thread beside it. No tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from infer.engine.sampling.thinking import Phase, Thinking
from infer.engine.step import SamplingSpec
from infer.errors import GrammarError
from infer.plugins.grammar import GrammarSource, Matcher, Vocabulary


class Grammars(Protocol):
    """Where guides get their matchers from; safe to call on any thread."""

    @property
    def vocabulary(self) -> Vocabulary: ...

    def matcher(self, source: GrammarSource) -> Matcher:
        """A fresh one. Raises `GrammarError`."""
        ...


class Guide:
    """One output. The order is `prepare`, (draw,) `accept`, `prepare`, ...; the two never run at once."""

    def __init__(self, spec: SamplingSpec, vocabulary: Vocabulary, matcher: Matcher | None) -> None:
        self.mask: bytearray | None = None
        """Of the next token, as `Matcher.fill` writes it; None: every token is allowed."""
        self.is_complete = False
        """The grammar's sentence is, and nothing may follow."""
        self.failure: str | None = None
        """Why this output cannot go on."""
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._end_ids = spec.end_ids
        self._buffer = bytearray(vocabulary.mask_bytes)
        self._thinking = None
        if spec.reasoning is not None:
            self._thinking = Thinking(spec.reasoning, spec.thinking_budget, vocabulary.tokens)
            self._opening_ids = self._thinking.opening_ids() if matcher is not None else []

    def accept(self, token_id: int) -> None:
        """Take in the token that was drawn."""
        if self.is_complete or self.failure is not None:
            return  # what is drawn behind the end, by steps that were in flight, is nobody's
        thinking = self._thinking
        if thinking is None or thinking.phase is Phase.OVER:
            self._answer(token_id)
        elif self._matcher is not None and thinking.phase is Phase.BEFORE and token_id not in self._opening_ids:
            thinking.phase = Phase.OVER
            self._answer(token_id)
        else:
            rest = thinking.accept(token_id)
            if rest is not None and rest.strip():
                for inner in self._vocabulary.encode(rest.decode(errors="replace")):
                    self._answer(inner)

    def prepare(self) -> None:
        """Make the mask of the next token."""
        if self.is_complete or self.failure is not None:
            self.mask = None
            return
        try:
            self.mask = self._next_mask()
        except GrammarError as error:
            self.failure, self.mask = str(error), None

    def _answer(self, token_id: int) -> None:
        matcher = self._matcher
        if matcher is None or self.failure is not None:
            return
        if token_id in self._end_ids:
            if not matcher.can_end:
                self.failure = f"token {token_id} ends the answer where the grammar does not"
            self.is_complete = matcher.can_end
            return
        self.failure = matcher.accept(token_id)
        self.is_complete = self.failure is None and matcher.is_complete

    def _next_mask(self) -> bytearray | None:
        thinking, mask = self._thinking, self._buffer
        if thinking is not None and thinking.phase is Phase.INSIDE:
            forced = thinking.forced_id
            if forced is not None:
                mask[:] = bytes(len(mask))
                _allow(mask, (forced,))
                return mask
            if self._matcher is None:
                return None
            mask[:] = b"\xff" * len(mask)
            _forbid(mask, self._vocabulary.eos_token_ids)  # the answer is still to come
            _forbid(mask, self._end_ids)
            return mask
        if self._matcher is None:
            return None
        self._matcher.fill(mask)
        _forbid(mask, self._vocabulary.eos_token_ids)
        if self._matcher.can_end:
            _allow(mask, self._end_ids)
        if thinking is not None and thinking.phase is Phase.BEFORE:
            _allow(mask, self._opening_ids)
        return mask


def make_guide(spec: SamplingSpec, outputs: Sequence[int], grammars: Grammars) -> Guide:
    """The guide of a request that has written `outputs` so far: what preemption threw away is made again from them."""
    matcher = None if spec.grammar is None else grammars.matcher(spec.grammar)
    guide = Guide(spec, grammars.vocabulary, matcher)
    for token_id in outputs:
        guide.accept(token_id)
    return guide


def is_guided(spec: SamplingSpec) -> bool:
    """Whether a request needs a guide."""
    return spec.grammar is not None or spec.thinking_budget is not None


def _allow(mask: bytearray, ids: Sequence[int]) -> None:
    for token_id in ids:
        mask[token_id >> 3] |= 1 << (token_id & 7)


def _forbid(mask: bytearray, ids: Sequence[int]) -> None:
    for token_id in ids:
        mask[token_id >> 3] &= ~(1 << (token_id & 7)) & 0xFF
