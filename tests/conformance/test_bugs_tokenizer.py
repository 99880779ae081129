"""Planted bugs: the kit of tokenizers names the promise that a wrong one breaks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from infer.plugins import TokenizerSpec
from infer.testing.kits import tokenizer
from planted_bugs import PlantBug, failures, plant_bug, registry

__all__ = ["plant_bug", "registry"]


class Stream:
    def __init__(self, tokenizer: ByteTokenizer, prompt: Sequence[int]) -> None:
        self.tokenizer, self.ids, self.said = tokenizer, list(prompt), tokenizer.decode(prompt)

    def step(self, token_id: int) -> str:
        self.ids.append(token_id)
        text = self.tokenizer.decode(self.ids)
        if text.endswith("\ufffd"):
            return ""
        new, self.said = text[len(self.said) :], text
        return new

    def finish(self) -> str:
        return self.tokenizer.decode(self.ids)[len(self.said) :]


class ByteTokenizer:
    """Ids are bytes; 256 is BOS."""

    vocab_size = 257
    bos_token_id = 256
    eos_token_ids: tuple[int, ...] = ()
    chat_template = None

    def __init__(self, path: Path) -> None:
        self.path = path

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [256] * add_special_tokens + list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text = bytes(token_id for token_id in token_ids if token_id < 256).decode(errors="replace")
        return text if skip_special_tokens else "<s>" * (256 in token_ids) + text

    def decode_stream(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True) -> Any:
        return Stream(self, prompt_ids)

    def special_tokens(self) -> dict[str, str]:
        return {"bos_token": "<s>"}


class EndsWithText(ByteTokenizer):
    """One that knows its bytes: its end of sequence counts as text."""

    eos_token_ids = (10,)
    special_token_ids = frozenset({256})

    def token_bytes(self, token_id: int) -> bytes | None:
        return bytes([token_id]) if token_id < 256 else b"<s>"


class NamesForBytes(EndsWithText):
    eos_token_ids = (256,)

    def token_bytes(self, token_id: int) -> bytes | None:
        return b"<0x%02X>" % token_id


class TwoBos(ByteTokenizer):
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [256, 256] * add_special_tokens + list(text.encode())


class Strips(ByteTokenizer):
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens).strip()


class OneIdAtATime(ByteTokenizer):
    def decode_stream(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True) -> Any:
        stream = Stream(self, prompt_ids)
        stream.step = lambda token_id: self.decode([token_id])  # type: ignore[method-assign]
        stream.finish = lambda: ""  # type: ignore[method-assign]
        return stream


class RepeatsThePrompt(ByteTokenizer):
    def decode_stream(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True) -> Any:
        stream = Stream(self, prompt_ids)
        stream.said = ""
        return stream


class SmallVocabulary(ByteTokenizer):
    vocab_size = 100


@pytest.mark.row("X-PLUGIN-KIT", "the kit fails six planted plugin bugs")
@pytest.mark.parametrize(
    ("bug", "broken"),
    [
        (ByteTokenizer, set()),
        (TwoBos, {"special_tokens_once"}),
        (Strips, {"round_trip", "special_tokens_once"}),
        (OneIdAtATime, {"stream", "stream_after_prompt"}),
        (RepeatsThePrompt, {"stream_after_prompt"}),
        (SmallVocabulary, {"round_trip"}),
        (EndsWithText, {"token_bytes"}),
        (NamesForBytes, {"token_bytes"}),
    ],
)
def test_tokenizer(plant_bug: PlantBug, tmp_path: Path, bug: type[ByteTokenizer], broken: set[str]) -> None:
    probe = plant_bug(lambda path: path == tmp_path, "probe")
    spec = TokenizerSpec(name="bug", api=1, factory=plant_bug(bug), probe=probe, example={})
    assert failures(tokenizer.checks(spec, tmp_path)) == broken


def test_tokenizer_probe_that_says_yes_to_everything(plant_bug: PlantBug, tmp_path: Path) -> None:
    probe = plant_bug(lambda path: True, "probe")
    spec = TokenizerSpec(name="bug", api=1, factory=plant_bug(ByteTokenizer), probe=probe, example={})
    assert failures(tokenizer.checks(spec, tmp_path)) == {"finds_its_own_files"}
