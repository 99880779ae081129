"""Loading a model from real safetensors files: order, progress, refusal before data is read, and the memory it takes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from infer.backends.reference.platform import OPS
from infer.errors import WeightError
from infer.layers.parameter import named_layers, named_parameters
from infer.models import llama, qwen3_moe
from infer.plugins.model_source import Progress
from infer.quantization.unquantized import UnquantizedMethod
from infer.quantization.weight_only import create_int8
from infer.testing.tiny_models import (
    DictCheckpoint,
    PagedDriver,
    build_model,
    make_checkpoint,
    model_config,
    random_transformers_model,
)
from infer.weights.at_load import quantize_at_load
from infer.weights.loader import check_weights, load_weights, parameter_bytes
from infer.weights.safetensors import SafetensorsCheckpoint

SPEC = llama.infer_models()[0]
CONFIG = SPEC.example


def empty(quant: Any = None, config: dict[str, Any] = CONFIG, **options: Any) -> Any:
    return build_model(SPEC, model_config(config), ops=OPS, quant=quant or UnquantizedMethod(), **options)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(CONFIG, tmp_path_factory.mktemp("tiny"), seed=3)


def test_a_safetensors_directory_runs_like_its_model(directory: Path) -> None:
    checkpoint = SafetensorsCheckpoint(directory)
    model = empty()
    load_weights(model, checkpoint)
    checkpoint.close()
    ids = list(range(5, 25))
    with torch.no_grad():
        expected = random_transformers_model(CONFIG, seed=3)(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(PagedDriver(model).step([("a", ids)])[0], expected, rtol=0, atol=1e-4)


@pytest.mark.row("LOAD-SAFETENSORS", "every checkpoint tensor is used exactly once or named as skipped")
def test_every_tensor_is_read_once(directory: Path) -> None:
    reads: list[str] = []

    class Recording(DictCheckpoint):
        def read(self, name: str, dtype: torch.dtype | None) -> Tensor:
            reads.append(name)
            return super().read(name, dtype)

    stored = load_file(directory / "model.safetensors") | {"lm_head.weight": torch.zeros(96, 32)}
    model = empty()
    load_weights(model, Recording(stored))
    assert sorted(reads) == sorted(stored.keys() - {"lm_head.weight"})
    assert model.weight_table().ignored >= {"lm_head.weight"}


@pytest.mark.parametrize("method", [None, create_int8(None)], ids=["plain", "int8"])
def test_a_transposed_tensor_is_turned(directory: Path, method: Any) -> None:
    """Stored the other way round, the shards of q, k, v and a whole matrix come to the same bits, quantised or not."""
    config = CONFIG | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    plain = dict(random_transformers_model(config, seed=3).state_dict())
    turned = {
        name: ("self_attn" in name or "down_proj" in name) and weight.dim() == 2 for name, weight in plain.items()
    }
    assert sum(turned.values()) == 5 * config["num_hidden_layers"]
    found = []
    for stored in (
        plain,
        {name: weight.t().contiguous() if turned[name] else weight for name, weight in plain.items()},
    ):
        model = empty(config=config)
        for name, target in model.weight_table().targets.items():
            transposed = stored is not plain and turned[name]
            model.weight_table().targets[name] = dataclasses.replace(target, transposed=transposed)
        if method is not None:
            assert quantize_at_load(model, method, None, torch.float32).expanded
        load_weights(model, DictCheckpoint(stored))
        found.append([tensor for _, layer in named_layers(model) for tensor in layer.tensors()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.row("ENG-MOE-LOADSTREAM", "At most one layer's experts are on the host at once, counted.")
@pytest.mark.parametrize("method", [None, create_int8(None)])
def test_one_tensor_is_on_its_way_at_a_time(tmp_path: Path, method: Any) -> None:
    """Every tensor that was read is gone before the next is: of a layer's experts there is one matrix beside the slots."""
    facts = qwen3_moe.EXAMPLE | {"moe_intermediate_size": 32}
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    class Counting(DictCheckpoint):
        def read(self, name: str, dtype: torch.dtype | None) -> Tensor:
            nonlocal most
            tensor = super().read(name, dtype)
            alive.append(weakref.ref(tensor))
            most = max(most, sum(ref() is not None for ref in alive))
            return tensor

    (spec,) = qwen3_moe.infer_models()
    model = build_model(spec, model_config(facts), ops=OPS, quant=UnquantizedMethod())
    if method is not None:
        assert quantize_at_load(model, method, None, torch.float32).expanded
    load_weights(model, Counting(load_file(make_checkpoint(facts, tmp_path) / "model.safetensors")))
    assert len(alive) >= facts["num_hidden_layers"] * facts["num_experts"] * 3
    assert most == 1


def test_progress_counts_stored_bytes(directory: Path) -> None:
    reports: list[Progress] = []
    load_weights(empty(dtype=torch.bfloat16), SafetensorsCheckpoint(directory), reports.append)
    total = sum(info.stored_bytes for info in SafetensorsCheckpoint(directory).tensors().values())
    assert [report.total for report in reports] == [total] * len(reports)
    assert [report.done for report in reports] == sorted({report.done for report in reports})
    assert reports[-1].done == total
    assert {report.stage for report in reports} == {"load"}


