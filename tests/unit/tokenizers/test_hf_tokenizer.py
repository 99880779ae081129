"""Tokenizers from model directories against transformers' AutoTokenizer, byte-level and SentencePiece-like."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, LlamaTokenizer

from infer.errors import ModelError, UnsupportedModelError
from infer.text.chat_template import ChatTemplate, encode_chat
from infer.tokenizers._fast import FastTokenizer
from infer.tokenizers.gguf import BYTE, CONTROL, NORMAL, UNKNOWN, from_metadata
from infer.tokenizers.hf import finds_tokenizer, load

CORPUS = [
    "Hello world, it's a test of 1234 tokens.",
    "  spaces   and\ttabs\nlines  ",
    "The quick brown fox jumps over the lazy dog",
    "naïve café 😀 你好 ½",
]
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
CORPUS_TEXT = st.lists(
    st.sampled_from([*" aehlotw,.1\n\t", "the", "  ", "é", "😀", "你", "<s>", "</s>", "▁"]), max_size=12
)
same_fixtures = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture(scope="module")
def byte_level_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE in Llama 3's manner: BOS by the post-processor, a chat template, tokens in the config only."""
    path = tmp_path_factory.mktemp("byte-level")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS * 3, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken("<|bos|>", special=True, normalized=False)])
    bos = tokenizer.token_to_id("<|bos|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", bos)]
    )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": {
            "__type": "AddedToken",
            "content": "<|eot|>",
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        },
        "pad_token": "<|pad|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": True,
        "added_tokens_decoder": {
            str(bos + 2): {"content": "<think>", "special": False, "normalized": False},
            str(bos + 1): {"content": "<|eot|>", "special": True, "normalized": False},
        },
        "chat_template": TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def byte_level(byte_level_dir: Path) -> tuple[FastTokenizer, Any]:
    return load(byte_level_dir), AutoTokenizer.from_pretrained(byte_level_dir)


@pytest.fixture(scope="module")
def sentencepiece_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real SentencePiece BPE with byte fallback, as Llama 2's: trained here."""
    import sentencepiece

    path = tmp_path_factory.mktemp("sentencepiece") / "tokenizer.model"
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS[:3] * 20),
            model_writer=file,
            vocab_size=400,
            model_type="bpe",
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            hard_vocab_limit=False,
            minloglevel=2,
        )
    return path


@pytest.fixture(scope="module")
def sentencepiece_like(sentencepiece_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[FastTokenizer, Any]:
    path = tmp_path_factory.mktemp("llama")
    shutil.copy(sentencepiece_file, path)
    LlamaTokenizer.from_pretrained(path).save_pretrained(path)
    return load(path), AutoTokenizer.from_pretrained(path)


def assert_equal_to(oracle: Any, ours: FastTokenizer, text: str) -> None:
    for special in (True, False):
        ids = ours.encode(text, add_special_tokens=special)
        expected = oracle.encode(text, add_special_tokens=special)
        bos = [oracle.bos_token_id]
        if special and oracle.encode("") == bos and expected[:2] == bos * 2:
            expected = expected[1:]  # the one difference: a BOS in the text is not doubled
        assert ids == expected
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == oracle.decode(ids, skip_special_tokens=skip)


@pytest.mark.row("LOAD-HF-BPE", "encode and decode equal transformers")
@same_fixtures
@given(text=st.text(max_size=30) | CORPUS_TEXT.map("".join))
def test_byte_level_equals_transformers(byte_level: tuple[FastTokenizer, Any], text: str) -> None:
    assert_equal_to(byte_level[1], byte_level[0], text)


@pytest.mark.row("LOAD-SENTENCEPIECE", "encode, decode and increments equal HF tokenizers")
@same_fixtures
@given(parts=CORPUS_TEXT)
def test_sentencepiece_like_equals_transformers(
    sentencepiece_like: tuple[FastTokenizer, Any], parts: list[str]
) -> None:
    ours, oracle = sentencepiece_like
    text = "".join(parts)
    assert_equal_to(oracle, ours, text)
    ids = ours.encode(text, add_special_tokens=False)
    stream = decoders.DecodeStream(skip_special_tokens=True)
    mine = ours.decode_stream([])
    for id_ in ids:
        assert mine.step(id_) == (stream.step(oracle.backend_tokenizer, id_) or "")
    assert mine.finish() == ""


def gguf_of(sentencepiece_file: Path) -> dict[str, Any]:
    import sentencepiece

    sp = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_file))
    size = sp.get_piece_size()
    kinds = [
        UNKNOWN if sp.is_unknown(i) else CONTROL if sp.is_control(i) else BYTE if sp.is_byte(i) else NORMAL
        for i in range(size)
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [sp.id_to_piece(i) for i in range(size)],
        "tokenizer.ggml.scores": [sp.get_score(i) for i in range(size)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": sp.bos_id(),
        "tokenizer.ggml.eos_token_id": sp.eos_id(),
        "tokenizer.ggml.unknown_token_id": sp.unk_id(),
    }


@pytest.fixture(scope="module")
def from_gguf(sentencepiece_file: Path) -> tuple[FastTokenizer, Any]:
    import sentencepiece

    sp = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_file))
    return from_metadata(gguf_of(sentencepiece_file)), sp


