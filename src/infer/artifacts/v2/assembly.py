"""From what was captured to an object in the open format, over the same memory. Runs on a worker thread; loads numpy."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import numpy as np

from infer.artifacts.admission import GenerationBounds
from infer.artifacts.generation import GenerationArtifact
from infer.artifacts.record import ChoiceRecord, FieldRows, GenerationRecord, ParentReference, WeightSpan
from infer.artifacts.request import ArtifactRequest
from infer.artifacts.v2.admission import captured_fields, parent_fields
from infer.artifacts.v2.capture import ChoiceEnd, OpenCapture, OpenChoice
from infer.artifacts.v2.conversion import record_of
from infer.artifacts.v2.limits import DEFAULT_LIMITS
from infer.artifacts.v2.writer import EncodedV2, encode_v2
from infer.config.capture import MOE_ROUTES
from infer.errors import ArtifactError
from infer.types import CapturedRows

_DTYPES = {"uint8": "u1", "uint16": "<u2", "int32": "<i4", "float32": "<f4", "bfloat16": "<u2", "float16": "<f2"}


def encode_open(
    source: OpenCapture | GenerationArtifact, request: ArtifactRequest, bounds: GenerationBounds, max_decoded: int
) -> EncodedV2:
    """The object to deliver. Raises `ArtifactError`."""
    if isinstance(source, OpenCapture):
        record = assembled(source)
    else:
        record = record_of(source, provenance=bounds.provenance, parent=_parent(request, bounds))
    return encode_v2(record, limits=replace(DEFAULT_LIMITS, decoded_bytes=max_decoded))


def assembled(capture: OpenCapture) -> GenerationRecord:
    """A record over the captured memory. Raises `ArtifactError` when something is missing."""
    prompt: Any = np.frombuffer(capture.prompt, np.int64)
    shared: dict[str, FieldRows] = {}
    if "prompt_logprobs" in capture.request.contents:
        width = 1 + (capture.bounds.prompt_logprobs or 0)
        values, ids = (_table(part, width) for part in (capture.prompt_logprobs, capture.prompt_ids))
        shared["prompt_logprobs"] = FieldRows(values=values, row_start=1, extra={"token_ids": ids})
    choices = [_choice(capture, index, choice, prompt, shared) for index, choice in capture.choices()]
    return GenerationRecord(
        choices=choices, provenance=capture.bounds.provenance, parent=_parent(capture.request, capture.bounds)
    )


def _choice(
    capture: OpenCapture, index: int, choice: OpenChoice, prompt: Any, shared: dict[str, FieldRows]
) -> ChoiceRecord:
    contents, bounds, end = capture.request.contents, capture.bounds, choice.end
    if end is None:
        raise _failed(f"choice {index} did not end")
    fields = dict(shared)
    start, count = len(prompt), len(choice.tokens)
    if "selected_logprobs" in contents:
        fields["selected_logprobs"] = FieldRows(values=_array(choice.logprobs), row_start=start)
    if "topk_logprobs" in contents:
        values, ids = (_table(part, bounds.num_top) for part in (choice.top_logprobs, choice.top_ids))
        fields["topk_logprobs"] = FieldRows(values=values, row_start=start, extra={"token_ids": ids})
    if "kept_set" in contents:
        offsets = _array(choice.kept_ends)
        fields["kept_set"] = FieldRows(values=_array(choice.kept), offsets=offsets, row_start=start)
    if "kept_logmass" in contents:
        fields["kept_logmass"] = FieldRows(values=_array(choice.kept_logmass), row_start=start)
    if "sampled_mask" in contents:
        mask = np.ones(start + count, np.uint8)
        mask[: start + bounds.num_forced] = 0
        fields["sampled_mask"] = FieldRows(values=mask)
    for name in captured_fields(contents, bounds):
        fields[name] = captured_rows(name, end.rows[name], predicted=name in bounds.predicted)
    spans = _spans(capture, end, start, count) if "weight_spans" in contents else ()
    return ChoiceRecord(
        choice_index=index,
        prompt_token_ids=prompt,
        output_token_ids=_array(choice.tokens),
        fields=fields,
        weight_spans=spans,
        finish_reason=end.finish_reason,
        stop_reason=end.stop_reason,
        seed=end.seed,
    )


def captured_rows(name: str, rows: CapturedRows, *, predicted: bool = False) -> FieldRows:
    """Captured rows as arrays over the same bytes. `predicted`: each belongs to the position behind its token."""
    values: Any = np.frombuffer(rows.data, _DTYPES[rows.dtype]).reshape(rows.count, *rows.row_shape)
    attributes: dict[str, Any] = {"layer_ids": rows.layer_ids} if rows.layer_ids else {}
    if name == MOE_ROUTES:
        attributes["expert_counts"] = (rows.num_experts,) * len(rows.layer_ids)
    return FieldRows(
        values=values,
        row_start=rows.start + predicted,
        status=np.frombuffer(rows.status, np.uint8) if rows.status.strip(b"\0") else None,
        attributes=attributes,
        executed=not predicted,
        bfloat16=rows.dtype == "bfloat16",
    )


def _spans(capture: OpenCapture, end: ChoiceEnd, start: int, count: int) -> tuple[WeightSpan, ...]:
    """Of every token: prompt tokens as their rows say it, output tokens as they were sampled.

    Versions count up from 0, so that a first token sampled under 0 means that all before it was computed under 0.
    """
    if not end.weight_versions:
        raise _failed("no token was sampled: it is not known which weights computed the prompt")
    output = [(start + first, start + stop, version) for first, stop, version in end.weight_versions]
    if output[-1][1] != start + count:
        raise _failed(f"weight versions end at token {output[-1][1]} of {start + count}")
    prompt = [(0, start, 0)]
    if output[0][2]:
        prompt = _prompt_spans(capture, end, start)
    return tuple(WeightSpan(first, stop, str(version)) for first, stop, version in (*prompt, *output))


def _prompt_spans(capture: OpenCapture, end: ChoiceEnd, start: int) -> list[tuple[int, int, int]]:
    rows = next((end.rows[name] for name in captured_fields(capture.request.contents, capture.bounds)), None)
    parent = capture.request.parent
    known_to_parent = 0 if parent is None else parent.token_count
    if rows is None or rows.start > known_to_parent or rows.start >= start:
        raise _failed("it is not known which weights computed the prompt: no captured row tells it")
    spans, at = [], rows.start
    for number, version in rows.versions:
        if at < start:
            spans.append((at, min(at + number, start), version))
        at += number
    # What lies before the rows is the parent's and not written; it must be covered all the same.
    return [(0, rows.start, spans[0][2])] * bool(rows.start) + spans


def _parent(request: ArtifactRequest, bounds: GenerationBounds) -> ParentReference | None:
    parent = request.parent
    if parent is None:
        return None
    return ParentReference(
        choice_index=parent.choice_index,
        fields=parent_fields(request, bounds),
        header_sha256=bytes.fromhex(parent.header_sha256),
        sha256=bytes.fromhex(parent.sha256),
        token_count=parent.token_count,
    )


def _array(values: array[Any]) -> Any:
    return np.frombuffer(values, values.typecode) if values else np.zeros(0, values.typecode)


def _table(values: array[Any], width: int) -> Any:
    return _array(values).reshape(len(values) // width, width)


def _failed(message: str) -> ArtifactError:
    return ArtifactError(message, code="artifact_capture_failed")
