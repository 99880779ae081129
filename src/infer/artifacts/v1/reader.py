"""Reads `generation_artifact_v1` lazily: the manifest first, tensors when wanted, slices without the rest.

Synchronous, for trainers and tools; owns the bytes that it has fetched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from math import prod
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from infer.artifacts.byte_source import ByteSource
from infer.artifacts.generation import GenerationArtifact, RoutedExperts, SelectedLogprobs
from infer.artifacts.reading import (
    ArtifactReader,
    ChoiceSummary,
    FieldSummary,
    Verified,
    chosen_layers,
    row_range,
    sound,
)
from infer.artifacts.record import FieldRows
from infer.artifacts.v1 import manifest as wire
from infer.artifacts.v1.decoder import (
    check_frame,
    decode_v1,
    read_body,
    read_manifest,
    read_prelude,
    tensor_array,
)
from infer.artifacts.v1.limits import CODEC_NONE, FORMAT, PRELUDE_BYTES
from infer.artifacts.v1.semantics import check_logprobs, check_routes, check_tokens
from infer.errors import ArtifactCorruptError, ArtifactFieldMissingError

_HEAD_BYTES = 1 << 16


class V1Reader(ArtifactReader):
    """Of an object in the closed format."""

    format = FORMAT

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._prelude = read_prelude(source.read(0, min(source.size, PRELUDE_BYTES)), source.size)
        self._manifest = read_manifest(self._read_head(), self._prelude)
        self._body: memoryview | None = None
        self._by_index = {choice.choice_index: choice for choice in self._manifest.choices}
        self.choices = tuple(_summary(choice) for choice in self._manifest.choices)
        self.actual_bytes = source.size
        self.codec = "none" if self._prelude.codec == CODEC_NONE else "zstd"

    def close(self) -> None:
        super().close()
        self._body = None

    def fields(self) -> tuple[FieldSummary, ...]:
        found = []
        for choice in self._manifest.choices:
            index, tensor = choice.choice_index, choice.sequence_token_ids
            found.append(_field("token_ids", "token", index, 0, tensor))
            for part in choice.components:
                if isinstance(part, wire.Routes):
                    found.append(_field("moe_routes", "token", index, part.token_start, part.expert_ids))
                else:
                    found.append(_field("selected_logprobs", "output_token", index, part.token_start, part.logprobs))
        return tuple(found)

    def field(
        self,
        name: str,
        choice: int | None = None,
        *,
        tokens: slice | None = None,
        layers: int | Iterable[int] | None = None,
    ) -> FieldRows:
        if name == "moe_routes":
            routes = self.routes(choice, layers=layers, tokens=tokens)
            attributes = {"layer_ids": tuple(routes.router_ids), "expert_counts": tuple(routes.expert_counts)}
            ids = np.asarray(routes.expert_ids)
            return FieldRows(values=ids, row_start=routes.token_start, attributes=attributes, executed=True)
        if layers is not None:
            raise ArtifactFieldMissingError(f"{name} has no layers")
        if name == "token_ids":
            start, values = 0, self.tokens(choice)
        elif name == "selected_logprobs":
            found = self.logprobs(choice)
            start, values = found.token_start, np.asarray(found.logprobs)
        else:
            raise ArtifactFieldMissingError(f"an artifact of format {FORMAT} holds no {name[:64]}")
        first, last = row_range(tokens, start, len(values))
        return FieldRows(values=values[first:last], row_start=start + first, executed=False)

    def tokens(self, choice: int | None = None) -> NDArray[np.int64]:
        found = self._choice(choice)
        array = self._tensor(found.sequence_token_ids)
        sound(lambda: check_tokens(array, found.prompt_token_count))
        return array

    def routes(
        self, choice: int | None = None, *, layers: int | Iterable[int] | None = None, tokens: slice | None = None
    ) -> RoutedExperts:
        """From an uncompressed object only the rows asked for are fetched."""
        found = self._choice(choice)
        part = self._component(found, wire.Routes)
        if len(part.expert_ids.shape) != 3:
            raise ArtifactCorruptError("expert_ids is not [rows, routers, experts per token]")
        rows, routers, _ = part.expert_ids.shape
        first, last = row_range(tokens, part.token_start, rows)
        ids = self._tensor(part.expert_ids, first, last)
        # A slice is a sound artifact of fewer tokens, so the one check serves both.
        end = part.token_start + last + 1
        if last == rows:
            end = found.sequence_token_ids.shape[0] if found.sequence_token_ids.shape else 0
        start = part.token_start + first
        sound(lambda: check_routes(ids, start, part.router_ids, part.expert_counts, end))
        wanted = chosen_layers(layers)
        chosen = list(range(routers)) if wanted is None else [_router(part, layer) for layer in wanted]
        if wanted is not None:
            ids = np.ascontiguousarray(ids[:, chosen])
        return RoutedExperts(
            start, ids, tuple(part.router_ids[n] for n in chosen), tuple(part.expert_counts[n] for n in chosen)
        )

    def logprobs(self, choice: int | None = None) -> SelectedLogprobs:
        found = self._choice(choice)
        part = self._component(found, wire.Logprobs)
        values = self._tensor(part.logprobs)
        num_tokens = prod(found.sequence_token_ids.shape)
        sound(lambda: check_logprobs(values, part.token_start, found.prompt_token_count, num_tokens))
        return SelectedLogprobs(part.token_start, values)

    def artifact(self) -> GenerationArtifact:
        return decode_v1(self._source.read(0, self._source.size))

    def verify(self, *, sha256: str | None = None, actual_bytes: int | None = None) -> Verified:
        data = self._source.read(0, self._source.size)
        digest = hashlib.sha256(data).hexdigest()
        if actual_bytes is not None and len(data) != actual_bytes:
            raise ArtifactCorruptError(f"the object has {len(data)} bytes; the receipt says {actual_bytes}")
        if sha256 is not None and digest != sha256.lower():
            raise ArtifactCorruptError(f"the object's SHA-256 is {digest}; the receipt says {sha256}")
        decode_v1(data)
        body = read_body(memoryview(data)[PRELUDE_BYTES:], self._prelude)
        return Verified(len(data), digest, hashlib.sha256(body).hexdigest())

    def _read_head(self) -> memoryview:
        """The body up to the payload, from as few bytes as that takes."""
        needed = self._prelude.payload_start
        if self._prelude.codec == CODEC_NONE:
            return memoryview(self._source.read(PRELUDE_BYTES, PRELUDE_BYTES + needed))
        length = _HEAD_BYTES
        while True:
            encoded = self._source.read(PRELUDE_BYTES, min(self._source.size, PRELUDE_BYTES + length))
            check_frame(encoded, self._prelude)
            try:  # a reader hands out no more than it is asked for, whatever the frame holds
                head = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(encoded).read(needed)
            except (zstandard.ZstdError, ValueError) as error:
                raise ArtifactCorruptError(f"the zstd frame is damaged: {str(error)[:200]}") from None
            if len(head) == needed:
                return memoryview(head)
            if PRELUDE_BYTES + length >= self._source.size:
                raise ArtifactCorruptError(f"the zstd frame ends within the manifest ({len(head)} of {needed} bytes)")
            length *= 8

    def _tensor(self, tensor: wire.Tensor, first: int = 0, last: int | None = None) -> NDArray[Any]:
        """Rows `first` to `last` of a tensor as an array of its own, or all of it."""
        whole = last is None or (first == 0 and last == tensor.shape[0])
        if not whole and last is not None:
            row = tensor.byte_count // tensor.shape[0]
            shape = (last - first, *tensor.shape[1:])
            tensor = wire.Tensor((last - first) * row, tensor.dtype, tensor.offset + first * row, shape)
        start = PRELUDE_BYTES + self._prelude.payload_start + tensor.offset
        if self._prelude.codec == CODEC_NONE:
            data = self._source.read(start, start + tensor.byte_count)
            return tensor_array(memoryview(data), tensor, tensor.offset)
        if self._body is None:
            self._body = read_body(memoryview(self._source.read(PRELUDE_BYTES, self._source.size)), self._prelude)
        array = tensor_array(self._body[self._prelude.payload_start :], tensor)
        if not whole:  # the rest may go
            array = array.copy()
            array.flags.writeable = False
        return array

    def _choice(self, index: int | None) -> wire.Choice:
        return self._by_index[self._chosen(index)]

    def _component(self, choice: wire.Choice, kind: type[Any]) -> Any:
        for component in choice.components:
            if isinstance(component, kind):
                return component
        name = "moe_routes" if kind is wire.Routes else "selected_logprobs"
        raise ArtifactFieldMissingError(f"choice {choice.choice_index} of this artifact holds no {name}")


def _summary(choice: wire.Choice) -> ChoiceSummary:
    routes = next((part for part in choice.components if isinstance(part, wire.Routes)), None)
    names = ["moe_routes" if isinstance(part, wire.Routes) else "selected_logprobs" for part in choice.components]
    return ChoiceSummary(
        choice_index=choice.choice_index,
        prompt_token_count=choice.prompt_token_count,
        num_tokens=prod(choice.sequence_token_ids.shape),
        contents=tuple(sorted(names)),
        route_start=routes.token_start if routes else None,
        routes_shape=routes.expert_ids.shape if routes else None,
        routes_dtype=routes.expert_ids.dtype if routes else None,
        router_ids=routes.router_ids if routes else (),
        expert_counts=routes.expert_counts if routes else (),
    )


def _field(name: str, scope: str, choice: int, start: int, tensor: wire.Tensor) -> FieldSummary:
    rows = tensor.shape[0] if tensor.shape else 0
    size = tensor.byte_count
    return FieldSummary(name, (choice,), scope, start, rows, tensor.dtype, tensor.shape, size, size)


def _router(part: wire.Routes, layer: int) -> int:
    try:
        return part.router_ids.index(layer)
    except ValueError:
        known = ", ".join(map(str, part.router_ids[:64]))
        raise ArtifactFieldMissingError(f"layer {layer} has no router here; those with one are {known}") from None