@pytest.mark.row("LOAD-SENTENCEPIECE", "encode and decode equal sentencepiece itself, from a GGUF's pieces and scores")
@same_fixtures
@given(text=st.text(alphabet=" aehlotw,.1\n\té😀你QZ", max_size=30))
def test_sentencepiece_in_a_gguf_equals_sentencepiece(from_gguf: tuple[FastTokenizer, Any], text: str) -> None:
    ours, sp = from_gguf
    ids = ours.encode(text, add_special_tokens=False)
    assert ids == sp.encode(text)
    assert ours.encode(text) == [sp.bos_id(), *ids]
    assert ours.decode(ids) == sp.decode(ids) == text


def test_gguf_without_space_prefix(sentencepiece_file: Path, from_gguf: tuple[FastTokenizer, Any]) -> None:
    """Gemma's variant: no space is put before the text, none is taken away."""
    ours = from_metadata({**gguf_of(sentencepiece_file), "tokenizer.ggml.add_space_prefix": False})
    prefixed = from_gguf[0]
    assert ours.encode(" Hello world") == prefixed.encode("Hello world")
    for text in CORPUS:
        assert ours.decode(ours.encode(text)) == text


def test_the_post_processor_alone_adds_bos(byte_level: tuple[FastTokenizer, Any]) -> None:
    ours, oracle = byte_level
    assert ours.bos_token_id == oracle.bos_token_id
    assert ours.encode("Hello")[0] == ours.bos_token_id  # though tokenizer_config.json says add_bos_token: false
    assert ours.eos_token_ids == (oracle.eos_token_id,)
    assert ours.special_tokens() == oracle.special_tokens_map


def test_a_leading_bos_is_not_doubled(byte_level: tuple[FastTokenizer, Any]) -> None:
    ours, _ = byte_level
    assert ours.encode("<|bos|>Hello") == ours.encode("Hello")


def test_truncation_and_padding_in_the_file_are_off(byte_level: tuple[FastTokenizer, Any]) -> None:
    ours, _ = byte_level
    text = "The quick brown fox " * 20
    assert ours.decode(ours.encode(text)) == text
    assert len(ours.encode("a")) == 2


def test_tokens_that_only_the_config_names(byte_level: tuple[FastTokenizer, Any]) -> None:
    ours, oracle = byte_level
    for token in ("<|eot|>", "<think>", "<|pad|>"):
        id_ = oracle.convert_tokens_to_ids(token)
        assert ours.encode(f"a{token}", add_special_tokens=False)[-1] == id_ < ours.vocab_size
    assert ours.decode(ours.encode("a<|eot|><think>")) == "a<think>"


def test_spaces_are_never_cleaned_up(byte_level: tuple[FastTokenizer, Any]) -> None:
    ours, _ = byte_level
    assert ours.decode(ours.encode("a . b , c 's")) == "a . b , c 's"


@pytest.mark.row("SERVE-CHAT-TEMPLATE", "ids equal transformers; no doubled BOS")
def test_chat_ids_equal_transformers(byte_level: tuple[FastTokenizer, Any]) -> None:
    ours, oracle = byte_level
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "world"}]
    assert isinstance(ours.chat_template, str)
    ids = encode_chat(ours, ChatTemplate(ours.chat_template, ours.special_tokens()).render(messages))
    assert ids == oracle.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids.count(ours.bos_token_id or -1) == 1


