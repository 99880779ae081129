"""Samples of format v2: the published records, drawn ones, and a reader written after docs/artifact_v2.md alone.

Used by the tests of artifacts; owns nothing.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import zstandard
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from artifact_samples import G1, A
from infer.artifacts.record import (
    CACHED,
    CAPTURED,
    MISSING,
    ChoiceRecord,
    FieldRows,
    GenerationRecord,
    Numerics,
    Provenance,
    WeightSpan,
)
from infer.artifacts.v2.conversion import record_of
from infer.artifacts.v2.writer import encode_v2

PROVENANCE = Provenance(
    model="tiny-moe",
    weights_digest="sha256:00ff",
    engine_version="0.1.0",
    logprobs_mode="raw",
    numerics=Numerics(mode="fast", weights_dtype="bf16", kv_dtype="bf16", router_dtype="f32", head_dtype="f32"),
    sampling={"max_tokens": 2, "temperature": 0.5, "stop": ("\n",), "logit_bias": {"7": -1.5}, "ignore_eos": False},
)
_ROUTES = np.array([[[0, 2], [1, 3]], [[1, 2], [0, 3]], [[2, 3], [1, 0]], [[3, 1], [2, 0]]], np.uint8)
_LAYERS = {"layer_ids": (3, 7), "expert_counts": (4, 4)}


def _two_choices() -> GenerationRecord:
    """Two answers to one prompt of three tokens, the second cut short; every kind of entry occurs."""
    choices = []
    for index, output, kept in ((0, [201, 202], [[201, 5], [202]]), (1, [203], [[203, 9, 7]])):
        rows, total = 3 + len(output) - 1, 3 + len(output)
        fields: dict[str, FieldRows | Sequence[FieldRows]] = {
            "moe_routes": FieldRows(
                values=_ROUTES[:rows],
                status=np.array([CACHED, CACHED, CAPTURED, CAPTURED][:rows], np.uint8),
                attributes=_LAYERS,
            ),
            "kept_set": FieldRows(
                values=np.concatenate(kept).astype(np.int32),
                offsets=np.cumsum([0, *map(len, kept)]),
                row_start=3,
            ),
            "kept_logmass": FieldRows(values=np.array([-0.5, -0.125][: len(output)], np.float32), row_start=3),
            "acme-probes.surprise": FieldRows(values=np.arange(total, dtype=np.int16), executed=False),
            "acme-probes.summary": FieldRows(values=np.array([[1.5], [2.5]]), axis="request"),
        }
        choices.append(
            ChoiceRecord(
                choice_index=index,
                prompt_token_ids=[101, 102, 103],
                output_token_ids=output,
                fields=fields,
                weight_spans=[WeightSpan(0, 3, "step-8"), WeightSpan(3, total, "step-9")],
                finish_reason="stop" if index else "length",
                stop_reason=203 if index else None,
                seed=40 + index,
            )
        )
    return GenerationRecord(choices=choices, provenance=PROVENANCE)


def child_of_g1() -> GenerationRecord:
    """The turn after G1: its four tokens and one more are the prompt."""
    parent = encode_v2(record_of(G1), codec="none").reference(token_count=4, fields=("moe_routes", "token_ids"))
    return GenerationRecord(
        choices=[
            ChoiceRecord(
                choice_index=0,
                prompt_token_ids=[101, 102, 201, 202, 103],
                output_token_ids=[301],
                fields={"moe_routes": FieldRows(values=_ROUTES[2:], row_start=3, attributes=_LAYERS)},
            )
        ],
        parent=parent,
    )


GOLDEN: dict[str, GenerationRecord] = {
    "A": record_of(A),
    "G1": record_of(G1),
    "N": _two_choices(),
    "D": child_of_g1(),
}


@st.composite
def records(draw: st.DrawFn) -> GenerationRecord:
    """Small generations of every shape: fields of every kind, ragged ones, shared and unshared prompts, missing rows."""
    prompt_len = draw(st.integers(1, 6))
    prompt = draw(hnp.arrays(np.int64, prompt_len, elements=st.integers(0, 2**40)))
    indices = sorted(draw(st.sets(st.integers(0, 300), min_size=1, max_size=3)))
    names = draw(st.sets(st.sampled_from(sorted(_DRAWN))))
    seed = draw(st.integers(0, 2**32))
    choices = []
    for index in indices:
        chance = np.random.default_rng(seed if draw(st.booleans()) else seed + index)
        length = draw(st.integers(0, 5))
        fields: dict[str, FieldRows | Sequence[FieldRows]] = {}
        for name in sorted(names):
            fields[name] = _pieces(draw, _DRAWN[name](chance, prompt_len, length))
        spans = []
        if draw(st.booleans()):
            cut = draw(st.integers(1, prompt_len + length))
            spans = [
                WeightSpan(0, cut, "a"),
                *([WeightSpan(cut, prompt_len + length, "b")] * (cut < prompt_len + length)),
            ]
        choices.append(
            ChoiceRecord(
                choice_index=index,
                prompt_token_ids=prompt,
                output_token_ids=chance.integers(0, 2**31, length),
                fields=fields,
                weight_spans=spans,
                finish_reason=draw(st.sampled_from([None, "stop", "abort"])),
                stop_reason=draw(st.sampled_from([None, 7, "END"])),
                seed=draw(st.sampled_from([None, 0, 2**63 - 1])),
            )
        )
    return GenerationRecord(choices=choices, provenance=draw(st.sampled_from([Provenance(), PROVENANCE])))


def _pieces(draw: st.DrawFn, rows: FieldRows) -> FieldRows | list[FieldRows]:
    """The same rows in several pieces, as capture may have them."""
    if rows.axis != "token" or rows.num_rows < 2 or not draw(st.booleans()):
        return rows
    at = draw(st.integers(1, rows.num_rows - 1))
    made = []
    for low, high in ((0, at), (at, rows.num_rows)):
        inner = slice(low, high) if rows.offsets is None else slice(int(rows.offsets[low]), int(rows.offsets[high]))
        made.append(
            FieldRows(
                values=rows.values[inner],
                row_start=rows.row_start + low,
                extra={name: array[inner] for name, array in rows.extra.items()},
                offsets=None if rows.offsets is None else rows.offsets[low : high + 1] - rows.offsets[low],
                status=None if rows.status is None else rows.status[low:high],
                attributes=rows.attributes,
                executed=rows.executed,
                bfloat16=rows.bfloat16,
            )
        )
    return made


def _routes(chance: Any, prompt: int, output: int) -> FieldRows:
    start = int(chance.integers(0, prompt))
    rows = prompt + output - 1 - start
    ids = chance.integers(0, 300, (rows, 3, 2))
    status = chance.integers(0, 4, rows).astype(np.uint8)
    ids[status == MISSING] = 0
    return FieldRows(
        values=ids,
        row_start=start,
        status=status,
        attributes={"layer_ids": (1, 4, 2), "expert_counts": (300, 301, 302)},
    )


def _hidden(chance: Any, prompt: int, output: int) -> FieldRows:
    bits = chance.integers(0, 2**16, (prompt + output - 1, 2, 3)).astype(np.uint16)
    return FieldRows(values=bits, bfloat16=True, attributes={"layer_ids": (0, 5)})


def _kept(chance: Any, prompt: int, output: int) -> FieldRows:
    counts = chance.integers(0, 4, output)
    ids = chance.integers(0, 2**31, int(counts.sum()))
    return FieldRows(values=ids, offsets=np.concatenate([[0], np.cumsum(counts)]), row_start=prompt)


def _top(chance: Any, prompt: int, output: int) -> FieldRows:
    values = -chance.random((output, 2)).astype(np.float32)
    return FieldRows(values=values, extra={"token_ids": chance.integers(0, 9, (output, 2))}, row_start=prompt)


def _prompt_logprobs(chance: Any, prompt: int, output: int) -> FieldRows:
    return FieldRows(values=-chance.random((prompt - 1, 1)).astype(np.float32), row_start=1)


def _entropy(chance: Any, prompt: int, output: int) -> FieldRows:
    return FieldRows(values=chance.random(output, np.float32), row_start=prompt)


def _mask(chance: Any, prompt: int, output: int) -> FieldRows:
    return FieldRows(values=np.arange(prompt + output) >= prompt)


def _indexer(chance: Any, prompt: int, output: int) -> FieldRows:
    ids = chance.integers(-1, 9, (prompt + output - 1, 1, 4)).astype(np.int32)
    return FieldRows(values=ids, attributes={"layer_ids": (9,)})


def _plugin(chance: Any, prompt: int, output: int) -> FieldRows:
    return FieldRows(
        values=chance.random((2, 2)), axis="step", row_start=1, attributes={"rate": 0.5, "names": ("x", "y")}
    )


def _plugin_ragged(chance: Any, prompt: int, output: int) -> FieldRows:
    counts = chance.integers(0, 3, prompt + output)
    values = chance.integers(0, 9, (int(counts.sum()), 2)).astype(np.uint16)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return FieldRows(values=values, offsets=offsets, executed=False)


_DRAWN: dict[str, Any] = {
    "moe_routes": _routes,
    "hidden_states": _hidden,
    "kept_set": _kept,
    "topk_logprobs": _top,
    "prompt_logprobs": _prompt_logprobs,
    "entropy": _entropy,
    "sampled_mask": _mask,
    "indexer_topk": _indexer,
    "acme.steps": _plugin,
    "acme-x.words": _plugin_ragged,
}

_ITEM = {"8": 1, "16": 2, "32": 4, "64": 8}


def independent_read_v2(data: bytes) -> dict[str, Any]:
    """Header and arrays of an object, after its description alone; every digest is checked."""
    magic, major, minor, length, total = struct.unpack_from("<8sHHIQ", data)
    assert (magic, major, minor, total) == (b"INFGEN2\0", 2, 0, len(data))
    head = data[64 : 64 + length]
    assert hashlib.sha256(head).digest() == data[24:56] and data[56:64] == bytes(8)
    header, end = msgpack(head, 0)
    assert end == len(head)
    end = 64 + length
    for field in header["fields"]:
        for array in field["arrays"].values():
            start = array["offset"]
            assert start == -(-end // 64) * 64 and not any(data[end:start])
            end = start + array["stored_bytes"]
            assert hashlib.sha256(data[start:end]).digest() == array["sha256"]
            array["data"] = _array(data, array)
    assert end == len(data)
    return header


def _array(data: bytes, array: dict[str, Any]) -> Any:
    kind = "u" if array["dtype"] == "bf16" else array["dtype"][0]
    dtype = np.dtype(f"<{kind}{_ITEM[array['dtype'].lstrip('uifb')]}")
    out = np.zeros(array["shape"], dtype)
    if not out.size:
        return out
    part = array.get("chunk_shape", array["shape"])
    chunks = array.get("chunks", [[array["stored_bytes"], array["sha256"]]])
    across = -(-array["shape"][1] // part[1]) if len(part) > 1 else 1
    at = array["offset"]
    for number, (size, digest) in enumerate(chunks):
        at = -(-at // 64) * 64
        raw = data[at : at + size]
        assert hashlib.sha256(raw).digest() == digest
        at += size
        if array["codec"] == "zstd":
            raw = zstandard.ZstdDecompressor().decompress(raw)
        row, column = number // across * part[0], number % across * (part[1] if len(part) > 1 else 1)
        box = (
            (slice(row, row + part[0]), slice(column, column + part[1])) if len(part) > 1 else slice(row, row + part[0])
        )
        out[box] = np.frombuffer(raw, dtype).reshape(out[box].shape)
    return out


def msgpack(data: bytes, at: int) -> tuple[Any, int]:
    """The subset that a header uses."""
    head = data[at]
    at += 1
    if head <= 0x7F:
        return head, at
    if head >= 0xE0:
        return head - 256, at
    if head in (0xC2, 0xC3):
        return head == 0xC3, at
    if head == 0xCB:
        return struct.unpack_from(">d", data, at)[0], at + 8
    if 0xCC <= head <= 0xCF or 0xD0 <= head <= 0xD3:
        width = 1 << (head - (0xCC if head <= 0xCF else 0xD0))
        return int.from_bytes(data[at : at + width], "big", signed=head >= 0xD0), at + width
    if 0xA0 <= head <= 0xBF or 0xD9 <= head <= 0xDB or 0xC4 <= head <= 0xC6:
        count = head - 0xA0
        if not 0xA0 <= head <= 0xBF:
            count, at = _length(data, at, 1 << (head - (0xD9 if head >= 0xD9 else 0xC4)))
        found = data[at : at + count]
        return found if head in (0xC4, 0xC5, 0xC6) else found.decode(), at + count
    if 0x90 <= head <= 0x9F or head in (0xDC, 0xDD):
        count, at = (head - 0x90, at) if head <= 0x9F else _length(data, at, 2 if head == 0xDC else 4)
        items = []
        for _ in range(count):
            item, at = msgpack(data, at)
            items.append(item)
        return items, at
    assert 0x80 <= head <= 0x8F or head in (0xDE, 0xDF), f"byte {head:#x} at {at - 1}"
    count, at = (head - 0x80, at) if head <= 0x8F else _length(data, at, 2 if head == 0xDE else 4)
    made = {}
    for _ in range(count):
        key, at = msgpack(data, at)
        made[key], at = msgpack(data, at)
    return made, at


def _length(data: bytes, at: int, width: int) -> tuple[int, int]:
    return int.from_bytes(data[at : at + width], "big"), at + width
