"""`config.resolve`: sizes, lengths, contradictions and refusals, in numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infer.config.engine import EngineConfig
from infer.config.memory_plan import format_memory_plan
from infer.config.model import GenerationDefaults, KVGroup, KVLayer, KVLayout, ModelConfig, ModelFootprint, StepBounds
from infer.config.platform import PlatformLimits
from infer.config.resolve import choose_dtype, resolve, resolve_within
from infer.errors import ConfigError

GIB = 2**30
PAGE = 2 * 2 * 16 * 3 * 64 * 2  # two layers, keys and values, 16 tokens, 3 heads of 64, bf16


def model(**facts: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "path": Path("/m"),
        "format": "safetensors",
        "architecture": "LlamaForCausalLM",
        "identity": "sha256:0",
        "vocab_size": 100,
        "max_position": 2048,
        "dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_ids": (2,),
        "quantization": None,
        "generation": GenerationDefaults(),
        "raw": {},
    }
    return ModelConfig(**{**values, **facts})


def limits(**facts: Any) -> PlatformLimits:
    values: dict[str, Any] = {
        "name": "cpu",
        "total_memory": 64 * GIB,
        "available_memory": 32 * GIB,
        "dtypes": ("bfloat16", "float32"),
        "threads": 4,
    }
    return PlatformLimits(**{**values, **facts})


ONE_GROUP = KVLayout(
    groups=(KVGroup(name="full", layer_ids=(0, 1)),),
    layers=tuple(KVLayer(layer_id=i, num_kv_heads=3, head_size=64) for i in (0, 1)),
)
TWO_GROUPS = KVLayout(
    groups=(KVGroup(name="full", layer_ids=(0,)), KVGroup(name="sliding", layer_ids=(1, 2), window=32)),
    layers=tuple(KVLayer(layer_id=i, num_kv_heads=1, head_size=64) for i in (0, 1, 2)),
)


def footprint(**facts: Any) -> ModelFootprint:
    values: dict[str, Any] = {
        "weight_bytes": GIB,
        "load_transient_bytes": 64 * 2**20,
        "workspace_bytes": 2**20,
        "bounds": StepBounds(num_tokens=512, num_rows=64, max_model_len=2**40),
        "kv_layout": ONE_GROUP,
    }
    return ModelFootprint(**{**values, **facts})


def test_silence_is_decided() -> None:
    decided = resolve(EngineConfig(), model(), limits(), footprint())
    assert (decided.dtype, decided.platform, decided.threads) == ("bfloat16", "cpu", 4)
    assert (decided.scheduler.in_flight_depth, decided.scheduler.max_num_active_seqs) == (2, 64)
    assert decided.scheduler.max_model_len == 2048
    assert (decided.cache.dtype, decided.cache.prefix_caching) == ("bfloat16", True)
    # max_num_seqs sequences of 2048 tokens, no more, and the share the scheduler keeps free on top.
    blocks = decided.cache.groups[0].num_blocks
    assert blocks - int(blocks * 0.01) == 64 * 128
    assert decided.notices == ()


@pytest.mark.row("KV-SIZING", "kv_cache_memory=N gives exactly floor(N/page_bytes) blocks")
@pytest.mark.parametrize("extra", [0, 1, PAGE - 1])
def test_memory_gives_exactly_floor_blocks(extra: int) -> None:
    decided = resolve(EngineConfig(cache={"memory": 700 * PAGE + extra}), model(), limits(), footprint())
    assert decided.cache.groups[0].bytes_per_block == PAGE
    assert decided.cache.groups[0].num_blocks == 700
    assert decided.memory.kv_cache == 701 * PAGE  # the null block comes on top


def test_num_blocks_are_those_of_the_full_group() -> None:
    decided = resolve(EngineConfig(cache={"num_blocks": 1000}), model(), limits(), footprint(kv_layout=TWO_GROUPS))
    full, sliding = decided.cache.groups
    assert full.num_blocks == 1000
    # Alone in use: 64 sequences x (ceil((32 + 512) / 16) + 1) blocks would be 2240, so it has as many as the full group.
    assert sliding.num_blocks == 1000
    assert sliding.bytes_per_block == 2 * full.bytes_per_block


def test_a_sliding_group_stops_at_what_it_can_use() -> None:
    config = EngineConfig(scheduler={"max_num_seqs": 2, "max_num_batched_tokens": 64}, cache={"memory": 8 * 2**20})
    full, sliding = resolve(config, model(), limits(), footprint(kv_layout=TWO_GROUPS)).cache.groups
    assert sliding.num_blocks == 2 * ((32 + 64) // 16 + 1)  # 1 % of 14 blocks is no block
    spent = full.num_blocks * full.bytes_per_block + sliding.num_blocks * sliding.bytes_per_block
    assert 8 * 2**20 - full.bytes_per_block < spent <= 8 * 2**20


def test_default_cache_is_capped_at_two_gib_and_at_half_of_the_rest() -> None:
    big = ModelFootprint(
        **{
            **{f: getattr(footprint(), f) for f in ModelFootprint.__struct_fields__},
            "kv_layout": KVLayout(
                groups=(KVGroup(name="full", layer_ids=tuple(range(32))),),
                layers=tuple(KVLayer(layer_id=i, num_kv_heads=8, head_size=128) for i in range(32)),
            ),
        }
    )
    decided = resolve(EngineConfig(), model(), limits(), big)
    group = decided.cache.groups[0]
    assert group.num_blocks == 2 * GIB // group.bytes_per_block
    tight = resolve(EngineConfig(), model(), limits(available_memory=3 * GIB), big)
    assert tight.memory.kv_cache <= GIB + group.bytes_per_block
    assert tight.memory.kv_cache > 0.9 * GIB


def test_memory_fraction_is_of_what_weights_and_workspace_leave() -> None:
    decided = resolve(EngineConfig(cache={"memory_fraction": 0.5}), model(), limits(), footprint())
    rest = 32 * GIB - GIB - decided.memory.workspace
    assert decided.cache.groups[0].num_blocks == rest // 2 // PAGE


def test_the_whole_fraction_still_fits() -> None:
    plan = resolve(EngineConfig(cache={"memory_fraction": 1.0}), model(), limits(), footprint()).memory
    assert plan.weights + plan.kv_cache + plan.workspace + plan.load_transient <= plan.available


def test_a_silent_length_is_lowered_with_a_notice() -> None:
    decided = resolve(EngineConfig(cache={"num_blocks": 10}), model(), limits(), footprint())
    assert decided.scheduler.max_model_len == 160
    assert "160" in decided.notices[0] and "2048" in decided.notices[0] and "cache.num_blocks=10" in decided.notices[0]


def test_a_stated_length_is_never_lowered() -> None:
    config = EngineConfig(model={"max_model_len": 1000}, cache={"memory": 10 * PAGE})
    with pytest.raises(ConfigError, match=r"model\.max_model_len=1000 .*cache\.memory=\d+.* 160 tokens") as caught:
        resolve(config, model(), limits(), footprint())
    assert caught.value.fields == ("model.max_model_len", "cache.memory")


def test_the_watermark_counts() -> None:
    # Of 200 blocks 2 are kept free when a request is admitted: a sequence of 200 blocks could never start.
    sizes = {"num_blocks": 200}
    assert (
        resolve(EngineConfig(cache=sizes), model(max_position=3200), limits(), footprint()).scheduler.max_model_len
        == 3168
    )
    with pytest.raises(ConfigError, match="3168"):
        resolve(
            EngineConfig(model={"max_model_len": 3200}, cache=sizes), model(max_position=3200), limits(), footprint()
        )
    none = EngineConfig(model={"max_model_len": 3200}, cache={**sizes, "watermark": 0})
    assert resolve(none, model(max_position=3200), limits(), footprint()).scheduler.max_model_len == 3200


def test_a_lone_sliding_group_bounds_no_length() -> None:
    sliding = KVLayout(groups=(KVGroup(name="s", layer_ids=(0,), window=32),), layers=ONE_GROUP.layers[:1])
    config = EngineConfig(scheduler={"max_num_batched_tokens": 64}, cache={"num_blocks": 7})
    assert resolve(config, model(), limits(), footprint(kv_layout=sliding)).scheduler.max_model_len == 2048
    few = EngineConfig(scheduler={"max_num_batched_tokens": 64}, cache={"num_blocks": 6})
    assert resolve(few, model(), limits(), footprint(kv_layout=sliding)).scheduler.max_model_len == 96


def test_a_stated_length_gets_its_cache_when_memory_allows() -> None:
    # One sequence of 2048 tokens needs 3 MiB; half of what is left is less.
    tight = limits(available_memory=GIB + 68 * 2**20)
    config = EngineConfig(model={"max_model_len": 2048})
    few = footprint(workspace_bytes=0)
    assert resolve(config, model(), tight, few).cache.groups[0].num_blocks >= 129


def test_longer_than_the_checkpoint_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len=4096.*2048"):
        resolve(EngineConfig(model={"max_model_len": 4096}), model(), limits(), footprint())


def test_less_than_one_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no block at all.*cache\.memory=100"):
        resolve(EngineConfig(cache={"memory": 100}), model(), limits(), footprint())


@pytest.mark.row("X-MEMPLAN", "refusal happens before any weight file is opened")
@pytest.mark.row("KV-SIZING", "asking for more than exists fails before weights load with the numbers in the message")
def test_more_than_exists_is_refused_with_the_numbers() -> None:
    # The paths of `model()` do not exist: nothing can have been opened.
    with pytest.raises(ConfigError) as caught:
        resolve(EngineConfig(cache={"memory": 40 * GIB}), model(), limits(), footprint())
    message = str(caught.value)
    for number in ("1.0 GiB", "40.0 GiB", "32.0 GiB", "64.0 MiB"):
        assert number in message
    assert caught.value.fields == ("cache.memory",)
    assert "left for the KV cache" in message


@pytest.mark.parametrize(
    ("facts", "field"),
    [
        ({"weight_bytes": 33 * GIB}, "model.ref"),
        ({"workspace_bytes": 512 * GIB}, "scheduler.max_num_batched_tokens"),
    ],
)
def test_refusal_says_what_to_lower(facts: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match="does not fit in memory") as caught:
        resolve(EngineConfig(), model(), limits(), footprint(**facts))
    assert field in caught.value.fields


@pytest.mark.row("LOAD-CONFIG-SURFACE", "impossible combinations fail before load naming both fields")
@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({"scheduler": {"max_num_active_seqs": 65}}, ("scheduler.max_num_active_seqs", "scheduler.max_num_seqs")),
        (
            {"scheduler": {"max_long_partial_prefills": 3, "max_num_partial_prefills": 2}},
            ("scheduler.max_long_partial_prefills", "scheduler.max_num_partial_prefills"),
        ),
        (
            {"scheduler": {"long_prefill_threshold": 64, "chunked_prefill": False}},
            ("scheduler.long_prefill_threshold", "scheduler.chunked_prefill"),
        ),
        (
            {"scheduler": {"chunked_prefill": False}, "model": {"max_model_len": 513}},
            ("scheduler.chunked_prefill", "model.max_model_len", "scheduler.max_num_batched_tokens"),
        ),
        ({"cache": {"radix_cache": True, "prefix_caching": False}}, ("cache.radix_cache", "cache.prefix_caching")),
        ({"cache": {"memory": 1, "num_blocks": 1}}, ("cache.memory", "cache.num_blocks")),
        (
            {"cache": {"memory": 1, "num_blocks": 1, "memory_fraction": 0.5}},
            ("cache.memory", "cache.num_blocks", "cache.memory_fraction"),
        ),
    ],
)
def test_contradictions_name_both_fields(settings: dict[str, Any], fields: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**settings)
    assert caught.value.fields == fields
    for field in fields:
        assert field in str(caught.value)


def test_whole_prompts_need_the_whole_budget_also_when_the_length_is_the_checkpoints() -> None:
    with pytest.raises(ConfigError, match=r"chunked_prefill=False.*2048.*512"):
        resolve(EngineConfig(scheduler={"chunked_prefill": False}), model(), limits(), footprint())


def test_radix_cache_is_prefix_caching() -> None:
    off = EngineConfig(cache={"radix_cache": False})
    assert not resolve(off, model(), limits(), footprint()).cache.prefix_caching
    assert EngineConfig.model_validate_json(off.model_dump_json()) == off


@pytest.mark.parametrize(
    ("asked", "checkpoint", "native", "expected"),
    [
        ("auto", "bfloat16", ("bfloat16", "float32"), "bfloat16"),
        ("auto", "bfloat16", ("float32",), "float32"),
        ("auto", "float16", ("bfloat16", "float32"), "float32"),
        ("float16", "bfloat16", ("float32",), "float16"),
    ],
)
def test_dtype(asked: str, checkpoint: str, native: tuple[str, ...], expected: str) -> None:
    config = EngineConfig(model={"dtype": asked})
    facts, offer = model(dtype=checkpoint), limits(dtypes=native)
    assert choose_dtype(config, facts, offer) == expected
    decided = resolve(config, facts, offer, footprint())
    assert decided.dtype == expected
    assert bool(decided.notices) == (expected != checkpoint or expected not in native)


def test_cache_dtype_counts_in_the_bytes() -> None:
    decided = resolve(EngineConfig(cache={"dtype": "float32", "num_blocks": 500}), model(), limits(), footprint())
    assert (decided.cache.dtype, decided.cache.groups[0].bytes_per_block) == ("float32", 2 * PAGE)


def test_a_model_without_attention_has_no_groups() -> None:
    decided = resolve(EngineConfig(), model(), limits(), footprint(kv_layout=KVLayout(groups=(), layers=())))
    assert (decided.cache.groups, decided.memory.kv_cache, decided.scheduler.max_model_len) == ((), 0, 2048)


def test_plan_in_words() -> None:
    line = format_memory_plan(resolve(EngineConfig(), model(), limits(), footprint()).memory)
    assert line.startswith("weights 1.0 GiB + KV cache 194 MiB + workspace ")
    assert "of 32.0 GiB available" in line and "\n" not in line


def measured(per_token: int, seen: list[int]) -> Callable[[StepBounds], ModelFootprint]:
    """A footprint whose workspace grows with the longest sequence; notes the lengths it is asked for."""

    def measure(bounds: StepBounds) -> ModelFootprint:
        seen.append(bounds.max_model_len)
        return footprint(workspace_bytes=per_token * bounds.max_model_len, bounds=bounds)

    return measure


def test_the_workspace_is_that_of_the_length_that_fits() -> None:
    """The cache holds less than the checkpoint's length, so the workspace is planned again for what it holds."""
    seen: list[int] = []
    config = EngineConfig(cache={"num_blocks": 100})
    decided = resolve_within(config, model(max_position=32_000), limits(), measured(1000, seen))
    assert decided.scheduler.max_model_len == 99 * 16
    assert seen == [32_000, 99 * 16] and decided.memory.workspace == 1000 * 99 * 16
    assert any("max_model_len 1584" in notice for notice in decided.notices)


