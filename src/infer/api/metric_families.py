"""One value as `/metrics` shows it. Pure; called at every scrape."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

Labels = Mapping[str, str]


def gauge(name: str, text: str, labels: Labels, value: float) -> Metric:
    family = GaugeMetricFamily(name, text, labels=tuple(labels))
    family.add_metric(tuple(labels.values()), value)
    return family


def counter(name: str, text: str, labels: Labels, value: float) -> Metric:
    family = CounterMetricFamily(name, text, labels=tuple(labels))
    family.add_metric(tuple(labels.values()), value)
    return family
