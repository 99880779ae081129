"""Choice of plugins, the footprint before loading against what is measured after it, and KV allocation."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from infer.config.engine import PluginsSection
from infer.config.model import KVLayout, ModelConfig, StepBounds
from infer.engine.sampling.sampler import workspace_bytes
from infer.engine.worker import builder as builder_module
from infer.engine.worker import footprint
from infer.engine.worker.builder import (
    ALIGNMENT,
    WorkerBuilder,
    choose_model,
    choose_quant_method,
    tensor_dtype,
    zeros,
)
from infer.engine.worker.footprint import measure_footprint
from infer.errors import ConfigError, PluginConflictError, UnsupportedModelError, WeightError
from infer.layers.parameter import Layer, Parameter
from infer.models.llama import EXAMPLE
from infer.plugins.manager import build_registry
from infer.plugins.model_source import Progress
from infer.testing.tiny_models import make_checkpoint, model_config
from unit.engine.worker.built import build, builder

BOUNDS = StepBounds(num_tokens=64, num_rows=4, max_model_len=100)
CONFIG = EXAMPLE | {"hidden_size": 64, "intermediate_size": 160, "vocab_size": 4096, "head_dim": 16}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(CONFIG, tmp_path_factory.mktemp("llama"))


class Plugins:
    """A registry of plain callables: kind -> spec and what its `probe` or `matches` gives."""

    def __init__(self, **kinds: list[tuple[Any, Any]]) -> None:
        self.kinds = kinds

    def specs(self, kind: str) -> tuple[Any, ...]:
        return tuple(spec for spec, _ in self.kinds.get(kind, []))

    def get(self, kind: str, name: str) -> Any:
        return next(spec for spec in self.specs(kind) if spec.name == name)

    def create(self, kind: str, name: str, *args: Any, field: str = "factory") -> Any:
        answer = next(answer for spec, answer in self.kinds[kind] if spec.name == name)
        return answer(*args) if callable(answer) else answer


def test_an_unknown_architecture_names_what_there_is() -> None:
    registry = build_registry(PluginsSection())
    assert choose_model(registry, "LlamaForCausalLM").name == "llama"
    with pytest.raises(UnsupportedModelError, match=r"'NoneForCausalLM'.*LlamaForCausalLM"):
        choose_model(registry, "NoneForCausalLM")


def quantized(section: dict[str, Any] | None) -> ModelConfig:
    config = model_config(CONFIG)
    return ModelConfig(**{f: getattr(config, f) for f in ModelConfig.__struct_fields__} | {"quantization": section})


def test_one_quantization_method_answers_for_a_checkpoint() -> None:
    registry = build_registry(PluginsSection())
    assert choose_quant_method(registry, quantized(None)).name == "unquantized"
    assert choose_quant_method(registry, quantized({"quant_method": "gguf"})).name == "gguf"
    with pytest.raises(UnsupportedModelError, match=r"'quant_method': 'marvel'.*awq, .*gguf, gptq, unquantized"):
        choose_quant_method(registry, quantized({"quant_method": "marvel"}))
    both: Any = Plugins(
        quant_method=[(SimpleNamespace(name=name, at_load=False), lambda section: True) for name in ("x", "y")]
    )
    with pytest.raises(PluginConflictError, match=r"x, y.*plugins\.block"):
        choose_quant_method(both, quantized(None))


@pytest.mark.row("X-MEMPLAN", "predicted bytes within 5 % of measured for weights and KV on CPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plan_is_what_is_then_measured(path: Path, dtype: str) -> None:
    runner, resolved = build(path, model={"ref": str(path), "dtype": dtype})
    measured = runner.measured()
    assert measured["weights"] == pytest.approx(resolved.memory.weights, rel=0.05)
    assert measured["kv_cache"] == pytest.approx(resolved.memory.kv_cache, rel=0.05)
    assert measured["weights"] == 4096 * 64 * tensor_dtype(dtype).itemsize + block_bytes(dtype)
    runner.close()


def block_bytes(dtype: str) -> int:
    """Of CONFIG's two blocks and last norm: 4 query heads, 2 key/value heads of 16; tied head."""
    block = 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 160 + 2 * 64
    return (2 * block + 64) * tensor_dtype(dtype).itemsize


