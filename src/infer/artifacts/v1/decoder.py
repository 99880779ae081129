"""Reads `generation_artifact_v1` strictly: every limit before every allocation, every deviation an `ArtifactCorruptError`.

Pure; runs on any thread. The arrays it returns are read-only.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from infer.artifacts.generation import ArtifactChoice, GenerationArtifact, RoutedExperts, SelectedLogprobs
from infer.artifacts.v1 import manifest as wire
from infer.artifacts.v1.encoder import DTYPES, PRELUDE, ROUTE_DTYPE
from infer.artifacts.v1.limits import (
    CODEC_NONE,
    CODEC_ZSTD,
    MAGIC,
    MAJOR,
    MAX_ELEMENTS,
    MAX_MANIFEST_BYTES,
    MAX_OBJECT_BYTES,
    MAX_PAYLOAD_BYTES,
    MINOR,
    PRELUDE_BYTES,
    align64,
    id_width,
)
from infer.artifacts.v1.semantics import check_logprobs, check_routes, check_tokens
from infer.errors import ArtifactCorruptError, ArtifactError

_MAX_WINDOW = 1 << 27


@dataclass(frozen=True, slots=True)
class Prelude:
    """The first 26 bytes."""

    codec: int
    manifest_bytes: int
    payload_bytes: int

    @property
    def payload_start(self) -> int:
        """Counted from the start of the body."""
        return align64(self.manifest_bytes)

    @property
    def decoded_bytes(self) -> int:
        return self.payload_start + self.payload_bytes


def read_prelude(head: bytes | memoryview, total: int) -> Prelude:
    """`head` is at least the first 26 bytes of an object of `total` bytes."""
    if not PRELUDE_BYTES <= total <= MAX_OBJECT_BYTES:
        raise ArtifactCorruptError(f"{total} bytes; an artifact has {PRELUDE_BYTES} to {MAX_OBJECT_BYTES}")
    if len(head) < PRELUDE_BYTES:
        raise ArtifactCorruptError(f"{len(head)} bytes could be read of {total}")
    magic, major, minor, codec, manifest_bytes, payload_bytes = PRELUDE.unpack_from(head)
    if magic != MAGIC:
        raise ArtifactCorruptError("these bytes are not a generation artifact (wrong magic)")
    if (major, minor) != (MAJOR, MINOR):
        raise ArtifactCorruptError(f"version {major}.{minor}; this reader knows {MAJOR}.{MINOR}")
    if codec not in (CODEC_NONE, CODEC_ZSTD):
        raise ArtifactCorruptError(f"codec {codec} is unknown; 0 is none and 1 is zstd")
    if manifest_bytes > MAX_MANIFEST_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise ArtifactCorruptError(
            f"manifest of {manifest_bytes} and payload of {payload_bytes} bytes; at most {MAX_MANIFEST_BYTES} and "
            f"{MAX_PAYLOAD_BYTES} are allowed"
        )
    prelude = Prelude(codec, manifest_bytes, payload_bytes)
    if codec == CODEC_NONE and total - PRELUDE_BYTES != prelude.decoded_bytes:
        raise ArtifactCorruptError(f"the body has {total - PRELUDE_BYTES} bytes instead of {prelude.decoded_bytes}")
    return prelude


def check_frame(encoded: bytes | memoryview, prelude: Prelude) -> None:
    """The zstd header promises exactly the body, before anything is decompressed: an output limit given to the library
    is ignored when the header carries a size."""
    try:
        frame = zstandard.get_frame_parameters(encoded)
    except zstandard.ZstdError:
        raise ArtifactCorruptError("the body does not begin with a zstd frame") from None
    if frame.dict_id != 0 or frame.content_size != prelude.decoded_bytes:
        raise ArtifactCorruptError(
            f"the zstd frame declares dictionary {frame.dict_id} and {frame.content_size} bytes instead of 0 and "
            f"{prelude.decoded_bytes}"
        )


def read_body(encoded: memoryview, prelude: Prelude) -> memoryview:
    """Manifest, padding and payload. `encoded` is everything behind the prelude."""
    if prelude.codec == CODEC_NONE:
        return encoded
    check_frame(encoded, prelude)
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
    try:
        body = decompressor.decompress(encoded, max_output_size=prelude.decoded_bytes, allow_extra_data=False)
    except (zstandard.ZstdError, ValueError, MemoryError) as error:
        raise ArtifactCorruptError(f"the zstd frame is damaged: {str(error)[:200]}") from None
    if len(body) != prelude.decoded_bytes:
        raise ArtifactCorruptError(f"the zstd frame holds {len(body)} bytes instead of {prelude.decoded_bytes}")
    return memoryview(body)


def read_manifest(head: memoryview, prelude: Prelude) -> wire.Manifest:
    """`head` is the body up to the payload. Checks padding, canonical form, schema and the tensors' places."""
    if any(head[prelude.manifest_bytes : prelude.payload_start]):
        raise ArtifactCorruptError("the padding behind the manifest is not zero")
    manifest = wire.unpack(bytes(head[: prelude.manifest_bytes]))
    end = 0
    for choice in manifest.choices:
        end = _check_tensor(choice.sequence_token_ids, end, prelude.payload_bytes, ("i64",))
        for component in choice.components:
            if isinstance(component, wire.Routes):
                end = _check_tensor(component.expert_ids, end, prelude.payload_bytes, tuple(ROUTE_DTYPE.values()))
            else:
                end = _check_tensor(component.logprobs, end, prelude.payload_bytes, ("fp32",))
    if end != prelude.payload_bytes:
        raise ArtifactCorruptError(f"the tensors end at {end} of {prelude.payload_bytes} payload bytes")
    return manifest


