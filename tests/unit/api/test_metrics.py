"""`/metrics` against an independent count of a scripted run, and where a request's time goes."""

from __future__ import annotations

import time
from typing import Any

import anyio
import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as PrometheusHistogram
from prometheus_client.parser import text_string_to_metric_families

from api_server import MODEL, in_process, until
from infer import SamplingParams
from infer.config.engine import EngineConfig
from infer.engine.metrics import Histogram
from infer.testing.fake_engine import scripted
from infer.testing.fake_executor import hashed_token

pytestmark = pytest.mark.anyio

VLLM_NAMES = {
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    *("vllm:num_preemptions", "vllm:prompt_tokens", "vllm:generation_tokens", "vllm:request_success"),
    *("vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:iteration_tokens_total"),
    *("vllm:request_prompt_tokens", "vllm:request_generation_tokens", "vllm:request_params_max_tokens"),
    *("vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"),
    *("vllm:request_time_per_output_token_seconds", "vllm:e2e_request_latency_seconds"),
    *("vllm:request_queue_time_seconds", "vllm:request_inference_time_seconds"),
    *("vllm:request_prefill_time_seconds", "vllm:request_decode_time_seconds", "vllm:cache_config_info"),
}
"""Of vLLM's list, what means the same here (as its parser names the families)."""


def samples(reply: httpx2.Response) -> dict[tuple[str, str], float]:
    """(sample name, its label beside model and engine) -> value, by Prometheus' own parser."""
    found = {}
    for family in text_string_to_metric_families(reply.text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[sample.name, next(iter(labels.values()), "")] = sample.value
    return found


@pytest.mark.row("SERVE-METRICS", "prometheus_client parses the page, the vLLM name list is a subset")
async def test_the_page_parses_and_has_vllms_names() -> None:
    async with in_process() as (client, _):
        reply = await client.get("/metrics")
    families = {family.name: family for family in text_string_to_metric_families(reply.text)}
    assert families.keys() >= VLLM_NAMES
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    labels = families["vllm:num_requests_running"].samples[0].labels
    assert labels == {"model_name": MODEL, "engine": "0"}


@pytest.mark.row("SERVE-METRICS", "counters equal exact token counts of a scripted run")
async def test_counters_equal_the_counts_of_the_replies() -> None:
    config = EngineConfig(cache={"num_blocks": 4096, "block_size": 16})
    prompts = ["a" * 5, "b" * 40, "b" * 40 + "c", "d" * 100]
    async with in_process(scripted("eight ch"), config=config) as (client, _):
        usages = []
        for prompt in prompts:
            asked = {"model": MODEL, "prompt": prompt, "max_tokens": 6 if prompt[0] == "d" else 20}
            usages.append((await client.post("/v1/completions", json=asked)).json()["usage"])
        asked = {"token_ids": [1, 2, 3], "sampling_params": {"n": 3, "max_tokens": 4, "temperature": 0}}
        usages.append((await client.post("/inference/v1/generate", json=asked)).json()["usage"])
        got = samples(await client.get("/metrics"))
    prompt_tokens = sum(usage["prompt_tokens"] for usage in usages)
    output_tokens = sum(usage["completion_tokens"] for usage in usages)
    cached_tokens = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert prompt_tokens == 5 + 40 + 41 + 100 + 3
    assert output_tokens == 9 + 9 + 9 + 6 + 12
    assert cached_tokens == 32
    assert got["vllm:prompt_tokens_total", ""] == prompt_tokens
    assert got["vllm:prompt_tokens_cached_total", ""] == got["vllm:prefix_cache_hits_total", ""] == cached_tokens
    assert got["vllm:generation_tokens_total", ""] == output_tokens
    assert got["vllm:request_success_total", "stop"] == 3 and got["vllm:request_success_total", "length"] == 1 + 3
    assert got["vllm:request_success_total", "abort"] == 0
    assert got["vllm:request_generation_tokens_sum", ""] == output_tokens
    assert got["vllm:request_generation_tokens_count", ""] == 4 + 3
    assert got["vllm:request_generation_tokens_bucket", "5.0"] == 3
    assert got["vllm:time_to_first_token_seconds_count", ""] == 7
    assert got["vllm:inter_token_latency_seconds_count", ""] == output_tokens - 7
    assert got["vllm:iteration_tokens_total_sum", ""] == got["infer_scheduled_tokens_total", ""]
    assert got["vllm:iteration_tokens_total_count", ""] == got["infer_steps_total", ""]
    assert got["infer_draft_tokens_total", ""] == 0
    assert got["vllm:num_requests_running", ""] == got["vllm:num_requests_waiting", ""] == 0


@pytest.mark.row("SERVE-METRICS", "two engines in one process do not clash")
async def test_two_servers_in_one_process_count_apart() -> None:
    asked = {"model": MODEL, "prompt": "x", "max_tokens": 3, "ignore_eos": True}
    async with in_process(hashed_token(90)) as (one, _), in_process(hashed_token(90)) as (two, _):
        for client, count in ((one, 1), (two, 4)):
            for _ in range(count):
                assert (await client.post("/v1/completions", json=asked)).status_code == 200
        first, second = samples(await one.get("/metrics")), samples(await two.get("/metrics"))
    assert first["vllm:generation_tokens_total", ""] == 3
    assert second["vllm:generation_tokens_total", ""] == 12


async def test_gauges_follow_what_runs_and_waits() -> None:
    config = EngineConfig(scheduler={"max_num_seqs": 1}, cache={"num_blocks": 64})
    asked = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 200, "ignore_eos": True}}
    async with in_process(hashed_token(90), config=config, latency=0.005) as (client, server):
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(lambda: client.post("/inference/v1/generate", json=asked))
            await until(lambda: server.engine.statistics().waiting == 2)
            got = samples(await client.get("/metrics"))
            for name in server.engine.request_ids:
                server.engine.abort(name)
        after = samples(await client.get("/metrics"))
    assert (got["vllm:num_requests_running", ""], got["vllm:num_requests_waiting", ""]) == (1, 2)
    assert 0 < got["vllm:kv_cache_usage_perc", ""] < 1
    assert got["infer_http_requests_running", ""] == 4 and got["infer_engine_alive", ""] == 1
    assert after["vllm:request_success_total", "abort"] == 3
    assert after["vllm:num_requests_running", ""] == 0


