"""`config.resolve` with captured rows: what is kept, what it takes, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from infer.config.capture import CaptureProfile
from infer.config.engine import EngineConfig
from infer.config.memory_plan import format_memory_plan
from infer.config.model import KVLayout
from infer.config.resolve import resolve
from infer.errors import ConfigError
from unit.config.test_resolve import GIB, footprint, limits, model

ROUTES = CaptureProfile(name="moe_routes", dtype="uint8", row_shape=(2, 4), layer_ids=(0, 1), num_experts=8)
"""8 bytes a row."""


def captured(**settings: Any) -> EngineConfig:
    section = settings.pop("capture", {"routed_experts": True})
    return EngineConfig(capture=section, **settings)


def test_capture_is_off_unless_asked_for() -> None:
    decided = resolve(EngineConfig(), model(), limits(), footprint())
    assert (decided.capture, decided.memory.capture_steps, decided.memory.capture_store) == (None, 0, 0)
    assert "captured" not in format_memory_plan(decided.memory)


@pytest.mark.row("X-AUX", "bounded: a store for every KV block by default, capture.max_bytes at most")
def test_stores_have_an_object_for_every_block_or_as_many_as_max_bytes_allows() -> None:
    """20 blocks of 16 rows of 8 bytes: objects of 128 bytes, 2,560 in all; 8 sequences, so 16 batches may wait."""
    asked: dict[str, Any] = {"cache": {"num_blocks": 20}, "scheduler": {"max_num_seqs": 8}}
    asked["model"] = {"max_model_len": 256}
    decided = resolve(captured(**asked), model(), limits(), footprint(captures=(ROUTES,)))
    assert decided.capture is not None
    assert (decided.capture.num_objects, decided.capture.store_bytes()) == ({"moe_routes": 20}, 2560)
    assert (decided.capture.queue_size, decided.capture.block_size, decided.capture.max_step_tokens) == (16, 16, 512)
    assert decided.memory.capture_store == 2560
    assert decided.memory.capture_steps == 512 * (2 * 4 * 4 + 2 * 8)
    assert "captured rows 24.0 KiB in steps and 2.5 KiB kept" in format_memory_plan(decided.memory)
    asked["capture"] = {"routed_experts": True, "max_bytes": 1000}
    bounded = resolve(captured(**asked), model(), limits(), footprint(captures=(ROUTES,)))
    assert bounded.capture is not None and bounded.capture.num_objects == {"moe_routes": 7}
    assert bounded.capture.profile("moe_routes") is ROUTES and bounded.capture.profile("other") is None


def test_a_store_smaller_than_one_object_is_refused() -> None:
    config = captured(capture={"routed_experts": True, "max_bytes": 127})
    with pytest.raises(ConfigError, match=r"capture\.max_bytes=127 is less than the 128 bytes") as caught:
        resolve(config, model(), limits(), footprint(captures=(ROUTES,)))
    assert caught.value.fields == ("capture.max_bytes", "cache.block_size")


def test_captured_rows_take_their_share_of_the_memory_for_blocks() -> None:
    """With rows as large as their KV, half as many blocks fit into all of the memory."""
    wide = CaptureProfile(name="hidden_states", dtype="bfloat16", row_shape=(1, 2 * 2 * 3 * 64), layer_ids=(0,))
    tight = limits(available_memory=2 * GIB)

    def blocks(config: EngineConfig, **facts: Any) -> int:
        decided = resolve(config, model(), tight, footprint(**facts))
        assert decided.memory.total + decided.memory.load_transient <= 2 * GIB
        return decided.cache.groups[0].num_blocks

    fraction = {"cache": {"memory_fraction": 1.0}}
    alone = blocks(EngineConfig(**fraction))
    both = blocks(captured(capture={"hidden_layers": [0]}, **fraction), captures=(wide,))
    assert both == pytest.approx(alone / 2, rel=0.01)


def test_a_store_that_does_not_fit_says_what_to_lower() -> None:
    wide = CaptureProfile(name="hidden_states", dtype="float32", row_shape=(64, 4096), layer_ids=tuple(range(64)))
    config = captured(capture={"hidden_layers": list(range(64))}, cache={"num_blocks": 10_000})
    with pytest.raises(ConfigError, match=r"captured rows .* kept .*set capture\.max_bytes") as caught:
        resolve(config, model(), limits(), footprint(captures=(wide,)))
    assert caught.value.fields == ("capture.max_bytes",)


def test_capture_without_prefix_caching_or_from_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"capture\.fields needs cache\.prefix_caching=True"):
        captured(capture={"fields": ["mood"]}, cache={"prefix_caching": False})
    with pytest.raises(ConfigError, match=r"capture\.routed_experts: moe_routes cannot be captured from this model"):
        resolve(captured(), model(), limits(), footprint())
    nothing = KVLayout(groups=(), layers=())
    with pytest.raises(ConfigError, match="it has no KV cache"):
        resolve(captured(), model(), limits(), footprint(captures=(ROUTES,), kv_layout=nothing))


@pytest.mark.row(
    "X-AUX-KEYS", "a store in files takes no memory, may hold more than the KV cache, and its keys are of one run"
)
def test_a_store_in_files() -> None:
    settings: dict[str, Any] = {"cache": {"num_blocks": 20}, "model": {"max_model_len": 256}}

    def decide(**section: Any) -> Any:
        config = captured(capture={"routed_experts": True, "store_dir": "rows"} | section, **settings)
        return resolve(config, model(), limits(), footprint(captures=(ROUTES,)))

    first, second, larger = decide(), decide(), decide(max_bytes=128 * 50)
    assert first.memory.capture_store == larger.memory.capture_store == 0
    assert (first.capture.num_objects, larger.capture.num_objects) == ({"moe_routes": 20}, {"moe_routes": 50})
    assert decide(max_bytes=128 * 5).capture.num_objects == {"moe_routes": 5}
    assert len(first.capture.run) == 16 and first.capture.run != second.capture.run
    in_memory = resolve(
        captured(capture={"routed_experts": True, "max_bytes": 128 * 50}, **settings),
        *(model(), limits(), footprint(captures=(ROUTES,))),
    )
    assert in_memory.capture is not None
    assert (in_memory.capture.num_objects, in_memory.capture.run) == ({"moe_routes": 20}, b"")
    with pytest.raises(ConfigError, match="give one of them") as caught:
        decide(shared_memory=True)
    assert caught.value.fields == ("capture.store_dir", "capture.shared_memory")
