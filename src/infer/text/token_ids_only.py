"""What stands in for a tokenizer when none was loaded: token ids pass, and whatever needs text is refused.

Runs in request tasks; pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from infer.errors import InvalidRequestError
from infer.types import SamplingParams

NEEDS_TEXT = ("stop", "bad_words", "structured_output", "thinking_budget")
"""Sampling parameters that are about text."""


class NoTokenizer:
    """A `Tokenizer` without a vocabulary: results have no text."""

    vocab_size = 0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    chat_template: str | dict[str, str] | None = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise needs_tokenizer("a prompt of text", "prompt")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        raise needs_tokenizer("the text of tokens", "token_ids")

    def decode_stream(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True) -> NoText:
        return NoText()

    def special_tokens(self) -> dict[str, str]:
        return {}

    def check(self, params: SamplingParams) -> None:
        """Raises `InvalidRequestError` for parameters that are about text."""
        for name in NEEDS_TEXT:
            if getattr(params, name) not in (None, ()):
                raise needs_tokenizer(name, name)


class NoText:
    """A `DecodeStream` of nothing."""

    def step(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


def needs_tokenizer(what: str, parameter: str) -> InvalidRequestError:
    """The refusal of what is text where none can be read."""
    return InvalidRequestError(
        f"{what} needs a tokenizer, and none is loaded (model.skip_tokenizer=True): give and take token ids",
        parameter=parameter,
    )
