"""Safetensors directories: equal to the safetensors library on good ones, a named error on bad ones, memory bounded."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from infer.errors import ModelError, UnsupportedModelError, WeightError
from infer.weights import safetensors as module
from infer.weights.safetensors import DTYPES, SafetensorsCheckpoint
from infer.weights.safetensors_header import ELEMENT_BYTES, read_header

INDEX = "model.safetensors.index.json"


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(7, 33, generator=generator)
    return {
        "f32": value,
        "f16": value.half(),
        "bf16": value.bfloat16().clone(),
        "f8": value.to(torch.float8_e4m3fn),
        "i64": torch.arange(-3, 9),
        "u8": torch.arange(12, dtype=torch.uint8),
        "bool": value > 0,
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
    }


def shard(directory: Path, names: dict[str, dict[str, torch.Tensor]], weight_map: dict[str, str] | None = None) -> None:
    for file_name, part in names.items():
        save_file(part, directory / file_name)
    if weight_map is None:
        weight_map = {name: file_name for file_name, part in names.items() for name in part}
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def test_every_dtype_equals_the_library(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = SafetensorsCheckpoint(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    assert set(checkpoint.tensors()) == set(expected) and checkpoint.metadata() == {"format": "pt"}
    for name, value in expected.items():
        ours = checkpoint.read(name, None)
        info = checkpoint.tensors()[name]
        assert ours.dtype == value.dtype and ours.shape == value.shape == torch.Size(info.shape)
        assert torch.equal(ours.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))
        assert info.stored_bytes == value.nbytes and ours.untyped_storage().nbytes() == value.nbytes


def test_cast_equals_torch_whatever_the_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    for size in (8, 64, 1 << 20):
        monkeypatch.setattr(module, "CHUNK_BYTES", size)
        for name in ("f32", "f16", "bf16", "f8", "scalar", "empty"):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                assert torch.equal(checkpoint.read(name, dtype), tensors()[name].to(dtype))


def test_type_tables_agree() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == ELEMENT_BYTES


@pytest.mark.row("LOAD-SAFETENSORS", "Hugging Face checkpoints load directly, sharded or not")
def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    parts = {
        "model-1.safetensors": {"a": torch.ones(3)},
        "model-2.safetensors": {"b": torch.zeros(2), "c": torch.ones(1)},
    }
    shard(tmp_path, parts)
    save_file({"other": torch.ones(9)}, tmp_path / "adapter.safetensors")  # not in the index: another thing
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert set(checkpoint.tensors()) == {"a", "b", "c"}
    assert torch.equal(checkpoint.read("c", None), torch.ones(1))
    checkpoint.close()


def test_one_file_of_any_name_or_the_usual_name(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "weights.safetensors")
    assert set(SafetensorsCheckpoint(tmp_path).tensors()) == {"a"}
    save_file({"b": torch.ones(1)}, tmp_path / "more.safetensors")
    with pytest.raises(WeightError, match=r"2 \.safetensors files but no"):
        SafetensorsCheckpoint(tmp_path)
    save_file({"c": torch.ones(1)}, tmp_path / "model.safetensors")
    assert set(SafetensorsCheckpoint(tmp_path).tensors()) == {"c"}


def test_missing_shard_is_named(tmp_path: Path) -> None:
    shard(tmp_path, {"x-1.safetensors": {"a": torch.ones(1)}, "x-2.safetensors": {"b": torch.ones(1)}})
    (tmp_path / "x-2.safetensors").unlink()
    with pytest.raises(WeightError, match=r"x-2\.safetensors"):
        SafetensorsCheckpoint(tmp_path)


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    one = {"a": torch.ones(1)}
    shard(tmp_path, {"x-1.safetensors": {**one, "c": torch.ones(1)}, "x-2.safetensors": {**one, "b": torch.ones(1)}})
    with pytest.raises(WeightError, match="both in") as caught:
        SafetensorsCheckpoint(tmp_path)
    assert caught.value.tensor == "a"


@pytest.mark.parametrize(
    ("weight_map", "named"),
    [
        ({"a": "x-1.safetensors", "ghost": "x-1.safetensors"}, "ghost"),
        ({"a": "../x-1.safetensors"}, "beside the index"),
        ({"a": "/etc/x.safetensors"}, "beside the index"),
        ({"a": "x-1.bin"}, "beside the index"),
    ],
)
def test_index_that_lies(tmp_path: Path, weight_map: dict[str, str], named: str) -> None:
    shard(tmp_path, {"x-1.safetensors": {"a": torch.ones(1)}}, weight_map)
    with pytest.raises(WeightError, match=named):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"weight_map": {"a": 3}}', "[" * 100_000, '{"weight_map": 1}'])
def test_broken_index(tmp_path: Path, text: str) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(WeightError, match="index"):
        SafetensorsCheckpoint(tmp_path)


def encode(header: Any, data: bytes = b"\0" * 16, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}


HOSTILE = {
    "empty file": (b"", "0"),
    "short file": (b"\1\2", "2"),
    "header past the end": (encode({}, length=2**40), str(2**40)),
    "not JSON": (encode(b"{nonsense"), "JSON"),
    "not an object": (encode([1]), "JSON"),
    "deep JSON": (encode(b'{"a":' + b"[" * 100_000), "JSON"),
    "not UTF-8": (encode(b'{"\xff\xfe":{}}'), "UTF-8|JSON"),
    "entry not an object": (encode({"a": 3}), "'a'"),
    "entry without shape": (encode({"a": {"dtype": "F32", "data_offsets": [0, 16]}}), "'a'.*shape"),
    "entry with more": (encode({"a": entry(extra=1)}), "'a'.*extra"),
    "negative size": (encode({"a": entry(shape=[-4])}), "shape"),
    "huge shape": (encode({"a": entry(shape=[2**62, 2**62])}), "does not take"),
    "too many dimensions": (encode({"a": entry(shape=[1] * 1000)}), "shape"),
    "float shape": (encode({"a": entry(shape=[4.5])}), "'a'"),
    "offsets past the end": (encode({"a": entry(data_offsets=[0, 2**50])}), str(2**50)),
    "negative offset": (encode({"a": entry(data_offsets=[-16, 0])}), "-16"),
    "offsets reversed": (encode({"a": entry(data_offsets=[16, 0])}), "16 to 0"),
    "size and offsets differ": (encode({"a": entry(shape=[3])}), "does not take the 16 bytes"),
    "overlap": (encode({"a": entry(), "b": entry(shape=[2], data_offsets=[8, 16])}), "begins at byte"),
    "hole": (encode({"a": entry(shape=[2], data_offsets=[8, 16])}), "begins at byte"),
    "bytes nobody owns": (encode({"a": entry()}, b"\0" * 20), "tensors end at byte"),
    "metadata not text": (encode({"a": entry(), "__metadata__": {"x": 1}}), "JSON"),
    "too many entries": (encode(b"{" + b'"a":0,' * (1 << 23) + b'"b":0}'), "entries"),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("raw", "named"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_header_is_an_error_naming_the_file(tmp_path: Path, raw: bytes, named: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    with pytest.raises(WeightError, match=named) as caught:
        SafetensorsCheckpoint(tmp_path)
    assert str(path) in str(caught.value)


def test_unknown_dtype_is_unsupported(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(encode({"a": entry(dtype="F4")}))
    with pytest.raises(UnsupportedModelError, match="'a' has dtype 'F4'"):
        SafetensorsCheckpoint(tmp_path)


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    raw = (tmp_path / "model.safetensors").read_bytes()
    for length in range(0, len(raw), 13):
        (tmp_path / "model.safetensors").write_bytes(raw[:length])
        with pytest.raises(WeightError, match=r"model\.safetensors"):
            read_header(tmp_path / "model.safetensors")


@pytest.mark.parametrize("change", [lambda p: p.write_bytes(p.read_bytes()[:-1]), lambda p: p.unlink()])
def test_file_that_changes_after_opening(tmp_path: Path, change: Callable[[Path], Any]) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(100)}, path)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    change(path)
    with pytest.raises(WeightError, match=r"model\.safetensors") as caught:
        checkpoint.read("a", None)
    assert caught.value.tensor == "a"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickle_only_is_refused_with_the_cure(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x02")
    with pytest.raises(UnsupportedModelError, match=rf"{name}.*save_pretrained"):
        SafetensorsCheckpoint(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")  # beside safetensors they are simply not read
    assert set(SafetensorsCheckpoint(tmp_path).tensors()) == {"a"}


def test_nothing_to_read(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ModelError, match=r"no \.safetensors file"):
            SafetensorsCheckpoint(path)


def test_unknown_name(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match="no tensor 'b'"):
        SafetensorsCheckpoint(tmp_path).read("b", None)


MEASURE = """
import sys, torch
from infer.weights.safetensors import SafetensorsCheckpoint

