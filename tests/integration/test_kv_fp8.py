"""Keys and values in 8-bit floats through the whole engine: how many tokens fit, whose scales count, what it costs in
accuracy, what is refused, and that prefix hits, forks and preemption read what was written."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from infer import ConfigError, Engine, EngineConfig, SamplingParams
from infer.config.cache_dtype import choose_cache_dtype
from infer.config.engine import PluginsSection
from infer.config.resolve import choose_dtype, resolve_within
from infer.engine.startup import _load_tokenizer
from infer.engine.statistics import EngineStatistics
from infer.engine.step import SamplingSpec
from infer.engine.worker.builder import WorkerBuilder
from infer.engine.worker.runner import Runner, null_plan
from infer.errors import ModelError
from infer.plugins.manager import build_registry
from infer.weights.facts import read_model_config

from .engine_support import LLAMA, engine_config, parts_of, prompt, write_checkpoint
from .test_models_real import TEXTS

pytestmark = pytest.mark.anyio

LOGIT_BOUND = 1.0
"""Root mean square error of the logits of SmolLM2-135M, which reach 30, over the corpus; found: 0.51."""
KL_BOUND = 0.05
"""Nats on average over the corpus; found: 0.018."""


def make_runner(path: Path, platform: str, cache_dtype: str, kernel_cache: Path) -> Runner:
    registry = build_registry(PluginsSection(allow=()))
    facts = read_model_config(path, "test", registry.specs("model"))
    config = EngineConfig(
        model={"ref": str(path), "dtype": "float32", "max_model_len": 512},
        cache={"dtype": cache_dtype, "num_blocks": 64},
        scheduler={"max_num_seqs": 2, "max_num_batched_tokens": 512},
    )
    worker = WorkerBuilder(registry, facts, platform, 2, kernel_cache)
    limits = worker.limits()
    dtype = choose_dtype(config, facts, limits)
    cache = choose_cache_dtype(config, dtype)
    return worker.build(resolve_within(config, facts, limits, lambda bounds: worker.footprint(dtype, cache, bounds)))


def logits(runner: Runner, ids: list[int], chunk: int) -> Tensor:
    """Of every position, [T, V] fp32; the prompt in chunks, so that most keys are read back from the cache."""
    model: Any = runner._model
    found, forward = [], model.forward

    def recorded(batch: Any) -> Tensor:
        hidden: Tensor = forward(batch)
        found.append(model.logits(hidden, torch.arange(len(hidden))).float().clone())
        return hidden

    model.forward = recorded
    for start in range(0, len(ids), chunk):
        count = min(chunk, len(ids) - start)
        plan = null_plan([(start, count)], 1, [SamplingSpec(seed=0)])
        if start:
            plan.admissions.clear()
        else:
            admission = plan.admissions[0]
            admission.token_ids[:] = ids
            admission.prompt_len = len(ids)
            admission.block_ids[0].extend(range(1, -(-len(ids) // 16) + 1))
        runner.execute(plan)
    del model.forward
    return torch.cat(found)


@pytest.mark.row("KV-FP8", "logit error on a fixed corpus stays below a stated bound")
@pytest.mark.parametrize("platform", ["cpu", pytest.param("reference", marks=pytest.mark.heavy)])
def test_logit_error_on_a_corpus(smollm2_gguf: Path, kernel_cache: Path, platform: str) -> None:
    tokenizer = _load_tokenizer(build_registry(PluginsSection(allow=())), smollm2_gguf)
    ids = tokenizer.encode("\n".join(TEXTS))[:320]
    exact, found = (
        logits(make_runner(smollm2_gguf, platform, cache, kernel_cache), ids, 40) for cache in ("float32", "fp8_e4m3")
    )
    wrong = (found - exact).square().mean().sqrt().item()
    p, q = exact.log_softmax(-1), found.log_softmax(-1)
    divergence = (p.exp() * (p - q)).sum(-1)
    print(f"{len(ids)} positions: logit error {wrong:.3f}, KL {divergence.mean():.4f} (most {divergence.max():.3f})")
    assert 0 < wrong < LOGIT_BOUND
    assert divergence.mean() < KL_BOUND


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), LLAMA)


def with_scales(source: Path, folder: Path, scales: dict[str, Tensor]) -> Path:
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | scales, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def error(found: Tensor, exact: Tensor) -> float:
    """Root mean square, as a share of the exact numbers'."""
    return float((found - exact).norm() / exact.norm())


