"""Writes `generation_artifact_v1`: values are checked, narrowed and streamed through zstd and SHA-256 in small pieces.

Pure; runs on any thread. One encoded copy exists at most; large arrays are converted piece by piece.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import zstandard
from numpy.typing import NDArray

from infer.artifacts.generation import ArtifactChoice, GenerationArtifact, RoutedExperts, SelectedLogprobs
from infer.artifacts.v1 import manifest as wire
from infer.artifacts.v1.limits import (
    CODEC_NONE,
    CODEC_ZSTD,
    MAGIC,
    MAJOR,
    MAX_MANIFEST_BYTES,
    MAX_PAYLOAD_BYTES,
    MINOR,
    PRELUDE_BYTES,
    align64,
    id_width,
)
from infer.artifacts.v1.semantics import check_logprobs, check_routes, check_tokens, integer, malformed, too_large

Codec = Literal["zstd", "none"]
PRELUDE = struct.Struct("<8sHHHIQ")
DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(code)
    for name, code in (("u8", "u1"), ("u16", "<u2"), ("i32", "<i4"), ("i64", "<i8"), ("fp16", "<f2"), ("fp32", "<f4"))
}
ROUTE_DTYPE = {1: "u8", 2: "u16", 4: "i32", 8: "i64"}
_PIECE = 1 << 18


@dataclass(frozen=True, slots=True)
class Encoded:
    """A finished object. `body_sha256` does not depend on the codec or the zstd version."""

    data: bytes
    sha256: str
    body_sha256: str
    completion_counts: tuple[int, ...]
    """Completion tokens of each choice."""


def encode_v1(artifact: GenerationArtifact, codec: Codec, max_payload: int = MAX_PAYLOAD_BYTES) -> Encoded:
    """Raises `ArtifactError`: what is wrong with the values (`artifact_capture_failed`) or their size
    (`artifact_too_large`)."""
    if codec not in ("zstd", "none"):
        raise malformed(f"codec={codec!r}; it must be 'zstd' or 'none'")
    layout = _Layout(min(max_payload, MAX_PAYLOAD_BYTES))
    choices = [layout.add_choice(choice) for choice in artifact.choices]
    if not choices:
        raise malformed("an artifact needs at least one choice")
    for before, after in itertools.pairwise(choices):
        if after.choice_index <= before.choice_index:
            raise malformed(f"choice_index {after.choice_index} follows {before.choice_index}; it must increase")
    manifest = wire.pack(wire.Manifest(choices=tuple(choices)))
    if len(manifest) > MAX_MANIFEST_BYTES:
        raise too_large(f"the manifest takes {len(manifest)} bytes; at most {MAX_MANIFEST_BYTES} are allowed")
    number = CODEC_ZSTD if codec == "zstd" else CODEC_NONE
    prelude = PRELUDE.pack(MAGIC, MAJOR, MINOR, number, len(manifest), layout.size)
    decoded = align64(len(manifest)) + layout.size
    padded = manifest.ljust(align64(len(manifest)), b"\0")
    counts = tuple(choice.sequence_token_ids.shape[0] - choice.prompt_token_count for choice in choices)
    return _write(prelude, [memoryview(padded)], layout.tensors, codec, decoded, counts)


class _Layout:
    """Places tensors one behind the other and keeps what is left of the payload."""

    def __init__(self, max_payload: int) -> None:
        self.tensors: list[tuple[NDArray[Any], np.dtype[Any]]] = []
        self.size = 0
        self._max = max_payload

    def add_choice(self, choice: ArtifactChoice) -> wire.Choice:
        index = integer(choice.choice_index, "choice_index")
        prompt = integer(choice.prompt_token_count, "prompt_token_count")
        tokens = integer_array(choice.sequence_token_ids, "sequence_token_ids", 1, (self._max - self.size) // 8)
        check_tokens(tokens, prompt)
        sequence = self._place(tokens, "i64")
        components: list[wire.Routes | wire.Logprobs] = []
        if choice.moe_routes is not None:
            components.append(self._routes(choice.moe_routes, len(tokens)))
        if choice.selected_logprobs is not None:
            components.append(self._logprobs(choice.selected_logprobs, prompt, len(tokens)))
        return wire.Choice(
            choice_index=index,
            components=tuple(components),
            prompt_token_count=prompt,
            sequence_token_ids=sequence,
        )

    def _routes(self, routes: RoutedExperts, num_tokens: int) -> wire.Routes:
        start = integer(routes.token_start, "moe_routes token_start")
        routers = tuple(integer(value, "router_ids") for value in routes.router_ids)
        counts = tuple(integer(value, "expert_counts", 1) for value in routes.expert_counts)
        ids = integer_array(routes.expert_ids, "expert_ids", 3, self._max - self.size)
        check_routes(ids, start, routers, counts, num_tokens)
        dtype = ROUTE_DTYPE[id_width(int(ids.max()) if ids.size else 0)]
        return wire.Routes(
            expert_counts=counts, expert_ids=self._place(ids, dtype), router_ids=routers, token_start=start
        )

    def _logprobs(self, logprobs: SelectedLogprobs, prompt: int, num_tokens: int) -> wire.Logprobs:
        start = integer(logprobs.token_start, "selected_logprobs token_start")
        values = float_array(logprobs.logprobs, (self._max - self.size) // 4)
        check_logprobs(values, start, prompt, num_tokens)
        return wire.Logprobs(logprobs=self._place(values, "fp32"), token_start=start)

    def _place(self, array: NDArray[Any], dtype: str) -> wire.Tensor:
        count = array.size * DTYPES[dtype].itemsize
        if count > self._max - self.size:
            raise too_large(f"the payload would exceed {self._max} bytes")
        tensor = wire.Tensor(byte_count=count, dtype=dtype, offset=self.size, shape=tuple(array.shape))
        self.tensors.append((array, DTYPES[dtype]))
        self.size += count
        return tensor


def _write(
    prelude: bytes,
    head: Sequence[memoryview],
    tensors: Sequence[tuple[NDArray[Any], np.dtype[Any]]],
    codec: Codec,
    decoded: int,
    counts: tuple[int, ...],
) -> Encoded:
    out, whole, body = io.BytesIO(), hashlib.sha256(), hashlib.sha256()
    if codec == "none":  # the size is known: reserve it, so that growing makes no second copy
        out.truncate(0)
        out.seek(PRELUDE_BYTES + decoded - 1)
        out.write(b"\0")
        out.seek(0)
        compressor = None
    else:
        made = zstandard.ZstdCompressor(level=1, write_content_size=True, write_checksum=False, write_dict_id=False)
        compressor = made.compressobj(size=decoded)

    def emit(data: bytes | memoryview) -> None:
        out.write(data)
        whole.update(data)

    emit(prelude)
    for piece in _pieces(head, tensors):
        body.update(piece)
        emit(piece if compressor is None else compressor.compress(piece))
    if compressor is not None:
        emit(compressor.flush())
    return Encoded(
        data=out.getvalue(), sha256=whole.hexdigest(), body_sha256=body.hexdigest(), completion_counts=counts
    )


def _pieces(head: Iterable[memoryview], tensors: Iterable[tuple[NDArray[Any], np.dtype[Any]]]) -> Iterator[memoryview]:
    for view in head:
        for start in range(0, len(view), _PIECE):
            yield view[start : start + _PIECE]
    for array, dtype in tensors:
        flat = array.reshape(-1) if array.flags.c_contiguous else array
        if flat.ndim != 1:  # a slice of something larger: whole rows at a time
            rows = max(1, _PIECE // max(1, dtype.itemsize * array[0].size)) if len(array) else 1
            for start in range(0, len(array), rows):
                part = np.ascontiguousarray(array[start : start + rows], dtype=dtype)
                yield part.reshape(-1).data.cast("B")
            continue
        step = _PIECE // dtype.itemsize
        for start in range(0, len(flat), step):
            yield np.ascontiguousarray(flat[start : start + step], dtype=dtype).data.cast("B")


def integer_array(value: Any, name: str, rank: int, allowance: int) -> NDArray[Any]:
    """A read-only integer array of at most `allowance` elements; that is checked before anything is copied."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "iu":
            raise malformed(f"{name} has dtype {value.dtype}; it must be an integer type")
        if value.size > allowance:
            raise too_large(f"{name} has {value.size} elements; {allowance} are left of the payload")
        view = value.view()
        view.flags.writeable = False
        return view
    shape = _shape(value, name, rank)
    count = 1
    for extent in shape:
        count *= extent
    if count > allowance:
        raise too_large(f"{name} has {count} elements; {allowance} are left of the payload")
    flat = np.empty(count, dtype=np.int64)
    filled = 0
    for row in _rows(value, shape, name):
        for number in row:
            flat[filled] = integer(number, name)
            filled += 1
    return flat.reshape(shape)