async def test_a_key_guards_the_page() -> None:
    async with in_process(settings={"api_keys": ("k",)}) as (client, _):
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.get("/metrics", headers={"authorization": "Bearer k"})).status_code == 200


# -- where the time of a request goes ----------------------------------------------------------------------------------


def whole(timings: Any) -> float:
    return float(timings.queued + timings.prefill + timings.decode)


@pytest.mark.row("SERVE-RESPONSE-METRICS", "queue + prefill + decode equals end-to-end within 1 ms")
@pytest.mark.row("SERVE-RESPONSE-METRICS", "preemptions are counted, for every finished request")
async def test_phases_add_up_and_preemptions_are_counted_for_every_finished_request() -> None:
    config = EngineConfig(
        scheduler={"max_num_seqs": 3, "max_num_batched_tokens": 16},
        cache={"num_blocks": 12, "block_size": 4, "watermark": 0, "prefix_caching": False},
    )
    async with in_process(hashed_token(90), config=config, latency=0.001) as (client, server):
        engine = server.engine
        done: list[tuple[Any, float]] = []

        async def run(index: int) -> None:
            params = SamplingParams(
                max_tokens=18, ignore_eos=True, n=2 if index == 3 else 1, stop=("\x10",) if index == 4 else ()
            )
            began = time.monotonic()
            completion = await engine.generate([index + 1] * 6, params, deadline=0.02 if index == 5 else None)
            done.append((completion, time.monotonic() - began))

        async with anyio.create_task_group() as tasks:
            for index in range(8):
                tasks.start_soon(run, index)
        got = samples(await client.get("/metrics"))
        preemptions = engine.statistics().preemptions
    assert len(done) == 8
    for completion, seen in done:
        timings = completion.timings
        assert abs(whole(timings) - timings.total) < 1e-3
        assert min(timings.queued, timings.prefill, timings.decode) >= 0
        assert timings.total <= seen + 1e-3
        if timings.first_token is not None:
            assert timings.first_token == pytest.approx(timings.queued + timings.prefill)
    assert preemptions > 0
    assert sum(completion.timings.num_preemptions for completion, _ in done) == preemptions
    assert got["vllm:num_preemptions_total", ""] == got["vllm:request_num_preemptions_sum", ""] == preemptions


async def test_a_request_that_never_ran_only_queued() -> None:
    config = EngineConfig(scheduler={"max_num_seqs": 1}, cache={"num_blocks": 64})
    async with in_process(hashed_token(90), config=config, latency=0.005) as (_, server):
        engine = server.engine
        async with engine.stream([1], SamplingParams(max_tokens=100, ignore_eos=True)):
            completion = await engine.generate([2], SamplingParams(max_tokens=5), deadline=0.05)
    timings = completion.timings
    assert completion.finish_reason == "deadline" and timings is not None
    assert (timings.prefill, timings.decode, timings.first_token) == (0.0, 0.0, None)
    assert timings.queued == timings.total > 0


@given(st.lists(st.floats(0, 20), max_size=40))
def test_histograms_count_as_prometheus_does(values: list[float]) -> None:
    bounds = (0.0, 0.5, 1.0, 10.0)
    registry = CollectorRegistry()
    theirs, ours = PrometheusHistogram("h", "h", buckets=bounds, registry=registry), Histogram(bounds)
    for value in values:
        theirs.observe(value)
        ours.observe(value)
    for bound, count in ours.cumulative():
        assert registry.get_sample_value("h_bucket", {"le": "+Inf" if bound == float("inf") else str(bound)}) == count
    assert registry.get_sample_value("h_sum") == ours.total
