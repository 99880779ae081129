"""Part: tokens per second of whole engines, against what memory and matrix units allow (a roofline from this run's ceilings)."""

from __future__ import annotations

from collections.abc import Iterator

from gpu.checkpoints import RandomCheckpoint, dense, sparse
from gpu.checks import Check, Facts
from gpu.engines import engine, greedy, random_prompts
from gpu.figures import figure
from gpu.place import Place
from infer.engine.blocking import BlockingEngine

DECODE_TARGET, PREFILL_TARGET = 0.6, 0.5
PROMPT = 16
"""Tokens before a decode figure: all prompts of a batch fit into one step."""


def checks(place: Place) -> Iterator[Check]:
    for name, make in (("dense", dense), ("sparse", sparse)):
        for size in place.sizes.decode_batches:
            yield Check(
                f"{name} decode, {size} requests",
                lambda make=make, size=size: decode(place, make(place), size),  # type: ignore[misc]
            )
        yield Check(f"{name} prefill", lambda make=make: prefill(place, make(place)))  # type: ignore[misc]


def decode(place: Place, checkpoint: RandomCheckpoint, size: int) -> Facts:
    """Steps per second between the first and the last token of a batch whose requests begin together."""
    count = place.sizes.decode_tokens
    scheduler = {"max_num_seqs": size, "max_num_batched_tokens": max(512, size * PROMPT)}
    prompts = random_prompts(checkpoint, size, PROMPT)
    with engine(place, checkpoint, numerics={"mode": "fast"}, scheduler=scheduler) as opened:
        opened.generate_many(prompts, greedy(count, logprobs=None))  # kernels are compiled, graphs recorded
        done = opened.generate_many(prompts, greedy(count, logprobs=None))
    seconds = max(one.timings.decode for one in done if one.timings is not None) / (count - 1)
    best = roofline(place, checkpoint, size, size * (PROMPT + count / 2))
    return figure(
        size / seconds,
        "tokens/s",
        ceiling=size / best,
        target=DECODE_TARGET,
        judged=not place.dry_run,
        seconds_per_step=seconds,
        roofline_seconds=best,
    )


def roofline(place: Place, checkpoint: RandomCheckpoint, rows: float, cached: float) -> float:
    """Seconds of a step of so many tokens that reads so many cached ones: the larger of what memory and products take."""
    experts = checkpoint.expert_bytes
    share = active = 1.0
    if experts:
        active = checkpoint.settings["num_experts_per_tok"] / checkpoint.settings["num_experts"]
        share = 1 - (1 - active) ** rows  # of the experts, chosen evenly
    read = checkpoint.other_bytes + share * experts + cached * checkpoint.kv_bytes
    multiplied = (checkpoint.other_bytes + active * experts) / place.dtype.itemsize
    return max(read / place.ceilings.copy_bandwidth, 2 * rows * multiplied / place.ceilings.matmul)


def prefill(place: Place, checkpoint: RandomCheckpoint) -> Facts:
    """Prompt tokens per second; the head is multiplied with the last of each alone."""
    sizes, settings = place.sizes, checkpoint.settings
    length = min(sizes.prefill_len, settings["max_position_embeddings"] - 8)
    prompts = [random_prompts(checkpoint, sizes.prefill_prompts, length, seed) for seed in range(2)]
    scheduler = {"max_num_seqs": sizes.prefill_prompts, "max_num_batched_tokens": length}
    cache = {"prefix_caching": False}
    with engine(place, checkpoint, numerics={"mode": "fast"}, scheduler=scheduler, cache=cache) as opened:
        run_prefill(opened, prompts[0])
        seconds = run_prefill(opened, prompts[1])
    tokens = length * sizes.prefill_prompts
    head = settings["vocab_size"] * settings["hidden_size"]
    share = settings["num_experts_per_tok"] / settings["num_experts"] if checkpoint.expert_bytes else 1.0
    used = (checkpoint.other_bytes + share * checkpoint.expert_bytes) / place.dtype.itemsize - head
    width = settings["num_attention_heads"] * settings["head_dim"]
    attended = 2 * checkpoint.num_layers * width * length * tokens
    best = (2 * used * tokens + attended) / place.ceilings.matmul
    return figure(
        tokens / seconds,
        "tokens/s",
        ceiling=tokens / best,
        target=PREFILL_TARGET,
        judged=not place.dry_run,
        seconds=seconds,
    )


def run_prefill(opened: BlockingEngine, prompts: list[list[int]]) -> float:
    done = opened.generate_many(prompts, greedy(1, logprobs=None))
    return max(one.timings.first_token or 0.0 for one in done if one.timings is not None)
