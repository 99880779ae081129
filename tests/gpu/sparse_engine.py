"""Part: an engine on a mixture of experts of 48 layers says the same with everything on and off, capture included."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from gpu import shared_expert
from gpu.checkpoints import RandomCheckpoint, sparse
from gpu.checks import Check, Facts
from gpu.engines import Load, answers, mixed_load, same_bits
from gpu.place import Place
from infer import Completion

CAPTURE = {"routed_experts": True}


class Shared:
    """As in the dense part."""

    def __init__(self, place: Place) -> None:
        self.place = place

    @cached_property
    def checkpoint(self) -> RandomCheckpoint:
        return sparse(self.place)

    @cached_property
    def load(self) -> Load:
        return mixed_load(self.place, self.checkpoint)

    @cached_property
    def captured_load(self) -> Load:
        return mixed_load(self.place, self.checkpoint, return_routed_experts=True)

    @cached_property
    def plain(self) -> list[Completion]:
        return answers(self.place, self.checkpoint, self.load)

    @cached_property
    def captured(self) -> list[Completion]:
        return answers(self.place, self.checkpoint, self.captured_load, capture=CAPTURE)


def checks(place: Place) -> Iterator[Check]:
    shared = Shared(place)
    slots = {"max_num_seqs": place.sizes.max_num_seqs}
    yield Check("answers of the invariant mode", lambda: complete(shared))
    yield Check("graphs on = off, to the bit", lambda: against(shared, platform={"graphs": False}))
    yield Check("depth 1 = depth 2, to the bit", lambda: against(shared, scheduler=slots | {"in_flight_depth": 1}))
    yield Check("capture on = off, to the bit", lambda: same_bits(shared.captured, shared.plain))
    yield Check("captured routes are whole", lambda: routes(shared))
    yield Check("captured routes without graphs", lambda: captured_eager(shared))
    yield from shared_expert.checks(place, lambda: shared.checkpoint)


def complete(shared: Shared) -> Facts:
    for done, params in zip(shared.plain, shared.load.params, strict=True):
        assert len(done.choices[0].token_ids) == params.max_tokens, done
    return {"requests": len(shared.plain)}


def against(shared: Shared, **sections: dict[str, Any]) -> None:
    same_bits(answers(shared.place, shared.checkpoint, shared.load, **sections), shared.plain)


def routes(shared: Shared) -> Facts:
    """A row for every token that was fed, every id an expert's, none twice, and all experts in use."""
    settings, used = shared.checkpoint.settings, np.zeros(0, dtype=np.int64)
    wanted = settings["num_hidden_layers"], settings["num_experts_per_tok"]
    for number, (ids, done) in enumerate(zip(route_arrays(shared.captured), shared.captured, strict=True)):
        fed = len(done.prompt_token_ids) + len(done.choices[0].token_ids) - 1
        assert ids.shape == (fed, *wanted), f"request {number}: routes of shape {ids.shape}, {fed} tokens were fed"
        assert int(ids.max()) < settings["num_experts"], f"request {number}: expert {ids.max()}"
        ordered = np.sort(ids, axis=-1)
        assert bool((ordered[..., 1:] != ordered[..., :-1]).all()), f"request {number}: an expert twice"
        used = np.union1d(used, ids)
    assert len(used) == settings["num_experts"], f"{len(used)} of {settings['num_experts']} experts are ever chosen"
    return {"rows": sum(len(ids) for ids in route_arrays(shared.captured))}


def captured_eager(shared: Shared) -> None:
    found = answers(shared.place, shared.checkpoint, shared.captured_load, capture=CAPTURE, platform={"graphs": False})
    same_bits(found, shared.captured)
    for number, (one, other) in enumerate(zip(route_arrays(found), route_arrays(shared.captured), strict=True)):
        assert np.array_equal(one, other), f"request {number} is routed otherwise"


def route_arrays(found: Sequence[Completion]) -> list[np.ndarray]:
    arrays = []
    for done in found:
        rows = done.choices[0].routed_experts
        assert rows is not None and rows.error is None, rows and rows.error
        data = np.frombuffer(rows.data, dtype=np.dtype(rows.dtype)).reshape(rows.count, *rows.row_shape)
        arrays.append(data.astype(np.int64))
    return arrays
