"""Takes special tokens out of text that was detokenized with them, for parsers; what the reader is shown has none.

Runs in the request's task; owns the text that may still become one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence


class SpecialTokenFilter:
    """Only tokens that were really written count: the same characters in ordinary tokens are the model's own words."""

    def __init__(self, special_ids: Collection[int], text_of: Callable[[int], str]) -> None:
        self._special_ids = special_ids
        self._text_of = text_of
        self._seen: set[int] = set()
        self._names: list[str] = []
        self._held: dict[str, str] = {}

    def see(self, token_ids: Sequence[int]) -> None:
        """Call it with the ids of a piece before its text comes."""
        for token_id in token_ids:
            if token_id in self._special_ids and token_id not in self._seen:
                self._seen.add(token_id)
                name = self._text_of(token_id)
                if name:
                    self._names.append(name)

    def clean(self, channel: str, text: str, *, last: bool = False) -> str:
        """The text that may be shown by now. A channel is a stream of its own, such as the answer or the reasoning."""
        text = self._held.pop(channel, "") + text
        if self._names:
            text = re.sub("|".join(map(re.escape, self._names)), "", text)  # once: what joins then is the model's own
        held = 0 if last else max((_begun(text, name) for name in self._names), default=0)
        if held:
            self._held[channel] = text[-held:]
            return text[:-held]
        return text


def _begun(text: str, name: str) -> int:
    """Characters at the end of the text that the name begins with."""
    return next((size for size in range(min(len(text), len(name) - 1), 0, -1) if text.endswith(name[:size])), 0)
