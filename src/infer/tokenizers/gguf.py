"""The tokenizer inside a GGUF header, rebuilt to give the ids of the model's own tokenizer.

Runs once while a model is opened (blocking, no tensors); owns nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer.errors import ModelError, UnsupportedModelError
from infer.plugins.hookspecs import hookimpl
from infer.plugins.tokenizer import API_VERSION, TokenizerSpec

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from infer.tokenizers._fast import FastTokenizer
    from infer.tokenizers._pre_tokenizers import PreTokenizer

logger = logging.getLogger(__name__)

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
END_OF_TURN = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<turn|>"),
        *("<|endoftext|>", "<|end_of_text|>", "<EOT>", "[EOT]", "<end_of_utterance>", "<｜end▁of▁sentence｜>"),
    }
)
"""A GGUF names at most one EOS, chat models stop on others too: control tokens with these texts end a turn."""


def finds_gguf(path: Path) -> bool:
    """Whether `path` is a GGUF file (by its magic, not by its name)."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def load(path: Path) -> FastTokenizer:
    """The tokenizer of the GGUF file at `path`; `UnsupportedModelError` names a kind that is not supported."""
    from infer.weights.gguf import GGUFFile  # noqa: PLC0415 - see docs/decisions/002-tokenizer-reads-gguf-header.md

    with GGUFFile.open(path) as file:
        return from_metadata(file.metadata)


def from_metadata(metadata: Mapping[str, Any]) -> FastTokenizer:
    """The tokenizer that the `tokenizer.*` keys describe (GGUF specification, section "Tokenizer")."""
    from infer.tokenizers._fast import FastTokenizer, library_errors  # noqa: PLC0415 - the library loads with the model

    header = _Header(metadata)
    model = header.model
    with library_errors("the GGUF's tokenizer cannot be rebuilt"):
        if model == "gpt2":
            backend, add_bos = _byte_level_bpe(header)
        elif model == "llama":
            backend, add_bos = _sentencepiece(header), True
        elif model == "gemma4":
            backend, add_bos = _gemma4(header), True
        else:
            raise UnsupportedModelError(
                f"tokenizer.ggml.model={model!r} is not supported: infer rebuilds 'gpt2' (byte-level BPE), 'llama' "
                "(SentencePiece BPE) and 'gemma4'. Use the model's directory with its tokenizer.json instead."
            )
        _add_tokens(backend, header)
        _add_post_processor(backend, header, add_bos)
    return FastTokenizer(
        backend,
        bos_token_id=header.token_id("bos", 1 if model == "llama" else None),
        eos_token_ids=header.eos_token_ids(),
        chat_template=header.chat_template(),
        special_tokens=header.special_tokens(),
        vocab_size=len(header.tokens),
    )


class _Header:
    """The tokenizer's keys, checked."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.model = str(metadata.get(PREFIX + "model"))
        tokens = self.get("tokens")
        if not isinstance(tokens, list) or not tokens:
            raise ModelError("the GGUF has no vocabulary: tokenizer.ggml.tokens is missing; use a complete file")
        self.tokens: list[str] = [str(token) or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
        self.vocab = {token: i for i, token in enumerate(self.tokens)}
        if len(self.vocab) != len(self.tokens):
            twice = next(token for i, token in enumerate(self.tokens) if self.vocab[token] != i)
            raise ModelError(f"tokenizer.ggml.tokens holds {twice!r} twice: the file is damaged, convert it again")
        self.types = self._per_token("token_type", NORMAL)
        self.scores = self._per_token("scores", 0.0)

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(PREFIX + key, default)

    def _per_token(self, key: str, default: Any) -> list[Any]:
        values = self.get(key)
        if values is None:
            return [default] * len(self.tokens)
        if len(values) < len(self.tokens):
            raise ModelError(
                f"tokenizer.ggml.{key} has {len(values)} entries for {len(self.tokens)} tokens: the file is damaged"
            )
        return list(values)

    def is_phi3(self) -> bool:
        """Phi-3's special tokens swallow the space after them; the format cannot say so, only the name does."""
        name = str(self._metadata.get("general.name", "")).lower()
        return self.model == "llama" and ("phi-3" in name or "phi3" in name)

    def merges(self) -> list[tuple[str, str]]:
        merges = self.get("merges")
        if merges is None:
            raise UnsupportedModelError(f"the GGUF's {self.model!r} tokenizer has no tokenizer.ggml.merges to merge by")
        pairs, vocab = [], self.vocab
        for merge in merges:
            cut = merge.find(" ", 1)
            left, right = merge[:cut], merge[cut + 1 :]
            if cut < 0 or left not in vocab or right not in vocab or left + right not in vocab:
                raise ModelError(f"tokenizer.ggml.merges holds {merge!r}, which does not join two tokens to a third")
            pairs.append((left, right))
        return pairs

    def token_id(self, name: str, default: int | None = None) -> int | None:
        value = self.get(f"{name}_token_id", default)
        return value if isinstance(value, int) and 0 <= value < len(self.tokens) else None

    def eos_token_ids(self) -> tuple[int, ...]:
        ids = [self.token_id("eos", 2 if self.model == "llama" else None), self.token_id("eot"), self.token_id("eom")]
        ids += sorted(id_ for text, id_ in self.vocab.items() if text in END_OF_TURN and self.types[id_] == CONTROL)
        return tuple(dict.fromkeys(id_ for id_ in ids if id_ is not None))

    def special_tokens(self) -> dict[str, str]:
        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        ids = {name: self.token_id(key) for name, key in names.items()}
        return {name: self.tokens[id_] for name, id_ in ids.items() if id_ is not None}

    def chat_template(self) -> str | dict[str, str] | None:
        default = self._metadata.get("tokenizer.chat_template")
        names = self._metadata.get("tokenizer.chat_templates") or []
        templates = {name: self._metadata.get(f"tokenizer.chat_template.{name}") for name in names}
        if default is not None:
            templates["default"] = default
        found = {name: source for name, source in templates.items() if isinstance(source, str)}
        return found.get("default") if found.keys() <= {"default"} else found