def test_an_exception_in_progress_stops_the_load(directory: Path) -> None:
    class Cancelled(Exception):
        pass

    seen: list[str] = []

    def stop(report: Progress) -> None:
        seen.append(report.detail)
        if len(seen) == 3:
            raise Cancelled

    with pytest.raises(Cancelled):
        load_weights(empty(), SafetensorsCheckpoint(directory), stop)
    assert len(seen) == 3


def test_layers_are_finalized_as_soon_as_they_are_full(directory: Path) -> None:
    """A method that packs holds one layer twice at a time, not the whole model."""
    events: list[str] = []

    class Packing(UnquantizedMethod):
        def finalize(self, storage: dict[str, Tensor], ops: Any) -> dict[str, Tensor]:
            events.append("pack")
            return {"weight": storage["weight"].clone()}

    load_weights(empty(Packing()), SafetensorsCheckpoint(directory), lambda report: events.append(report.detail))
    last_shard = next(i for i, event in enumerate(events) if ".0.self_attn.v_proj" in event)
    assert events[last_shard - 1] == "pack"
    assert events.count("pack") == 8


def test_a_wrong_checkpoint_is_refused_before_any_data_is_read(directory: Path) -> None:
    class Unreadable(DictCheckpoint):
        def read(self, name: str, dtype: torch.dtype | None) -> Tensor:
            raise AssertionError(f"{name} was read")

    stored = load_file(directory / "model.safetensors")
    wrong = Unreadable(stored | {"model.norm.weight": torch.zeros(31)})
    planned = empty(device="meta")
    with pytest.raises(WeightError, match=r"'model.norm.weight' has shape \(31,\)") as caught:
        check_weights(planned, wrong)
    assert caught.value.tensor == "model.norm.weight"
    with pytest.raises(WeightError, match=r"\(31,\)"):
        load_weights(empty(), wrong)


def test_a_tensor_that_lies_about_its_shape_is_named(directory: Path) -> None:
    class Lying(DictCheckpoint):
        def read(self, name: str, dtype: torch.dtype | None) -> Tensor:
            return super().read(name, dtype)[..., :-1]

    with pytest.raises(WeightError, match=r"tensor 'model\.embed_tokens\.weight': shape") as caught:
        load_weights(empty(), Lying(load_file(directory / "model.safetensors")))
    assert caught.value.tensor == "model.embed_tokens.weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_planned_bytes_are_the_loaded_bytes(directory: Path, dtype: torch.dtype) -> None:
    model = empty(dtype=dtype)
    planned = parameter_bytes(empty(dtype=dtype, device="meta"))
    load_weights(model, SafetensorsCheckpoint(directory))
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for _, layer in named_layers(model)
        for tensor in layer.tensors()
    }
    assert planned == parameter_bytes(model) == sum(storages.values())


MEASURE = """
import sys, torch, json
torch.set_num_threads(1)
from pathlib import Path
from infer.backends.reference.platform import OPS
from infer.models import llama, qwen3_moe
from infer.quantization.unquantized import UnquantizedMethod
from infer.quantization.weight_only import create_int8
from infer.testing.tiny_models import build_model, model_config
from infer.weights.at_load import quantize_at_load
from infer.weights.loader import load_weights
from infer.weights.safetensors import SafetensorsCheckpoint

def status(key):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024

directory = Path(sys.argv[1])
config = json.loads((directory / "config.json").read_text())
before = status("VmRSS")
checkpoint = SafetensorsCheckpoint(directory)
model = build_model(llama.infer_models()[0], model_config(config), ops=OPS, quant=UnquantizedMethod())
load_weights(model, checkpoint)
checkpoint.close()
print(status("VmHWM") - before)
"""


@pytest.mark.row("LOAD-SAFETENSORS", "peak RSS stays under model size plus one shard")
def test_peak_memory(tmp_path: Path) -> None:
    config = CONFIG | {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "vocab_size": 8192,
    }
    planned = empty(config=config, device="meta")
    parameters = named_parameters(planned)
    shards: dict[str, dict[str, Tensor]] = {}
    shard_of: dict[str, str] = {}
    for i, (name, target) in enumerate(planned.weight_table().targets.items()):
        shape = list(parameters[target.path].shape)
        if target.rows is not None:
            shape[0] = target.rows[1] - target.rows[0]
        file = f"model-{i // 10:05d}.safetensors"
        shards.setdefault(file, {})[name] = torch.ones(shape)
        shard_of[name] = file
    for file, tensors in shards.items():
        save_file(tensors, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shard_of}))
    (tmp_path / "config.json").write_text(json.dumps(config))
    largest = max((tmp_path / file).stat().st_size for file in shards)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEASURE), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    peak, size = int(done.stdout), parameter_bytes(planned)
    assert size > 4 * largest, "one shard must be small beside the model for this to prove anything"
    assert size < peak < size + largest
