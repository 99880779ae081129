"""The external KV store in `/metrics`: lookups, hits, bytes, failures. Read at every scrape; absent without a connector."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import Metric

from infer.api.metric_families import Labels, counter, gauge

if TYPE_CHECKING:
    from infer.engine.statistics import KVConnectorStatistics


def kv_connector_metrics(now: KVConnectorStatistics | None, labels: Labels) -> Iterator[Metric]:
    if now is None:
        return
    yield gauge("infer_kv_connector_transfers", "Loads and saves on their way.", labels, now.transfers)
    counters = (
        ("infer_kv_connector_queries", "Lookups that the external KV store answered.", now.queries),
        ("infer_kv_connector_hits", "Lookups with more than the engine had itself.", now.hits),
        ("infer_kv_connector_misses", "Lookups without.", now.queries - now.hits),
        ("infer_kv_connector_hit_tokens", "Tokens the store had and the engine had not.", now.hit_tokens),
        ("infer_kv_connector_lookup_failures", "Lookups that failed; they count as misses.", now.lookup_failures),
        ("infer_kv_connector_loaded_bytes", "Bytes of KV blocks loaded.", now.loaded_bytes),
        ("infer_kv_connector_saved_bytes", "Bytes of KV blocks saved.", now.saved_bytes),
        ("infer_kv_connector_load_failures", "Loads of which a block did not come.", now.load_failures),
        ("infer_kv_connector_save_failures", "Saves of which a block was not taken.", now.save_failures),
        ("infer_kv_connector_skipped_blocks", "Blocks not saved: too many were on their way.", now.skipped_saves),
    )
    for name, text, value in counters:
        yield counter(name, text, labels, value)
