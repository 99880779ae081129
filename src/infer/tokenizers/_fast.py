"""A `tokenizers.Tokenizer` behind the contract: ids, text, and the text that each generated id completes.

Request tasks, any thread: nothing changes after construction but a cache of pieces. No hook here; `hf` and `gguf` build it.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from infer.errors import InferError, ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

REPLACEMENT = "\ufffd"
SPACE_MARK = "\u2581"
PROMPT_WINDOW = 16


@contextmanager
def library_errors(problem: str) -> Iterator[None]:
    """Bare exceptions of the library, and its panics, which are not even an `Exception` and would end the caller's
    task, event loop or server."""
    try:
        yield
    except InferError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ModelError(f"{problem}: {error}") from error
        raise


class FastTokenizer:
    """Implements `plugins.tokenizer.Tokenizer` over the Rust library."""

    def __init__(
        self,
        backend: Backend,
        *,
        bos_token_id: int | None,
        eos_token_ids: Sequence[int],
        chat_template: str | dict[str, str] | None,
        special_tokens: Mapping[str, str],
        vocab_size: int | None = None,
    ) -> None:
        self._backend = backend
        self._special_tokens = dict(special_tokens)
        self._special_ids = frozenset(id_ for id_, token in backend.get_added_tokens_decoder().items() if token.special)
        self._layout = decoder_layout(backend)
        self._pieces: dict[int, bytes] = {}
        self.vocab_size = backend.get_vocab_size() if vocab_size is None else vocab_size
        self.bos_token_id = bos_token_id
        with library_errors("the tokenizer cannot encode an empty text"):
            self._adds_bos = bos_token_id is not None and backend.encode("").ids[:1] == [bos_token_id]
        self.eos_token_ids = tuple(eos_token_ids)
        self.chat_template = chat_template

    def special_tokens(self) -> dict[str, str]:
        return dict(self._special_tokens)

    @property
    def special_token_ids(self) -> frozenset[int]:
        return self._special_ids

    def token_bytes(self, token_id: int) -> bytes | None:
        return None if self._layout is None else self._piece(token_id, skip_special=False)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        with library_errors("the tokenizer cannot encode this text"):
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self._adds_bos and ids[:2] == [self.bos_token_id] * 2:
            return ids[1:]  # the text brought its own BOS, as rendered chat templates do
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        layout = self._layout
        if layout is None:
            return self._decode(list(token_ids), skip_special_tokens)
        data = b"".join([self._piece(token_id, skip_special_tokens) for token_id in token_ids])
        if layout.strip_first_space:
            data = data.removeprefix(b" ")
        return _decode_utf8(data, layout.per_byte, final=True)[0]

    def decode_stream(
        self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> ByteDecodeStream | WindowDecodeStream:
        if self._layout is None:
            return WindowDecodeStream(lambda ids: self._decode(ids, skip_special_tokens), prompt_ids)
        return ByteDecodeStream(lambda id_: self._piece(id_, skip_special_tokens), self._layout, prompt_ids)

    def _decode(self, token_ids: list[int], skip_special: bool) -> str:
        with library_errors("the tokenizer cannot decode these ids"):
            return self._backend.decode(token_ids, skip_special_tokens=skip_special)

    def _piece(self, token_id: int, skip_special: bool) -> bytes:
        if skip_special and token_id in self._special_ids:
            return b""
        piece = self._pieces.get(token_id)
        if piece is None:
            token = self._backend.id_to_token(token_id)
            # A model's padded vocabulary has ids that no token stands behind: they are silent, as in the library.
            piece = b"" if token is None or self._layout is None else self._layout.to_bytes(token)
            self._pieces[token_id] = piece
        return piece


class DecoderLayout:
    """How token strings become bytes, for the two families where one token's bytes depend on nothing else."""

    def __init__(self, to_bytes: Callable[[str], bytes], *, per_byte: bool, strip_first_space: bool) -> None:
        self.to_bytes = to_bytes
        self.per_byte = per_byte
        """One replacement character per bad byte (byte fallback), not one per broken sequence (byte-level)."""
        self.strip_first_space = strip_first_space


def decoder_layout(backend: Backend) -> DecoderLayout | None:
    """The layout of byte-level BPE and of SentencePiece with byte fallback; None for any other decoder."""
    if backend.decoder is None:
        return None
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    if state["type"] == "ByteLevel":
        alphabet = _byte_alphabet()

        def byte_level(token: str) -> bytes:
            try:
                return bytes([alphabet[char] for char in token])
            except KeyError:  # an added token with a character outside the alphabet stands for itself
                return token.encode()

        return DecoderLayout(byte_level, per_byte=False, strip_first_space=False)
    if state["type"] != "Sequence":
        return None
    steps = list(state["decoders"])
    replace = {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}
    if steps[:3] != [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]:
        return None
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    if steps[3:] not in ([], [strip]):
        return None
    return DecoderLayout(_fallback_piece, per_byte=True, strip_first_space=bool(steps[3:]))


