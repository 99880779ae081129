"""Tokenizers rebuilt from GGUF headers against the ids that the models' own tokenizers gave."""

from __future__ import annotations

import logging
import subprocess
import sys
import unicodedata
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from gguf import GGUFReader
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from infer.errors import ModelError, UnsupportedModelError
from infer.tokenizers import gguf, hf
from infer.tokenizers._fast import FastTokenizer
from infer.tokenizers._pre_tokenizers import known_pre_tokenizers
from infer.tokenizers.gguf import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, finds_gguf, from_metadata, load
from infer.weights.gguf import GGUFFile

KINDS = [
    *("command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe", "llama-spm", "mpt"),
    *("phi-3", "qwen2", "qwen35", "refact", "starcoder"),
]
SEPARATOR = "\n__ggml_vocab_test__\n"
TEXTS = [
    "Hello, world! It's 2024; 3.14159 and 1234567890.",
    "  leading and  double  spaces\n\n\ttabs\r\n and trailing   ",
    "naïve café ½ ² ﬁ Ａ １２３ Ω K",
    "你好世界 こんにちは 안녕하세요 สวัสดี नमस्ते مرحبا",
    "emoji 😀👩‍👩‍👧 🇳🇴 e\u0301 \u200b\u00a0 end",
    "def f(x):\n    return x**2 + {'a': [1, 2]}  # done?!",
    "I'LL we're THEY'D don't 'S",
]


@pytest.fixture(scope="module", params=KINDS)
def published(request: pytest.FixtureRequest, llama_cpp_sdist: Path) -> tuple[str, Path, FastTokenizer]:
    """Each supported vocabulary, loaded once: pytest runs the tests of one parameter together."""
    path = llama_cpp_sdist / f"ggml-vocab-{request.param}.gguf"
    return request.param, path, load(path)


def expected_ids(vocabulary: Path) -> list[tuple[str, list[int]]]:
    texts = Path(f"{vocabulary}.inp").read_bytes().decode().removesuffix(SEPARATOR).split(SEPARATOR)
    lines = Path(f"{vocabulary}.out").read_text().removesuffix("\n").split("\n")
    return [(text, [int(id_) for id_ in line.split()]) for text, line in zip(texts, lines, strict=True)]


@pytest.mark.row("LOAD-GGUF", "the tokenizer built from metadata equals the HF one on a text corpus")
def test_ids_equal_the_published_ones(published: tuple[str, Path, FastTokenizer]) -> None:
    kind, vocabulary, tokenizer = published
    cases = expected_ids(vocabulary)
    assert len(cases) >= 45
    for text, ids in cases:
        if kind == "qwen35" and not unicodedata.is_normalized("NFC", text):
            continue  # those lines come from llama.cpp, which does not normalise; Qwen's tokenizer does (next test)
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text


def test_qwen35_normalises_as_its_own_tokenizer_does(llama_cpp_sdist: Path) -> None:
    from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

    vocabulary = llama_cpp_sdist / "ggml-vocab-qwen35.gguf"
    with GGUFFile.open(vocabulary) as file:
        merges = [tuple(merge.split(" ")) for merge in file.metadata["tokenizer.ggml.merges"]]
        vocab = {token: i for i, token in enumerate(file.metadata["tokenizer.ggml.tokens"])}
    oracle = Qwen3_5Tokenizer(vocab=vocab, merges=merges)
    tokenizer = load(vocabulary)
    for text in [*TEXTS, *(text for text, _ in expected_ids(vocabulary))]:
        assert tokenizer.encode(text) == oracle.encode(text), text


