"""Text that arrives id by id against the full decode of the `tokenizers` library and of sentencepiece."""

from __future__ import annotations

import io
import json
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from infer.text.detokenizer import Detokenizer
from infer.tokenizers._fast import ByteDecodeStream, FastTokenizer, WindowDecodeStream

REPLACEMENT = "\ufffd"
EMOJI = "😀👩‍👩‍👧🇳🇴é ½你好"
SPECIAL, ADDED = "<|end|>", ["<tool>", "  ", "né", "日"]


def byte_char(byte: int) -> str:
    """The printable stand-in of a byte, as the library makes it from the character with that byte last."""
    text = bytes([0xC3, byte]).decode() if 0x80 <= byte < 0xC0 else chr(byte)
    if byte >= 0xC0:
        return chr(byte)  # printable Latin-1 stands for itself
    piece = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]
    return piece[-1]


@lru_cache
def byte_level() -> Tokenizer:
    """One token per byte, merges for some pairs of bytes (inside characters too), special and added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    merges = []
    for text in ("he", "ll", "😀", "é", " w", "你"):
        pieces = list(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0])
        merged = pieces[0] + pieces[1]
        if merged not in vocab:
            vocab[merged] = len(vocab)
            merges.append((pieces[0], pieces[1]))
    for odd in ("\xbc\xff", "\x98\x80\xe2", "\xbc\xc3", "\xbc\xf0\xffx"):  # ends one character, breaks the next
        vocab["".join(byte_char(ord(byte)) for byte in odd)] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ADDED])
    return tokenizer


@lru_cache
def sentencepiece_model() -> Any:
    import sentencepiece

    model = io.BytesIO()
    corpus = ["Hello world, hello again", "the quick brown fox", "  two  spaces ", "a b c d e f g h i j k l m n"] * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus),
        model_writer=model,
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@lru_cache
def sentencepiece_like() -> Tokenizer:
    sp = sentencepiece_model()
    vocab = {sp.id_to_piece(i): i for i in range(sp.get_piece_size())}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    return tokenizer


@lru_cache
def metaspace() -> Tokenizer:
    """A decoder whose first token is special: neither byte-level nor byte fallback."""
    words = ["▁Hello", "▁wor", "ld", "▁", "▁▁", "é", "!", "<s>"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


@lru_cache
def word_piece() -> Tokenizer:
    words = ["[UNK]", "hello", "##ing", "##s", "world", ",", ".", "'", "s", "[SEP]"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken("[SEP]", special=True)])
    return tokenizer


@lru_cache
def fast(name: str) -> FastTokenizer:
    backend = {"byte_level": byte_level, "sentencepiece": sentencepiece_like}.get(name) or globals()[name]
    return FastTokenizer(backend(), bos_token_id=None, eos_token_ids=(), chat_template=None, special_tokens={})


def ids_of(tokenizer: Tokenizer, *, beyond: int = 3) -> st.SearchStrategy[list[int]]:
    """Random ids, with some that no token stands behind, mixed with the ids of real text."""
    random = st.lists(st.integers(0, tokenizer.get_vocab_size() + beyond - 1), max_size=12)
    texts = st.text(alphabet=EMOJI + "hel wo", max_size=6).map(lambda text: byte_ids(tokenizer, text))
    texts |= st.builds(lambda ids, cut: ids[:cut], texts, st.integers(-3, -1))  # ends inside a character
    return st.lists(st.one_of(random, texts), max_size=4).map(lambda parts: [id_ for part in parts for id_ in part])


def byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    if tokenizer.token_to_id("<0x41>") is not None:
        found = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
        return [id_ for id_ in found if id_ is not None]
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def increments(tokenizer: FastTokenizer, prompt: list[int], output: list[int], skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt, skip)
    texts = [detokenizer.feed(id_) for id_ in output] + [detokenizer.finish()]
    assert detokenizer.finish() == ""
    return texts


@pytest.mark.row("LOAD-HF-BPE", "for random id sequences, with emoji and broken bytes, joined increments equal decode")
@given(ids=ids_of(byte_level()), skip=st.booleans())
@example(ids=byte_ids(byte_level(), "👩‍👩‍👧"), skip=True)
@example(ids=byte_ids(byte_level(), "😀")[:-1], skip=True)
def test_byte_level_increments_join_to_the_full_decode(ids: list[int], skip: bool) -> None:
    whole = byte_level().decode(ids, skip_special_tokens=skip)
    assert fast("byte_level").decode(ids, skip_special_tokens=skip) == whole
    assert "".join(increments(fast("byte_level"), [], ids, skip)) == whole


@pytest.mark.row("LOAD-HF-BPE", "prompts ending inside a character never leak prompt text")
@given(prompt=ids_of(byte_level()), output=ids_of(byte_level()), skip=st.booleans())
@example(prompt=byte_ids(byte_level(), "secret 😀")[:-1], output=byte_ids(byte_level(), "😀")[-1:], skip=True)
@example(prompt=byte_ids(byte_level(), "secret 😀")[:-1], output=byte_ids(byte_level(), "x"), skip=True)
@example(prompt=byte_ids(byte_level(), "ü")[:-1], output=[byte_level().token_to_id("¼ÿ")], skip=True)
@example(prompt=[byte_level().token_to_id(byte_char(byte)) for byte in b"\xed\xa0"], output=[], skip=True)
@example(prompt=[byte_level().token_to_id("í")], output=[byte_level().token_to_id(byte_char(0xA0))], skip=True)
def test_output_text_is_what_the_output_adds_to_the_prompt(prompt: list[int], output: list[int], skip: bool) -> None:
    before = byte_level().decode(prompt, skip_special_tokens=skip)
    whole = byte_level().decode(prompt + output, skip_special_tokens=skip)
    text = "".join(increments(fast("byte_level"), prompt, output, skip))
    assume(not (before.endswith(REPLACEMENT) and completes_a_replacement_character(prompt, output)))
    if whole.startswith(before):
        assert text == whole[len(before) :]
    else:  # the output completed the prompt's last character
        assert before.endswith(REPLACEMENT)
        assert text == whole[len(before) - 1 :]


def completes_a_replacement_character(prompt: list[int], output: list[int]) -> bool:
    """U+FFFD as real text looks like a broken character: the one case that strings cannot tell apart."""
    ends = [byte_level().id_to_token(id_) or "" for id_ in (*prompt[-3:], *output[:3])]
    return "ï¿½" in "".join(ends)


@given(ids=ids_of(byte_level()))
def test_nothing_is_delivered_before_it_is_final(ids: list[int]) -> None:
    """Every prefix of the increments is a prefix of the full decode, whatever comes next."""
    whole, text = byte_level().decode(ids), ""
    for piece in increments(fast("byte_level"), [], ids):
        text += piece
        assert whole.startswith(text)


@pytest.mark.row("LOAD-SENTENCEPIECE", "increments equal HF tokenizers on a byte-fallback and spaces corpus")
@given(text=st.text(alphabet=EMOJI + " abhelo", max_size=30), prompt=st.sampled_from(["", "<s>", "Hello"]))
def test_sentencepiece_increments_on_text(text: str, prompt: str) -> None:
    sp, backend = sentencepiece_model(), sentencepiece_like()
    before = [1] if prompt == "<s>" else list(sp.encode(prompt))
    output = list(sp.encode(text))
    texts = increments(fast("sentencepiece"), before, output)
    full, head = backend.decode(before + output), backend.decode(before)
    assert "".join(texts) == full.removeprefix(head)
    stream = decoders.DecodeStream(skip_special_tokens=True)
    for id_ in before:
        stream.step(backend, id_)
    assert texts[:-1] == [stream.step(backend, id_) or "" for id_ in output]


def broken_run(pieces: list[str]) -> bool:
    """Whether a run of byte tokens is neither valid as a whole nor bad from its first byte on."""
    run = b""
    for piece in [*pieces, "end"]:
        if piece.startswith("<0x"):
            run += bytes([int(piece[3:5], 16)])
            continue
        valid = run.decode("utf-8", "ignore")
        if valid and valid.encode() != run:
            return True
        run = b""
    return False


@given(ids=ids_of(sentencepiece_like(), beyond=0))
def test_sentencepiece_increments_on_random_ids(ids: list[int]) -> None:
    tokenizer, backend, sp = fast("sentencepiece"), sentencepiece_like(), sentencepiece_model()
    text = "".join(increments(tokenizer, [], ids))
    assert text == tokenizer.decode(ids)
    pieces = [id_ for id_ in ids if id_ > 2]  # sentencepiece prints its unknown token, the library skips it
    if not broken_run([backend.id_to_token(id_) for id_ in pieces]):
        assert text == backend.decode(ids)
    # Valid characters in a broken run stay, as in sentencepiece itself; the library replaces the whole run.
    after_text = [*sp.encode("a"), *pieces]
    assert "".join(increments(tokenizer, [], after_text)) == sp.decode(after_text)


@given(ids=ids_of(sentencepiece_like()), prompt=ids_of(sentencepiece_like()))
def test_sentencepiece_output_after_any_prompt(ids: list[int], prompt: list[int]) -> None:
    tokenizer = fast("sentencepiece")
    text = "".join(increments(tokenizer, prompt, ids))
    before, whole = tokenizer.decode(prompt), tokenizer.decode(prompt + ids)
    complete = before.rstrip(REPLACEMENT)
    assert whole.endswith(text)
    assert len(complete) <= len(whole) - len(text) <= len(before)


@pytest.mark.parametrize("name", ["metaspace", "word_piece"])
@given(data=st.data())
def test_other_decoders_by_window(name: str, data: st.DataObject) -> None:
    backend: Tokenizer = globals()[name]()
    ids = st.lists(st.integers(0, backend.get_vocab_size() - 1), max_size=40)
    prompt, output = data.draw(ids), data.draw(ids)
    before, whole = backend.decode(prompt), backend.decode(prompt + output)
    assert whole.startswith(before)
    assert "".join(increments(fast(name), prompt, output)) == whole[len(before) :]
    assert fast(name).decode(output) == backend.decode(output)


def test_the_fast_path_is_chosen_by_the_decoder() -> None:
    assert isinstance(fast("byte_level").decode_stream([]), ByteDecodeStream)
    assert isinstance(fast("sentencepiece").decode_stream([]), ByteDecodeStream)
    assert isinstance(fast("metaspace").decode_stream([]), WindowDecodeStream)
    state = json.loads(metaspace().decoder.__getstate__())
    assert state["type"] == "Metaspace"


def test_the_library_stream_has_the_faults_that_ours_avoids() -> None:
    """Why there is a stream of our own: if these change, use the library's."""
    backend, secret = byte_level(), byte_ids(byte_level(), "secret ü")
    stream = decoders.DecodeStream(secret[:-1])
    assert "secret" in stream.step(backend, secret[-1])  # leaks the prompt
    assert increments(fast("byte_level"), secret[:-1], secret[-1:]) == ["ü", ""]
    spm = sentencepiece_like()
    stream = decoders.DecodeStream()
    for id_ in [*byte_ids(spm, "é"), spm.token_to_id("<0xFF>")]:
        stream.step(spm, id_)
    with pytest.raises(Exception, match="Invalid prefix"):
        stream.step(spm, spm.token_to_id("▁"))
