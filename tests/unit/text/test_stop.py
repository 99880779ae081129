"""Stop strings: the published cases, and what happens after the end."""

from __future__ import annotations

import pytest

from infer.text.stop import StopMatch, StopMatcher


@pytest.mark.parametrize("stops", [["a", "is"], ["is", "a"]])
@pytest.mark.parametrize(("include", "text"), [(False, " The user "), (True, " The user is")])
def test_the_stop_that_completes_first_wins(stops: list[str], include: bool, text: str) -> None:
    """Behaviour case 53."""
    matcher = StopMatcher(stops, include)
    first, match = matcher.feed(" The user")
    assert match is None
    rest, match = matcher.feed(" is a")
    assert match == StopMatch("is", 2)
    assert first + rest == text


@pytest.mark.parametrize(("stops", "stop"), [(["bc", "abc"], "bc"), (["abc", "bc"], "abc")])
def test_ties_go_to_the_order_of_the_list(stops: list[str], stop: str) -> None:
    text, match = StopMatcher(stops).feed("xabcx")
    assert match == StopMatch(stop, 1)
    assert text == "xabc".removesuffix(stop)


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abcd")])
def test_tokens_up_to_the_one_that_completes_the_stop_are_kept(include: bool, text: str) -> None:
    """Behaviour case 54: one step brings six tokens."""
    matcher = StopMatcher(["cd"], include)
    results = [matcher.feed(piece) for piece in "abcdef"]
    assert "".join(emit for emit, _ in results) == text
    assert matcher.match == StopMatch("cd", 4)
    assert results[4] == results[5] == ("", matcher.match)
    assert matcher.finish("more") == ("", matcher.match)


def test_one_token_can_hold_the_whole_stop() -> None:
    assert StopMatcher(["cd"]).feed("abcdef") == ("ab", StopMatch("cd", 1))


def test_min_tokens_lets_text_pass() -> None:
    matcher = StopMatcher(["ab"], min_tokens=2)
    assert matcher.feed("ab") == ("ab", None)
    assert matcher.feed("xa") == ("xa", None)
    assert matcher.feed("b") == ("b", None)  # its "a" came too early to count
    assert matcher.feed("ab") == ("", StopMatch("ab", 4))


def test_without_stops_everything_passes_at_once() -> None:
    matcher = StopMatcher([])
    assert matcher.feed("text") == ("text", None)
    assert matcher.finish("end") == ("end", None)


def test_the_end_brings_what_was_held() -> None:
    matcher = StopMatcher(["</s>"])
    assert matcher.feed("a<") == ("a", None)
    assert matcher.feed("/") == ("", None)
    assert matcher.finish() == ("</", None)
    assert matcher.finish() == ("", None)


def test_the_detokenizers_last_text_can_complete_a_stop() -> None:
    matcher = StopMatcher(["\ufffd"])
    assert matcher.feed("a") == ("a", None)
    assert matcher.finish("\ufffd") == ("", StopMatch("\ufffd", 1))


def test_many_long_stops_cost_one_step_per_character() -> None:
    stops = ["a" * 1023 + chr(0x4E00 + i) for i in range(64)]
    matcher = StopMatcher(stops)
    for _ in range(300):
        assert matcher.feed("a" * 40 + "b")[1] is None
    for _ in range(1023):
        assert matcher.feed("a") == ("", None)
    assert matcher.feed(stops[7][-1]) == ("", StopMatch(stops[7], 300 + 1023 + 1))
