"""Bounds-checked GGUF v2/v3 headers: no count, length or offset is believed before it is compared with the file size.

Any thread, blocking, no tensor library. `GGUFFile` owns the descriptor and the mapping of the header until closed.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from infer.errors import ModelError, UnsupportedModelError, WeightError
from infer.weights.file_reading import read_exactly

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 20
MAX_STRINGS = 1 << 22
"""Over all arrays of one header; real vocabularies with their merges stay below one million."""
MAX_NAME_BYTES = 1 << 16
MAX_DIMENSIONS = 4

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class GGMLType(NamedTuple):
    """A storage type: `block` elements take `nbytes` bytes."""

    name: str
    block: int
    nbytes: int


GGML_TYPES = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    9: GGMLType("Q8_1", 32, 40),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    15: GGMLType("Q8_K", 256, 292),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    20: GGMLType("IQ4_NL", 32, 18),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136),
    24: GGMLType("I8", 1, 1),
    25: GGMLType("I16", 1, 2),
    26: GGMLType("I32", 1, 4),
    27: GGMLType("I64", 1, 8),
    28: GGMLType("F64", 1, 8),
    29: GGMLType("IQ1_M", 256, 56),
    30: GGMLType("BF16", 1, 2),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    39: GGMLType("MXFP4", 32, 17),
    40: GGMLType("NVFP4", 64, 36),
    41: GGMLType("Q1_0", 128, 18),
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies. `shape` is in row-major order (the reverse of the file's), `offset` from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset: int
    nbytes: int


class _Array(NamedTuple):
    """A metadata array that was located and bounds-checked, not decoded."""

    element: int
    length: int
    start: int


class _Cursor:
    """Reads forward through the header; every step is checked against the file size first."""

    __slots__ = ("data", "path", "pos", "size", "strings")

    def __init__(self, data: mmap.mmap, size: int, path: Path, pos: int = 0) -> None:
        self.data, self.size, self.path, self.pos = data, size, path, pos
        self.strings = 0

    def error(self, message: str, *, tensor: str | None = None) -> WeightError:
        return WeightError(f"{self.path}: {message}; the file is damaged, fetch it again", tensor=tensor)

    def take(self, length: int, what: str) -> int:
        """Position of the next `length` bytes, which exist."""
        start = self.pos
        if length > self.size - start:
            raise self.error(f"{what} takes {length} bytes at offset {start}, but the file ends at {self.size}")
        self.pos = start + length
        return start

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.data, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.data, self.take(8, what))[0])

    def string(self, what: str, limit: int | None = None) -> str:
        length = self.u64(f"the length of {what}")
        if limit is not None and length > limit:
            raise self.error(f"{what} is {length} bytes long, at most {limit} are allowed")
        start = self.take(length, what)
        return _utf8(self.data[start : start + length], what, self.path)

    def skip_strings(self, count: int, what: str) -> None:
        self.strings += count
        if count > (self.size - self.pos) // 8 or self.strings > MAX_STRINGS:
            raise self.error(
                f"{what} claims {count} strings; {self.size - self.pos} bytes follow, and a header has at most {MAX_STRINGS}"
            )
        data, pos, size, unpack = self.data, self.pos, self.size, _U64.unpack_from
        for index in range(count):
            if size - pos < 8:
                raise self.error(f"{what}[{index}] lies past the end of the file")
            length = unpack(data, pos)[0]
            pos += 8
            if length > size - pos:
                raise self.error(f"{what}[{index}] is {length} bytes long, but only {size - pos} bytes follow")
            pos += length
        self.pos = pos

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.string(f"the value of {key!r}")
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _SCALARS:
            raise self.error(f"metadata key {key!r} has the unknown type {kind}")
        layout = struct.Struct(_SCALARS[kind])
        value = layout.unpack_from(self.data, self.take(layout.size, f"the value of {key!r}"))[0]
        return self.boolean(value, key) if kind == _BOOL else value

    def boolean(self, value: int, key: str) -> bool:
        if value > 1:
            raise self.error(f"metadata key {key!r} is a bool with the value {value}")
        return bool(value)

    def array(self, key: str) -> _Array:
        element, count = self.u32(f"the element type of {key!r}"), self.u64(f"the length of {key!r}")
        start = self.pos
        if element == _STRING:
            self.skip_strings(count, repr(key))
        elif element == _ARRAY:
            raise self.error(f"metadata key {key!r} is an array of arrays, which no model file needs")
        elif element in _SCALARS:
            self.take(count * struct.calcsize(_SCALARS[element]), f"the array {key!r} of {count} elements")
        else:
            raise self.error(f"metadata key {key!r} is an array of the unknown type {element}")
        return _Array(element, count, start)


class GGUFMetadata(Mapping[str, Any]):
    """The file's key-value pairs as Python values; an array becomes a list when it is first asked for."""

    def __init__(self, values: dict[str, Any], data: mmap.mmap, path: Path) -> None:
        self._values, self._data, self._path = values, data, path

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, _Array):
            value = self._values[key] = self._decode(value, key)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def array_length(self, key: str) -> int | None:
        """Number of elements without decoding them; None when the key is absent or no array."""
        value = self._values.get(key)
        if isinstance(value, _Array):
            return value.length
        return len(value) if isinstance(value, list) else None

    def _decode(self, ref: _Array, key: str) -> list[Any]:
        if self._data.closed:
            raise ModelError(f"{self._path} was closed before the metadata array {key!r} was read")
        if ref.element == _STRING:
            return self._decode_strings(ref, key)
        layout = _SCALARS[ref.element]
        raw = self._data[ref.start : ref.start + ref.length * struct.calcsize(layout)]
        values = list(struct.unpack(f"<{ref.length}{layout[1]}", raw))
        if ref.element == _BOOL:
            if any(value > 1 for value in values):
                raise WeightError(f"{self._path}: metadata key {key!r} holds a bool other than 0 and 1")
            return [bool(value) for value in values]
        return values

    def _decode_strings(self, ref: _Array, key: str) -> list[str]:
        data, pos, unpack, values = self._data, ref.start, _U64.unpack_from, []
        for index in range(ref.length):  # lengths were checked when the file was opened
            end = pos + 8 + unpack(data, pos)[0]
            try:
                values.append(data[pos + 8 : end].decode())
            except UnicodeDecodeError:
                raise WeightError(f"{self._path}: {key}[{index}] is not UTF-8: {data[pos + 8 : end]!r:.80}") from None
            pos = end
        return values