def _byte_level_bpe(header: _Header) -> tuple[Backend, bool]:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers  # noqa: PLC0415

    kind = _pre_tokenizer_kind(header.get("pre"))
    backend = Tokenizer(models.BPE(header.vocab, header.merges(), ignore_merges=kind.ignore_merges))
    if kind.nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in kind.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend, kind.add_bos


def _pre_tokenizer_kind(name: str | None) -> PreTokenizer:
    from infer.tokenizers._pre_tokenizers import known_pre_tokenizers  # noqa: PLC0415

    known = known_pre_tokenizers()
    if name is None:
        logger.warning("the GGUF does not name its pre-tokenizer (tokenizer.ggml.pre): 'default' may split differently")
        name = "default"
    if name not in known:
        raise UnsupportedModelError(
            f"tokenizer.ggml.pre={name!r} is not supported; known kinds: {', '.join(sorted(known))}. "
            "Use the model's directory with its tokenizer.json instead."
        )
    return known[name]


def _sentencepiece(header: _Header) -> Backend:
    from tokenizers import decoders, normalizers  # noqa: PLC0415

    if header.get("precompiled_charsmap"):
        raise UnsupportedModelError(
            "tokenizer.ggml.precompiled_charsmap: SentencePiece with a character map is not supported"
        )
    mergeable = [i for i, kind in enumerate(header.types) if kind in (NORMAL, USER_DEFINED, UNUSED)]
    merges = merges_by_score(header.vocab, {header.tokens[i]: header.scores[i] for i in mergeable})
    backend = _fallback_bpe(header, merges)
    prefix = bool(header.get("add_space_prefix", True))
    steps = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def _gemma4(header: _Header) -> Backend:
    from tokenizers import decoders, normalizers, pre_tokenizers  # noqa: PLC0415

    backend = _fallback_bpe(header, header.merges())
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _fallback_bpe(header: _Header, merges: list[tuple[str, str]]) -> Backend:
    from tokenizers import Tokenizer, models  # noqa: PLC0415

    unknown = header.token_id("unknown", 0)
    return Tokenizer(
        models.BPE(
            header.vocab,
            merges,
            byte_fallback=True,
            fuse_unk=True,
            unk_token=None if unknown is None else header.tokens[unknown],
        )
    )


def merges_by_score(vocab: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """SentencePiece BPE as ranked merges: every split of a piece into two pieces, best piece first."""
    merges: list[tuple[str, str]] = []
    for piece in sorted(scores, key=lambda piece: -scores[piece]):  # stable: equal scores keep the vocabulary's order
        pairs = [
            (left, right)
            for cut in range(1, len(piece))
            if (left := piece[:cut]) in vocab and (right := piece[cut:]) in vocab
        ]
        if len(pairs) > 1:
            pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges += pairs
    return merges


def _add_tokens(backend: Backend, header: _Header) -> None:
    """Control and user-defined tokens are matched in the text before anything else."""
    from tokenizers import AddedToken  # noqa: PLC0415

    strip_right = header.is_phi3()
    special, plain = [], []
    for text, kind in zip(header.tokens, header.types, strict=False):
        if kind in (CONTROL, UNKNOWN):
            rstrip = strip_right and text not in ("<unk>", "<s>", "<|endoftext|>")
            special.append(AddedToken(text, special=True, normalized=False, rstrip=rstrip))
        elif kind == USER_DEFINED:
            plain.append(AddedToken(text, special=False, normalized=False, rstrip=strip_right))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _add_post_processor(backend: Backend, header: _Header, add_bos: bool) -> None:
    from tokenizers import processors  # noqa: PLC0415

    bos = header.token_id("bos", 1 if header.model == "llama" else None)
    eos = header.token_id("eos", 2 if header.model == "llama" else None)
    before = [bos] if bos is not None and header.get("add_bos_token", add_bos) else []
    after = [eos] if eos is not None and header.get("add_eos_token", False) else []
    if not before and not after:
        return
    names = {id_: f"id{id_}" for id_ in (*before, *after)}
    single = [names[id_] for id_ in before] + ["$A"] + [names[id_] for id_ in after]
    backend.post_processor = processors.TemplateProcessing(
        single=single,
        pair=[*single, "$B:1"],
        special_tokens=[{"id": name, "ids": [id_], "tokens": [header.tokens[id_]]} for id_, name in names.items()],
    )


@hookimpl
def infer_tokenizers() -> list[TokenizerSpec]:
    return [
        TokenizerSpec(
            name="gguf",
            api=API_VERSION,
            factory="infer.tokenizers.gguf:load",
            probe="infer.tokenizers.gguf:finds_gguf",
            priority=10,
            example={},
        )
    ]
