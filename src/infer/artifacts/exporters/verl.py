"""verl: an int16 array in process, as long as the sequence, zero where there is no row, with a mask that says where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.artifacts.exporters.rows import largest_expert_count, narrow, on_axis, routes_of
from infer.artifacts.generation import ArtifactChoice

_TYPES = ((32_767, "<i2"),)


@dataclass(frozen=True, slots=True)
class VerlRoutes:
    routed_experts: NDArray[Any]
    """int16 [N, layers, K]; zero is also a legal expert, so read it with the mask."""
    replay_mask: NDArray[np.bool_]
    """[N]; False where the trainer's own router decides: before the captured rows, and the last token."""


def to_verl(choice: ArtifactChoice, *, num_hidden_layers: int | None = None) -> VerlRoutes:
    routes = routes_of(choice)
    ids = narrow(on_axis(routes, num_hidden_layers), _TYPES, largest_expert_count(routes) - 1, "verl")
    num_tokens, first = len(choice.sequence_token_ids), routes.token_start
    made, mask = np.zeros((num_tokens, *ids.shape[1:]), ids.dtype), np.zeros(num_tokens, bool)
    made[first : first + len(ids)] = ids
    mask[first : first + len(ids)] = True
    return VerlRoutes(made, mask)