def _fallback_piece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(SPACE_MARK, " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: printable Latin-1 is itself, the other bytes are U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _decode_utf8(data: bytes, per_byte: bool, *, final: bool) -> tuple[str, bytes]:
    """(text, the incomplete character at the end); broken sequences become replacement characters."""
    text: list[str] = []
    while True:
        try:
            part, used = codecs.utf_8_decode(data, "strict", final)
        except UnicodeDecodeError as error:
            text.append(data[: error.start].decode())
            text.append(REPLACEMENT * (error.end - error.start if per_byte else 1))
            data = data[error.end :]
        else:
            text.append(part)
            data = data[used:]
            if not _begins_surrogate(data):
                return "".join(text), data
            text.append(REPLACEMENT)
            data = data[1:]


def _begins_surrogate(data: bytes) -> bool:
    """Python waits for a surrogate's third byte before it calls it broken; its second byte says enough."""
    return data[:1] == b"\xed" and data[1:2] >= b"\xa0"


class ByteDecodeStream:
    """Text per id through bytes: exact, and constant time whatever came before.

    A character that begins in the prompt is delivered only if the output completes it. With byte fallback a complete
    character is delivered at once and stays delivered when a later byte of its run is broken (as sentencepiece does;
    the library's decoder turns the whole run into replacement characters, which no stream could take back).
    """

    def __init__(self, piece: Callable[[int], bytes], layout: DecoderLayout, prompt_ids: Sequence[int]) -> None:
        self._piece = piece
        self._per_byte = layout.per_byte
        tail = b""
        for token_id in reversed(prompt_ids):
            tail = piece(token_id) + tail
            if len(tail) >= 4:  # UTF-8 synchronises itself: an incomplete character has at most three bytes
                break
        self._strip = layout.strip_first_space and not tail
        self._pending = _decode_utf8(tail, self._per_byte, final=False)[1]
        self._from_prompt = len(self._pending)

    def step(self, token_id: int) -> str:
        return self._advance(self._piece(token_id), final=False)

    def finish(self) -> str:
        return self._advance(b"", final=True)

    def _advance(self, piece: bytes, *, final: bool) -> str:
        if self._strip and piece:
            self._strip = False
            piece = piece.removeprefix(b" ")
        if not piece and not final:
            return ""
        data, owed = self._pending + piece, ""
        if self._from_prompt:
            data, owed = self._leave_prompt(data, final)
        text, self._pending = _decode_utf8(data, self._per_byte, final=final)
        return owed + text

    def _leave_prompt(self, data: bytes, final: bool) -> tuple[bytes, str]:
        """Drop a character that began in the prompt and turned out broken: it is the prompt's, not the output's."""
        prompt_bytes = self._from_prompt
        if _begins_surrogate(data):
            self._from_prompt = 0
            return data[1:], ""
        try:
            if codecs.utf_8_decode(data, "strict", final)[1]:
                self._from_prompt = 0  # complete: the output's
            return data, ""
        except UnicodeDecodeError as error:
            self._from_prompt = 0
            if error.start > 0:
                return data, ""
            return data[error.end :], REPLACEMENT * (error.end - prompt_bytes if self._per_byte else 0)


class WindowDecodeStream:
    """Text per id for any other decoder: decode a short window with and without the new ids, deliver the difference."""

    def __init__(self, decode: Callable[[list[int]], str], prompt_ids: Sequence[int]) -> None:
        self._decode = decode
        size = PROMPT_WINDOW
        self._ids = list(prompt_ids[-size:])
        while not decode(self._ids) and size < len(prompt_ids):  # only skipped tokens so far: look further back
            size *= 2
            self._ids = list(prompt_ids[-size:])
        self._num_read = len(self._ids)
        self._read = decode(self._ids)

    def step(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if len(text) <= len(self._read) or text.endswith(REPLACEMENT):
            return ""
        return self._take(text)

    def finish(self) -> str:
        return self._take(self._decode(self._ids))

    def _take(self, text: str) -> str:
        new = text[len(self._read) :]
        # The next window starts with the ids just delivered: enough for what a decoder does to the first token.
        self._ids = self._ids[self._num_read :]
        self._read = self._decode(self._ids)
        self._num_read = len(self._ids)
        return new
