"""Special tokens leave the text that a reader is shown, however it is split; the same characters in ordinary tokens stay."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from infer.text.special_filter import SpecialTokenFilter

NAMES = {900: "<|im_start|>", 901: "<|im_end|>", 902: "</s>", 903: ""}


def made() -> SpecialTokenFilter:
    return SpecialTokenFilter(NAMES.keys(), NAMES.__getitem__)


def test_only_tokens_that_were_written_count() -> None:
    cleaner = made()
    cleaner.see([5, 6])
    assert cleaner.clean("text", "The mark <|im_end|> is a text here.") == "The mark <|im_end|> is a text here."
    cleaner.see([901])
    assert cleaner.clean("text", "gone<|im_end|>, and <|im_start|> stays") == "gone, and <|im_start|> stays"


def test_channels_are_streams_of_their_own() -> None:
    cleaner = made()
    cleaner.see([902])
    assert cleaner.clean("reasoning", "a</") == "a"
    assert cleaner.clean("text", "s>b") == "s>b"
    assert cleaner.clean("reasoning", "s>c") == "c"
    assert cleaner.clean("reasoning", "<", last=False) == ""
    assert cleaner.clean("reasoning", "", last=True) == "<"


@example(["</s", 901, ">", 902])
@given(st.lists(st.sampled_from(["a", "<", "|", "</s", "im_end", ">", 900, 901, 902, 903]), max_size=30))
def test_no_split_matters(parts: list[str | int]) -> None:
    """Against the whole text at once, with all tokens known before."""
    ids = [part for part in parts if isinstance(part, int)]
    text = "".join(NAMES[part] if isinstance(part, int) else part for part in parts)
    whole = made()
    whole.see(ids)
    expected = whole.clean("text", text, last=True)
    pieces = made()
    pieces.see(ids)
    said = "".join(pieces.clean("text", character) for character in text) + pieces.clean("text", "", last=True)
    assert said == expected
