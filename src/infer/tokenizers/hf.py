"""The tokenizer of a Hugging Face model directory: tokenizer.json and the configuration files beside it.

Runs once while a model is opened (blocking, no tensors); owns nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer.errors import ModelError, UnsupportedModelError
from infer.plugins.hookspecs import hookimpl
from infer.plugins.tokenizer import API_VERSION, TokenizerSpec

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

    from infer.tokenizers._fast import FastTokenizer

TOKENIZER = "tokenizer.json"
SLOW_FORMATS = ("tokenizer.model", "tekken.json", "spiece.model", "vocab.json", "vocab.txt", "tiktoken.model")
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def finds_tokenizer(path: Path) -> bool:
    """Whether the directory `path` holds a tokenizer in a Hugging Face format, readable here or not."""
    return path.is_dir() and any((path / name).is_file() for name in (TOKENIZER, *SLOW_FORMATS))


def load(path: Path) -> FastTokenizer:
    """The tokenizer of the directory `path`.

    BOS and EOS are added by tokenizer.json's own post-processor alone, as transformers 5 does: `add_bos_token` in
    tokenizer_config.json has no say. Text is never "cleaned up" after decoding.
    """
    from infer.tokenizers._fast import FastTokenizer  # noqa: PLC0415 - the tokenizer library loads with the model

    backend = _read_backend(path)
    config = _read_json(path / "tokenizer_config.json")
    special = _special_tokens(config, _read_json(path / "special_tokens_map.json"))
    _add_missing_tokens(backend, config, special)
    ids = {name: backend.token_to_id(text) for name, text in special.items()}
    eos = ids.get("eos_token")
    added = backend.get_added_tokens_decoder()
    return FastTokenizer(
        backend,
        bos_token_id=ids.get("bos_token"),
        eos_token_ids=() if eos is None else (eos,),
        chat_template=_chat_template(path, config),
        special_tokens=special,
        vocab_size=max([backend.get_vocab_size(with_added_tokens=False), *(id_ + 1 for id_ in added)]),
    )


def _read_backend(path: Path) -> Backend:
    from tokenizers import Tokenizer  # noqa: PLC0415

    from infer.tokenizers._fast import library_errors  # noqa: PLC0415

    file = path / TOKENIZER
    if not file.is_file():
        found = [name for name in SLOW_FORMATS if (path / name).is_file()]
        raise UnsupportedModelError(
            f"{path} has no tokenizer.json, only {', '.join(found) or 'no tokenizer files'}. Create it once with "
            f"transformers: AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained({str(path)!r})"
        )
    with library_errors(f"{file} cannot be read as a tokenizer"):
        backend: Backend = Tokenizer.from_file(str(file))
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds a {type(value).__name__}, not an object")
    return value


def _special_tokens(*sources: dict[str, Any]) -> dict[str, str]:
    """Name to text; a source that comes first wins. A token is its text, or an object with `content`."""
    special: dict[str, str] = {}
    for name in SPECIAL_NAMES:
        for source in sources:
            value = source.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                special.setdefault(name, text)
    return special


def _add_missing_tokens(backend: Backend, config: dict[str, Any], special: dict[str, str]) -> None:
    """Tokens that only tokenizer_config.json knows, in the order of their ids."""
    from tokenizers import AddedToken  # noqa: PLC0415

    listed = config.get("added_tokens_decoder") or {}
    known = backend.get_added_tokens_decoder()
    missing: list[AddedToken] = []
    for _, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        token = AddedToken(
            entry["content"],
            single_word=entry.get("single_word", False),
            lstrip=entry.get("lstrip", False),
            rstrip=entry.get("rstrip", False),
            normalized=entry.get("normalized", True),
            special=entry.get("special", False) or entry["content"] in special.values(),
        )
        if repr(token) not in {repr(other) for other in known.values()}:
            missing.append(token)
    contents = {token.content for token in (*known.values(), *missing)}
    missing += [AddedToken(text, special=True) for text in dict.fromkeys(special.values()) if text not in contents]
    for token in missing:  # one by one: the order gives the ids
        if token.special:
            backend.add_special_tokens([token])
        else:
            backend.add_tokens([token])


def _chat_template(path: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    """A file of its own goes before the configuration's entry, which is one template or a list of named ones."""
    named: dict[str, str] = {}
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
    elif isinstance(source, str):
        named = {"default": source}
    legacy = _read_json(path / "chat_template.json").get("chat_template")
    if isinstance(legacy, str):
        named["default"] = legacy
    file = path / "chat_template.jinja"
    if file.is_file():
        named["default"] = file.read_text(encoding="utf-8")
    for extra in sorted((path / "additional_chat_templates").glob("*.jinja")):
        named[extra.stem] = extra.read_text(encoding="utf-8")
    return named.get("default") if named.keys() <= {"default"} else named


@hookimpl
def infer_tokenizers() -> list[TokenizerSpec]:
    return [
        TokenizerSpec(
            name="hf",
            api=API_VERSION,
            factory="infer.tokenizers.hf:load",
            probe="infer.tokenizers.hf:finds_tokenizer",
            priority=20,
            example={},
        )
    ]