def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

dtype = getattr(torch, sys.argv[2])
torch.ones(1 << 16, dtype=torch.bfloat16).to(dtype)[:4].clone()  # pages of torch's own code in first
with open("/proc/self/clear_refs", "w") as control:
    control.write("5")  # the peak starts again from here
base = status("VmRSS")
checkpoint = SafetensorsCheckpoint(sys.argv[1])
kept = [checkpoint.read(name, dtype) for name in checkpoint.tensors()]
print(status("VmHWM") - base, sum(value.nbytes for value in kept))
"""


@pytest.mark.row("LOAD-SAFETENSORS", "peak RSS stays under model size plus one shard")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_peak_memory_of_loading(tmp_path: Path, dtype: str) -> None:
    """Four shards of 48 MiB in bf16. The bound is far below weights plus a mapped shard, whatever the shard size."""
    weight_map = {}
    for index in range(4):
        rows = {
            f"t{index}.{k}": {
                "dtype": "BF16",
                "shape": [6, 1 << 20],
                "data_offsets": [k * 12 << 20, (k + 1) * 12 << 20],
            }
            for k in range(4)
        }
        path = tmp_path / f"s{index}.safetensors"
        path.write_bytes(encode(rows, b""))
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size + (48 << 20))  # sparse
        weight_map.update(dict.fromkeys(rows, path.name))
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path), dtype], capture_output=True, text=True, check=True
    )
    rise, weights = map(int, done.stdout.split())
    assert weights == (192 << 20) * (1 if dtype == "bfloat16" else 2)
    assert rise <= weights + (24 << 20)
