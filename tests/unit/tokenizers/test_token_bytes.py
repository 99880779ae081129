"""The bytes of tokens, which constrained output is built on: joined they are the text, and special tokens have their names."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from infer import GrammarError, InvalidRequestError
from infer.engine.structured import vocabulary_of
from infer.plugins.tokenizer import SupportsTokenBytes
from infer.testing.fake_engine import fake_engine
from infer.testing.tiny_models import model_config
from infer.text.token_ids_only import NoTokenizer
from infer.tokenizers import hf
from integration.engine_support import EOS, LLAMA, VOCAB, write_tokenizer

TEXTS = ["Hello, world!\n", "  two spaces\tand 123", "naïve café 你好 😀", '{"a": [1, null]}', "\x00\x7f"]


@pytest.mark.row("TOOLS-STRUCTURED-CORE", "tokens are the bytes that they add to the text")
@pytest.mark.parametrize("text", TEXTS)
def test_joined_they_are_the_text(tmp_path: Path, text: str) -> None:
    write_tokenizer(tmp_path)
    tokenizer = hf.load(tmp_path)
    assert isinstance(tokenizer, SupportsTokenBytes)
    pieces = [tokenizer.token_bytes(token_id) for token_id in tokenizer.encode(text, add_special_tokens=False)]
    assert b"".join(piece or b"" for piece in pieces) == text.encode()
    assert tokenizer.token_bytes(EOS) == b"</s>"
    assert tokenizer.token_bytes(VOCAB + 5) == b"", "an id of a padded vocabulary, without a token"
    assert EOS in tokenizer.special_token_ids


def test_a_vocabulary_is_as_wide_as_the_model(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    facts = model_config(LLAMA | {"vocab_size": VOCAB + 60})
    words = vocabulary_of(hf.load(tmp_path), facts)
    assert len(words.tokens) == VOCAB + 60
    assert set(words.tokens[VOCAB:]) == {b""}
    assert words.eos_token_ids == (EOS,)
    assert words.mask_bytes % 4 == 0 and words.mask_bytes * 8 >= VOCAB + 60


def test_a_tokenizer_whose_tokens_are_no_bytes_is_refused(tmp_path: Path) -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(GrammarError, match="joins them"):
        vocabulary_of(hf.load(tmp_path), model_config(LLAMA | {"vocab_size": 3}))
    with pytest.raises(GrammarError, match="none such is loaded"):
        vocabulary_of(NoTokenizer(), model_config(LLAMA))


@pytest.mark.anyio
async def test_without_a_tokenizer_it_is_refused_by_name() -> None:
    from infer import EngineConfig, SamplingParams

    config = EngineConfig(model={"ref": "x", "skip_tokenizer": True}, cache={"num_blocks": 50})
    async with fake_engine(lambda ids, spec: 65, config) as engine:
        with pytest.raises(InvalidRequestError, match=r"structured_output needs a tokenizer.*skip_tokenizer"):
            await engine.generate([1, 2], SamplingParams(structured_output={"regex": "a"}))
        assert len((await engine.generate([1, 2], SamplingParams(max_tokens=3))).token_ids) == 3
