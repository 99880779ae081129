"""Admission and capture of `generation_artifact_v2`: what is refused by name, and that no object outgrows what was admitted."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer import SamplingParams
from infer.artifacts import ArtifactParent, ArtifactReceipt, ArtifactRequest, ManagedTarget, open_artifact
from infer.artifacts.admission import GenerationBounds, admit
from infer.artifacts.provenance import text_digest, tokenizer_digest, with_sampling
from infer.artifacts.record import Provenance
from infer.artifacts.request import parse_request
from infer.artifacts.router_layout import RouterLayout
from infer.artifacts.v2.admission import RECORDED, admit_v2, check_v2, first_row, most_kept, parent_fields
from infer.artifacts.v2.assembly import assembled, encode_open
from infer.artifacts.v2.capture import EXCLUDED, ChoiceEnd, OpenCapture
from infer.artifacts.v2.fields import RULES
from infer.config.capture import FIELD_NAME, LAYERED, CaptureProfile, artifact_name
from infer.engine.step import PositionLogprobs
from infer.errors import ArtifactError, ArtifactRefusedError
from infer.types import CapturedRows

V2 = "generation_artifact_v2"
ROUTES = CaptureProfile(name="moe_routes", dtype="uint8", row_shape=(3, 2), layer_ids=(0, 2, 5), num_experts=8)
HIDDEN = CaptureProfile(name="hidden_states", dtype="bfloat16", row_shape=(2, 16), layer_ids=(1, 4))
PLUGIN = CaptureProfile(name="best_expert", dtype="int32", row_shape=(3,))
CAPTURED = {"moe_routes": ROUTES, "hidden_states": HIDDEN, "a-dist.best_expert": PLUGIN}
EVERYTHING = (*RECORDED, *CAPTURED)
DIGEST = "ab" * 32
GIB16 = 2**34


def request(*contents: str, **changes: Any) -> ArtifactRequest:
    return ArtifactRequest(target=ManagedTarget("runs", "k"), contents=contents, format=V2, **changes)


def bounds(prompt: int, generated: int, **changes: Any) -> GenerationBounds:
    facts: dict[str, Any] = {"captured": CAPTURED, "num_top": 3, "prompt_logprobs": 2, "num_kept": 5} | changes
    return GenerationBounds(prompt_tokens=prompt, max_tokens=generated, **facts)


def entry(token_id: int, seed: int = 0, kept: int = 1) -> PositionLogprobs:
    """Facts that differ from token to token."""
    value = -0.5 - (token_id + seed) % 7
    top = tuple((token_id + place, value - place) for place in range((token_id + seed) % 5))
    ids = None if kept == 0 else array("i", range(token_id, token_id + kept))
    return PositionLogprobs(token_id, value, 1, top, kept_ids=ids, kept_logmass=-0.25 * (token_id % 3))


def rows_of(profile: CaptureProfile, start: int, count: int, seed: int, version: int = 0) -> CapturedRows:
    generator = np.random.default_rng(seed)
    if profile.name == "moe_routes":
        data = generator.integers(0, profile.num_experts, count * 6, np.uint8).tobytes()
    else:
        data = generator.bytes(count * profile.row_bytes)
    return CapturedRows(
        field=profile.name,
        start=start,
        count=count,
        data=data,
        dtype=profile.dtype,
        row_shape=profile.row_shape,
        layer_ids=profile.layer_ids,
        num_experts=profile.num_experts,
        status=bytes(index % 3 for index in range(count)),
        versions=((count, version),) if count else (),
    )


def filled(asked: ArtifactRequest, limits: GenerationBounds, outputs: list[list[int]], version: int = 0) -> OpenCapture:
    """As the engine would: prompt, deltas, ends."""
    capture = OpenCapture(asked, limits)
    prompt = list(range(100, 100 + limits.prompt_tokens))
    if "prompt_logprobs" in asked.contents:
        capture.record_prompt_logprobs([entry(token_id) for token_id in prompt[1:]])
    for index, output in enumerate(outputs):
        capture.record(index, prompt_token_ids=prompt)
        for place, token_id in enumerate(output):
            kept = place % (limits.num_kept + 1)
            capture.record(index, token_ids=[token_id], entries=[entry(token_id, place, kept)])
        count = len(prompt) + len(output) - 1 - limits.route_start
        rows = {
            name: rows_of(profile, limits.route_start, count, 1 + place, version)
            for place, (name, profile) in enumerate(CAPTURED.items())
        }
        versions = ((0, len(output), version),)
        capture.finish(
            index,
            ChoiceEnd(finish_reason="length", seed=index, weight_versions=versions, rows=rows, stop_reason="x" * 9),
        )
    return capture


# -- admission ---------------------------------------------------------------------------------------------------------


@pytest.mark.row("X-ARTIFACT-V2", "no object is larger than what was admitted")
@given(
    prompt=st.integers(1, 40),
    outputs=st.lists(st.lists(st.integers(0, 10**5), min_size=1, max_size=30), min_size=1, max_size=4),
    contents=st.sets(st.sampled_from(EVERYTHING)),
    spare=st.integers(0, 5),
)
def test_no_object_outgrows_what_was_admitted(
    prompt: int, outputs: list[list[int]], contents: set[str], spare: int
) -> None:
    """And it says what was captured."""
    known = with_sampling(Provenance(model="m" * 70), SamplingParams(stop=("abc",), logit_bias={5: 0.5}), 9)
    longest = max(map(len, outputs)) + spare
    limits = bounds(prompt, longest, num_choices=len(outputs), provenance=known, longest_stop=9)
    asked = request(*sorted(contents))
    check_v2(asked, limits)
    admitted = admit_v2(asked, limits, GIB16, GIB16)
    made = encode_open(filled(asked, limits, outputs), asked, limits, GIB16)
    assert made.actual_bytes == len(made.data) <= admitted.encoded_bytes
    assert made.raw_bytes <= admitted.payload_bytes
    reader = open_artifact(made.data)
    reader.verify(sha256=made.sha256)
    assert {one.name for one in reader.fields()} == {*contents, "token_ids"} == set(dict(made.field_sha256))
    for index, output in enumerate(outputs):
        assert reader.tokens(index).tolist() == [*range(100, 100 + prompt), *output]
        if "moe_routes" in contents:
            held = reader.field("moe_routes", index)
            expected = rows_of(ROUTES, 0, prompt + len(output) - 1, 1)
            assert held.values.tobytes() == expected.data
            assert held.status is None or held.status.tobytes() == expected.status
        if "kept_set" in contents:
            sizes = [len(reader.field("kept_set", index).row(place)) for place in range(len(output))]
            assert sizes == [place % 6 for place in range(len(output))]
        if "topk_logprobs" in contents:
            rows = reader.field("topk_logprobs", index)
            for place, token_id in enumerate(output):
                top = list(entry(token_id, place).top[:3]) + [(0, EXCLUDED)] * (3 - len(entry(token_id, place).top))
                assert list(zip(rows.extra["token_ids"][place], rows.values[place], strict=True)) == [
                    (known_id, np.float32(value)) for known_id, value in top
                ]


def test_a_delta_is_admitted_by_what_it_stores() -> None:
    """A turn that adds 100 tokens to 100,000 reserves for 100."""
    limits = bounds(100_100, 50)
    parent = ArtifactParent(sha256=DIGEST, header_sha256=DIGEST, token_count=100_000)
    whole, delta = request("hidden_states", "weight_spans"), request("hidden_states", "weight_spans", parent=parent)
    large = admit_v2(whole, limits, GIB16, GIB16)
    assert first_row(delta, limits, 0) == 99_999
    limits = replace(limits, route_start=first_row(delta, limits, 0))
    check_v2(delta, limits)
    small = admit_v2(delta, limits, GIB16, GIB16)
    assert large.payload_bytes > 100_000 * 64 and small.encoded_bytes < 150 * 100 + 5_000
    made = encode_open(filled(delta, limits, [[7] * 50]), delta, limits, GIB16)
    assert made.actual_bytes <= small.encoded_bytes and made.raw_bytes <= small.payload_bytes


@pytest.mark.row("X-ARTIFACT-V2", "more than 64 MiB")
def test_more_than_64_mib_is_admitted() -> None:
    """The figures at which v1 ends (48 routers, 128 experts, 8 of them: 169,000 tokens) are an eighth of the way here."""
    routes = CaptureProfile(
        name="moe_routes", dtype="uint8", row_shape=(48, 8), layer_ids=tuple(range(48)), num_experts=128
    )
    limits = bounds(1_000, 1_000_000, captured={"moe_routes": routes}, router_layout=RouterLayout(range(48), 128, 8))
    v1 = ArtifactRequest(target=ManagedTarget("runs", "k"), contents=("moe_routes",))
    with pytest.raises(ArtifactRefusedError, match="decoded byte limit"):
        admit(v1, limits, 2**26, 2**26)
    asked = request("moe_routes")
    admitted = admit_v2(asked, limits, 2**29, 2**30)
    assert 1_001_000 * (384 + 8) <= admitted.encoded_bytes < 1.01 * 1_001_000 * (384 + 9)
    assert admitted.reserved_bytes == admitted.payload_bytes + admitted.encoded_bytes
    with pytest.raises(ArtifactRefusedError, match=r"v2_max_decoded_bytes=268435456; .* at most") as refused:
        admit_v2(asked, limits, 2**28, 2**30)
    longest = int(str(refused.value).split("at most ")[1])
    admit_v2(asked, replace(limits, max_tokens=longest), 2**28, 2**30)
    with pytest.raises(ArtifactRefusedError):
        admit_v2(asked, replace(limits, max_tokens=longest + 1), 2**28, 2**30)
    with pytest.raises(ArtifactRefusedError, match="target max_bytes"):
        admit_v2(asked, limits, 2**29, 2**28)


def test_choices_hold_their_prompt_rows_and_store_them_once() -> None:
    one = admit_v2(request("hidden_states"), bounds(1000, 1), GIB16, GIB16)
    four = admit_v2(request("hidden_states"), bounds(1000, 1, num_choices=4), GIB16, GIB16)
    assert four.payload_bytes > 3.6 * one.payload_bytes and four.encoded_bytes < 1.2 * one.encoded_bytes


def test_a_header_that_no_reader_takes_is_refused() -> None:
    known = with_sampling(Provenance(), SamplingParams(allowed_token_ids=tuple(range(10**6))), 9)
    with pytest.raises(ArtifactRefusedError, match="the header may take"):
        admit_v2(request(), bounds(5, 5, provenance=known), GIB16, GIB16)


@pytest.mark.parametrize(
    ("params", "most"),
    [
        ({}, 1),
        ({"temperature": 0, "top_p": 0.5}, 1),
        ({"top_k": 40}, 40),
        ({"top_k": 40, "top_p": 0.5}, 40),
        ({"top_p": 0.5}, 1000),
        ({"min_p": 0.1}, 1000),
        ({"allowed_token_ids": (1, 2, 3), "min_p": 0.1}, 3),
        ({"logit_bias": {1: -100.0}}, 1000),
        ({"min_tokens": 1, "max_tokens": 2}, 1000),
    ],
)
def test_how_many_tokens_a_kept_set_can_have(params: dict[str, Any], most: int) -> None:
    assert most_kept(SamplingParams(**params), 1000) == most


PARENT = ArtifactParent(sha256=DIGEST, header_sha256=DIGEST, token_count=4)
REFUSED: list[tuple[ArtifactRequest, dict[str, Any], str, str]] = [
    (request("entropy"), {}, "unsupported", "does not record entropy"),
    (request("routes"), {}, "unsupported", "'routes' is not supported; token_ids"),
    (request("best_expert"), {}, "unsupported", "a-dist.best_expert are"),
    (request("b.best_expert"), {}, "unsupported", "capture.fields"),
    (request("moe_routes"), {"captured": {}}, "unsupported", "capture.routed_experts"),
    (request("hidden_states"), {"captured": {}}, "unsupported", "capture.hidden_layers"),
    (request("moe_routes", "moe_routes"), {}, "invalid_request", "duplicates"),
    (request(codec="none"), {}, "unsupported", "codec"),  # type: ignore[arg-type]
    (request("moe_routes"), {"route_start": 9}, "invalid_request", "must not exceed the prompt length"),
    (request("topk_logprobs"), {"explicit_logprob_ids": True}, "unsupported", "topk_logprobs cannot be combined"),
    (request("prompt_logprobs"), {"logprobs_mode": "raw_logits"}, "unsupported", "prompt_logprobs are log-prob"),
    (request("weight_spans"), {"weight_version": 3}, "unsupported", "captured rows alone"),
    (request("weight_spans", "moe_routes"), {"weight_version": 3, "route_start": 1}, "unsupported", "captured rows"),
    (request(), {"has_token_ids": False}, "unsupported", "require token ids"),
    (request(parent=replace(PARENT, sha256="AB" * 32)), {}, "invalid_request", "parent.sha256"),
    (request(parent=replace(PARENT, token_count=True)), {}, "invalid_request", "parent.token_count"),
    (request(parent=replace(PARENT, token_count=9)), {}, "invalid_request", "parent.token_count=9"),
    (request(parent=replace(PARENT, fields=("kept_set",))), {}, "invalid_request", "parent.fields"),
    (request(parent=replace(PARENT, fields=("token_ids",) * 2)), {}, "invalid_request", "each once"),
    (request(parent=replace(PARENT, fields=(5,))), {}, "invalid_request", "array of strings"),  # type: ignore[arg-type]
    (request("moe_routes", parent=PARENT), {"route_start": 4}, "invalid_request", "leaves a gap"),
]


@pytest.mark.row("X-ARTIFACT-V2", "a field that the engine cannot fill is refused by name at admission")
@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_refusals(number: int) -> None:
    asked, changes, code, words = REFUSED[number]
    with pytest.raises(ArtifactRefusedError) as refused:
        check_v2(asked, bounds(8, 8, **changes))
    assert refused.value.code == f"artifact_{code}" and words in str(refused.value)


def test_what_is_left_to_a_parent() -> None:
    contents = ("moe_routes", "selected_logprobs", "prompt_logprobs", "sampled_mask", "a-dist.best_expert")
    limits = bounds(8, 8)
    assert parent_fields(request(*contents), limits) == ()
    asked = request(*contents, parent=PARENT)
    assert parent_fields(asked, limits) == ("a-dist.best_expert", "moe_routes", "sampled_mask", "token_ids")
    assert first_row(asked, limits, 0) == 3 and first_row(asked, limits, 2) == 2
    some = request(*contents, parent=replace(PARENT, fields=("token_ids", "moe_routes")))
    assert first_row(some, limits, 0) == 0, "the plugin's rows are to be whole"


# -- the request and its receipt ---------------------------------------------------------------------------------------


def test_a_parent_travels() -> None:
    for parent in (PARENT, replace(PARENT, fields=("token_ids", "moe_routes"), choice_index=2)):
        asked = request("moe_routes", parent=parent)
        again = parse_request(asked.to_json())
        assert again.parent == parent and again.format == V2


@pytest.mark.parametrize(
    "parent", [5, {}, {"sha256": DIGEST}, {"sha256": "", "header_sha256": "", "token_count": 1, "fields": 5}, []]
)
def test_a_parent_of_another_shape(parent: Any) -> None:
    with pytest.raises(ArtifactRefusedError, match="parent"):
        parse_request({**request().to_json(), "parent": parent})


def test_a_receipt_becomes_a_parent() -> None:
    ready = ArtifactReceipt(format=V2, contents=(), state="ready", sha256=DIGEST, header_sha256="cd" * 32)
    assert ready.as_parent(4, choice_index=1) == ArtifactParent(
        sha256=DIGEST, header_sha256="cd" * 32, token_count=4, choice_index=1
    )
    for wrong in (
        ArtifactReceipt(format=V2, contents=(), state="failed", error_code="artifact_conflict", sha256=DIGEST),
        ArtifactReceipt(format="generation_artifact_v1", contents=(), state="ready", sha256=DIGEST),
    ):
        with pytest.raises(ArtifactError, match="cannot be a parent"):
            wrong.as_parent(4)


def test_names_on_the_wire() -> None:
    assert artifact_name("moe_routes", "infer-engine") == "moe_routes"
    assert artifact_name("best_expert", "My.Dist") == "my-dist.best_expert"
    assert artifact_name("best-expert", "z") == "z.best-expert"
    assert artifact_name("x.y", "z") == "x.y"
    assert {name for name, rule in RULES.items() if rule.executed} == set(LAYERED)
    for name, rule in RULES.items():
        assert artifact_name(name, "z") == (name if rule.executed else f"z.{name}"), (
            "what is not captured stays the engine's"
        )
        assert rule.rank == 3 or name not in LAYERED
    for name in ("moe_routes", "z.entropy", "my-dist.best-logit", "0.a", f"{'a' * 64}.{'b' * 64}"):
        assert FIELD_NAME.fullmatch(name)
    for name in ("best-logit", "z.Best", "z.1st", "z.", ".a", "a.b.c", "z.a b", f"{'a' * 65}.b", "", "z.ö"):
        assert not FIELD_NAME.fullmatch(name)


def test_a_field_of_a_well_known_name_is_told_from_a_plugins() -> None:
    profile = CaptureProfile(name="entropy", dtype="float32", row_shape=())
    limits = bounds(3, 4, captured={"my-dist.entropy": profile})
    check_v2(request("my-dist.entropy"), limits)
    with pytest.raises(ArtifactRefusedError, match=r"does not record entropy; my-dist\.entropy is there"):
        check_v2(request("entropy"), limits)


def test_digests_of_provenance(tmp_path: Any) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    assert tokenizer_digest(tmp_path) == tokenizer_digest(tmp_path / "tokenizer.json") == text_digest("{}")
    assert tokenizer_digest(tmp_path / "none") == tokenizer_digest(None) == tokenizer_digest(tmp_path / "a.gguf") == ""
    assert text_digest(None) == "" and text_digest({"b": "1", "a": "2"}) == text_digest({"a": "2", "b": "1"})


# -- capture -----------------------------------------------------------------------------------------------------------


def _short_rows(capture: OpenCapture) -> None:
    rows = {name: rows_of(profile, 0, 3, 1) for name, profile in CAPTURED.items()}
    capture.record(0, prompt_token_ids=[1, 2], token_ids=[3, 4, 5], entries=[entry(3), entry(4), entry(5)])
    capture.finish(0, ChoiceEnd(finish_reason="stop", rows=rows))


def _end(**changes: Any) -> ChoiceEnd:
    rows = {name: rows_of(profile, 0, 2, 1) for name, profile in CAPTURED.items()}
    facts: dict[str, Any] = {"finish_reason": "stop", "rows": rows, "weight_versions": ((0, 1, 0),)}
    return ChoiceEnd(**(facts | changes))


def _ended(**changes: Any) -> Callable[[OpenCapture], None]:
    def run(capture: OpenCapture) -> None:
        capture.record_prompt_logprobs([entry(2)])
        capture.record(0, prompt_token_ids=[1, 2], token_ids=[3], entries=[entry(3)])
        end = _end(**changes)
        if "error" in changes.get("finish_reason", ""):
            end = replace(end, rows={**end.rows, "moe_routes": replace(end.rows["moe_routes"], error="planted")})
        capture.finish(0, end)
        assembled(capture)

    return run


BROKEN: dict[str, tuple[Callable[[OpenCapture], Any], str]] = {
    "other prompt": (lambda c: (c.record(0, prompt_token_ids=[1, 2]), c.record(0, prompt_token_ids=[1, 3])), "changed"),
    "long prompt": (lambda c: c.record(0, prompt_token_ids=[1, 2, 3]), "2 were admitted"),
    "no prompt": (lambda c: c.record(0, token_ids=[3], entries=[entry(3)]), "before the prompt"),
    "too many": (
        lambda c: c.record(0, prompt_token_ids=[1, 2], token_ids=[3] * 4, entries=[entry(3)] * 4),
        "3 were admitted",
    ),
    "choice": (lambda c: c.record(1, prompt_token_ids=[1, 2]), "choice 1 was not admitted"),
    "logprobs": (lambda c: c.record(0, prompt_token_ids=[1, 2], token_ids=[3]), "with 0 logprobs"),
    "other token": (lambda c: c.record(0, prompt_token_ids=[1, 2], token_ids=[3], entries=[entry(4)]), "of token 4"),
    "no kept set": (
        lambda c: c.record(0, prompt_token_ids=[1, 2], token_ids=[3], entries=[PositionLogprobs(3, -1.0, 1)]),
        "without its kept set",
    ),
    "large kept set": (
        lambda c: c.record(0, prompt_token_ids=[1, 2], token_ids=[3], entries=[entry(3, kept=6)]),
        "1 to 5 were admitted",
    ),
    "prompt logprobs": (lambda c: c.record_prompt_logprobs([entry(1), entry(2)]), "more prompt logprobs"),
    "rows": (_short_rows, "3 rows from 0 on, 4 are needed"),
    "missing rows": (_ended(rows={}), "moe_routes: no rows came"),
    "failed rows": (_ended(finish_reason="error"), "planted"),
    "no versions": (_ended(weight_versions=()), "no token was sampled"),
    "short versions": (_ended(weight_versions=((0, 2, 0),)), "weight versions end"),
    "not ended": (lambda c: (c.record(0, prompt_token_ids=[1, 2]), c.choices()), "did not end"),
    "no choice": (lambda c: c.choices(), "0 of 1 choices"),
    "released": (lambda c: (c.release(), c.record(0, prompt_token_ids=[1, 2])), "released"),
    "a token that is none": (lambda c: c.record(0, prompt_token_ids=[1, "x"]), "64-bit"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_does_not_fit_fails_the_artifact(name: str) -> None:
    step, words = BROKEN[name]
    capture = OpenCapture(request(*EVERYTHING), bounds(2, 3))
    with pytest.raises(ArtifactError, match=words) as failed:
        step(capture)
    assert failed.value.code == "artifact_capture_failed"


def test_spans_of_a_prompt_come_from_its_rows() -> None:
    """Weights were updated before: the rows say what computed the prompt, here in two parts."""
    asked, limits = request("weight_spans", "moe_routes"), bounds(4, 3, weight_version=7)
    capture = OpenCapture(asked, limits)
    capture.record(0, prompt_token_ids=[1, 2, 3, 4], token_ids=[5, 6])
    rows = replace(rows_of(ROUTES, 0, 5, 1), versions=((3, 5), (2, 7)))
    end = ChoiceEnd(finish_reason="stop", weight_versions=((0, 1, 7), (1, 2, 8)), rows={"moe_routes": rows})
    capture.finish(0, end)
    spans = open_artifact(encode_open(capture, asked, limits, GIB16).data).weight_spans()
    assert [(span.start, span.end, span.version) for span in spans] == [(0, 3, "5"), (3, 5, "7"), (5, 6, "8")]


def test_spans_that_nothing_tells_fail() -> None:
    """An update came in while the request waited, and no row was captured."""
    asked, limits = request("weight_spans"), bounds(2, 3)
    capture = filled(asked, limits, [[5]], version=1)
    with pytest.raises(ArtifactError, match="which weights computed the prompt"):
        assembled(capture)
