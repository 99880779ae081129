"""The memory plan on a GPU: the real wrappers of the kernels over tensors without numbers, for every kind of layer."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes.cuda_device import FakeDevice
from infer.backends.cuda import cuda_platform, platform
from infer.config.engine import PluginsSection
from infer.config.model import StepBounds
from infer.engine.worker import footprint
from infer.engine.worker.builder import WorkerBuilder
from infer.plugins.manager import build_registry
from infer.plugins.platform import Probe
from infer.testing.tiny_models import make_checkpoint
from infer.weights.facts import read_model_config


@pytest.mark.row("KV-WARMUP-PROFILE", "measures the worst-case step to decide how much KV is safe")
@pytest.mark.parametrize("name", ["gemma3", "qwen3_moe", "deepseek_v3"])
def test_a_model_is_planned_by_the_kernels_own_wrappers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "probe", lambda: Probe(True))
    monkeypatch.setattr(
        cuda_platform,
        "create",
        lambda threads, numerics: cuda_platform.CudaPlatform(FakeDevice(), invariant=numerics == "invariant"),
    )
    traced: list[int] = []
    trace = footprint.trace_worst_step

    def watched(*args: object, **options: bool) -> int:
        traced.append(trace(*args, **options))  # type: ignore[arg-type]
        return traced[-1]

    monkeypatch.setattr(footprint, "trace_worst_step", watched)
    registry = build_registry(PluginsSection(allow=()))
    facts = read_model_config(
        make_checkpoint(registry.get("model", name).example, tmp_path), "test", registry.specs("model")
    )

    def plan(numerics: str, **bounds: int) -> int:
        """An estimate by shapes, where tracing fails, is not traced."""
        builder = WorkerBuilder(registry, facts, "cuda", None, numerics=numerics)
        builder.footprint("bfloat16", "bfloat16", StepBounds(**bounds))
        return traced[-1]

    small = {"num_rows": 8, "num_tokens": 16, "max_model_len": 256}
    plain, invariant = plan("auto", **small), plan("invariant", **small)
    assert len(traced) == 2 and plain > 0
    # Keys are cut at fixed places in the invariant mode: the parts of long contexts lie side by side.
    longer = {"num_rows": 256, "num_tokens": 300, "max_model_len": 1 << 17}
    assert plan("invariant", **longer) - plan("auto", **longer) > 64 * (invariant - plain + 1)