def test_decoding_gives_the_text_back(published: tuple[str, Path, FastTokenizer]) -> None:
    tokenizer = published[2]
    for text in TEXTS:
        text = unicodedata.normalize("NFC", text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(("kind", "model"), [("bert-bge", "bert"), ("nomic-bert-moe", "t5")])
def test_other_models_are_refused_by_name(llama_cpp_sdist: Path, kind: str, model: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"tokenizer.ggml.model='{model}' is not supported"):
        load(llama_cpp_sdist / f"ggml-vocab-{kind}.gguf")


@pytest.mark.parametrize("kind", ["aquila", "gpt-neox"])
def test_a_file_without_a_kind_is_read_as_default_with_a_warning(
    llama_cpp_sdist: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "infer"):
        tokenizer = load(llama_cpp_sdist / f"ggml-vocab-{kind}.gguf")
    assert "does not name its pre-tokenizer" in caplog.text
    assert tokenizer.decode(tokenizer.encode("Hello 1234 world")) == "Hello 1234 world"


SPECIAL_IDS = {
    "llama-bpe": (128000, (128001, 128009), True),
    "llama-spm": (1, (2,), True),
    "phi-3": (1, (32000, 32007), True),
    "qwen2": (151643, (151643, 151645), False),
    "command-r": (5, (255001,), True),
    "gpt-2": (50256, (50256,), False),
    "gemma-4": (2, (1, 106), True),
}


def test_bos_and_eos(published: tuple[str, Path, FastTokenizer]) -> None:
    kind, _, tokenizer = published
    plain = tokenizer.encode("Hi", add_special_tokens=False)
    own_bos, own_eos = tokenizer.bos_token_id, tokenizer.eos_token_ids
    bos, eos, adds_bos = SPECIAL_IDS.get(kind, (own_bos, own_eos, tokenizer.encode("") != []))
    assert (own_bos, own_eos) == (bos, eos)
    assert tokenizer.encode("Hi") == ([bos, *plain] if adds_bos else plain)
    assert tokenizer.encode("") == ([bos] if adds_bos else [])


def test_a_leading_bos_is_not_doubled(published: tuple[str, Path, FastTokenizer]) -> None:
    tokenizer = published[2]
    bos = tokenizer.special_tokens()["bos_token"]
    with_own = tokenizer.encode(bos + "Hi there")
    assert with_own == tokenizer.encode(bos + "Hi there", add_special_tokens=False)
    assert with_own.count(tokenizer.bos_token_id or 0) == 1
    assert tokenizer.encode(bos + bos) == [tokenizer.bos_token_id] * 2


TEMPLATES = {"command-r": ["default", "rag", "tool_use"], "qwen2": str, "phi-3": str, "gpt-2": None}


def test_templates_by_name(published: tuple[str, Path, FastTokenizer]) -> None:
    kind, _, tokenizer = published
    template = tokenizer.chat_template
    expected = TEMPLATES.get(kind, type(template) if template else None)
    assert expected == (sorted(template) if isinstance(template, dict) else type(template) if template else None)


def test_phi3_special_tokens_swallow_the_space_after_them(llama_cpp_sdist: Path) -> None:
    tokenizer = load(llama_cpp_sdist / "ggml-vocab-phi-3.gguf")
    assert tokenizer.encode("<|user|>\nHi") == tokenizer.encode("<|user|>Hi")
    assert tokenizer.encode("<s>\nHi") != tokenizer.encode("<s>Hi")


def metadata_by_gguf_py(path: Path) -> dict[str, Any]:
    """The header as the `gguf` package reads it: another reader than ours."""
    fields = GGUFReader(path).fields
    return {name: field.contents() for name, field in fields.items() if name.startswith(("tokenizer.", "general."))}


@pytest.mark.model
@pytest.mark.row("LOAD-GGUF", "the tokenizer built from metadata equals the HF one on a text corpus")
def test_smollm2_splits_digits_one_by_one(smollm2_gguf: Path) -> None:
    tokenizer = load(smollm2_gguf)
    metadata = metadata_by_gguf_py(smollm2_gguf)
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    oracle = Tokenizer(models.BPE(vocab, merges))  # SmolLM2's tokenizer.json: digits, then GPT-2's own pattern
    oracle.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    oracle.decoder = decoders.ByteLevel()
    for text in [*TEXTS, " ½ ²", "1234", "a1b22"]:
        ids = tokenizer.encode(text)
        assert ids == oracle.encode(text).ids, text
        assert tokenizer.decode(ids) == text
    assert len(tokenizer.encode("1234")) == 4
    assert tokenizer.special_tokens()["eos_token"] == "<|im_end|>"
    assert tokenizer.eos_token_ids[0] == 2
    assert tokenizer.encode("<|im_start|>user\n")[0] == 1


@pytest.mark.parametrize("transformer_class", ["Qwen2Tokenizer", "GPT2Tokenizer"])
@given(text=st.text(max_size=40))
def test_any_text_has_the_ids_of_transformers_own_class(transformer_class: str, text: str) -> None:
    ours, oracle = small_byte_level_pair(transformer_class)
    assert ours.encode(text) == oracle.encode(text, add_special_tokens=False)


@lru_cache
def small_byte_level_pair(transformer_class: str) -> tuple[FastTokenizer, Any]:
    import transformers

    vocab, merges = trained_byte_level()
    oracle = getattr(transformers, transformer_class)(vocab=dict(vocab), merges=list(merges))
    kind = {"Qwen2Tokenizer": "qwen2", "GPT2Tokenizer": "gpt-2"}[transformer_class]
    return from_metadata(byte_level_metadata(kind)), oracle


@lru_cache
def trained_byte_level() -> tuple[dict[str, int], list[tuple[str, str]]]:
    import json

    from tokenizers import trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*TEXTS, *TEXTS, *TEXTS], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in model["merges"]]
    vocab = dict(model["vocab"])
    vocab["<|endoftext|>"] = len(vocab)
    return vocab, merges


