"""A finished request's timings as replies show them, in vLLM's field names and one more for the whole. Pure."""

from __future__ import annotations

from typing import Any

from infer.types import Completion


def timing_metrics(done: Completion) -> dict[str, Any] | None:
    """Milliseconds: queue + time_to_first_token (the prefill) + generation = total."""
    timings = done.timings
    if timings is None:
        return None
    longest = max(len(choice.token_ids) for choice in done.choices)
    output, decode = done.usage.output_tokens, timings.decode
    return {
        "queue_time_ms": timings.queued * 1e3,
        "time_to_first_token_ms": timings.prefill * 1e3,
        "generation_time_ms": decode * 1e3,
        "total_time_ms": timings.total * 1e3,
        "mean_itl_ms": decode * 1e3 / (longest - 1) if longest > 1 else None,
        "tokens_per_second": output / decode if decode > 0 and output > 1 else None,
        "num_preemptions": timings.num_preemptions,
    }
