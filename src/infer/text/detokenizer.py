"""Text of one choice as its ids arrive: what each id completes, and at the end what was held back.

Runs in the request's task; owns the decode stream of its choice.
"""

from __future__ import annotations

from collections.abc import Sequence

from infer.plugins.tokenizer import Tokenizer


class Detokenizer:
    """The concatenation of `feed` and `finish` is the text that the output ids add to the prompt's.

    With an empty prompt that is `tokenizer.decode(output_ids)`. Prompt text is never delivered; a character that the
    prompt began is delivered when the output completes it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        self._stream = tokenizer.decode_stream(prompt_ids, skip_special_tokens=skip_special_tokens)
        self._finished = False

    def feed(self, token_id: int) -> str:
        """The text `token_id` completes; "" while a character is incomplete or the token is skipped."""
        return self._stream.step(token_id)

    def finish(self) -> str:
        """What was held back, with replacement characters for what stayed incomplete; "" when called again."""
        if self._finished:
            return ""
        self._finished = True
        return self._stream.finish()