def byte_level_metadata(kind: str | None, **changes: Any) -> dict[str, Any]:
    vocab, merges = trained_byte_level()
    tokens = sorted(vocab, key=lambda token: vocab[token])
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": kind,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL if token == "<|endoftext|>" else NORMAL for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.eos_token_id": vocab["<|endoftext|>"],
        **{f"tokenizer.ggml.{name}": value for name, value in changes.items()},
    }
    return {name: value for name, value in metadata.items() if value is not None}


@pytest.mark.parametrize("kind", sorted(known_pre_tokenizers()))
def test_every_kind_builds_and_round_trips(kind: str) -> None:
    tokenizer = from_metadata(byte_level_metadata(kind))
    for text in TEXTS:
        text = unicodedata.normalize("NFC", text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("kind", "text", "pieces"),
    [
        ("gpt-2", "don't go 12345", ["don", "'t", " go", " 12345"]),
        ("smollm", "a 123", ["a", " ", "1", "2", "3"]),
        ("llama-bpe", "DON'T 12345\n\nx", ["DON", "'T", " ", "123", "45", "\n\n", "x"]),
        ("qwen2", "it's 12", ["it", "'s", " ", "1", "2"]),
        ("tekken", "HelloWorld don't 12", ["Hello", "World", " don", "'t", " ", "1", "2"]),
        ("gpt-4o", "HelloWorld don't 12345", ["Hello", "World", " don't", " ", "123", "45"]),
        ("deepseek-v3", "x12345 you...", ["x", "123", "45", " you", "..."]),
        ("deepseek-llm", "ab 12\nc", ["ab", " ", "1", "2", "\n", "c"]),
        ("seed-coder", "a;\n\nb 12", ["a", ";", "\n\n", "b", " ", "1", "2"]),
        ("bailingmoe", "it's a!!\n", ["it", "'s", " a", "!!\n"]),
        ("bloom", "Hi, there", ["Hi", ",", " there"]),
        ("viking", "ab12", ["ab", "1", "2"]),
        ("falcon", "a+b 1234", ["a", "+", "b", " ", "123", "4"]),
        ("default", "a+b 1234", ["a", "+", "b", " ", "123", "4"]),
    ],
)
def test_where_each_kind_cuts(kind: str, text: str, pieces: list[str]) -> None:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in known_pre_tokenizers()[kind].patterns]
    found = pre_tokenizers.Sequence([*cuts, byte_level]).pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in found] == pieces


def test_kinds_that_normalise() -> None:
    """transformers' Qwen2, Cohere and GPT-NeoX classes normalise to NFC; GPT-2, Llama 3 and StarCoder do not."""
    composes = {}
    for kind in known_pre_tokenizers():
        tokenizer = from_metadata(byte_level_metadata(kind))
        composes[kind] = tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")
    nfc = {kind for kind, composed in composes.items() if composed}
    assert {"qwen2", "qwen35", "command-r", "mpt", "olmo"} <= nfc
    assert not nfc & {"gpt-2", "llama-bpe", "starcoder", "smollm", "falcon", "tekken", "gpt-4o", "deepseek-v3"}


