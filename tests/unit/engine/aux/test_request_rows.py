"""What one choice accepts of the rows that steps emit, how they are cut with its tokens, and how they are handed out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.config.capture import CaptureProfile
from infer.engine.aux.rows import CACHED, CAPTURED, RECOMPUTED, RequestRows
from infer.engine.request import Request
from infer.engine.step import AuxRows
from infer.types import CapturedRows
from step_driver import new_request

ROUTES = CaptureProfile(name="moe_routes", dtype="uint8", row_shape=(2, 2), layer_ids=(1, 2), num_experts=8)
HIDDEN = CaptureProfile(name="hidden_states", dtype="float32", row_shape=(1, 3))


def content(profile: CaptureProfile, first: int, end: int) -> bytes:
    """Rows that tell their position."""
    return b"".join(bytes([position % 251]) * profile.row_bytes for position in range(first, end))


def piece(
    start: int,
    count: int,
    *,
    cached: int = 0,
    versions: list[tuple[int, int]] | None = None,
    profiles: tuple[CaptureProfile, ...] = (ROUTES,),
    error: str | None = None,
) -> AuxRows:
    data = {profile.name: content(profile, start, start + count) for profile in profiles}
    spans = ([(count, 0)] if count else []) if versions is None else versions
    return AuxRows(start, count, cached, data, spans, error)


def make(
    prompt_len: int = 4, max_tokens: int = 8, start: int = 0, profiles: tuple[CaptureProfile, ...] = (ROUTES,)
) -> RequestRows:
    return RequestRows(profiles, prompt_len=prompt_len, max_tokens=max_tokens, start=start)


def routes(rows: RequestRows) -> CapturedRows:
    return rows.export()["moe_routes"]


def holds(rows: RequestRows, first: int, end: int) -> bool:
    """The rows are those of positions first to end, in every field, and the counts say so."""
    return all(
        (out.start, out.count, bytes(out.data), out.error) == (first, end - first, content(p, first, end), None)
        and len(out.status) == sum(rows for rows, _ in out.versions) == end - first
        for p, out in zip(rows.profiles, rows.export().values(), strict=True)
    )


@pytest.mark.row("SAMPLE-ROUTED-EXPERTS", "rows = N - 1 - start: the last sampled token has none")
@pytest.mark.parametrize("start", [0, 1, 3, 4])
def test_rows_follow_the_start(start: int) -> None:
    rows = make(start=start)
    rows.accept(piece(start, 4 - start), 5)
    assert holds(rows, start, 4)
    rows.accept(piece(4, 1), 6)
    assert holds(rows, start, 5)
    assert rows.cursor == 5


def test_start_at_the_prompt_end_with_one_token_is_empty_and_complete() -> None:
    rows = make(start=4, max_tokens=1)
    assert rows.nbytes == 0
    rows.accept(None, 5)
    assert holds(rows, 4, 4) and rows.failure is None


def test_late_output_after_preemption_is_cut_to_the_tokens() -> None:
    rows = make()
    rows.accept(piece(0, 4), 5)
    assert rows.count == 4
    late = piece(4, 4)
    late.data["moe_routes"] = content(ROUTES, 4, 5) + bytes(12)  # fed after a token that was not accepted
    rows.accept(late, 6)
    assert holds(rows, 0, 5) and rows.cursor == 5
    rows.accept(piece(5, 1), 7)
    assert holds(rows, 0, 6)


def test_rows_held_already_are_dropped() -> None:
    """RE-58: a second prefill, shorter than what is held, takes nothing away and changes nothing."""
    rows = make()
    rows.accept(piece(0, 4), 5)
    rows.accept(piece(4, 1), 6)
    again = piece(2, 3)
    again.data["moe_routes"] = bytes(12)
    rows.accept(again, 6)
    assert holds(rows, 0, 5)
    again = piece(3, 3)
    again.data["moe_routes"] = bytes(8) + content(ROUTES, 5, 6)
    rows.accept(again, 7)
    assert holds(rows, 0, 6)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (piece(5, 1), "rows start at position 5, where 4 is next"),
        (None, "rows end at position 4: 6 tokens need them up to 5"),
        (piece(4, 0), "rows end at position 4"),
        (piece(4, 1, versions=[(2, 0)]), "do not cover 1 rows"),
        (piece(4, 1, cached=2), "not possible"),
        (AuxRows(-1, 7, 0, {"moe_routes": bytes(28)}, [(7, 0)]), "not possible"),
        (AuxRows(4, 1, 0, {"moe_routes": bytes(3)}, [(1, 0)]), "3 bytes are not 1 rows of moe_routes (4 each)"),
        (AuxRows(4, 1, 0, {"other": bytes(4)}, [(1, 0)]), "no rows of moe_routes"),
        (piece(4, 1, error="expert id 9 of 8"), "expert id 9 of 8"),
    ],
    ids=["gap", "absent", "short", "versions", "cached", "start", "size", "field", "worker"],
)
def test_what_cannot_be_right_fails_the_rows(wrong: AuxRows | None, reason: str) -> None:
    rows = make()
    rows.accept(piece(0, 4), 5)
    rows.accept(wrong, 6)
    out = routes(rows)
    assert out.error is not None and reason in out.error
    assert (out.count, out.data, out.status, out.versions) == (0, b"", b"", ())
    rows.accept(piece(4, 1), 6)
    assert routes(rows).error == out.error, "the first reason stays"


def test_every_field_is_checked_and_kept_apart() -> None:
    both = (ROUTES, HIDDEN)
    rows = make(profiles=both)
    rows.accept(piece(0, 4, profiles=both), 5)
    assert holds(rows, 0, 4)
    assert rows.fields == ("moe_routes", "hidden_states")
    out = rows.export()["hidden_states"]
    assert (out.dtype, out.row_shape, len(out.data)) == ("float32", (1, 3), 48)
    rows.accept(piece(4, 1), 6)
    assert rows.failure == "no rows of hidden_states came"


def test_statuses_tell_cached_captured_and_recomputed() -> None:
    rows = make(prompt_len=6)
    rows.accept(piece(0, 6, cached=2), 7)
    assert routes(rows).status == bytes([CACHED] * 2 + [CAPTURED] * 4)
    rows.recomputed_until = 8
    rows.accept(piece(5, 4, cached=2), 10)
    assert routes(rows).status == bytes([CACHED] * 2 + [CAPTURED] * 4 + [CACHED] + [RECOMPUTED] + [CAPTURED])


@pytest.mark.row("X-WEIGHT-SPANS", "rows say under which weights they were computed")
def test_version_spans_are_merged_and_cut() -> None:
    rows = make()
    rows.accept(piece(0, 4, versions=[(1, 3), (2, 3), (1, 4)]), 5)
    rows.accept(piece(2, 4, versions=[(3, 4), (1, 5)]), 7)
    assert routes(rows).versions == ((3, 3), (2, 4), (1, 5))
    rows.trim(5)
    assert routes(rows).versions == ((3, 3), (1, 4))


def test_trim_is_final() -> None:
    rows = make()
    rows.accept(piece(0, 4), 5)
    rows.accept(piece(4, 2), 7)
    rows.trim(6)
    assert holds(rows, 0, 5)
    rows.accept(piece(6, 1), 8)
    assert holds(rows, 0, 5)
    rows.trim(7)
    assert holds(rows, 0, 5)
    rows.trim(4)
    assert holds(rows, 0, 3)
    rows.trim(0)
    assert holds(rows, 0, 0)


def test_ended_before_the_first_token_has_an_outcome_and_no_rows() -> None:
    """RE-32."""
    rows = make()
    rows.trim(4)
    out = routes(rows)
    assert (out.count, out.data, out.status, out.versions) == (0, b"", b"", ())
    assert out.error is not None and "before its first token" in out.error


def test_views_are_read_only_and_outlive_the_release() -> None:
    rows = make()
    rows.accept(piece(0, 4), 5)
    out = routes(rows)
    assert isinstance(out.data, memoryview) and out.data.readonly
    rows.release()
    assert out.data == content(ROUTES, 0, 4)
    rows.accept(piece(4, 1), 6)
    assert routes(rows).error == "the rows were released" and rows.nbytes == 0


def test_nothing_is_copied_between_accept_and_export() -> None:
    rows = make()
    rows.accept(piece(0, 4), 5)
    before = rows.view("moe_routes")
    rows.accept(piece(4, 1), 6)
    assert before.obj is rows.view("moe_routes").obj is routes(rows).data.obj  # type: ignore[union-attr]


def test_room_for_the_longest_answer_is_address_space_only() -> None:
    wide = CaptureProfile(name="moe_routes", dtype="uint8", row_shape=(94, 8))
    rows = RequestRows((wide,), prompt_len=1, max_tokens=2**21)
    assert rows.nbytes == 2**21 * 752
    rows.accept(AuxRows(0, 1, 0, {"moe_routes": bytes(752)}, [(1, 0)]), 2)
    assert rows.failure is None and routes(rows).count == 1


class TestSiblings:
    def test_prompt_rows_are_stored_once(self) -> None:
        first = make()
        second = first.sibling()
        assert second.nbytes == 7 * ROUTES.row_bytes
        first.accept(piece(0, 4), 5)
        assert second.cursor == 4
        second.accept(None, 5)
        assert holds(second, 0, 4)
        assert routes(second).data.obj is routes(first).data.obj  # type: ignore[union-attr]
        second.accept(piece(4, 2), 7)
        assert holds(second, 0, 6)
        assert holds(first, 0, 4), "what a sibling adds is its own"

    def test_whoever_comes_first_brings_the_prompt(self) -> None:
        first = make(start=1)
        second, third = first.sibling(), first.sibling()
        second.accept(piece(1, 4), 6)
        assert holds(second, 1, 5)
        first.accept(piece(1, 3), 5)
        third.accept(piece(1, 3), 5)
        assert holds(first, 1, 4) and holds(third, 1, 4)

    def test_trim_and_release_concern_one_choice(self) -> None:
        first = make()
        second = first.sibling()
        first.accept(piece(0, 4), 5)
        second.accept(piece(4, 1), 6)
        first.trim(3)
        first.release()
        assert holds(second, 0, 5)
        second.trim(4)
        assert holds(second, 0, 3)

    def test_a_parent_that_ended_leaves_its_last_piece_to_the_fork(self) -> None:
        first = make()
        second = first.sibling()
        first.trim(4)
        first.release()
        second.accept_prompt(piece(0, 4))
        second.accept(None, 5)
        assert holds(second, 0, 4)

    def test_a_fork_without_the_prompt_fails(self) -> None:
        second = make().sibling()
        second.accept_prompt(None)
        assert second.failure is not None and "rows end at position 0" in second.failure

    def test_a_fork_that_got_no_token_has_no_rows(self) -> None:
        first = make()
        second = first.sibling()
        first.accept(piece(0, 4), 5)
        second.accept_prompt(piece(0, 4))
        assert routes(second).error is not None and routes(second).count == 0

    def test_statuses_and_versions_join(self) -> None:
        first = make()
        second = first.sibling()
        first.accept(piece(0, 4, cached=1), 5)
        second.accept(piece(4, 2, versions=[(1, 0), (1, 1)]), 7)
        assert routes(second).status == bytes([CACHED] + [CAPTURED] * 5)
        assert routes(second).versions == ((5, 0), (1, 1))


@given(st.data(), st.integers(1, 12), st.integers(1, 12), st.booleans())
def test_any_cutting_gives_the_same_rows(data: st.DataObject, prompt_len: int, max_tokens: int, forked: bool) -> None:
    """Pieces of any length that overlap what is held, in any number: the rows are those of the tokens."""
    start = data.draw(st.integers(0, prompt_len))
    rows = make(prompt_len, max_tokens, start, (ROUTES, HIDDEN))
    if forked:
        rows = rows.sibling()
    num_tokens = prompt_len
    while num_tokens < prompt_len + max_tokens and data.draw(st.booleans()):
        num_tokens += data.draw(st.integers(1, prompt_len + max_tokens - num_tokens))
        begin = data.draw(st.integers(start, rows.cursor))
        end = data.draw(st.integers(max(begin, num_tokens - 1), num_tokens + 3))
        rows.accept(piece(begin, end - begin, profiles=(ROUTES, HIDDEN)), num_tokens)
        assert rows.failure is None
        assert holds(rows, start, max(start, num_tokens - 1))
    if num_tokens > prompt_len:
        kept = data.draw(st.integers(prompt_len, num_tokens))
        rows.trim(kept)
        assert holds(rows, start, max(start, kept - 1))


class TestWeightVersionsOfTokens:
    def request(self) -> Request:
        request = new_request([1, 2], 8)
        for token, version in [(5, 0), (6, 0), (7, 3), (8, 0)]:
            request.accept([token], version)
        return request

    @pytest.mark.row("X-WEIGHT-SPANS", "spans cover every output token once")
    def test_one_span_per_change(self) -> None:
        request = self.request()
        assert request.versions == [(0, 0), (2, 3), (3, 0)]
        assert request.weight_versions(4) == ((0, 2, 0), (2, 3, 3), (3, 4, 0))

    def test_cut_with_the_tokens(self) -> None:
        request = self.request()
        assert request.weight_versions(2) == ((0, 2, 0),)
        assert request.weight_versions(0) == ()
        assert new_request([1], 1).weight_versions(0) == ()