@pytest.mark.row("X-MEMPLAN", "refusal happens before any weight file is opened")
def test_a_footprint_opens_no_weight_file(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = builder(path)

    def refuse(*args: object) -> None:
        raise AssertionError("a checkpoint was opened")

    monkeypatch.setattr(builder_module, "open_checkpoint", refuse)
    found = worker.footprint("float32", "float32", BOUNDS)
    assert found.weight_bytes == 4096 * 64 * 4 + block_bytes("float32")
    assert found.load_transient_bytes == 4096 * 64 * 4
    assert [group.layer_ids for group in found.kv_layout.groups] == [(0, 1)]
    worker.close()


def workspace(path: Path, dtype: str, **bounds: int) -> int:
    whole = {"num_tokens": 4096, "num_rows": 1, "max_model_len": 8192} | bounds
    return builder(path).footprint(dtype, dtype, StepBounds(**whole)).workspace_bytes


def test_the_workspace_per_token_is_the_widest_point_of_a_block(path: Path) -> None:
    """At the MLP: the residual, the normed input, gate and up, their product, the angles of the step, and two hidden
    states that the block before still holds."""

    def per_token(dtype: str) -> float:
        return (workspace(path, dtype) - workspace(path, dtype, num_tokens=2048)) / 2048

    angles = 2 * 8 * 4
    widest = (64 + 64 + 2 * 160 + 160) * 4
    assert widest <= per_token("float32") <= 1.25 * (widest + angles + 2 * 64 * 4)  # and gaps between
    assert per_token("bfloat16") < 0.6 * per_token("float32")


def test_the_workspace_holds_the_logits_of_every_row(path: Path) -> None:
    found = workspace(path, "float32", num_tokens=2048, num_rows=2048, max_model_len=100)
    slots, positions = 2048 * 4 * (100 + 7), 2048 * 8 * 100
    logits = 2048 * 4 * (4096 + 64 + 64)
    assert found == pytest.approx(logits + slots + positions + workspace_bytes(4096), rel=0.05)


def test_the_workspace_grows_with_the_longest_sequence(path: Path) -> None:
    """Its keys and values side by side, where each is (computed from four more of the kind), and this step's mask."""
    grown = workspace(path, "float32", num_tokens=32, max_model_len=16384) - workspace(path, "float32", num_tokens=32)
    gathered, positions, mask, ids = 2 * 2 * 16 * 4, 5 * 8, 32 * 4, 4
    assert grown / 8192 == pytest.approx(gathered + positions + mask + ids, rel=0.02)


def test_planning_does_not_import_the_compiler_of_torch(path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from pathlib import Path; from unit.engine.worker.built import builder;"
        "from infer.config.model import StepBounds;"
        f"builder(Path({str(path)!r})).footprint('float32', 'float32', StepBounds(num_tokens=64, num_rows=4, max_model_len=100));"
        "raise SystemExit('torch._dynamo' in sys.modules)"
    )
    tests = str(Path(__file__).parents[3])
    assert subprocess.run([sys.executable, "-c", code], cwd=tests, timeout=120).returncode == 0


def test_large_weights_have_no_storage_while_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Parameter] = []

    original = Parameter.__init__

    def record(self: Parameter, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        original(self, *args, **kwargs)

    monkeypatch.setattr(Parameter, "__init__", record)
    huge = EXAMPLE | {"hidden_size": 1 << 14, "intermediate_size": 1 << 16, "vocab_size": 1 << 18, "head_dim": 4096}
    worker = WorkerBuilder(build_registry(PluginsSection()), model_config(huge), "reference", 1)
    found = worker.footprint("float32", "float32", BOUNDS)
    assert found.weight_bytes > 40 * 2**30
    assert sum(p.data.numel() * 4 for p in made if p.data.device.type == "cpu") < 2**20


class Peeking(Layer):
    """Looks at the values of its weight, which are not there while planning."""

    def __init__(self, device: torch.device) -> None:
        self.weight = Parameter(torch.empty(1000, 300, device=device))

    def forward(self, batch: Any) -> Tensor:
        return torch.full((len(batch.token_ids), 300), float(self.weight.data[0, 0]))

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        return hidden[rows] @ self.weight.data.T

    def kv_layout(self) -> KVLayout:
        return KVLayout(groups=(), layers=())


def test_a_model_that_cannot_be_traced_is_estimated() -> None:
    model: Any = Peeking
    found = measure_footprint(lambda ops, device: model(device), 1000, BOUNDS)
    assert found.weight_bytes == 1000 * 300 * 4
    rows = 4 * (2 * 4 * 1000) + 4 * 4 * 100
    assert found.workspace_bytes == 64 * 2 * 1300 * 4 + rows + workspace_bytes(1000)
    assert footprint.LARGEST_REAL < 1000 * 300


def test_a_dtype_the_quantization_cannot_compute_in_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = builder(path)
    monkeypatch.setattr(worker, "_quant_spec", SimpleNamespace(name="eightbit", dtypes=("bfloat16",)))
    with pytest.raises(ConfigError, match=r"model\.dtype=float32.*'eightbit'.*bfloat16"):
        worker.footprint("float32", "float32", BOUNDS)
    with pytest.raises(ConfigError, match="'floaty'"):
        worker.footprint("bfloat16", "floaty", BOUNDS)


def test_a_checkpoint_that_does_not_fit_fails_with_the_tensor_named(path: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"intermediate_size": 168}))
    with pytest.raises(WeightError, match=r"mlp\.gate_proj\.weight") as raised:
        build(tmp_path)
    assert raised.value.tensor is not None


def test_loading_reports_progress(path: Path) -> None:
    reports: list[Progress] = []
    worker = builder(path)
    _, resolved = build(path)
    worker.build(resolved, reports.append).close()
    loads = [report for report in reports if report.stage == "load"]
    assert loads[-1].done == loads[-1].total


def test_cpu_zeros_are_aligned_and_cost_no_memory_until_written() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    sizes = []
    for _ in range(3):  # other threads of the test process take memory, too
        before = resident()
        cache = zeros((1 << 14, 16, 4, 128), torch.bfloat16, torch.device("cpu"))
        sizes.append(resident() - before)
    assert cache.numel() * 2 == 1 << 28
    assert min(sizes) < 1 << 25
    assert cache.data_ptr() % ALIGNMENT == 0 and cache.is_contiguous()
    assert not bool(cache[17].any())
    cache[17, 3] = 1.0
    assert float(cache.sum()) == 4 * 128


def test_each_layer_gets_its_groups_blocks_and_the_null_block(tmp_path: Path) -> None:
    from infer.models.gemma3 import infer_models

    config = next(spec.example for spec in infer_models())
    runner, resolved = build(make_checkpoint(config, tmp_path))
    layout = runner._loaded().kv_layout()
    assert len(layout.groups) == 2
    for group, decided in zip(layout.groups, resolved.cache.groups, strict=True):
        for layer in group.layer_ids:
            keys, values = runner._kv[layer]
            assert keys.shape == values.shape
            assert keys.shape[:2] == (decided.num_blocks + 1, resolved.cache.block_size)
    runner.close()
