"""The optional protocols of a model: hidden states and routes, written where they are asked for and nowhere else.

Part of the kit of models, over the small model that it built; owns the buffers. On the calling thread.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infer.plugins.model import CausalLM, SupportsHiddenTaps, SupportsRouteTaps
from infer.testing.kits import expect
from infer.testing.tiny_models import PagedDriver

SPARE = 3
"""Rows of a buffer beyond the tokens of the step."""
UNTOUCHED = 77
TOLERANCE = 2e-4


def check_hidden(model: CausalLM, example: dict[str, Any], prompt: list[int], device: str) -> None:
    if not isinstance(model, SupportsHiddenTaps):
        return
    layers, size = model.hidden_shape()
    wanted = (example["num_hidden_layers"], example["hidden_size"])
    expect((layers, size) == wanted, f"hidden_shape() is {(layers, size)}, config.json says {wanted}")
    plain = _run(model, [prompt], device)
    taps = {layer: torch.full((len(prompt) + SPARE, size), float(UNTOUCHED), device=device) for layer in range(layers)}
    model.set_hidden_taps(taps)
    expect(torch.equal(_run(model, [prompt], device), plain), "a tap changes the logits")
    for layer, rows in taps.items():
        _only_first_rows(rows, len(prompt), f"hidden states of layer {layer}")
    expect(not torch.equal(taps[0], taps[layers - 1]) or layers == 1, "all layers have the same hidden states")
    half = len(prompt) // 2
    pieces: list[Tensor] = []
    model.set_hidden_taps({layers - 1: (buffer := torch.empty(len(prompt), size, device=device))})
    driver, before = PagedDriver(model, device=device), taps[0].clone()
    for piece in (prompt[:half], prompt[half:]):
        driver.step([("a", piece)])
        pieces.append(buffer[: len(piece)].clone())
    whole, found = taps[layers - 1][: len(prompt)], torch.cat(pieces)
    error = ((found - whole).abs().max() / whole.abs().max()).item()
    expect(error <= TOLERANCE, f"hidden states of a prompt in chunks differ by {error:.2e} of the largest")
    expect(torch.equal(taps[0], before) or layers == 1, "a layer that is not named any more is still written")
    model.set_hidden_taps({})


def check_routes(model: CausalLM, prompt: list[int], device: str) -> None:
    if not isinstance(model, SupportsRouteTaps) or not model.routed_layers():
        return
    routed = model.routed_layers()
    ids = [layer.layer_id for layer in routed]
    expect(ids == sorted(set(ids)), f"routed layers {ids} do not ascend")
    plain = _run(model, [prompt], device)
    taps = {
        layer.layer_id: torch.full((len(prompt) + SPARE, layer.top_k), UNTOUCHED, dtype=torch.int16, device=device)
        for layer in routed
    }
    model.set_route_taps(taps)
    expect(torch.equal(_run(model, [prompt], device), plain), "a tap changes the logits")
    for layer in routed:
        rows, what = taps[layer.layer_id], f"routes of layer {layer.layer_id}"
        _only_first_rows(rows, len(prompt), what)
        chosen = rows[: len(prompt)].long()
        expect(bool(((chosen >= 0) & (chosen < layer.num_experts)).all()), f"{what}: ids that no expert has")
        distinct = all(len(set(row)) == layer.top_k for row in chosen.tolist())
        expect(distinct, f"{what}: a token has one expert twice")
        expect(len({tuple(row) for row in chosen.tolist()}) > 1, f"{what}: every token has the same experts")
    first = {layer_id: rows.clone() for layer_id, rows in taps.items()}
    _run(model, [prompt], device)
    expect(all(torch.equal(taps[i], first[i]) for i in taps), "the same prompt is routed otherwise the second time")
    model.set_route_taps({})
    for rows in taps.values():
        rows.fill_(UNTOUCHED)
    _run(model, [prompt], device)
    expect(
        all(bool((rows == UNTOUCHED).all()) for rows in taps.values()), "taps that were taken away are still written"
    )


def _only_first_rows(rows: Tensor, count: int, what: str) -> None:
    expect(bool(rows[:count].isfinite().all()), f"{what} are not finite")
    expect(not bool((rows[:count] == UNTOUCHED).all(1).any()), f"{what} are not written for every token")
    expect(bool((rows[count:] == UNTOUCHED).all()), f"{what}: rows beyond the step's tokens changed")


def _run(model: CausalLM, pieces: list[list[int]], device: str) -> Tensor:
    driver = PagedDriver(model, device=device)
    return torch.cat([driver.step([("a", piece)])[0] for piece in pieces])
