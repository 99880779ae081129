"""What infer is to reach against the peers: the table of the issue on CPU speed, as data."""

from __future__ import annotations

from dataclasses import dataclass

LOWER_IS_BETTER = ("prefix_wall_s", "prefix_first_s", "first_token_s", "peak_rss")
TITLES = {
    "decode_1": "Decode, 1 request (tokens/s)",
    "decode_8": "Decode, 8 requests (tokens/s)",
    "decode_32": "Decode, 32 requests (tokens/s)",
    "prefill": "Prefill, one prompt of {prefill} tokens (tokens/s)",
    "prefix_wall_s": "{sharing} requests that share {shared} tokens, {shared_output} out: wall time (s)",
    "prefix_first_s": "The same, all first tokens (s)",
    "first_token_s": "Process start to first token (s)",
    "peak_rss": "Peak resident memory (MB)",
}
MAX_START_SECONDS = 4.0
MAX_RSS_BEYOND = 400e6
"""Bytes over weights and keys and values."""


@dataclass(frozen=True)
class Target:
    """At least `ratio` times the peers that `against` names: "class" (the best of the weight class), "same" (llama.cpp with the
    same quantization) or the name of an engine."""

    ratio: float
    against: str = "class"


def target(work_name: str, weight_class: str, weights: str) -> Target | None:
    """None: the issue asks for no ratio here."""
    if work_name == "prefix_wall_s":
        return Target(1.5, "vLLM")
    if work_name == "first_token_s":
        return Target(10.0, "vLLM")
    if work_name == "decode_1" and weight_class == "4-bit":
        same = {"Q4_0": 2.2, "Q4_1": 2.2, "Q4_K_M": 1.5}
        return Target(same[weights], "same") if weights in same else None
    by_class = {
        "decode_1": {"16-bit": 1.15, "8-bit": 1.5},
        "decode_8": {"16-bit": 1.7, "8-bit": 2.4, "4-bit": 2.2},
        "decode_32": {"16-bit": 1.6, "8-bit": 2.0, "4-bit": 2.0},
        "prefill": {"16-bit": 1.1, "8-bit": 1.5, "4-bit": 1.4},
    }
    ratio = by_class.get(work_name, {}).get(weight_class)
    return None if ratio is None else Target(ratio)


CACHE_OFF_RATIO = 8.0
"""Time to all first tokens, prefix cache off over on."""