def test_a_length_whose_workspace_does_not_fit_is_lowered_unless_it_was_stated() -> None:
    seen: list[int] = []
    small = EngineConfig(cache={"num_blocks": 4000})
    decided = resolve_within(small, model(max_position=131_072), limits(), measured(2**20, seen))
    assert seen[0] == 131_072 and decided.scheduler.max_model_len < 32_768
    assert decided.memory.workspace == 2**20 * decided.scheduler.max_model_len
    stated = EngineConfig(cache={"num_blocks": 9000}, model={"max_model_len": 131_072})
    with pytest.raises(ConfigError, match="does not fit") as caught:
        resolve_within(stated, model(max_position=131_072), limits(), measured(2**20, []))
    assert "scheduler.max_num_batched_tokens" in caught.value.fields


def test_a_workspace_that_never_fits_is_refused() -> None:
    seen: list[int] = []
    with pytest.raises(ConfigError, match="does not fit"):
        resolve_within(EngineConfig(), model(max_position=131_072), limits(), measured(2**30, seen))
    assert seen == sorted(seen, reverse=True) and seen[-1] <= 1024


def test_a_dtype_that_the_platform_cannot_compute_in_is_refused() -> None:
    """Found by the combinations: with a cache dtype stated beside it, the kernels raised a TypeError."""
    config = EngineConfig(model={"dtype": "float16"}, cache={"dtype": "bfloat16"})
    with pytest.raises(
        ConfigError, match=r"model\.dtype=float16: platform 'cpu' computes in float32, bfloat16"
    ) as refused:
        choose_dtype(config, model(), limits(compute_dtypes=("float32", "bfloat16")))
    assert refused.value.fields == ("model.dtype", "platform.name")
