"""The GGUF reader: equal to gguf-py on good files, a named error in bounded memory on hostile ones."""

from __future__ import annotations

import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from gguf_samples import LLAMA_METADATA, write_gguf, write_llama
from infer.errors import ModelError, UnsupportedModelError, WeightError
from infer.weights.gguf import GGUFFile

FileWith = Callable[[bytes], Path]


def string(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def key(name: str, kind: int, payload: bytes) -> bytes:
    return string(name.encode()) + struct.pack("<I", kind) + payload


def info(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return string(name.encode()) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header(
    keys: list[bytes] | None = None,
    infos: list[bytes] | None = None,
    *,
    num_keys: int | None = None,
    num_tensors: int | None = None,
    version: int = 3,
    data: int = 256,
) -> bytes:
    keys, infos = keys or [], infos or []
    counts = len(infos) if num_tensors is None else num_tensors, len(keys) if num_keys is None else num_keys
    raw = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(infos)
    return raw + b"\0" * (-len(raw) % 32) + b"\0" * data


GOOD = header([key("general.alignment", 4, struct.pack("<I", 32))], [info("a", (8, 4)), info("b", (8,), 0, 128)])


@pytest.fixture
def file_with(tmp_path: Path) -> FileWith:
    def write(raw: bytes) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(raw)
        return path

    return write


def test_good_header_places_tensors(file_with: FileWith) -> None:
    with GGUFFile.open(file_with(GOOD)) as file:
        base = len(GOOD) - 256
        assert {n: (t.shape, t.type.name, t.offset, t.nbytes) for n, t in file.tensors.items()} == {
            "a": ((4, 8), "F32", base, 128),
            "b": ((8,), "F32", base + 128, 32),
        }


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions_are_read(file_with: FileWith, version: int) -> None:
    with GGUFFile.open(file_with(header(infos=[info("a", (8,))], version=version))) as file:
        assert file.version == version and list(file.tensors) == ["a"]


HUGE = 2**64 - 1
HOSTILE = {
    "no file at all": (b"", "0 bytes"),
    "magic": (b"GGML" + GOOD[4:], "b'GGML'"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + GOOD[8:], "big-endian"),
    "unknown version": (header(version=7), "version 7"),
    "huge tensor count": (header(num_tensors=HUGE), f"{HUGE} tensors"),
    "huge key count": (header(num_keys=2**40), f"{2**40} metadata keys"),
    "one tensor too many": (header(infos=[info("a", (8,))], num_tensors=2), "tensor"),
    "2^40-byte string": (header([key("k", 8, struct.pack("<Q", 2**40))]), f"{2**40} bytes"),
    "2^40-byte key": (header([struct.pack("<Q", 2**40)], num_keys=1), f"{2**40} bytes"),
    "unknown value type": (header([key("k", 13, b"\0" * 8)]), "type 13"),
    "bool of 2": (header([key("k", 7, b"\2")]), "value 2"),
    "key twice": (header([key("k", 0, b"\1")] * 2), "'k' occurs twice"),
    "key not UTF-8": (header([string(b"\xff") + struct.pack("<I", 0) + b"\1"]), "UTF-8"),
    "huge number array": (header([key("k", 9, struct.pack("<IQ", 4, 2**62))]), f"{2**62} elements"),
    "huge string array": (header([key("k", 9, struct.pack("<IQ", 8, 2**62))]), f"{2**62} strings"),
    "string array past the end": (header([key("k", 9, struct.pack("<IQQ", 8, 2, 2**40))]), f"{2**40} bytes"),
    "nested array": (header([key("k", 9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 9, 1))]), "array of arrays"),
    "array of unknown type": (header([key("k", 9, struct.pack("<IQ", 77, 1))]), "type 77"),
    "alignment 0": (header([key("general.alignment", 4, struct.pack("<I", 0))]), "alignment is 0"),
    "alignment 48": (header([key("general.alignment", 4, struct.pack("<I", 48))]), "alignment is 48"),
    "alignment 2^31": (header([key("general.alignment", 4, struct.pack("<I", 2**31))]), f"alignment is {2**31}"),
    "alignment a string": (header([key("general.alignment", 8, string(b"32"))]), "alignment is '32'"),
    "no dimensions": (header(infos=[info("a", ())]), "0 dimensions"),
    "2^31 dimensions": (header(infos=[string(b"a") + struct.pack("<I", 2**31) + b"\0" * 64]), f"{2**31} dimensions"),
    "shape overflows 64 bits": (header(infos=[info("a", (2**33, 2**33, 4))]), "'a'"),
    "empty shape": (header(infos=[info("a", (0, 4))]), "empty"),
    "row no multiple of the block": (header(infos=[info("a", (33,), 2)]), "multiple of 32"),
    "offset past the end": (header(infos=[info("a", (8,), 0, 2**50)]), "the file ends at"),
    "offset not aligned": (header(infos=[info("a", (8,), 0, 8)]), "offset 8"),
    "data past the end": (header(infos=[info("a", (65,))]), "260 bytes"),
    "tensor twice": (header(infos=[info("a", (8,)), info("a", (8,), 0, 32)]), "'a' occurs twice"),
    "tensors overlap": (header(infos=[info("a", (16,)), info("b", (8,), 0, 32)]), "overlap"),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("raw", "named"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_header_is_a_named_error_in_bounded_memory(file_with: FileWith, raw: bytes, named: str) -> None:
    path = file_with(raw)
    tracemalloc.start()
    try:
        with pytest.raises(WeightError) as caught:
            GGUFFile.open(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert named in str(caught.value) and str(path) in str(caught.value)
    assert peak < 1 << 20


def test_tensor_errors_name_the_tensor(file_with: FileWith) -> None:
    with pytest.raises(WeightError) as caught:
        GGUFFile.open(file_with(header(infos=[info("blk.3.x", (65,))])))
    assert caught.value.tensor == "blk.3.x"


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (header([key("split.count", 2, struct.pack("<H", 3))]), "split into 3 files"),
        (header(version=1), "version 1"),
        (header(infos=[info("a", (8,), 4)]), "ggml type 4"),
    ],
)
def test_well_formed_but_unsupported(file_with: FileWith, raw: bytes, named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        GGUFFile.open(file_with(raw))


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    raw = write_llama(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for length in [*range(0, 2000, 7), *range(2000, len(raw) - 1, 4999)]:
        path.write_bytes(raw[:length])
        with pytest.raises(WeightError):
            GGUFFile.open(path)


def test_file_that_shrinks_after_opening_is_an_error(file_with: FileWith) -> None:
    path = file_with(GOOD)
    with GGUFFile.open(path) as file:
        with path.open("r+b") as again:
            again.truncate(len(GOOD) - 255)
        with pytest.raises(WeightError, match="shorter") as caught:
            file.read_into(file.tensors["b"], 0, memoryview(bytearray(32)))
    assert caught.value.tensor == "b"


def test_metadata_values_equal_gguf_py(tmp_path: Path) -> None:
    values = {**LLAMA_METADATA, "x.int": -5, "x.flags": [True, False], "x.text": "ünï\n", "x.empty": ""}
    path = write_gguf(tmp_path / "m.gguf", {"a": (np.ones((2, 8), np.float32), "F16")}, values)
    reader = gguf.GGUFReader(path)
    theirs = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    with GGUFFile.open(path) as file:
        assert dict(file.metadata) == theirs
        assert file.metadata.array_length("x.flags") == 2 and file.metadata.array_length("x.int") is None
        assert {t.name: t.data_offset for t in reader.tensors} == {n: t.offset for n, t in file.tensors.items()}


def test_array_that_is_not_utf8_fails_when_read(file_with: FileWith) -> None:
    raw = header([key("k", 9, struct.pack("<IQ", 8, 2) + string(b"ok") + string(b"\xc3"))])
    with GGUFFile.open(file_with(raw)) as file, pytest.raises(WeightError, match=r"k\[1\] is not UTF-8"):
        file.metadata["k"]


def test_closed_file_says_so_and_closing_twice_is_fine(file_with: FileWith) -> None:
    file = GGUFFile.open(file_with(header([key("k", 9, struct.pack("<IQ", 8, 1) + string(b"ok"))], [info("a", (8,))])))
    file.close()
    file.close()
    with pytest.raises(ModelError, match="closed"):
        file.metadata["k"]
    with pytest.raises(ModelError, match="closed"):
        file.read_into(file.tensors["a"], 0, memoryview(bytearray(4)))


def test_missing_file_and_directory_are_model_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ModelError):
            GGUFFile.open(path)


def test_errors_leave_no_descriptor_open(file_with: FileWith) -> None:
    path = file_with(header(num_tensors=HUGE))
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        with pytest.raises(WeightError):
            GGUFFile.open(path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.timeout(60)
def test_largest_allowed_string_array_is_skipped_and_a_larger_one_refused(file_with: FileWith) -> None:
    for count, allowed in ((1 << 22, True), ((1 << 22) + 1, False)):
        path = file_with(header([key("k", 9, struct.pack("<IQ", 8, count) + b"\0" * (8 * count))]))
        if allowed:
            with GGUFFile.open(path) as file:
                assert file.metadata.array_length("k") == count
        else:
            with pytest.raises(WeightError, match=f"{count} strings"):
                GGUFFile.open(path)


@pytest.mark.model
@pytest.mark.timeout(60)
def test_real_model_opens_quickly(smollm2_gguf: Path) -> None:
    start = time.perf_counter()
    with GGUFFile.open(smollm2_gguf) as file:
        opened = time.perf_counter() - start
        assert len(file.tensors) == 272
        assert file.metadata.array_length("tokenizer.ggml.tokens") == 49152
        assert file.metadata["tokenizer.ggml.tokens"][:2] == ["<|endoftext|>", "<|im_start|>"]
    print(f"SmolLM2 header: {opened * 1e3:.1f} ms, with its vocabulary {(time.perf_counter() - start) * 1e3:.1f} ms")


def test_reader_needs_no_tensor_library() -> None:
    code = (
        "import sys, infer.weights.gguf, infer.weights.gguf_config, infer.weights.facts\n"
        "print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
