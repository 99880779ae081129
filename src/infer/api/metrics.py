"""`/metrics` for Prometheus: the engine's own counts, under vLLM's names where the meaning is the same.

Runs in request tasks. Each application has a registry of its own, read from the engine when it is asked.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from infer.api.artifact_metrics import artifact_metrics, capture_metrics
from infer.api.context import ApiContext
from infer.api.kv_connector_metrics import kv_connector_metrics
from infer.api.metric_families import counter, gauge
from infer.api.routing import ApiRoute, Call
from infer.engine.metrics import EngineMetrics, Histogram
from infer.engine.statistics import EngineStatistics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABELS = ("model_name", "engine")
_FINISH_REASONS = ("stop", "length", "abort", "deadline", "repetition", "error")


def routes(context: ApiContext) -> list[ApiRoute]:
    registry = CollectorRegistry()
    registry.register(EngineCollector(context))

    async def metrics(call: Call) -> Response:
        return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE})

    return [
        ApiRoute(
            method="GET",
            path="/metrics",
            handler=metrics,
            always=True,
            monitoring=True,
            summary="Metrics for Prometheus",
        )
    ]


class EngineCollector(Collector):
    """Reads one engine at every scrape; nothing is counted twice or between scrapes."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._labels = (context.model_name, "0")
        self._named = dict(zip(_LABELS, self._labels, strict=True))

    def collect(self) -> Iterable[Metric]:
        context = self._context
        yield self._gauge("infer_engine_alive", "1 while the engine serves.", float(context.engine.is_alive))
        yield self._gauge("infer_http_requests_running", "HTTP requests in progress.", float(len(context.calls)))
        yield self._endpoint_calls()
        if not context.engine.is_alive:
            return
        statistics, metrics = context.engine.statistics(), context.engine.metrics
        yield from self._gauges(statistics)
        yield from self._counters(statistics, metrics)
        yield from self._requests(metrics)
        yield from self._latencies(metrics)
        yield from capture_metrics(statistics, self._named)
        yield from kv_connector_metrics(statistics.kv_connector, self._named)
        yield from artifact_metrics(context.engine.artifact_statistics, self._named)
        yield self._info()

    def _endpoint_calls(self) -> Metric:
        family = CounterMetricFamily(
            "infer_endpoint_calls",
            "Calls of endpoint plugins, by what became of them.",
            labels=(*_LABELS, "endpoint", "outcome"),
        )
        for (endpoint, outcome), count in sorted(self._context.endpoint_outcomes.items()):
            family.add_metric((*self._labels, endpoint, outcome), count)
        return family

    def _gauges(self, now: EngineStatistics) -> Iterator[Metric]:
        yield self._gauge("vllm:num_requests_running", "Requests being computed.", now.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests waiting to be scheduled.", now.waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use; 1 is all of it.", now.kv_usage)

    def _counters(self, now: EngineStatistics, metrics: EngineMetrics) -> Iterator[Metric]:
        yield self._counter(
            "vllm:prompt_tokens", "Prompt tokens prefilled, cached ones included.", metrics.prompt_tokens
        )
        yield self._counter("vllm:prompt_tokens_cached", "Prompt tokens from the prefix cache.", metrics.cached_tokens)
        yield self._counter("vllm:generation_tokens", "Output tokens generated.", metrics.output_tokens)
        yield self._counter("vllm:num_preemptions", "Preemptions of running requests.", now.preemptions)
        yield self._counter(
            "vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", now.prefix_queried_tokens
        )
        yield self._counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", now.prefix_hit_tokens)
        yield self._counter("infer_steps", "Steps scheduled.", now.steps)
        yield self._counter("infer_scheduled_tokens", "Tokens computed, prompt and output.", now.scheduled_tokens)
        yield self._counter("infer_draft_tokens", "Output tokens that took no step of their own.", now.draft_tokens)
        ended = CounterMetricFamily(
            "vllm:request_success", "Choices that ended, by reason.", labels=(*_LABELS, "finished_reason")
        )
        for reason in (*_FINISH_REASONS, *sorted(metrics.finished.keys() - set(_FINISH_REASONS))):
            ended.add_metric((*self._labels, reason), metrics.finished[reason])
        yield ended

    def _requests(self, metrics: EngineMetrics) -> Iterator[Metric]:
        yield self._histogram("vllm:iteration_tokens_total", "Tokens of a step.", metrics.step_tokens)
        yield self._histogram("vllm:request_prompt_tokens", "Prompt tokens of a choice.", metrics.prompt_length)
        yield self._histogram("vllm:request_generation_tokens", "Output tokens of a choice.", metrics.output_length)
        yield self._histogram("vllm:request_params_max_tokens", "Output tokens allowed.", metrics.max_tokens)
        yield self._histogram("vllm:request_num_preemptions", "Preemptions of a choice.", metrics.preemptions)

    def _latencies(self, metrics: EngineMetrics) -> Iterator[Metric]:
        seconds = (
            ("vllm:time_to_first_token_seconds", "From arrival to the first token.", metrics.first_token),
            ("vllm:inter_token_latency_seconds", "Between two tokens of a choice.", metrics.inter_token),
            ("vllm:time_per_output_token_seconds", "Older name of inter_token_latency.", metrics.inter_token),
            ("vllm:request_time_per_output_token_seconds", "Mean of a choice after its first.", metrics.request_token),
            ("vllm:e2e_request_latency_seconds", "From arrival to the end.", metrics.total),
            ("vllm:request_queue_time_seconds", "From arrival to being scheduled.", metrics.queued),
            ("vllm:request_prefill_time_seconds", "From being scheduled to the first token.", metrics.prefill),
            ("vllm:request_decode_time_seconds", "From the first token to the end.", metrics.decode),
            ("vllm:request_inference_time_seconds", "From being scheduled to the end.", metrics.inference),
        )
        for name, text, histogram in seconds:
            yield self._histogram(name, text, histogram)

    def _info(self) -> Metric:
        resolved = self._context.engine.resolved
        facts = {
            "block_size": str(resolved.cache.block_size),
            "cache_dtype": resolved.cache.dtype,
            "num_gpu_blocks": str(sum(group.num_blocks for group in resolved.cache.groups)),
            "enable_prefix_caching": str(resolved.cache.prefix_caching),
            "platform": resolved.platform,
            "version": importlib.metadata.version("infer-engine"),
        }
        info = GaugeMetricFamily("vllm:cache_config_info", "Facts of the KV cache.", labels=(*_LABELS, *facts))
        info.add_metric((*self._labels, *facts.values()), 1.0)
        return info

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return gauge(name, text, self._named, value)

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return counter(name, text, self._named, value)

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, text, labels=_LABELS)
        buckets = [
            ("+Inf" if bound == float("inf") else str(float(bound)), count) for bound, count in histogram.cumulative()
        ]
        family.add_metric(self._labels, buckets, histogram.total)
        return family