class GGUFFile:
    """An opened GGUF: metadata and where the tensors lie. Raises `WeightError` on damage, naming what and the value."""

    def __init__(self, path: Path, fd: int, data: mmap.mmap, cursor: _Cursor) -> None:
        self.path = path
        self._fd = fd
        self._data = data
        self.version, num_tensors, num_keys = _read_preamble(cursor)
        values = _read_metadata(cursor, num_keys)
        self.metadata = GGUFMetadata(values, data, path)
        self.alignment = _alignment(cursor, values)
        _refuse_split(path, values)
        infos = [_read_tensor_info(cursor) for _ in range(num_tensors)]
        self.tensors = _place_tensors(cursor, infos, self.alignment)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Parse the header. Reads no tensor data; time and memory are bounded by the size of the header."""
        path = Path(path)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ModelError(f"cannot open {path}: {error.strerror}") from error
        data: mmap.mmap | None = None
        try:
            size = os.fstat(fd).st_size
            if size < 24:
                raise WeightError(f"{path} has {size} bytes; a GGUF header alone takes 24; fetch the file again")
            data = mmap.mmap(fd, size, access=mmap.ACCESS_READ)
            return cls(path, fd, data, _Cursor(data, size, path))
        except BaseException as error:
            if data is not None:
                data.close()
            os.close(fd)
            if isinstance(error, OSError):
                raise ModelError(f"cannot read {path}: {error}") from error
            raise

    def read_into(self, tensor: GGUFTensor, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `start` of the tensor. Plain reads: unlike a mapping, a file that shrinks meanwhile
        is an error, not a SIGBUS in the host application, and no page stays in our memory."""
        if self._fd < 0:
            raise ModelError(f"{self.path} was closed before tensor {tensor.name!r} was read")
        read_exactly(self._fd, buffer, tensor.offset + start, self.path, tensor.name)

    def close(self) -> None:
        if self._fd >= 0:
            self._data.close()
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _utf8(raw: bytes, what: str, path: Path) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise WeightError(f"{path}: {what} is not UTF-8: {raw!r:.80}; the file is damaged, fetch it again") from None