def _check_tensor(tensor: wire.Tensor, end: int, payload_bytes: int, allowed: tuple[str, ...]) -> int:
    if tensor.dtype not in allowed:
        raise ArtifactCorruptError(f"a tensor has dtype {tensor.dtype[:20]!r}; it must be {' or '.join(allowed)}")
    if len(tensor.shape) > 3:
        raise ArtifactCorruptError(f"a tensor has rank {len(tensor.shape)}; 3 is the most")
    elements = 1
    for extent in tensor.shape:
        elements *= extent
        if max(elements, extent) > MAX_ELEMENTS:  # a zero elsewhere hides nothing
            raise ArtifactCorruptError(f"a tensor has more than {MAX_ELEMENTS} elements")
    if tensor.byte_count != elements * DTYPES[tensor.dtype].itemsize:
        raise ArtifactCorruptError(f"a tensor of shape {tensor.shape[:4]} has {tensor.byte_count} bytes")
    if tensor.offset != end or end + tensor.byte_count > payload_bytes:
        raise ArtifactCorruptError(f"a tensor lies at {tensor.offset} instead of {end}, or leaves the payload")
    return end + tensor.byte_count


def tensor_array(payload: memoryview, tensor: wire.Tensor, base: int = 0) -> NDArray[Any]:
    """A read-only array of one tensor; `base` is the payload offset at which `payload` begins."""
    dtype, count = DTYPES[tensor.dtype], prod(tensor.shape)
    array = np.frombuffer(payload, dtype, count, tensor.offset - base) if count else np.empty(0, dtype)
    if not array.flags.aligned:  # tensors are packed without alignment
        array = array.copy()
    array = array.reshape(tensor.shape)
    array.flags.writeable = False
    return array


def decode_v1(data: bytes | bytearray | memoryview) -> GenerationArtifact:
    """Raises `ArtifactCorruptError` and nothing else, whatever the bytes are."""
    view = memoryview(data).cast("B").toreadonly()
    prelude = read_prelude(view[:PRELUDE_BYTES], len(view))
    body = read_body(view[PRELUDE_BYTES:], prelude)
    manifest = read_manifest(body[: prelude.payload_start], prelude)
    payload = body[prelude.payload_start :]
    return GenerationArtifact(choices=tuple(_choice(payload, choice) for choice in manifest.choices))


def _choice(payload: memoryview, choice: wire.Choice) -> ArtifactChoice:
    tokens = tensor_array(payload, choice.sequence_token_ids)
    routes: RoutedExperts | None = None
    logprobs: SelectedLogprobs | None = None
    try:
        check_tokens(tokens, choice.prompt_token_count)
        for component in choice.components:
            if isinstance(component, wire.Routes):
                routes = _routes(tensor_array(payload, component.expert_ids), component, len(tokens))
            else:
                values = tensor_array(payload, component.logprobs)
                check_logprobs(values, component.token_start, choice.prompt_token_count, len(tokens))
                logprobs = SelectedLogprobs(component.token_start, values)
    except ArtifactCorruptError:
        raise
    except ArtifactError as error:
        raise ArtifactCorruptError(str(error)) from None
    return ArtifactChoice(choice.choice_index, choice.prompt_token_count, tokens, routes, logprobs)


def _routes(ids: NDArray[Any], component: wire.Routes, num_tokens: int) -> RoutedExperts:
    check_routes(ids, component.token_start, component.router_ids, component.expert_counts, num_tokens)
    narrowest = ROUTE_DTYPE[id_width(int(ids.max()) if ids.size else 0)]
    if component.expert_ids.dtype != narrowest:
        raise ArtifactCorruptError(f"expert_ids has dtype {component.expert_ids.dtype}; its values need {narrowest}")
    return RoutedExperts(component.token_start, ids, component.router_ids, component.expert_counts)