def copy_with(source: Path, target: Path, **files: Any) -> Path:
    shutil.copytree(source, target, dirs_exist_ok=True)
    for name, content in files.items():
        file = target / name.replace("__", "/").replace("_JSON", ".json").replace("_JINJA", ".jinja")
        file.parent.mkdir(exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    return target


def test_template_files_go_before_the_config(byte_level_dir: Path, tmp_path: Path) -> None:
    by_json = copy_with(byte_level_dir, tmp_path / "json", chat_template_JSON={"chat_template": "json"})
    assert load(by_json).chat_template == "json"
    by_file = copy_with(by_json, tmp_path / "jinja", chat_template_JINJA="file")
    assert load(by_file).chat_template == "file" == AutoTokenizer.from_pretrained(by_file).chat_template
    several = copy_with(by_file, tmp_path / "several", additional_chat_templates__tool_use_JINJA="tools")
    expected = {"default": "file", "tool_use": "tools"}
    assert load(several).chat_template == expected == AutoTokenizer.from_pretrained(several).chat_template


def test_named_templates_in_the_config(byte_level_dir: Path, tmp_path: Path) -> None:
    config = json.loads((byte_level_dir / "tokenizer_config.json").read_text())
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    config["chat_template"] = named
    path = copy_with(byte_level_dir, tmp_path / "named", tokenizer_config_JSON=config)
    assert load(path).chat_template == {"default": "plain", "tool_use": "tools"}
    config["chat_template"] = named[:1]
    assert load(copy_with(path, tmp_path / "one", tokenizer_config_JSON=config)).chat_template == "plain"


def test_special_tokens_from_the_older_file(byte_level_dir: Path, tmp_path: Path) -> None:
    special = {"bos_token": {"content": "<|bos|>"}, "eos_token": "<|eot|>"}
    path = copy_with(byte_level_dir, tmp_path / "old", special_tokens_map_JSON=special, tokenizer_config_JSON={})
    tokenizer = load(path)
    assert tokenizer.special_tokens() == {"bos_token": "<|bos|>", "eos_token": "<|eot|>"}
    assert tokenizer.chat_template is None
    assert len(tokenizer.eos_token_ids) == 1


def test_without_any_config_the_tokenizer_still_works(byte_level_dir: Path, tmp_path: Path) -> None:
    path = copy_with(byte_level_dir, tmp_path / "bare")
    (path / "tokenizer_config.json").unlink()
    tokenizer = load(path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.chat_template) == (None, (), None)
    assert tokenizer.decode(tokenizer.encode("Hello world")) == "Hello world"


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        ({"tokenizer_JSON": "{"}, ModelError, "tokenizer.json cannot be read as a tokenizer"),
        ({"tokenizer_JSON": {"model": {"type": "Nonsense"}}}, ModelError, "cannot be read as a tokenizer"),
        ({"tokenizer_config_JSON": "[]"}, ModelError, "tokenizer_config.json holds a list, not an object"),
        ({"tokenizer_config_JSON": "{"}, ModelError, "tokenizer_config.json cannot be read"),
    ],
)
def test_damaged_files_are_named(
    byte_level_dir: Path, tmp_path: Path, files: dict[str, Any], error: type[ModelError], message: str
) -> None:
    with pytest.raises(error, match=message):
        load(copy_with(byte_level_dir, tmp_path / "bad", **files))


@pytest.mark.parametrize("name", ["tekken.json", "vocab.json", "tiktoken.model", "vocab.txt"])
def test_other_formats_are_refused_with_the_cure(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("x")
    assert finds_tokenizer(tmp_path)
    with pytest.raises(UnsupportedModelError, match=rf"only {name}\. Create it once with transformers"):
        load(tmp_path)


def test_the_probe(byte_level_dir: Path, tmp_path: Path) -> None:
    assert finds_tokenizer(byte_level_dir)
    assert not finds_tokenizer(tmp_path)
    assert not finds_tokenizer(byte_level_dir / "tokenizer.json")
