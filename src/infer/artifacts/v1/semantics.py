"""What the values of a choice must satisfy, asked by the encoder and the decoder alike. Pure; raises `ArtifactError`."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.artifacts.v1.limits import MAX_ID
from infer.errors import ArtifactError

FLOAT32_MAX = float(np.finfo(np.float32).max)


def malformed(message: str) -> ArtifactError:
    return ArtifactError(message, code="artifact_capture_failed")


def too_large(message: str) -> ArtifactError:
    return ArtifactError(message, code="artifact_too_large")


def integer(value: Any, name: str, low: int = 0, high: int = MAX_ID) -> int:
    """`value` as an int within bounds; a boolean or a float is not an integer."""
    if isinstance(value, bool | np.bool_):
        raise malformed(f"{name} is {value!r}: a boolean is not an integer")
    try:
        number = operator.index(value)
    except TypeError:
        raise malformed(f"{name} is {value!r}, which is not an integer") from None
    if not low <= number <= high:
        raise malformed(f"{name}={number} is outside {low}...{high}")
    return number


def check_tokens(tokens: NDArray[Any], prompt_token_count: int) -> None:
    """Rank 1, ids not negative, and the prompt no longer than the sequence."""
    if tokens.ndim != 1:
        raise malformed(f"sequence_token_ids has rank {tokens.ndim}; it must have rank 1")
    _check_ids(tokens, "sequence_token_ids")
    if prompt_token_count > len(tokens):
        raise malformed(f"prompt_token_count={prompt_token_count} exceeds the {len(tokens)} tokens of the sequence")


def check_routes(
    ids: NDArray[Any], token_start: int, router_ids: Sequence[int], expert_counts: Sequence[int], num_tokens: int
) -> None:
    """Rank 3 with one row per fed token from `token_start` on, every id below its router's expert count."""
    if ids.ndim != 3:
        raise malformed(f"expert_ids has rank {ids.ndim}; it must be [rows, routers, experts per token]")
    rows, routers, top_k = ids.shape
    if routers < 1 or top_k < 1:
        raise malformed(f"expert_ids has shape {ids.shape}; routers and experts per token must be positive")
    if token_start >= num_tokens:
        raise malformed(f"moe_routes token_start={token_start} is not below the {num_tokens} tokens of the sequence")
    expected = num_tokens - token_start - 1
    if rows != expected:
        raise malformed(
            f"expert_ids has {rows} rows; {num_tokens} tokens from {token_start} on need {expected} "
            "(the last token was never fed to the model)"
        )
    if len(router_ids) != routers or len(set(router_ids)) != routers:
        raise malformed(
            f"router_ids must be {routers} different layers, not {len(router_ids)} entries with repetitions"
        )
    if len(expert_counts) != routers or min(expert_counts) < 1:
        raise malformed(f"expert_counts must be {routers} positive numbers")
    _check_ids(ids, "expert_ids")
    if rows:
        largest = ids.max(axis=(0, 2))
        for router, count, seen in zip(router_ids, expert_counts, largest.tolist(), strict=True):
            if seen >= count:
                raise malformed(f"expert id {seen} of router {router} is not below its {count} experts")


def check_logprobs(values: NDArray[Any], token_start: int, prompt_token_count: int, num_tokens: int) -> None:
    """One finite value within float32 for each completion token."""
    if values.ndim != 1:
        raise malformed(f"logprobs has rank {values.ndim}; it must have rank 1")
    if token_start != prompt_token_count:
        raise malformed(f"selected_logprobs token_start={token_start} is not the prompt's {prompt_token_count} tokens")
    if len(values) != num_tokens - prompt_token_count:
        raise malformed(f"{len(values)} logprobs for {num_tokens - prompt_token_count} completion tokens")
    if len(values) and not bool((np.abs(values) <= FLOAT32_MAX).all()):
        raise malformed("a logprob is not a finite float32")


def _check_ids(ids: NDArray[Any], name: str) -> None:
    if not ids.size:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high > MAX_ID:
        raise malformed(f"{name} holds {low if low < 0 else high}, outside 0...2**63-1")
