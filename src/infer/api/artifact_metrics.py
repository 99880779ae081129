"""Generation artifacts and captured rows in `/metrics`: what was admitted, delivered, refused, lost. Read at every scrape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, Metric

from infer.api.metric_families import Labels, counter, gauge

if TYPE_CHECKING:
    from infer.artifacts.pipeline import PipelineStatistics
    from infer.engine.statistics import EngineStatistics


def capture_metrics(now: EngineStatistics, labels: Labels) -> Iterator[Metric]:
    """Of captured rows (routed experts and the like), whoever gets them."""
    yield gauge("infer_capturing_requests", "Running requests with captured rows.", labels, now.capturing)
    counters = (
        ("infer_captured_rows", "Rows captured for requests.", now.captured_rows),
        ("infer_capture_failures", "Requests whose captured rows were lost.", now.capture_failures),
        ("infer_capture_uniform_blocks", "Captured blocks of equal cells: a broken router?", now.uniform_blocks),
    )
    for name, text, value in counters:
        yield counter(name, text, labels, value)


def artifact_metrics(now: PipelineStatistics, labels: Labels) -> Iterator[Metric]:
    counters = (
        ("infer_artifacts_admitted", "Artifacts whose request was let in.", now.admitted),
        ("infer_artifacts_ready", "Artifacts that were delivered.", now.ready),
        ("infer_artifact_bytes", "Bytes of delivered artifacts, as stored.", now.delivered_bytes),
        ("infer_artifact_encode_seconds", "Seconds spent on encoding.", now.encode_seconds),
        ("infer_artifact_upload_seconds", "Seconds spent on uploads, failed ones too.", now.upload_seconds),
    )
    for name, text, value in counters:
        yield counter(name, text, labels, value)
    by_code = (
        ("infer_artifacts_refused", "Artifact requests refused before inference, by code.", now.refused),
        ("infer_artifacts_failed", "Artifacts that were not delivered, by code.", now.failed),
    )
    for name, text, counts in by_code:
        yield _by_code(name, text, labels, counts)
    gauges = (
        ("infer_artifact_queue_depth", "Finished artifacts that wait for a slot.", now.queue_depth),
        ("infer_artifacts_delivering", "Artifacts being encoded or uploaded.", now.running),
        ("infer_artifact_reserved_bytes", "Bytes of artifacts.process_bytes that are taken.", now.reserved_bytes),
    )
    for name, text, value in gauges:
        yield gauge(name, text, labels, value)


def _by_code(name: str, text: str, labels: Labels, counts: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, text, labels=(*labels, "code"))
    for code, count in sorted(counts.items()):
        family.add_metric((*labels.values(), code), count)
    return family
