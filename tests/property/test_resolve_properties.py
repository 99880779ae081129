"""Invariants of configuration decisions over drawn models, machines and settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from infer.config.engine import EngineConfig
from infer.config.memory_plan import MemoryPlan
from infer.config.model import GenerationDefaults, KVGroup, KVLayer, KVLayout, ModelConfig, ModelFootprint, StepBounds
from infer.config.platform import PlatformLimits
from infer.config.resolve import ResolvedConfig, resolve
from infer.errors import ConfigError

MIB = 2**20


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    windows = draw(st.lists(st.one_of(st.none(), st.integers(1, 4096)), min_size=0, max_size=2))
    groups, layers = [], []
    for index, window in enumerate(windows):
        heads, size = draw(st.integers(1, 8)), draw(st.sampled_from([16, 64, 128]))
        ids = tuple(range(len(layers), len(layers) + draw(st.integers(1, 6))))
        groups.append(KVGroup(name=f"g{index}", layer_ids=ids, window=window))
        layers += [KVLayer(layer_id=i, num_kv_heads=heads, head_size=size) for i in ids]
    return KVLayout(groups=tuple(groups), layers=tuple(layers))


footprints = st.builds(
    ModelFootprint,
    weight_bytes=st.integers(0, 512 * MIB),
    load_transient_bytes=st.integers(0, 64 * MIB),
    workspace_bytes=st.integers(0, 64 * MIB),
    bounds=st.builds(
        StepBounds,
        num_tokens=st.just(512),
        num_rows=st.just(64),
        max_model_len=st.just(2**40) | st.integers(64, 100_000),
    ),
    kv_layout=layouts(),
)
models = st.builds(
    ModelConfig,
    path=st.just(Path("/nowhere")),
    format=st.just("safetensors"),
    architecture=st.just("A"),
    identity=st.just("i"),
    vocab_size=st.just(100),
    max_position=st.integers(500, 200_000),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    bos_token_id=st.none(),
    eos_token_ids=st.just((1,)),
    quantization=st.none(),
    generation=st.just(GenerationDefaults()),
    raw=st.just({}),
)
machines = st.builds(
    PlatformLimits,
    name=st.just("cpu"),
    total_memory=st.just(64 * 1024 * MIB),
    available_memory=st.integers(512 * MIB, 64 * 1024 * MIB),
    dtypes=st.sampled_from([("float32",), ("bfloat16", "float32")]),
    threads=st.integers(1, 64),
)


@st.composite
def cache_settings(draw: st.DrawFn) -> dict[str, Any]:
    size = draw(st.sampled_from(["none", "memory", "num_blocks", "memory_fraction"]))
    values: dict[str, Any] = {"block_size": draw(st.integers(1, 128))}
    if size == "memory":
        values["memory"] = draw(st.integers(1, 1024 * MIB))
    elif size == "num_blocks":
        values["num_blocks"] = draw(st.integers(1, 5_000))
    elif size == "memory_fraction":
        values["memory_fraction"] = draw(st.floats(0.001, 1.0))
    values["watermark"] = draw(st.sampled_from([0.0, 0.01, 0.3, 0.9]))
    values["dtype"] = draw(st.sampled_from(["auto", "float32", "bfloat16"]))
    return values


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    seqs = draw(st.integers(1, 512))
    scheduler: dict[str, Any] = {
        "max_num_seqs": seqs,
        "max_num_batched_tokens": draw(st.integers(1, 8192)),
        "max_num_active_seqs": draw(st.one_of(st.none(), st.integers(1, seqs))),
        "in_flight_depth": draw(st.sampled_from(["auto", 1, 2, 8])),
        "max_num_waiting": draw(st.one_of(st.none(), st.integers(0, 10))),
    }
    return EngineConfig(
        model={
            "ref": draw(st.sampled_from(["a/b", "/m", "pypi:x==1"])),
            "dtype": draw(st.sampled_from(["auto", "float32", "bfloat16"])),
            "max_model_len": draw(st.one_of(st.none(), st.integers(1, 500))),
        },
        scheduler=scheduler,
        cache=draw(cache_settings()) | draw(st.sampled_from([{}, {"radix_cache": False}, {"prefix_caching": False}])),
        plugins={
            "allow": draw(st.one_of(st.none(), st.just(("a", "b")))),
            "prefer": draw(st.sampled_from([{}, {"model:llama": "other"}])),
        },
    )


def decided(config: EngineConfig, model: ModelConfig, limits: PlatformLimits, sizes: ModelFootprint) -> ResolvedConfig:
    try:
        return resolve(config, model, limits, sizes)
    except ConfigError as error:
        assert error.fields and str(error)  # every refusal says what to change
        assume(False)
        raise AssertionError from error


def total(plan: MemoryPlan) -> int:
    return plan.weights + plan.kv_cache + plan.workspace + plan.load_transient


@pytest.mark.row("KV-SIZING", "asking for more than exists fails before weights load")
@given(configs(), models, machines, footprints)
def test_what_is_decided_fits(
    config: EngineConfig, model: ModelConfig, limits: PlatformLimits, sizes: ModelFootprint
) -> None:
    made = decided(config, model, limits, sizes)
    plan, cache = made.memory, made.cache
    assert total(plan) <= limits.available_memory
    usable = sum(group.num_blocks * group.bytes_per_block for group in cache.groups)
    assert plan.kv_cache == usable + sum(group.bytes_per_block for group in cache.groups)
    if config.cache.memory is not None:
        assert usable <= config.cache.memory
    if config.cache.memory_fraction is not None:
        assert usable <= config.cache.memory_fraction * (limits.available_memory - plan.weights - plan.workspace)
    for group in cache.groups:  # one sequence of the longest length can always run alone
        needed = -(-made.scheduler.max_model_len // cache.block_size)
        if group.window is not None:
            window = -(-(group.window + made.scheduler.max_num_batched_tokens) // cache.block_size) + 1
            needed = min(needed, window)
        assert group.num_blocks - int(cache.watermark * group.num_blocks) >= needed
    assert 1 <= made.scheduler.max_model_len <= model.max_position
    if config.model.max_model_len is not None:
        assert made.scheduler.max_model_len == config.model.max_model_len


@given(configs(), models, machines, footprints, st.integers(1, 4096 * MIB))
def test_more_memory_never_gives_less(
    config: EngineConfig, model: ModelConfig, limits: PlatformLimits, sizes: ModelFootprint, more: int
) -> None:
    before = decided(config, model, limits, sizes)
    bigger = PlatformLimits(
        name=limits.name,
        total_memory=limits.total_memory + more,
        available_memory=limits.available_memory + more,
        dtypes=limits.dtypes,
        threads=limits.threads,
    )
    after = resolve(config, model, bigger, sizes)
    assert after.scheduler.max_model_len >= before.scheduler.max_model_len
    for old, new in zip(before.cache.groups, after.cache.groups, strict=True):
        assert new.num_blocks >= old.num_blocks


@given(models, footprints, st.integers(1, 2048 * MIB), st.integers(0, 64 * MIB))
def test_a_bigger_budget_never_gives_less(model: ModelConfig, sizes: ModelFootprint, memory: int, more: int) -> None:
    limits = PlatformLimits(name="cpu", total_memory=2**50, available_memory=2**50, dtypes=("float32",), threads=1)
    before = decided(EngineConfig(cache={"memory": memory}), model, limits, sizes)
    after = resolve(EngineConfig(cache={"memory": memory + more}), model, limits, sizes)
    for old, new in zip(before.cache.groups, after.cache.groups, strict=True):
        assert new.num_blocks >= old.num_blocks
    if len(before.cache.groups) == 1:
        assert before.cache.groups[0].num_blocks == memory // before.cache.groups[0].bytes_per_block
    elif before.cache.groups:  # no budget is left that another block of every group would fit in
        usable = sum(group.num_blocks * group.bytes_per_block for group in before.cache.groups)
        assert memory - usable < sum(group.bytes_per_block for group in before.cache.groups)


@given(configs(), models, machines, footprints)
def test_same_inputs_same_decision(
    config: EngineConfig, model: ModelConfig, limits: PlatformLimits, sizes: ModelFootprint
) -> None:
    copy = EngineConfig.model_validate_json(config.model_dump_json())
    assert decided(config, model, limits, sizes) == resolve(copy, model, limits, sizes)


@pytest.mark.row("LOAD-CONFIG-SURFACE", "config to JSON to config is identity")
@example(EngineConfig(cache={"radix_cache": False}))
@example(EngineConfig())
@given(configs())
def test_config_survives_json(config: EngineConfig) -> None:
    text = config.model_dump_json()
    again = EngineConfig.model_validate_json(text)
    assert again == config
    assert again.model_dump_json() == text
