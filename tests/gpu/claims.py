"""Which clause of which capability (docs/capabilities.tsv) each check proves, where only a GPU can show it. Plain data.

`test_run.py` makes a marked test of every line, so that docs/status.md lists them as waiting until a run is in docs/gpu/.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    row: str
    clause: str
    part: str
    check: str


CLAIMS = (
    Claim(
        "ENG-CUDAGRAPH",
        "graphed and eager greedy tokens are identical while requests join and leave, padded sizes included",
        "dense engine",
        "graphs on = off, to the bit",
    ),
    Claim(
        "ENG-CUDAGRAPH",
        "the same of a mixture of experts of 48 layers",
        "sparse engine",
        "graphs on = off, to the bit",
    ),
    Claim("ENG-CUDAGRAPH", "replay count is above zero", "trace", "graphs are replayed"),
    Claim("ENG-CUDAGRAPH", "compute-sanitizer reports no errors", "sanitizer", "memcheck of the kernels"),
    Claim(
        "ENG-ASYNC-SCHED",
        "on a GPU the gap between kernels of adjacent steps shrinks",
        "trace",
        "gaps between steps shrink at depth 2",
    ),
    Claim(
        "ENG-ASYNC-SCHED",
        "on a GPU tokens are identical with it on and off",
        "dense engine",
        "depth 1 = depth 2, to the bit",
    ),
    Claim(
        "ENG-BATCH-INVARIANT",
        "on a GPU, with the mode on, log-probabilities are bit-equal alone and in batches of 2 to 32",
        "dense engine",
        "alone = in batches, to the bit",
    ),
    Claim(
        "ENG-BATCH-INVARIANT",
        "on a GPU, under chunked prefill and with the prefix cache on or off",
        "dense engine",
        "chunks and no prefix cache, to the bit",
    ),
    Claim(
        "ENG-BATCH-INVARIANT",
        "on a GPU, with it off, the difference is recorded",
        "dense engine",
        "fast mode: alone and in a batch",
    ),
    Claim(
        "ENG-MOE-SHARED-AUX",
        "outputs are bit-equal with it on and off, eager and captured",
        "sparse engine",
        "shared expert beside = after, to the bit",
    ),
    Claim(
        "ENG-MOE-SHARED-AUX",
        "decode time falls at batch 16 and below",
        "sparse engine",
        "shared expert beside: time of a step of 16",
    ),
    Claim("ENG-MOE-SHARED-AUX", "memcheck is clean", "sanitizer", "memcheck of the kernels"),
    Claim("ENG-MOE-HOSTFREE", "no host copy of the experts stays", "memory", "no host copy of the experts stays"),
    Claim("KV-DEVICE-RESIDENCY", "a GPU trace of decode steps", "trace", "only ids and metadata cross the bus"),
    Claim(
        "KV-WARMUP-PROFILE",
        "on a GPU with graphs the peak is what was predicted, or up to 5 percent less",
        "memory",
        "the plan holds for the worst step",
    ),
    Claim(
        "LOAD-SAFETENSORS-DIRECT-DENSE",
        "Host peak stays under two layers' bytes",
        "memory",
        "dense weights come file to device",
    ),
    Claim(
        "LOAD-SAFETENSORS-DIRECT-DENSE",
        "weights, and so tokens, equal the ordinary load",
        "memory",
        "dense weights equal an ordinary load",
    ),
    Claim(
        "SAMPLE-PHILOX",
        "equals torch's CUDA generator bit for bit on a GPU",
        "sampling",
        "torch's CUDA generator, bit for bit",
    ),
    Claim("KV-SIZING", "on a GPU only this process's own use is counted", "memory", "another process does not count"),
    Claim(
        "ATTN-SLIDING-WINDOW",
        "tokens equal to the CPU reference for each GPU backend",
        "models",
        "sliding window: tokens of the CPU reference",
    ),
)


def rows_of(part: str, check: str) -> list[list[str]]:
    """[[row, clause], ...] of one check."""
    return [[claim.row, claim.clause] for claim in CLAIMS if (claim.part, claim.check) == (part, check)]