@pytest.mark.row("KV-FP8", "checkpoint scales are used")
@pytest.mark.parametrize("platform", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("names", "shape"), [("{p}_scale", (1,)), ("{p}_proj.{p}_scale", ())], ids=["compressed-tensors", "modelopt"]
)
def test_checkpoint_scales(
    checkpoint: Path, tmp_path: Path, kernel_cache: Path, platform: str, names: str, shape: tuple[int, ...]
) -> None:
    """What lies in the cache is what a cache without scales holds, divided by them; a scale that ruins the rounding shows."""
    scales = {
        f"model.layers.{layer}.self_attn.{names.format(p=part)}": torch.full(shape, value)
        for layer in range(2)
        for part, value in (("k", 0.5 + layer), ("v", 0.25))
    }
    ids = prompt(40)
    plain = make_runner(checkpoint, platform, "float32", kernel_cache)
    scaled = make_runner(with_scales(checkpoint, tmp_path / "scaled", scales), platform, "fp8_e4m3", kernel_cache)
    exact, found = logits(plain, ids, 8), logits(scaled, ids, 8)
    assert error(found, exact) < 0.1
    used = (slice(1, 3), slice(None))  # the first layer's input is exact: bytes can be compared
    for kept, stored, scale in zip(plain._kv[0], scaled._kv[0], (0.5, 0.25), strict=True):
        expected = (kept[used] / scale).to(torch.float8_e4m3fn)
        assert torch.equal(stored[used].view(torch.uint8), expected.view(torch.uint8))
    ruined = {name: torch.full(shape, 1e5) for name in scales}
    far = make_runner(with_scales(checkpoint, tmp_path / "ruined", ruined), platform, "fp8_e4m3", kernel_cache)
    assert error(logits(far, ids, 8), exact) > 0.3
    untouched = make_runner(tmp_path / "ruined", platform, "float32", kernel_cache)  # no 8-bit cache: no scale
    assert torch.equal(logits(untouched, ids, 8), exact)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [(torch.tensor([0.0]), "k_scale is 0.0; a scale is a positive number"), (torch.ones(2), "is one number here")],
)
def test_a_scale_that_cannot_be_is_refused(
    checkpoint: Path, tmp_path: Path, kernel_cache: Path, tensor: Tensor, message: str
) -> None:
    folder = with_scales(checkpoint, tmp_path / "wrong", {"model.layers.1.self_attn.k_scale": tensor})
    with pytest.raises(ModelError, match=message):
        make_runner(folder, "cpu", "fp8_e4m3", kernel_cache)


@pytest.mark.row("KV-FP8", "token capacity is at least 1.9 times at equal bytes")
async def test_token_capacity_at_equal_bytes(checkpoint: Path, anyio_backend: Any) -> None:
    tokens = {}
    for dtype in ("bfloat16", "fp8_e4m3", "fp8"):
        config = engine_config(checkpoint, cache={"dtype": dtype, "memory": 2**20}, platform={"name": "cpu"})
        async with Engine(config) as engine:
            (group,) = engine.resolved.cache.groups
            tokens[dtype] = group.num_blocks * engine.resolved.cache.block_size
            worker: Any = parts_of(engine).executor
            assert worker._worker.measured()["kv_cache"] <= 2**20 + group.bytes_per_block + 4 * 64
    assert tokens["fp8_e4m3"] == tokens["fp8"] >= 1.9 * tokens["bfloat16"]


async def test_what_a_platform_does_not_store_is_refused_by_name(checkpoint: Path, anyio_backend: Any) -> None:
    with pytest.raises(ConfigError, match=r"cache.dtype=float16: platform 'cpu' stores .*fp8_e4m3") as refused:
        async with Engine(engine_config(checkpoint, cache={"dtype": "float16"}, platform={"name": "cpu"})):
            pass
    assert refused.value.fields == ("cache.dtype", "platform.name")


@pytest.mark.parametrize("platform", ["cpu", "reference"])
async def test_prefix_hits_forks_and_preemption(checkpoint: Path, anyio_backend: Any, platform: str) -> None:
    """On the native kernels to the bit. On the reference the answers may part where two tokens are nearly tied."""
    ask = SamplingParams(max_tokens=24, temperature=1.0, seed=5, n=3, logprobs=0, ignore_eos=True)
    prompts = [prompt(37) + prompt(9, i) for i in range(4)]

    async def answers(cache: dict[str, Any]) -> tuple[list[list[list[int]]], EngineStatistics]:
        config = engine_config(
            checkpoint, cache=cache | {"dtype": "fp8_e4m3"}, platform={"name": platform, "threads": 2}
        )
        done: dict[int, list[list[int]]] = {}
        async with Engine(config) as engine:

            async def one(index: int) -> None:
                result = await engine.generate(prompts[index], ask)
                done[index] = [choice.token_ids for choice in result.choices]

            async with anyio.create_task_group() as tasks:
                for index in range(len(prompts)):
                    tasks.start_soon(one, index)
            return [done[index] for index in range(len(prompts))], engine.statistics()

    roomy, _ = await answers({"num_blocks": 200, "prefix_caching": False})
    tight, seen = await answers({"num_blocks": 14})
    assert seen.preemptions and seen.prefix_hit_tokens
    assert all(len(choice) == 24 for answer in tight for choice in answer)
    if platform == "cpu":
        assert tight == roomy


@pytest.mark.row("KV-DEVICE-RESIDENCY", "on CPU the storage pointers of all caches never change")
@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("platform", ["cpu", "reference"])
async def test_caches_stay_where_they_are(checkpoint: Path, anyio_backend: Any, platform: str, dtype: str) -> None:
    """Over 100 decode steps with new requests, forks, prefix hits and an abort among them."""
    config = engine_config(checkpoint, cache={"dtype": dtype, "num_blocks": 120}, platform={"name": platform})
    async with Engine(config) as engine:
        worker: Any = parts_of(engine).executor
        runner = worker._worker

        def places() -> list[tuple[int, int, int]]:
            pairs = [tensor for pair in runner._kv.values() for tensor in pair]
            return [(id(t), t.data_ptr(), t.untyped_storage().data_ptr()) for t in pairs]

        before, steps = places(), []
        begin = runner.begin

        def watched(plan: Any) -> Any:
            step = begin(plan)
            steps.append(places() == before)
            return step

        runner.begin = watched
        long = SamplingParams(max_tokens=110, temperature=0, ignore_eos=True)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.generate, prompt(30), long)
            for index in range(3):
                ask = SamplingParams(max_tokens=30, n=2, seed=index, ignore_eos=True)
                tasks.start_soon(engine.generate, prompt(30) + prompt(5, index), ask)
            async with engine.stream(prompt(8), long) as stream:
                async for _ in stream:
                    break
    assert len(steps) >= 100 and all(steps)
