"""Log-probabilities in the shapes of chat, of completions, and of vLLM's `prompt_logprobs`.

Pure but for decoding tokens. OpenAI has no value for "impossible": -inf is sent as -9999.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from infer.types import TokenLogprob

LOWEST = -9999.0

TokenText = Callable[[int], str]


def token_writer(token_text: TokenText, as_ids: bool) -> TokenText:
    """How tokens are written: as text, or as "token_id:N"."""
    return (lambda token_id: f"token_id:{token_id}") if as_ids else token_text


def scored(entry: TokenLogprob, candidate_ids: Sequence[int]) -> list[tuple[int, float]]:
    """(id, value) of the requested candidates that are not told otherwise: as the token itself or an alternative."""
    if not candidate_ids:
        return []
    told = {entry.token_id, *(token_id for token_id, _ in entry.top)}
    found = dict(zip(candidate_ids, entry.candidates, strict=True))
    return [(token_id, value) for token_id, value in found.items() if token_id not in told]


def kept_set(entry: TokenLogprob) -> dict[str, Any]:
    """What truncation kept, for those who asked; kept_ids null: everything."""
    if entry.kept_logmass is None:
        return {}
    ids = None if entry.kept_ids is None else entry.kept_ids.tolist()
    return {"kept_ids": ids, "kept_logmass": entry.kept_logmass}


def chat_logprobs(
    entries: Sequence[TokenLogprob] | None, write: TokenText, text: TokenText, candidate_ids: Sequence[int] = ()
) -> dict[str, Any] | None:
    """`choices[].logprobs` of chat. Candidates stand behind the alternatives, as in vLLM."""
    if entries is None:
        return None
    content = []
    for entry in entries:
        one = _chat_token(entry.token_id, entry.logprob, write, text)
        shown = [*entry.top, *scored(entry, candidate_ids)]
        one["top_logprobs"] = [_chat_token(token_id, value, write, text) for token_id, value in shown]
        content.append(one | kept_set(entry))
    return {"content": content, "refusal": None}


def _chat_token(token_id: int, logprob: float, write: TokenText, text: TokenText) -> dict[str, Any]:
    own = text(token_id)
    # Part of a character: its bytes are not known from the text.
    known = None if "\ufffd" in own else list(own.encode("utf-8", "replace"))
    return {"token": write(token_id), "logprob": _finite(logprob), "bytes": known}


class CompletionLogprobs:
    """`choices[].logprobs` of completions, piece by piece; keeps the text offset between pieces."""

    def __init__(self, write: TokenText, text: TokenText, candidate_ids: Sequence[int] = ()) -> None:
        self._write = write
        self._text = text
        self._candidate_ids = candidate_ids
        self._offset = 0

    def piece(self, entries: Iterable[TokenLogprob | None], first_ids: Sequence[int] = ()) -> dict[str, Any]:
        """`first_ids`: ids of entries that are None (nothing predicts a prompt's first token), in order."""
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        kept: list[dict[str, Any]] = []
        unpredicted = iter(first_ids)
        for entry in entries:
            token_id = next(unpredicted) if entry is None else entry.token_id
            tokens.append(self._write(token_id))
            values.append(None if entry is None else _finite(entry.logprob))
            tops.append(None if entry is None else self._top(entry))
            offsets.append(self._offset)
            kept.append({} if entry is None else kept_set(entry))
            self._offset += len(self._text(token_id))
        made = {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}
        if any(kept):  # a prompt's tokens were not drawn from anything
            made |= {name: [one.get(name) for one in kept] for name in ("kept_ids", "kept_logmass")}
        return made

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The best alternatives and the token itself. Tokens with the same text share an entry: the best stays."""
        found: dict[str, float] = {}
        for token_id, value in (*entry.top, (entry.token_id, entry.logprob), *scored(entry, self._candidate_ids)):
            found.setdefault(self._write(token_id), _finite(value))
        return found


def prompt_logprobs(
    entries: Sequence[TokenLogprob | None] | None, text: TokenText, candidate_ids: Sequence[int] = ()
) -> list[Any] | None:
    """vLLM's shape: per prompt token None, or id -> logprob, rank, decoded_token. Of candidates no rank is known."""
    if entries is None:
        return None
    return [None if entry is None else _ranked(entry, text, candidate_ids) for entry in entries]


def _ranked(entry: TokenLogprob, text: TokenText, candidate_ids: Sequence[int]) -> dict[str, Any]:
    found = {
        str(token_id): {"logprob": _finite(value), "rank": rank, "decoded_token": text(token_id)}
        for rank, (token_id, value) in enumerate(entry.top, start=1)
    }
    found[str(entry.token_id)] = {
        "logprob": _finite(entry.logprob),
        "rank": entry.rank,
        "decoded_token": text(entry.token_id),
    }
    for token_id, value in scored(entry, candidate_ids):
        found[str(token_id)] = {"logprob": _finite(value), "rank": None, "decoded_token": text(token_id)}
    return found


def _finite(value: float) -> float:
    return value if value > LOWEST else LOWEST
