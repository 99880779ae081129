"""One request's tokens and log-probabilities have the same bits alone and in any company, on the native CPU kernels.

Random requests run one after the other, then together under another schedule: other chunks, block pools so small that
requests are preempted, with and without prefix cache, other depths and threads. Everything must be equal to the bit.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gguf_samples import write_block_llama
from infer import Engine, EngineConfig, SamplingParams
from infer.config.engine import PluginsSection
from infer.plugins.manager import build_registry
from infer.testing.tiny_models import make_checkpoint
from infer.types import Completion

MODELS = ("llama", "gemma3", "qwen3_moe", "qwen2_moe", "deepseek_v3")
"""Full attention; sliding windows and softcaps; experts; latent attention with grouped routing."""
BLOCKS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "Q2_K", "Q3_K")
"""A Llama whose weights stay in these blocks."""
CACHES = st.sampled_from(["auto", "fp8_e4m3"])
MADE = ("llama", "qwen3_moe", "qwen2_moe")
"""Models whose weights, the experts' too, become blocks while they are loaded: 32 wide everywhere."""
AT_LOAD = ("int8", "int4")
SHARED = 24
"""Tokens that prompts may begin with in common."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int]]:
    """Name -> (checkpoint, vocabulary)."""
    registry = build_registry(PluginsSection(allow=()))
    made = {}
    for name in MODELS:
        example = registry.get("model", name).example
        made[name] = (make_checkpoint(example, tmp_path_factory.mktemp(name)), int(example["vocab_size"]))
    wide = {"intermediate_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
    for name in MADE:
        example = dict(registry.get("model", name).example)
        example |= {key: size for key, size in wide.items() if key in example}
        path = make_checkpoint(example, tmp_path_factory.mktemp(f"{name}-wide"))
        made |= {f"{name}+{method}": (path, int(example["vocab_size"])) for method in AT_LOAD}
    folder = tmp_path_factory.mktemp("blocks")
    for kind in BLOCKS:
        made[kind] = (write_block_llama(folder / f"{kind}.gguf", kind), 32)
    return made


REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            "shared": st.integers(0, SHARED),
            "own": st.integers(1, 50),
            "max_tokens": st.integers(1, 20),
            "temperature": st.sampled_from([0.0, 1.0]),
            "top_p": st.sampled_from([1.0, 0.8]),
            "top_k": st.sampled_from([0, 10]),
            "presence_penalty": st.sampled_from([0.0, 0.5]),
        }
    ),
    min_size=2,
    max_size=8,
)


def prompt(request: dict[str, Any], index: int, vocabulary: int) -> list[int]:
    shared = np.random.default_rng(0).integers(3, vocabulary, SHARED)[: request["shared"]]
    own = np.random.default_rng(index + 1).integers(3, vocabulary, request["own"])
    return [int(token) for token in (*shared, *own)]


async def run(
    path: Path,
    dtype: str,
    cache: str,
    drawn: list[dict[str, Any]],
    vocabulary: int,
    *,
    together: bool,
    schedule: dict[str, Any],
    quantization: str | None = None,
) -> list[Completion]:
    config = EngineConfig(
        model={"ref": str(path), "dtype": dtype, "skip_tokenizer": True, "quantization": quantization},
        platform={"name": "cpu", "threads": schedule.get("threads", 2), "graphs": schedule.get("graphs", False)},
        cache={
            "num_blocks": schedule.get("blocks", 120),
            "prefix_caching": schedule.get("prefix_caching", True),
            "dtype": cache,
        },
        scheduler={
            "max_num_batched_tokens": schedule.get("budget", 256),
            "max_num_seqs": 8,
            "in_flight_depth": schedule.get("depth", 1),
        },
    )
    done: dict[int, Completion] = {}
    async with Engine(config) as engine:

        async def one(index: int) -> None:
            request = drawn[index]
            params = SamplingParams(
                max_tokens=request["max_tokens"],
                temperature=request["temperature"],
                top_p=request["top_p"],
                top_k=request["top_k"],
                presence_penalty=request["presence_penalty"],
                seed=index,
                logprobs=3,
                prompt_logprobs=0 if index % 3 == 2 else None,
                ignore_eos=True,
            )
            done[index] = await engine.generate(prompt(request, index, vocabulary), params)

        if together:
            async with anyio.create_task_group() as tasks:
                for index in range(len(drawn)):
                    tasks.start_soon(one, index)
        else:
            for index in range(len(drawn)):
                await one(index)
    return [done[index] for index in range(len(drawn))]


SCHEDULES = st.fixed_dictionaries(
    {
        "threads": st.sampled_from([1, 2, 3]),
        "budget": st.sampled_from([9, 17, 64, 256]),
        "depth": st.sampled_from([1, 2]),
        "blocks": st.sampled_from([12, 120]),
        "prefix_caching": st.booleans(),
        "graphs": st.booleans(),
    }
)


def compare(
    path: Path,
    vocabulary: int,
    dtype: str,
    cache: str,
    drawn: list[dict[str, Any]],
    schedule: dict[str, Any],
    quantization: str | None = None,
) -> None:
    one_way = partial(run, path, dtype, cache, drawn, vocabulary, quantization=quantization)
    alone = anyio.run(partial(one_way, together=False, schedule={}))
    company = anyio.run(partial(one_way, together=True, schedule=schedule))
    for one, other in zip(alone, company, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == other.logprobs
        assert one.prompt_logprobs == other.prompt_logprobs


@pytest.mark.row("ENG-BATCH-INVARIANT", "one request's logprobs are bit-equal alone and in batches")
@pytest.mark.row("ENG-BATCH-INVARIANT", "under chunked prefill and with the prefix cache on or off")
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(MODELS) | st.sampled_from(BLOCKS),
    st.sampled_from(["float32", "bfloat16"]),
    CACHES,
    REQUESTS,
    SCHEDULES,
)
def test_bits_do_not_depend_on_the_company(
    models: dict[str, tuple[Path, int]],
    name: str,
    dtype: str,
    cache: str,
    drawn: list[dict[str, Any]],
    schedule: dict[str, Any],
) -> None:
    compare(*models[name], dtype, cache, drawn, schedule)


@pytest.mark.row("ENG-BATCH-INVARIANT", "one request's logprobs are bit-equal alone and in batches")
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(MADE), st.sampled_from(AT_LOAD), st.sampled_from(["float32", "bfloat16"]), REQUESTS, SCHEDULES)
def test_bits_of_weights_quantised_at_load(
    models: dict[str, tuple[Path, int]],
    name: str,
    method: str,
    dtype: str,
    drawn: list[dict[str, Any]],
    schedule: dict[str, Any],
) -> None:
    compare(*models[f"{name}+{method}"], dtype, "auto", drawn, schedule, method)
