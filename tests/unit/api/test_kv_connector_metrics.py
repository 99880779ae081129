"""The external KV store's counters in the text that Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from infer.api.kv_connector_metrics import kv_connector_metrics
from infer.engine.statistics import KVConnectorStatistics, statistics
from kv_driver import ExternalDriver
from step_driver import StepDriver

LABELS = {"model_name": "m", "engine": "0"}


def test_counters_are_those_of_the_scheduler() -> None:
    driver = ExternalDriver()
    prompt = list(range(60))
    driver.remember(prompt, 3)
    driver.add(prompt, 2)
    driver.add([5] * 40, 2)
    driver.run()
    now = statistics(driver.scheduler).kv_connector
    assert now is not None
    text = exposed(now)
    assert {name: text[f"infer_kv_connector_{name}"] for name in ("queries", "hits", "misses", "hit_tokens")} == {
        "queries": 2,
        "hits": 1,
        "misses": 1,
        "hit_tokens": 48,
    }
    assert text["infer_kv_connector_loaded_bytes"] == 3 and text["infer_kv_connector_saved_bytes"] == 2
    assert text["infer_kv_connector_transfers"] == 0


def exposed(now: KVConnectorStatistics) -> dict[str, float]:
    class Once(Collector):
        def collect(self) -> Iterator[Metric]:
            return kv_connector_metrics(now, LABELS)

    registry = CollectorRegistry()
    registry.register(Once())
    found = {}
    for line in generate_latest(registry).decode().splitlines():
        if not line.startswith("#"):
            name, _, value = line.partition("{")
            found[name.removesuffix("_total")] = float(value.rpartition(" ")[2])
    return found


def test_without_a_connector_there_is_nothing() -> None:
    now = statistics(StepDriver().scheduler).kv_connector
    assert now is None and list(kv_connector_metrics(now, LABELS)) == []
