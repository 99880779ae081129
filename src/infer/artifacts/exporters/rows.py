"""What every exporter starts from: the rows of a choice, on the axis of MoE layers or of all layers, in a named width."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.artifacts.generation import ArtifactChoice, RoutedExperts
from infer.errors import ArtifactError, ArtifactFieldMissingError


def routes_of(choice: ArtifactChoice) -> RoutedExperts:
    if choice.moe_routes is None:
        raise ArtifactFieldMissingError(f"choice {choice.choice_index} of this artifact holds no moe_routes")
    return choice.moe_routes


def from_the_start(choice: ArtifactChoice, client: str) -> RoutedExperts:
    """Routes of an encoding that has no place for a start."""
    routes = routes_of(choice)
    if routes.token_start != 0:
        raise ArtifactError(
            f"the encoding of {client} has no start and these routes begin at token {routes.token_start}; "
            "capture them from token 0"
        )
    return routes


def largest_expert_count(routes: RoutedExperts) -> int:
    return max(routes.expert_counts)


def on_axis(routes: RoutedExperts, num_hidden_layers: int | None) -> NDArray[Any]:
    """[rows, layers, experts per token]. `num_hidden_layers` None: the MoE layers, as stored. A number: all layers, and
    those without a router hold 0, 1, ... which means nothing."""
    ids = np.asarray(routes.expert_ids)
    if num_hidden_layers is None:
        return ids
    if max(routes.router_ids) >= num_hidden_layers:
        raise ArtifactError(f"layer {max(routes.router_ids)} has a router; the model has {num_hidden_layers} layers")
    rows, _, top_k = ids.shape
    filled = np.empty((rows, num_hidden_layers, top_k), ids.dtype)
    filled[:] = np.arange(top_k, dtype=ids.dtype)
    filled[:, list(routes.router_ids)] = ids
    return filled


def narrow(ids: NDArray[Any], choices: tuple[tuple[int, str], ...], bound: int, client: str) -> NDArray[Any]:
    """In the first type of (largest value, dtype) that holds `bound`."""
    for largest, dtype in choices:
        if bound <= largest:
            return np.ascontiguousarray(ids, dtype=dtype)
    raise ArtifactError(f"{client} has no integer type for expert {bound}")


def base64_text(array: NDArray[Any]) -> str:
    """Raw bytes in C order."""
    return base64.b64encode(array.tobytes()).decode("ascii")
