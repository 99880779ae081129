"""A tokenizer of bytes: one id for each of the 256, then the special tokens that the model's my-name.json lists.

Used in request tasks, by several threads at once; never changes after it is made.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from pathlib import Path

from infer import ModelError
from infer.plugins import TokenizerSpec, hookimpl

FILE = "my-name.json"
BYTES = 256


class ByteStream:
    """Text as it becomes whole: the bytes of an unfinished character wait."""

    def __init__(self, tokenizer: ByteTokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token_id: int) -> str:
        return self._decoder.decode(self._tokenizer.shown(token_id, self._skip))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteTokenizer:
    def __init__(self, path: Path) -> None:
        try:
            facts = json.loads((path / FILE).read_text("utf-8"))
            self._special: list[str] = [str(text) for text in facts["special_tokens"]]
            self._roles: dict[str, str] = {role: facts[role] for role in ("bos_token", "eos_token") if facts.get(role)}
            ids = {text: BYTES + i for i, text in enumerate(self._special)}
            self.eos_token_ids: tuple[int, ...] = (ids[self._roles["eos_token"]],)
            self.bos_token_id = ids[self._roles["bos_token"]] if "bos_token" in self._roles else None
            self.chat_template: str | dict[str, str] | None = facts.get("chat_template")
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ModelError(f"{path / FILE} is no tokenizer: {type(error).__name__}: {error}") from error
        self._ids = ids
        self.vocab_size = BYTES + len(ids)
        longest_first = sorted(ids, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        made = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        for part in self._split.split(text):  # the special tokens of a chat template are in the text
            made += [self._ids[part]] if part in self._ids else part.encode("utf-8", "replace")
        return made

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return b"".join(self.shown(i, skip_special_tokens) for i in token_ids).decode("utf-8", "replace")

    def decode_stream(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True) -> ByteStream:
        return ByteStream(self, skip_special_tokens)

    def special_tokens(self) -> dict[str, str]:
        return dict(self._roles)

    # The two members below are optional (`SupportsTokenBytes`): with them constrained output works.

    @property
    def special_token_ids(self) -> frozenset[int]:
        return frozenset(self._ids.values())

    def token_bytes(self, token_id: int) -> bytes | None:
        return self.shown(token_id, skip_special_tokens=False)

    def shown(self, token_id: int, skip_special_tokens: bool) -> bytes:
        if token_id < BYTES:
            return bytes([token_id])
        known = not skip_special_tokens and token_id < self.vocab_size
        return self._special[token_id - BYTES].encode() if known else b""


def probe(path: Path) -> bool:
    return (path / FILE).is_file()


EXAMPLE = {"special_tokens": ["<s>", "</s>"], "bos_token": "<s>", "eos_token": "</s>", "chat_template": None}


@hookimpl
def infer_tokenizers() -> list[TokenizerSpec]:
    return [
        TokenizerSpec(
            name="my-name",
            api=1,
            factory=f"{__name__}:ByteTokenizer",
            probe=f"{__name__}:probe",
            priority=10,  # before the built-in ones, for models that have the file
            example={"files": {FILE: json.dumps(EXAMPLE)}},
        )
    ]