def _read_preamble(cursor: _Cursor) -> tuple[int, int, int]:
    magic = cursor.data[:4]
    cursor.take(4, "the magic")
    if magic != b"GGUF":
        raise WeightError(f"{cursor.path} is not a GGUF: it begins with {magic!r} instead of b'GGUF'")
    version = cursor.u32("the version")
    if version in (0x0200_0000, 0x0300_0000):
        raise WeightError(f"{cursor.path} is a big-endian GGUF (version 0x{version:08x}); convert it to little-endian")
    if version == 1:
        raise UnsupportedModelError(f"{cursor.path} is a GGUF of version 1; convert it again with a current llama.cpp")
    if version not in (2, 3):
        raise WeightError(f"{cursor.path} has the unknown GGUF version {version}; versions 2 and 3 are read")
    num_tensors, num_keys = cursor.u64("the tensor count"), cursor.u64("the key count")
    left = cursor.size - cursor.pos
    if num_tensors > min(MAX_TENSORS, left // 32):  # name length, dimensions, one dimension, type, offset
        raise cursor.error(f"the header claims {num_tensors} tensors, but only {left} bytes follow")
    if num_keys > min(MAX_KEYS, left // 13):  # key length, type, one byte
        raise cursor.error(f"the header claims {num_keys} metadata keys, but only {left} bytes follow")
    return version, num_tensors, num_keys


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for index in range(count):
        key = cursor.string(f"metadata key {index}", MAX_NAME_BYTES)
        if key in values:
            raise cursor.error(f"metadata key {key!r} occurs twice")
        values[key] = cursor.value(cursor.u32(f"the type of {key!r}"), key)
    return values


def _alignment(cursor: _Cursor, values: dict[str, Any]) -> int:
    alignment = values.get("general.alignment", 32)
    if not isinstance(alignment, int) or isinstance(alignment, bool):
        raise cursor.error(f"general.alignment is {alignment!r}, not an integer")
    if alignment < 1 or alignment & (alignment - 1) or alignment > cursor.size:
        raise cursor.error(f"general.alignment is {alignment}, not a power of two within the file")
    return alignment


def _refuse_split(path: Path, values: dict[str, Any]) -> None:
    count = values.get("split.count", 0)
    if not isinstance(count, int) or count > 1:
        raise UnsupportedModelError(
            f"{path} is one part of a GGUF split into {count!r} files (split.count); "
            "merge them with llama.cpp's `llama-gguf-split --merge` and load the result"
        )


def _read_tensor_info(cursor: _Cursor) -> GGUFTensor:
    """One tensor's entry; `offset` is still relative to the data section."""
    name = cursor.string("a tensor name", MAX_NAME_BYTES)
    what = f"tensor {name!r}"
    num_dims = cursor.u32(f"the dimension count of {what}")
    if not 1 <= num_dims <= MAX_DIMENSIONS:
        raise cursor.error(f"{what} has {num_dims} dimensions; 1 to {MAX_DIMENSIONS} are possible", tensor=name)
    start = cursor.take(8 * num_dims, f"the shape of {what}")
    shape = tuple(reversed(struct.unpack_from(f"<{num_dims}Q", cursor.data, start)))
    type_id = cursor.u32(f"the type of {what}")
    offset = cursor.u64(f"the offset of {what}")
    kind = GGML_TYPES.get(type_id)
    if kind is None:
        raise UnsupportedModelError(f"{cursor.path}: {what} has the unknown ggml type {type_id}")
    elements = 1
    for size in shape:
        elements *= size
    if not 0 < elements <= cursor.size * kind.block or shape[-1] % kind.block:
        raise cursor.error(
            f"{what} of type {kind.name} has the shape {shape}, which is empty, larger than the file "
            f"or no multiple of {kind.block} wide",
            tensor=name,
        )
    return GGUFTensor(name, shape, kind, offset, elements // kind.block * kind.nbytes)


def _place_tensors(cursor: _Cursor, infos: list[GGUFTensor], alignment: int) -> dict[str, GGUFTensor]:
    """Absolute offsets, checked: inside the file, aligned, without overlap, names unique."""
    base = -(-cursor.pos // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for info in infos:
        if info.name in tensors:
            raise cursor.error(f"tensor {info.name!r} occurs twice", tensor=info.name)
        if info.offset % alignment:
            raise cursor.error(
                f"tensor {info.name!r} has the offset {info.offset}, no multiple of {alignment}", tensor=info.name
            )
        if base + info.offset + info.nbytes > cursor.size:
            raise cursor.error(
                f"tensor {info.name!r} takes {info.nbytes} bytes at offset {base + info.offset}, "
                f"but the file ends at {cursor.size}",
                tensor=info.name,
            )
        tensors[info.name] = GGUFTensor(info.name, info.shape, info.type, base + info.offset, info.nbytes)
    last: GGUFTensor | None = None
    for tensor in sorted(tensors.values(), key=lambda item: item.offset):
        if last is not None and tensor.offset < last.offset + last.nbytes:
            raise cursor.error(f"tensors {last.name!r} and {tensor.name!r} overlap", tensor=tensor.name)
        last = tensor
    return tensors
