"""Which tokens a text is made of, so that each output text has the log-probabilities of its own tokens.

One of each per response; runs in its request task.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from infer.types import TokenLogprob

if TYPE_CHECKING:
    from infer.plugins.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenPiece:
    token_id: int
    entry: TokenLogprob
    size: int
    """Characters that the token completes."""


class TokenPieces:
    """Cuts a choice's text at its tokens, however it comes: stop strings hold text back, and deltas are merged."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._stream = tokenizer.decode_stream(prompt_ids, skip_special_tokens=skip_special_tokens)
        self._left: deque[TokenPiece] = deque()
        self._text = ""

    def cut(
        self, text: str, entries: Sequence[TokenLogprob], *, last: bool = False
    ) -> Iterator[tuple[str, TokenPiece | None]]:
        """Each token whose text is there, with that text. `last`: what is left of the text; tokens behind it have none."""
        self._text += text
        for entry in entries:
            size = len(self._stream.step(entry.token_id))
            self._left.append(TokenPiece(entry.token_id, entry, size))
        while self._left and self._left[0].size <= len(self._text):
            piece = self._left.popleft()
            yield self._text[: piece.size], piece
            self._text = self._text[piece.size :]
        if last and self._text:
            yield self._text, self._left.popleft() if self._left else None


class TokenRun:
    """The tokens that the next piece of text may be made of."""

    def __init__(self) -> None:
        self._pieces: deque[TokenPiece] = deque()

    def add(self, piece: TokenPiece) -> None:
        self._pieces.append(piece)

    def clear(self) -> None:
        """What came was no text."""
        self._pieces.clear()

    def take(self, size: int) -> list[TokenLogprob]:
        """The entries of the text's last `size` characters; tokens before them were a format's marks."""
        covered = sum(piece.size for piece in self._pieces)
        while self._pieces and 0 < self._pieces[0].size <= covered - size:
            covered -= self._pieces.popleft().size
        taken = [piece.entry for piece in self._pieces]
        self._pieces.clear()
        return taken