def _shape(value: Any, name: str, rank: int) -> tuple[int, ...]:
    shape: list[int] = []
    for level in range(rank):
        if isinstance(value, str | bytes) or not isinstance(value, Sequence | np.ndarray):
            raise malformed(f"{name} has rank {level} or irregular rows; it must have rank {rank}")
        shape.append(len(value))
        if len(value) == 0:
            return (*shape, *([0] * (rank - level - 1)))
        value = value[0]
    return tuple(shape)


def _rows(value: Any, shape: tuple[int, ...], name: str) -> Iterator[Sequence[Any] | NDArray[Any]]:
    """The innermost sequences, each of the length that the shape promises."""
    if not isinstance(value, Sequence | np.ndarray) or len(value) != shape[0]:
        raise malformed(f"{name} has rows of different lengths")
    if len(shape) == 1:
        yield value
        return
    for part in value:
        yield from _rows(part, shape[1:], name)


def float_array(value: Any, allowance: int) -> NDArray[Any]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence | np.ndarray):
        raise malformed("logprobs must be an array of numbers")
    if len(value) > allowance:
        raise too_large(f"logprobs has {len(value)} elements; {allowance} are left of the payload")
    if isinstance(value, np.ndarray):
        if value.dtype.kind != "f":
            raise malformed(f"logprobs has dtype {value.dtype}; it must be a floating type")
        view = value.view()
        view.flags.writeable = False
        return view
    if any(isinstance(item, bool) or not isinstance(item, int | float | np.floating) for item in value):
        raise malformed("logprobs holds something that is not a number")
    try:
        return np.array(value, dtype=np.float64)
    except OverflowError:
        raise malformed("a logprob is not a finite float32") from None
