"""Bounds-checked safetensors headers and shard indexes (format: github.com/huggingface/safetensors, README).

Any thread, no tensor library. Pure functions over files that they open and close.
"""

from __future__ import annotations

import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from infer.errors import ModelError, UnsupportedModelError, WeightError

MAX_HEADER_BYTES: Final = 100_000_000
"""The format's own limit."""
MAX_TENSORS: Final = 1 << 20
INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
ELEMENT_BYTES: Final = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "F8_E8M0": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "C64": 8,
}  # fmt: skip


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies: `offset` from the start of the file `path`, whose size was `file_bytes`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int
    file_bytes: int


def read_header(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors of one file and its metadata. Raises `WeightError` naming the file and what is wrong with it."""
    raw, size = _header_bytes(path)
    if raw.count(b":") > 4 * MAX_TENSORS:  # an entry has four; bounds what decoding takes
        raise _damaged(path, f"its header has more than {MAX_TENSORS} entries")
    try:
        sections = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(sections.pop("__metadata__", b"{}"), type=dict[str, str])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(path, f"its header is not the JSON it should be: {error}") from None
    start = 8 + len(raw)
    tensors = {name: _tensor(path, name, section, start, size) for name, section in sections.items()}
    end = start
    for tensor in sorted(tensors.values(), key=lambda item: (item.offset, item.nbytes)):
        if tensor.offset != end:
            raise _damaged(
                path,
                f"tensor {tensor.name!r} begins at byte {tensor.offset}, the one before ends at {end}",
                tensor.name,
            )
        end += tensor.nbytes
    if end != size:
        raise _damaged(path, f"its tensors end at byte {end}, but the file has {size}")
    return tensors, metadata


def read_headers(directory: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """All tensors of a checkpoint directory, sharded or not, and the files' metadata together."""
    tensors: dict[str, StoredTensor] = {}
    metadata: dict[str, str] = {}
    weight_map = _weight_map(directory)
    for path in _shards(directory, weight_map):
        found, extra = read_header(path)
        metadata.update(extra)
        for name, tensor in found.items():
            if name in tensors:
                raise WeightError(
                    f"{directory}: tensor {name!r} is both in {tensors[name].path.name} and in {path.name}", tensor=name
                )
            tensors[name] = tensor
    for name, file_name in weight_map.items():
        if name not in tensors or tensors[name].path.name != file_name:
            raise WeightError(
                f"{directory / INDEX_NAME} says that tensor {name!r} is in {file_name}, but it is not", tensor=name
            )
    return tensors, metadata


def safetensors_files(directory: Path) -> list[Path]:
    """Files of the checkpoint format in a directory, by name."""
    return sorted(path for path in directory.glob("*.safetensors") if path.is_file())


def refuse_pickle(directory: Path) -> None:
    """Raise `UnsupportedModelError` when the weights are pickles, which run code when loaded."""
    pickles = sorted(path.name for path in directory.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise UnsupportedModelError(
            f"{directory} has its weights only as pickle ({', '.join(pickles[:3])}), which runs code when it is loaded; "
            "convert them with transformers: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)"
        )


def _header_bytes(path: Path) -> tuple[bytes, int]:
    """The header's JSON and the file size."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise _damaged(path, "it is not a regular file")
            size = status.st_size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > size - 8:
                raise _damaged(path, f"its header claims {length} bytes, but the file has {size}")
            if length > MAX_HEADER_BYTES:
                raise _damaged(path, f"its header claims {length} bytes; the format allows {MAX_HEADER_BYTES}")
            raw = file.read(length)
    except OSError as error:
        raise WeightError(f"cannot read {path}: {error.strerror or error}") from error
    if len(raw) < length:
        raise _damaged(path, "it became shorter while it was read")
    return raw, size


def _tensor(path: Path, name: str, section: msgspec.Raw, start: int, size: int) -> StoredTensor:
    try:
        entry = msgspec.json.decode(section, type=_Entry)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(path, f"the entry of tensor {name!r} is wrong: {error}", name) from None
    element_bytes = ELEMENT_BYTES.get(entry.dtype)
    if element_bytes is None:
        raise UnsupportedModelError(
            f"{path}: tensor {name!r} has dtype {entry.dtype!r:.40}; supported are {', '.join(ELEMENT_BYTES)}"
        )
    begin, end = entry.data_offsets
    if not 0 <= begin <= end <= size - start:
        raise _damaged(
            path, f"tensor {name!r} has the offsets {begin} to {end}; {size - start} bytes of data exist", name
        )
    if len(entry.shape) > 64 or any(not 0 <= length <= 2**62 for length in entry.shape):
        raise _damaged(path, f"tensor {name!r} has the impossible shape {entry.shape[:8]}", name)
    if math.prod(entry.shape) * element_bytes != end - begin:
        raise _damaged(
            path,
            f"tensor {name!r} of {entry.dtype} {entry.shape} does not take the {end - begin} bytes it is given",
            name,
        )
    return StoredTensor(name, entry.dtype, tuple(entry.shape), path, start + begin, end - begin, size)


def _weight_map(directory: Path) -> dict[str, str]:
    """Tensor name -> file name from the shard index; empty when there is none."""
    path = directory / INDEX_NAME
    if not path.is_file():
        return {}
    try:
        index = msgspec.json.decode(path.read_bytes(), type=_Index)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WeightError(f"{path} is not a shard index: {error}; fetch it again") from None
    for name, file_name in index.weight_map.items():
        if not file_name.endswith(".safetensors") or file_name != Path(file_name).name or "\0" in file_name:
            raise WeightError(
                f"{path} puts tensor {name!r} into {file_name!r}; shards are .safetensors files beside the index",
                tensor=name,
            )
    return index.weight_map


def _shards(directory: Path, weight_map: dict[str, str]) -> list[Path]:
    if weight_map:
        shards = [directory / name for name in sorted(set(weight_map.values()))]
        missing = [path.name for path in shards if not path.is_file()]
        if missing:
            raise WeightError(
                f"{directory} lacks {len(missing)} of {len(shards)} shards: {', '.join(missing[:5])}; fetch the model again"
            )
        return shards
    files = safetensors_files(directory)
    if not files:
        if directory.is_dir():
            refuse_pickle(directory)
        raise ModelError(f"{directory} holds no .safetensors file")
    if directory / SINGLE_NAME in files:
        return [directory / SINGLE_NAME]
    if len(files) > 1:
        raise WeightError(
            f"{directory} holds {len(files)} .safetensors files but no {INDEX_NAME} that says what belongs together"
        )
    return files


def _damaged(path: Path, message: str, tensor: str | None = None) -> WeightError:
    return WeightError(f"{path} is damaged: {message}; fetch it again", tensor=tensor)