def test_unknown_characters_in_a_row_are_one_unknown_token() -> None:
    """As sentencepiece does where a vocabulary has no byte tokens."""
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "▁", "a"],
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL, NORMAL, NORMAL],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -1.0, -2.0],
    }
    assert from_metadata(metadata).encode("aéüa") == [1, 3, 4, 0, 4]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"pre": "brand-new"}, UnsupportedModelError, "tokenizer.ggml.pre='brand-new' is not supported"),
        ({"model": "rwkv"}, UnsupportedModelError, "tokenizer.ggml.model='rwkv' is not supported"),
        ({"model": "plamo2"}, UnsupportedModelError, "tokenizer.ggml.model='plamo2' is not supported"),
        ({"model": None}, UnsupportedModelError, "tokenizer.ggml.model='None' is not supported"),
        ({"merges": None}, UnsupportedModelError, "no tokenizer.ggml.merges"),
        ({"tokens": None}, ModelError, "tokenizer.ggml.tokens is missing"),
        ({"tokens": []}, ModelError, "tokenizer.ggml.tokens is missing"),
        ({"tokens": ["a", "b", "a"], "token_type": None}, ModelError, "holds 'a' twice"),
        ({"token_type": [1, 1]}, ModelError, "tokenizer.ggml.token_type has 2 entries"),
        ({"merges": ["zz qq"]}, ModelError, "holds 'zz qq'"),
        ({"merges": ["nospace"]}, ModelError, "holds 'nospace'"),
        ({"model": "llama", "precompiled_charsmap": [1, 2]}, UnsupportedModelError, "precompiled_charsmap"),
    ],
)
def test_bad_headers_are_refused(changes: dict[str, Any], error: type[ModelError], message: str) -> None:
    with pytest.raises(error, match=message):
        from_metadata(byte_level_metadata("gpt-2", **changes))


def test_add_eos_and_ids_out_of_range() -> None:
    metadata = byte_level_metadata("gpt-2", add_eos_token=True, bos_token_id=10**6, add_bos_token=True)
    tokenizer = from_metadata(metadata)
    assert tokenizer.bos_token_id is None
    assert tokenizer.encode("Hi")[-1] == metadata["tokenizer.ggml.eos_token_id"]
    assert tokenizer.encode("Hi")[:-1] == tokenizer.encode("Hi", add_special_tokens=False)


def test_ids_beyond_the_vocabulary_are_silent() -> None:
    metadata = byte_level_metadata("gpt-2")
    tokenizer = from_metadata(metadata)
    assert tokenizer.vocab_size == len(metadata["tokenizer.ggml.tokens"])
    assert tokenizer.decode([*tokenizer.encode("Hi"), 5000]) == "Hi"


def test_user_defined_tokens_match_first_and_stay_in_the_text() -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab", "<think>"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * 5, USER_DEFINED]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [0.0] * 259 + [-1.0, -2.0, -3.0, -4.0, -5.0, 0.0],
        "tokenizer.ggml.add_bos_token": False,
    }
    tokenizer = from_metadata(metadata)
    ids = tokenizer.encode("a<think>ab</s>")
    assert [tokens[id_] for id_ in ids] == ["▁a", "<think>", "▁a", "b", "</s>"]
    assert tokenizer.decode(ids) == "a<think> ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<think> ab</s>"
    assert tokenizer.decode(tokenizer.encode("né 😀")) == "né 😀"


def test_user_defined_white_space_is_matched_longest_first() -> None:
    """Gemma's tokens for runs of spaces and newlines, which the file writes with real spaces."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "  ", "   ", "\n", "\n\n"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [UNKNOWN, *[BYTE] * 256, *[NORMAL] * 3, *[USER_DEFINED] * 4],
        "tokenizer.ggml.scores": [-1000.0] * 257 + [-1.0, -2.0, -3.0] + [-1000.0] * 4,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
    }
    tokenizer = from_metadata(metadata)
    for text, pieces in [
        ("a a", ["a", "▁a"]),
        ("a  a", ["a", "  ", "a"]),
        ("a    a", ["a", "   ", "▁a"]),
        ("\n\n\na", ["\n\n", "\n", "a"]),
        (" a", ["▁a"]),
    ]:
        ids = tokenizer.encode(text)
        assert [tokens[id_] for id_ in ids] == pieces
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("module", [gguf, hf])
def test_the_hook_names_things_that_exist(module: ModuleType) -> None:
    (spec,) = module.infer_tokenizers()
    assert spec.factory == f"{module.__name__}:{module.load.__name__}"
    name, _, probe = spec.probe.partition(":")
    assert name == module.__name__
    assert callable(getattr(module, probe))


def test_looking_at_the_hooks_imports_no_tokenizer_library() -> None:
    code = (
        "import sys, infer.tokenizers.gguf as g, infer.tokenizers.hf as h, infer.text.chat_template, infer.text.stop;"
        "g.infer_tokenizers(), h.infer_tokenizers();"
        "print(sorted({'tokenizers', 'jinja2', 'torch', 'numpy', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_probe_reads_the_magic(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(b"GGUF....")
    assert finds_gguf(file)
    file.write_bytes(b"PK")
    assert not finds_gguf(file)
    assert not finds_gguf(tmp_path)
