"""What one output may go on with: its reasoning, its thinking budget and its grammar, as a mask over the vocabulary.

Told of each token in the worker thread right after it was drawn; the next mask is made on the thread beside it. No tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Protocol

from infer.engine.sampling.thinking import Phase, Thinking
from infer.engine.step import SamplingSpec
from infer.errors import GrammarError
from infer.plugins.grammar import GrammarSource, Matcher, Vocabulary

MAX_AHEAD = 64
"""Tokens taken in ahead; a grammar may go on with the only one for ever."""


class Grammars(Protocol):
    """Where guides get their matchers from; safe to call on any thread."""

    @property
    def skip_forced_tokens(self) -> bool:
        """Whether guides look ahead."""
        ...

    @property
    def vocabulary(self) -> Vocabulary: ...

    def matcher(self, source: GrammarSource) -> Matcher:
        """A fresh one. Raises `GrammarError`."""
        ...


class Guide:
    """One output. The order is `prepare`, (draw,) `accept`, `prepare`, ...; the two never run at once.

    With `look_ahead`, `prepare` takes in every token that is the only one allowed; `accept` then only crosses it off, and
    what is said of mask, end and failure is what holds behind the tokens accepted so far.
    """

    def __init__(
        self, spec: SamplingSpec, vocabulary: Vocabulary, matcher: Matcher | None, *, look_ahead: bool = False
    ) -> None:
        self.looks_ahead = look_ahead
        self._ahead: deque[int] = deque()
        """Taken in and not accepted."""
        self._mask: bytearray | None = None
        self._is_complete = False
        self._failure: str | None = None
        self._stuck: str | None = None
        """Why no mask could be made behind what was taken in ahead: told when that is accepted and a mask is due."""
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._end_ids = spec.end_ids
        self._buffer = bytearray(vocabulary.mask_bytes)
        self._thinking = None
        if spec.reasoning is not None:
            self._thinking = Thinking(spec.reasoning, spec.thinking_budget, vocabulary.tokens)
            self._opening_ids = self._thinking.opening_ids() if matcher is not None else []

    @property
    def mask(self) -> bytearray | None:
        """Of the next token, as `Matcher.fill` writes it; None: every token is allowed."""
        if not self._ahead:
            return self._mask
        mask = bytearray(len(self._buffer))
        _allow(mask, (self._ahead[0],))
        return mask

    @property
    def is_complete(self) -> bool:
        """The grammar's sentence is, and nothing may follow."""
        return self._is_complete and not self._ahead

    @property
    def failure(self) -> str | None:
        """Why this output cannot go on."""
        return None if self._ahead else self._failure

    @property
    def knows_next(self) -> bool:
        """What comes next was taken in ahead: `prepare` has nothing to do."""
        return bool(self._ahead)

    @property
    def drafts(self) -> list[int]:
        """Tokens that come next for certain, and behind which one is drawn."""
        ends = self._is_complete or self._failure is not None or self._stuck is not None
        return list(islice(self._ahead, len(self._ahead) - ends)) if self._ahead else []

    def fail(self, reason: str) -> None:
        """No mask could be made."""
        if self._ahead:
            self._stuck = reason
        else:
            self._failure, self._mask = reason, None

    def accept(self, token_id: int) -> None:
        """Take in the token that was drawn, or one of the drafts."""
        if self._ahead:
            if token_id != self._ahead.popleft():
                self._ahead.clear()
                self.fail(f"token {token_id} came where its grammar allows another one alone")
        elif not self._is_complete and self._failure is None:
            try:
                self._take(token_id)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:  # a backend's own fault, a panic of compiled code too, ends this row alone
                self.fail(f"its grammar backend failed: {type(error).__name__}: {error}")
        # What is drawn behind the end, by steps that were in flight, is nobody's.

    def prepare(self) -> None:
        """Make the mask of the next token."""
        if self._ahead:
            return
        if self._stuck is not None:
            self.fail(self._stuck)
            return
        try:
            self._mask = self._next_mask()
            while self.looks_ahead and len(self._ahead) < MAX_AHEAD:
                token_id = self._only_token()
                if token_id is None:
                    break
                self._take(token_id)
                self._ahead.append(token_id)
                self._mask = self._next_mask()
        except GrammarError as error:
            self.fail(str(error))

    def _only_token(self) -> int | None:
        """The one that the mask allows, if it is no more than one and no end."""
        if self._mask is None:
            return None
        start = len(self._mask) - len(self._mask.lstrip(b"\0"))
        byte = self._mask.strip(b"\0")  # of all ways to count bits the one that mostly ends at once
        if len(byte) != 1 or byte[0] & (byte[0] - 1):
            return None
        token_id = 8 * start + byte[0].bit_length() - 1
        if token_id >= len(self._vocabulary.tokens):  # a bit that no token has
            return None
        return None if token_id in self._end_ids or token_id in self._vocabulary.eos_token_ids else token_id

    def _take(self, token_id: int) -> None:
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

    def _answer(self, token_id: int) -> None:
        matcher = self._matcher
        if matcher is None or self._failure is not None:
            return
        if token_id in self._end_ids:
            if not matcher.can_end:
                self._failure = f"token {token_id} ends the answer where the grammar does not"
            self._is_complete = matcher.can_end
            return
        self._failure = matcher.accept(token_id)
        self._is_complete = self._failure is None and matcher.is_complete

    def _next_mask(self) -> bytearray | None:
        thinking, mask = self._thinking, self._buffer
        if self._is_complete or self._failure is not None:
            return None
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
    look_ahead = grammars.skip_forced_tokens and _may_skip(spec)
    guide = Guide(spec, grammars.vocabulary, matcher, look_ahead=look_ahead)
    for token_id in outputs:
        guide.accept(token_id)
    return guide


def is_guided(spec: SamplingSpec) -> bool:
    """Whether a request needs a guide."""
    return spec.grammar is not None or spec.thinking_budget is not None


def _may_skip(spec: SamplingSpec) -> bool:
    """Whether the only token that a guide allows is surely the one that is drawn, and nobody asks how it was processed."""
    processed = spec.logprobs is not None and (
        spec.return_kept_set or spec.logprobs_mode in ("processed", "processed_logits")
    )
    others = spec.allowed_token_ids is not None or spec.bad_words or spec.logits_processors or spec.forced_token_ids
    return not (processed or others)


def _allow(mask: bytearray, ids: Sequence[int]) -> None:
    for token_id in ids:
        mask[token_id >> 3] |= 1 << (token_id & 7)


def _forbid(mask: bytearray, ids: Sequence[int]) -> None:
    for token_id in ids:
        mask[token_id >> 3] &= ~(1 << (token_id & 7)) & 0xFF
