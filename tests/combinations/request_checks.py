"""Whether every value of a request's features was at work, and whether the answer is that of the plainest engine.

Of a platform that promises the same bits everything must be equal; elsewhere numbers may differ by a tolerance, and tokens where
two were nearly tied."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from combinations.request_features import CALL, CHOICES, FIELD, FORCED, MERGED, STOP_IDS, TAG
from infer import Engine, SamplingParams
from infer.artifacts import open_artifact
from infer.types import CapturedRows

if TYPE_CHECKING:
    from combinations.declared import Row
    from combinations.running import Answer

TOLERANCE = {"float32": 2e-3, "float16": 0.1, "bfloat16": 0.5}
"""Of log-probabilities where the same bits are not promised; with keys in 8 bits ten times that."""
FINITE = {
    "schema": ('{"a":true}', '{"a":false}'),
    "choice": CHOICES,
    "call": (CALL,),
    "grammar": ('{"go', '{"stop'),
    "tag": (TAG,),
}
"""All that these grammars allow."""


def check(answer: Answer, expected: Answer, row: Row, engine: Engine, *, exact: bool) -> None:
    values = answer.ask.row
    for name, function in CHECKS.items():
        try:
            function(answer, values[name], row)
        except AssertionError as error:
            raise AssertionError(f"{name}={values[name]}: {error}") from error
    if exact:
        _same_bits(answer, expected, row)
    else:
        _close(answer, expected, row)


# -- against the plain engine ------------------------------------------------------------------------------------------


def _same_bits(answer: Answer, expected: Answer, row: Row) -> None:
    done, plain = answer.done, expected.done
    assert done.prompt_token_ids == plain.prompt_token_ids
    for mine, theirs in zip(done.choices, plain.choices, strict=True):
        assert mine.token_ids == theirs.token_ids, f"{mine.token_ids} and, plain, {theirs.token_ids}"
        for name in ("finish_reason", "stop_reason", "seed", "logprobs", "beam_score"):
            one, other = getattr(mine, name), getattr(theirs, name)
            assert one == other, f"{name} is {one!r:.300} and, plain, {other!r:.300}"
        if row["tokenizer"] == "loaded":
            assert (mine.text, mine.content, mine.reasoning) == (theirs.text, theirs.content, theirs.reasoning)
        assert mine.captured.keys() == theirs.captured.keys()
        for name, rows in mine.captured.items():
            assert _digest(rows) == _digest(theirs.captured[name]), f"rows of {name} differ from a plain engine's"
    assert done.prompt_logprobs == plain.prompt_logprobs, "prompt_logprobs differ from a plain engine's"
    if answer.objects:
        mine_fields, plain_fields = (artifact_rows(one.objects) for one in (answer, expected))
        assert mine_fields == plain_fields, f"artifacts differ in {_different(mine_fields, plain_fields)}"


def _digest(rows: CapturedRows) -> tuple[int, int, str]:
    assert rows.error is None, rows.error
    return rows.start, rows.count, (rows.digest if rows.keys else hashlib.sha256(rows.data).digest()).hex()


def artifact_rows(objects: Sequence[bytes]) -> dict[tuple[str, int], tuple[Any, ...]]:
    """(field, choice) -> first position and the bytes of all its arrays."""
    found = {}
    with open_artifact(objects[-1]) as reader:
        for summary in reader.fields():
            for choice in summary.choices:
                rows = reader.field(summary.name, choice)
                arrays = [rows.values, *(rows.extra[name] for name in sorted(rows.extra))]
                if rows.offsets is not None:
                    arrays.append(rows.offsets)
                found[summary.name, choice] = (rows.row_start, [(a.dtype.str, a.shape, a.tobytes()) for a in arrays])
    return found


def _different(one: dict[Any, Any], other: dict[Any, Any]) -> list[Any]:
    return sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))


def _tolerance(row: Row) -> float:
    if row["model"] in ("moe", "latent") and row["compute"] != "float32":
        return float(
            "inf"
        )  # a token that two experts want as much may go to either, which is another number altogether
    return TOLERANCE[row["compute"]] * (10 if row["kv dtype"] == "fp8_e4m3" else 1)


def _close(answer: Answer, expected: Answer, row: Row) -> None:
    """As far as the tokens are the same."""
    limit = _tolerance(row)
    if answer.ask.params.logprobs_mode == "raw_logits":
        limit *= 4
    for mine, theirs in zip(answer.done.choices, expected.done.choices, strict=False):
        for one, other in zip(mine.logprobs or (), theirs.logprobs or (), strict=False):
            if one.token_id != other.token_id:
                break
            assert near(one.logprob, other.logprob, limit), f"{one.logprob} and, plain, {other.logprob}"
    for first, second in zip(answer.done.prompt_logprobs or (), expected.done.prompt_logprobs or (), strict=True):
        if first is not None and second is not None:
            assert near(first.logprob, second.logprob, limit), f"{first.logprob} and, plain, {second.logprob}"
    same = [c.token_ids for c in answer.done.choices] == [c.token_ids for c in expected.done.choices]
    if answer.objects and same:
        mine_fields, plain_fields = (artifact_rows(one.objects) for one in (answer, expected))
        assert mine_fields.keys() == plain_fields.keys()
        for key, (start, arrays) in mine_fields.items():
            assert start == plain_fields[key][0] and [a[:1] for a in arrays] == [a[:1] for a in plain_fields[key][1]]


def near(one: float, other: float, limit: float) -> bool:
    """Equal when both are infinite."""
    return one == other or abs(one - other) <= limit * max(1.0, abs(other) / 10)


async def check_ties(answer: Answer, expected: Answer, row: Row, engine: Engine) -> None:
    """A greedy token that differs is allowed where a plain engine, given all before it, thinks as much of both."""
    params, values = answer.ask.params, answer.ask.row
    bare = values["grammar"] == values["processors"] == values["bans"] == "none" and values["thinking"] == "free"
    if values["sampling"] != "greedy" or params.beam is not None or not bare or values["ends"] == "min":
        return
    mine, theirs = answer.done.token_ids, expected.done.token_ids
    place = next((i for i, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        return
    asked = SamplingParams(
        temperature=0, forced_token_ids=theirs[: place + 1], logprob_token_ids=(mine[place], theirs[place])
    )
    done = await engine.generate(list(answer.done.prompt_token_ids), asked, cache_salt="ties")
    assert done.logprobs is not None
    one, other = done.logprobs[place].candidates
    assert abs(one - other) <= 2 * _tolerance(row), (
        f"token {place} is {mine[place]} and, plain, {theirs[place]}: no tie"
    )


# -- one feature at a time ---------------------------------------------------------------------------------------------


def _prompt(answer: Answer, value: str, row: Row) -> None:
    done = answer.done
    if value == "ids":
        assert list(done.prompt_token_ids) == answer.ask.prompt
    for choice in done.choices:
        assert (choice.parsed is not None) == (value in ("chat", "tools"))
        if value != "tools":
            assert not choice.tool_calls
        elif answer.ask.row["grammar"] == "call" and (choice.finish_reason, choice.stop_reason) == ("stop", None):
            assert [call.name for call in choice.tool_calls] == ["look"]


def _call(answer: Answer, value: str, row: Row) -> None:
    assert bool(answer.deltas) == (value == "stream")
    if value == "stream":
        for choice in answer.done.choices:
            mine = [delta for delta in answer.deltas if delta.choice_index == choice.index]
            assert tuple(token for delta in mine for token in delta.token_ids) == choice.token_ids
            assert "".join(delta.text for delta in mine) == choice.text
            assert mine[-1].finish_reason == choice.finish_reason
            joined = [entry for delta in mine for entry in delta.logprobs or ()]
            assert joined == list(choice.logprobs or ())


def _sampling(answer: Answer, value: str, row: Row) -> None:
    sampling = answer.done.sampling
    assert (sampling.temperature == 0) == (value != "seeded") and (sampling.top_k == 60) == (value == "seeded")
    assert (sampling.repetition_penalty == 1.3) == (value == "penalties")


def _choices(answer: Answer, value: str, row: Row) -> None:
    done = answer.done
    assert [choice.index for choice in done.choices] == list(range(2 if value == "2" else 1))
    assert all((choice.beam_score is not None) == (value == "beam") for choice in done.choices)
    assert done.usage.output_tokens == sum(len(choice.token_ids) for choice in done.choices)
    if value == "2" and answer.ask.row["sampling"] != "seeded":
        assert done.choices[0].token_ids == done.choices[1].token_ids
    assert all(0 < len(choice.token_ids) <= (answer.ask.params.max_tokens or 0) for choice in done.choices)


def _logprobs(answer: Answer, value: str, row: Row) -> None:
    for choice in answer.done.choices:
        wanted = answer.ask.params.wants_logprobs
        assert (choice.logprobs is not None) == wanted
        for token_id, entry in zip(choice.token_ids if wanted else (), choice.logprobs or (), strict=True):
            assert entry.token_id == token_id
            most = 2 if value in ("raw", "processed", "logits") else 0
            assert len(entry.top) == most or value == "processed"  # what cannot be drawn is not listed
            assert len(entry.candidates) == (2 if value == "ids" else 0)
            assert value == "logits" or entry.logprob <= 1e-4


def _prompt_logprobs(answer: Answer, value: str, row: Row) -> None:
    found = answer.done.prompt_logprobs
    assert (found is not None) == (value == "1")
    if found is not None:
        assert found[0] is None and len(found) == len(answer.done.prompt_token_ids)
        for entry, token_id in zip(found[1:], answer.done.prompt_token_ids[1:], strict=True):
            assert entry is not None and entry.token_id == token_id and len(entry.top) == 1


def _kept_set(answer: Answer, value: str, row: Row) -> None:
    forced = len(answer.ask.params.forced_token_ids or ())
    for choice in answer.done.choices:
        for place, entry in enumerate(choice.logprobs or ()):
            assert (entry.kept_logmass is not None) == (value == "returned" and place >= forced) or place < forced
            if entry.kept_ids is not None and place >= forced:
                assert entry.token_id in entry.kept_ids


def _grammar(answer: Answer, value: str, row: Row) -> None:
    if value == "none" or row["tokenizer"] != "loaded":
        return
    for choice in answer.done.choices:
        text = choice.text
        if row["reasoning"] == "qwen3":
            if "</think>" not in text:
                continue  # it never came to an answer
            text = text.partition("</think>")[2]
        # What was cut off, by length or by another end, is the beginning of one.
        whole = choice.finish_reason == "stop" and choice.stop_reason is None
        assert fits(value, text, whole=whole), f"{text!r} does not fit"


def fits(grammar: str, text: str, *, whole: bool) -> bool:
    if grammar == "regex":
        return (
            re.fullmatch(r'\{"[a-f]{2,4}-[0-9]{2}' if whole else r'\{?|\{"[a-f]{0,4}|\{"[a-f]{2,4}-[0-9]{0,2}', text)
            is not None
        )
    return any(text == one if whole else one.startswith(text) for one in FINITE[grammar])


def _thinking(answer: Answer, value: str, row: Row) -> None:
    if value == "budget" and row["tokenizer"] == "loaded":
        for choice in answer.done.choices:
            if choice.finish_reason == "length" and answer.ask.row["prompt"] == "chat":
                assert "</think>" in choice.text or choice.content


def _processors(answer: Answer, value: str, row: Row) -> None:
    forced = len(answer.ask.params.forced_token_ids or ())
    for choice in answer.done.choices:
        if value != "none":
            assert all(token < MERGED for token in choice.token_ids[forced:])


def _bans(answer: Answer, value: str, row: Row) -> None:
    forced = len(answer.ask.params.forced_token_ids or ())
    for choice in answer.done.choices:
        ids = choice.token_ids[forced:]
        if value in ("bias", "allowed"):
            assert all(token < MERGED for token in ids)
        elif value == "words" and not forced:
            assert "Z" not in choice.text


def _ends(answer: Answer, value: str, row: Row) -> None:
    forced = len(answer.ask.params.forced_token_ids or ())
    for choice in answer.done.choices:
        ids, stops = choice.token_ids, set(STOP_IDS)
        if value in ("ids", "min"):
            early = ids[max(forced - 1, 0) : -1] if value == "ids" else ids[4:-1]
            assert value == "min" or not set(early) & stops
            if choice.stop_reason is not None:
                assert choice.stop_reason == ids[-1] and ids[-1] in stops
                assert value == "ids" or len(ids) >= 5
        elif value == "string" and isinstance(choice.stop_reason, str):
            assert not any(stop in choice.text for stop in ("e", "a", "o"))
        elif value == "length" and choice.finish_reason == "length":
            assert len(ids) == answer.ask.params.max_tokens


def _repetition(answer: Answer, value: str, row: Row) -> None:
    for choice in answer.done.choices:
        assert value == "detected" or choice.finish_reason != "repetition"
        if choice.finish_reason == "repetition":
            ids = choice.token_ids
            assert ids[-1] == ids[-2] or ids[-4:-2] == ids[-2:]


def _forced(answer: Answer, value: str, row: Row) -> None:
    for choice in answer.done.choices:
        if value == "ids":
            assert choice.token_ids[: len(FORCED)] == FORCED


def _artifact(answer: Answer, value: str, row: Row) -> None:
    receipt = answer.done.artifact
    if value == "none":
        assert receipt is None and not answer.objects
        return
    assert receipt is not None and receipt.state == "ready", receipt
    assert len(answer.objects) == (2 if value == "v2 delta" else 1)
    assert hashlib.sha256(answer.objects[-1]).hexdigest() == receipt.sha256
    prompt = list(answer.done.prompt_token_ids)
    with open_artifact(answer.objects[-1]) as reader:
        reader.verify(sha256=receipt.sha256, actual_bytes=receipt.actual_bytes)
        names = {summary.name for summary in reader.fields()}
        assert names == {"token_ids", *(answer.ask.artifact or {})["contents"]} or value.startswith("v1")
        for choice in answer.done.choices:
            sequence = [*prompt, *choice.token_ids]
            if value != "v2 delta":
                assert reader.tokens(choice.index).tolist() == sequence
            for name in names & {"moe_routes", "hidden_states", FIELD}:
                rows = reader.field(name, choice.index)
                behind = int(name == FIELD)  # its rows belong to the token that is predicted
                bounds = (_first(answer) + behind, len(sequence) - 1 + behind)
                assert rows.complete and (rows.row_start, rows.row_end) == bounds, (
                    rows.row_start,
                    rows.row_end,
                    bounds,
                )
            if "selected_logprobs" in names and choice.logprobs and answer.ask.row["logprobs"] in ("none", "raw"):
                told = [np.float32(entry.logprob) for entry in choice.logprobs]
                assert reader.logprobs(choice.index).logprobs.tolist() == told


def _first(answer: Answer) -> int:
    return answer.ask.params.routed_experts_prompt_start


def _rows(answer: Answer, value: str, row: Row) -> None:
    for choice in answer.done.choices:
        rows = choice.routed_experts
        assert (rows is not None) == (value != "none")
        if rows is not None:
            fed = len(answer.done.prompt_token_ids) + len(choice.token_ids) - 1
            assert rows.error is None, rows.error
            assert (rows.start, rows.start + rows.count) == (_first(answer), fed), (rows.start, rows.count, fed)
            assert bool(rows.digest) == (
                value == "keys"
            )  # in a tight pool the store may have lost what keys would name
            assert value == "keys" or not rows.keys


def _admission(answer: Answer, value: str, row: Row) -> None:
    assert all(choice.finish_reason in ("stop", "length", "repetition") for choice in answer.done.choices)


CHECKS: dict[str, Any] = {
    "prompt": _prompt,
    "call": _call,
    "sampling": _sampling,
    "choices": _choices,
    "logprobs": _logprobs,
    "prompt logprobs": _prompt_logprobs,
    "kept set": _kept_set,
    "grammar": _grammar,
    "thinking": _thinking,
    "processors": _processors,
    "bans": _bans,
    "ends": _ends,
    "repetition": _repetition,
    "forced": _forced,
    "artifact": _artifact,
    "rows": _rows,
    "admission": _admission,
}
