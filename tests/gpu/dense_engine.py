"""Part: an engine on a dense model of a billion random parameters says the same with everything on and off."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

from gpu.checkpoints import RandomCheckpoint, dense
from gpu.checks import Check, Facts
from gpu.engines import Load, answers, engine, mixed_load, same_bits, same_but_for_near_ties
from gpu.place import Place
from infer import Completion


class Shared:
    """The checkpoint, the load, and the answers that others are compared with: each made when first asked for."""

    def __init__(self, place: Place) -> None:
        self.place = place

    @cached_property
    def checkpoint(self) -> RandomCheckpoint:
        return dense(self.place)

    @cached_property
    def load(self) -> Load:
        return mixed_load(self.place, self.checkpoint)

    @cached_property
    def plain(self) -> list[Completion]:
        """Graphs, depth 2, prefix cache, large chunks, invariant."""
        return answers(self.place, self.checkpoint, self.load)

    @cached_property
    def fast(self) -> list[Completion]:
        return answers(self.place, self.checkpoint, self.load, numerics={"mode": "fast"})


def checks(place: Place) -> Iterator[Check]:
    shared = Shared(place)
    yield Check("random checkpoint", lambda: written(shared))
    yield Check("answers of the invariant mode", lambda: complete(shared))
    yield Check("graphs on = off, to the bit", lambda: against(shared, platform={"graphs": False}))
    yield Check(
        "depth 1 = depth 2, to the bit", lambda: against(shared, scheduler=slots(place) | {"in_flight_depth": 1})
    )
    yield Check("chunks and no prefix cache, to the bit", lambda: against(shared, **in_pieces(place)))
    yield Check("alone = in batches, to the bit", lambda: in_company(shared))
    yield Check("fast mode: graphs on = off", lambda: fast_graphs(shared))
    yield Check("fast mode: alone and in a batch", lambda: fast_alone(shared))


def written(shared: Shared) -> Facts:
    found = shared.checkpoint
    return {"bytes": found.expert_bytes + found.embedding_bytes + found.other_bytes}


def complete(shared: Shared) -> Facts:
    """All tokens that were asked for; and they are not one token over and over, which would agree too easily."""
    for done, params in zip(shared.plain, shared.load.params, strict=True):
        assert len(done.choices[0].token_ids) == params.max_tokens, done
    distinct = {token for done in shared.plain for token in done.choices[0].token_ids}
    assert len(distinct) > len(shared.plain), f"only {len(distinct)} different tokens in {len(shared.plain)} answers"
    return {"requests": len(shared.plain), "different_tokens": len(distinct)}


def slots(place: Place) -> dict[str, int]:
    return {"max_num_seqs": place.sizes.max_num_seqs}


def in_pieces(place: Place) -> dict[str, dict[str, Any]]:
    budget = max(place.sizes.max_num_seqs, place.sizes.prompt_len // 5)
    return {"scheduler": {**slots(place), "max_num_batched_tokens": budget}, "cache": {"prefix_caching": False}}


def against(shared: Shared, **sections: dict[str, Any]) -> None:
    if "cache" in sections:
        sections["cache"] = {"num_blocks": shared.place.sizes.cache_blocks, **sections["cache"]}
    same_bits(answers(shared.place, shared.checkpoint, shared.load, **sections), shared.plain)


def in_company(shared: Shared) -> Facts:
    """One request by itself, and in batches of growing size."""
    load, most = shared.load, shared.place.sizes.max_num_seqs
    batches = [size for size in (1, 2, 3, 5, 8, 16, 32) if size <= most]
    with engine(shared.place, shared.checkpoint, cache={"prefix_caching": False}) as opened:
        for size in batches:
            found = opened.generate_many(load.prompts[:size], list(load.params[:size]))
            same_bits(found, shared.plain[:size])
    return {"batches": batches}


def fast_graphs(shared: Shared) -> Facts:
    sections: dict[str, Any] = {"numerics": {"mode": "fast"}, "platform": {"graphs": False}}
    found = answers(shared.place, shared.checkpoint, shared.load, **sections)
    return same_but_for_near_ties(found, shared.fast)


def fast_alone(shared: Shared) -> Facts:
    """Records the difference."""
    load = shared.load
    count = shared.place.sizes.max_num_seqs // 2
    with engine(shared.place, shared.checkpoint, numerics={"mode": "fast"}) as opened:
        pairs = zip(load.prompts[:count], load.params[:count], strict=True)
        found = [opened.generate(prompt, params) for prompt, params in pairs]
    return same_but_for_near_ties(found, shared.fast[:count])
