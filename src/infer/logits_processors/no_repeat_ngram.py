"""No sequence of `size` tokens occurs twice: forbids each token that would complete one that the prompt or answer has.

Runs on the worker thread; what it knows of an answer lies in its row's state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from infer.errors import InvalidRequestError, shown
from infer.plugins import LogitsProcessorSpec, LogitsRow, hookimpl
from infer.plugins.logits_processor import API_VERSION

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class _Seen:
    """Of one answer: what followed every run of `size` - 1 tokens."""

    followers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    recent: list[int] = field(default_factory=list)
    """The last tokens, at most `size`."""
    num_output: int = 0

    def take(self, token_ids: Sequence[int], size: int) -> None:
        recent = self.recent
        for token_id in token_ids:
            recent.append(token_id)
            if len(recent) == size:
                self.followers.setdefault(tuple(recent[:-1]), []).append(token_id)
                del recent[0]


class NoRepeatNgram:
    """{"size": n}, as `no_repeat_ngram_size` of transformers."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def check(self, params: Mapping[str, Any]) -> None:
        size = params.get("size")
        unknown = sorted(set(params) - {"size"})
        if unknown:
            raise InvalidRequestError(
                f"no_repeat_ngram takes size alone, not {unknown[0]}", parameter="logits_processors", value=unknown[0]
            )
        if type(size) is not int or size < 1:
            raise InvalidRequestError(
                f"no_repeat_ngram: size={shown(size)} is not a positive integer",
                parameter="logits_processors",
                value=size,
            )

    def apply(self, logits: Tensor, rows: Sequence[LogitsRow]) -> None:
        for i, row in enumerate(rows):
            size = row.params["size"]
            seen = row.state
            if seen is None:
                seen = row.state = _Seen()
                seen.take(row.prompt_ids, size)
            seen.take(row.output_ids[seen.num_output :], size)
            seen.num_output = len(row.output_ids)
            banned = seen.followers.get(tuple(seen.recent))
            if banned:
                logits[i, banned] = float("-inf")


def create(vocab_size: int) -> NoRepeatNgram:
    return NoRepeatNgram(vocab_size)


@hookimpl
def infer_logits_processors() -> list[LogitsProcessorSpec]:
    return [
        LogitsProcessorSpec(
            name="no_repeat_ngram",
            api=API_VERSION,
            factory=f"{__name__}:create",
            example={"params": {"size": 3}, "refused": {"size": 0}},
        )
    ]
