"""Contract of a tokenizer (hook `infer_tokenizers`). Used in request tasks; must be thread-safe and free of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

API_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSpec:
    name: str
    api: int
    factory: str
    """"module:attr", called as `factory(path: Path) -> Tokenizer` with the model's directory or file."""
    probe: str
    """"module:attr", called with the path, returns bool: whether it finds its own files there."""
    priority: int = 0
    example: dict[str, Any]
    """{"files": {name: text of a file that the tokenizer reads}, "texts": [...]}; the kit checks encode/decode round trips
    and increments on the texts, or on its own. Without files the kit must be given a path."""


class DecodeStream(Protocol):
    """Incremental detokenization of one sequence."""

    def step(self, token_id: int) -> str:
        """The text this id completes; "" while a character is incomplete."""
        ...

    def finish(self) -> str:
        """What is still held back, as the full decode shows it: replacement characters. Called once, at the end."""
        ...


class Tokenizer(Protocol):
    vocab_size: int
    """Number of ids that decode; may be smaller than the model's padded vocabulary."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    chat_template: str | dict[str, str] | None
    """One Jinja source, or several by name: "default", and "tool_use" for requests with tools."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """With add_special_tokens, BOS/EOS as the tokenizer's own post-processor adds them; never twice."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def decode_stream(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True) -> DecodeStream:
        """A stream positioned after the prompt: never emits prompt text."""
        ...

    def special_tokens(self) -> dict[str, str]:
        """Names used by chat templates ("bos_token", "eos_token", "pad_token", "unk_token") to their text."""
        ...


@runtime_checkable
class SupportsTokenBytes(Protocol):
    """A tokenizer whose tokens are pieces of UTF-8, whatever stands beside them: what constrained output needs."""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that are not ordinary text."""
        ...

    def token_bytes(self, token_id: int) -> bytes | None:
        """What an id adds to the text, special tokens by their names; b"" for an id without a token. None when this
        tokenizer's decoder lets neighbours have a say."""
        ...
