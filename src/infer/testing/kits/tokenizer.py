"""Conformance of a tokenizer: ids in range, text back, streams that say what the whole decode says, safe in threads.

Runs on the calling thread and a small pool; owns nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from infer.plugins.tokenizer import SupportsTokenBytes, Tokenizer, TokenizerSpec
from infer.testing.kits import Check, expect, load

TEXTS = (
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog.\nTwice.\n\n",
    "  two leading spaces, a tab\t, and 12345 digits",
    "naïve café, Привет, 你好, こんにちは",
    "emoji 👩‍👩‍👧‍👦 and flags 🇫🇷 and a rare one 𝕬",
)


def checks(spec: TokenizerSpec, path: Path, texts: Sequence[str] | None = None) -> Iterator[Check]:
    """`path` holds files that the tokenizer reads: a directory or one file. Texts default to the example's, then ours."""
    chosen = tuple(texts if texts is not None else spec.example.get("texts", TEXTS))

    def run(body: Callable[[Tokenizer, str], None]) -> None:
        tokenizer: Tokenizer = load(spec)(path)
        for text in chosen:
            body(tokenizer, text)

    yield Check("finds_its_own_files", lambda: _probe(spec, path))
    for body in (_round_trip, _special_tokens_once, _token_bytes, _stream, _stream_after_prompt, _threads):
        yield Check(body.__name__.strip("_"), partial(run, body))


def example_files(spec: TokenizerSpec, directory: Path) -> Path:
    """Write what the example brings and return the directory. Raises `AssertionError` when it brings nothing."""
    files: dict[str, str] = spec.example.get("files", {})
    expect(files, 'the example has no "files" that the tokenizer could read')
    home = directory / "files"
    for name, text in files.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return home


def _probe(spec: TokenizerSpec, path: Path) -> None:
    probe = load(spec, "probe")
    expect(probe(path) is True, f"probe({path}) is {probe(path)!r}; it reads this tokenizer")
    absent = path.parent / "no-such-tokenizer"
    expect(probe(absent) is False, f"probe of a path that does not exist is {probe(absent)!r}")


def _round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    bad = [token_id for token_id in ids if not 0 <= token_id < tokenizer.vocab_size]
    expect(not bad, f"ids {bad} of {text!r} are outside vocab_size={tokenizer.vocab_size}")
    back = tokenizer.decode(ids)
    expect(back == text, f"{text!r} comes back as {back!r}")
    for token_id in (tokenizer.bos_token_id, *tokenizer.eos_token_ids):
        expect(token_id is None or 0 <= token_id < tokenizer.vocab_size, f"special id {token_id} is out of range")


def _special_tokens_once(tokenizer: Tokenizer, text: str) -> None:
    bos, plain = tokenizer.bos_token_id, tokenizer.encode(text, add_special_tokens=False)
    ids = tokenizer.encode(text)
    if bos is not None:
        expect(ids.count(bos) <= 1, f"BOS {bos} appears {ids.count(bos)} times in {ids}")
    shift = next((i for i in range(len(ids) - len(plain) + 1) if ids[i : i + len(plain)] == plain), None)
    expect(shift is not None, f"special tokens are not around the text: {ids} against {plain}")
    shown, hidden = tokenizer.decode(ids, skip_special_tokens=False), tokenizer.decode(ids)
    expect(hidden == text, f"decode without special tokens gives {hidden!r}")
    expect(len(shown) >= len(hidden), "special tokens are not shown when asked for")


def _token_bytes(tokenizer: Tokenizer, text: str) -> None:
    """Where tokens are pieces of UTF-8: those of a text are the text, and an end of sequence is none. A leading space is the
    format's own affair."""
    if not isinstance(tokenizer, SupportsTokenBytes):
        return
    special = tokenizer.special_token_ids
    ordinary = sorted(set(tokenizer.eos_token_ids) - special)
    expect(not ordinary, f"eos_token_ids {ordinary} are not among special_token_ids")
    pieces = [tokenizer.token_bytes(token_id) for token_id in tokenizer.encode(text, add_special_tokens=False)]
    if None not in pieces:
        joined = b"".join(piece for piece in pieces if piece is not None)
        expect(
            joined.lstrip(b" ") == text.encode().lstrip(b" "), f"the bytes of its tokens are {joined!r}, not {text!r}"
        )


def _stream(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    streamed = _drain(tokenizer, [], ids)
    expect(
        streamed == tokenizer.decode(ids), f"the stream says {streamed!r}, the whole decode {tokenizer.decode(ids)!r}"
    )


def _stream_after_prompt(tokenizer: Tokenizer, text: str) -> None:
    """Split at every place where the prompt is whole text: the stream says what follows and nothing of the prompt."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids)
    for cut in range(1, len(ids)):
        prompt = tokenizer.decode(ids[:cut])
        if whole.startswith(prompt):
            said = _drain(tokenizer, ids[:cut], ids[cut:])
            expect(prompt + said == whole, f"after {prompt!r} the stream says {said!r} of {whole!r}")


def _threads(tokenizer: Tokenizer, text: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        encoded = list(pool.map(tokenizer.encode, [text] * 32))
        decoded = set(pool.map(tokenizer.decode, encoded))
    expect(all(ids == encoded[0] for ids in encoded) and len(decoded) == 1, "threads disagree about one text")


def _drain(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> str:
    stream = tokenizer.decode_stream(prompt)
    return "".join(stream.step(token_id) for token_id in ids) + stream.finish()
