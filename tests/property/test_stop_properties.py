"""Stop strings under every split of the text, against a search over the whole text."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from infer.text.stop import StopMatch, StopMatcher, StopStrings

LETTERS = st.text(alphabet="ab ", min_size=1, max_size=5)
STOPS = st.lists(LETTERS, max_size=4)
PIECES = st.lists(st.text(alphabet="ab ", max_size=4), max_size=12)


def naive(pieces: list[str], stops: list[str], include: bool, min_tokens: int = 0) -> tuple[str, StopMatch | None]:
    """Grow the text a character at a time and look at its end; the first stop in the list wins a tie."""
    passed = "".join(pieces[:min_tokens])
    text = ""
    for number, piece in enumerate(pieces[min_tokens:], start=min_tokens + 1):
        for char in piece:
            text += char
            for stop in stops:
                if text.endswith(stop):
                    kept = text if include else text[: len(text) - len(stop)]
                    return passed + kept, StopMatch(stop, number)
    return passed + text, None


def feed_all(matcher: StopMatcher, pieces: list[str]) -> tuple[list[str], StopMatch | None]:
    texts = []
    for piece in pieces:
        text, match = matcher.feed(piece)
        texts.append(text)
        if match is not None:
            return texts, match
    text, match = matcher.finish()
    return [*texts, text], match


@pytest.mark.row("SAMPLE-CORE", "stop strings cut exactly in streams and not")
@given(pieces=PIECES, stops=STOPS, include=st.booleans(), min_tokens=st.integers(0, 4))
@example(pieces=["aa", "ab"], stops=["aab"], include=False, min_tokens=0)
def test_matches_equal_a_search_of_the_whole_text(
    pieces: list[str], stops: list[str], include: bool, min_tokens: int
) -> None:
    texts, match = feed_all(StopMatcher(stops, include, min_tokens=min_tokens), pieces)
    assert ("".join(texts), match) == naive(pieces, stops, include, min_tokens)


@given(text=st.text(alphabet="ab ", max_size=12), stops=STOPS, include=st.booleans(), data=st.data())
def test_the_split_does_not_matter(text: str, stops: list[str], include: bool, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    by_pieces, match = feed_all(StopMatcher(stops, include), pieces)
    whole, match_whole = feed_all(StopMatcher(stops, include), [text])
    assert "".join(by_pieces) == "".join(whole)
    assert (match and match.stop) == (match_whole and match_whole.stop)


@given(pieces=PIECES, stops=STOPS)
def test_only_what_may_begin_a_stop_is_held(pieces: list[str], stops: list[str]) -> None:
    matcher, seen, delivered = StopMatcher(stops), "", ""
    for piece in pieces:
        text, match = matcher.feed(piece)
        seen, delivered = seen + piece, delivered + text
        if match is not None:
            return
        suffixes = [seen[cut:] for cut in range(len(seen) + 1)]
        longest = next(suffix for suffix in suffixes if suffix == "" or any(s.startswith(suffix) for s in stops))
        assert seen == delivered + longest


@given(pieces=PIECES, stops=STOPS)
def test_choices_share_the_compiled_stops(pieces: list[str], stops: list[str]) -> None:
    shared = StopStrings(stops)
    first, second = StopMatcher(shared), StopMatcher(shared)
    for piece in pieces:
        first.feed(piece)
    assert feed_all(second, pieces) == feed_all(StopMatcher(stops), pieces)
