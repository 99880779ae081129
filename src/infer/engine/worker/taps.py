"""Taps: preallocated buffers that the model writes in every forward pass whose rows somebody captures.

Used on the worker thread; owns the buffers, and their attachment to the model.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infer.engine.sampling.sampler import prompt_rows
from infer.errors import ConfigError
from infer.plugins.artifact_field import ArtifactField, TapFacts
from infer.plugins.model import CausalLM, SupportsHiddenTaps, SupportsRouteTaps


class Evidence:
    """Ids as they were tapped, wider than what is kept, and their range: whether a model can have written them."""

    def __init__(self, ids: Tensor, num_experts: int) -> None:
        self._ids = ids
        self._num_experts = num_experts
        lowest, highest = torch.aminmax(ids)
        self.range: tuple[Tensor, Tensor] = lowest, highest
        """Lowest and highest id; once they are on the host nothing waits for the device any more."""

    def invalid(self) -> NDArray[np.bool_] | None:
        """[n] which rows hold an id that does not exist; None: none does."""
        lowest, highest = self.range
        if int(lowest) >= 0 and int(highest) < self._num_experts:
            return None
        wrong = (self._ids.amin((0, 2)) < 0) | (self._ids.amax((0, 2)) >= self._num_experts)
        found: NDArray[np.bool_] = wrong.cpu().numpy()
        return found


class Tap(Protocol):
    name: str
    buffer: Tensor
    """[layers, max tokens of a step, width]."""

    def attach(self) -> None: ...

    def detach(self) -> None: ...

    def clear(self, num_tokens: int) -> None:
        """Make the rows of the coming step unlike anything a model writes."""
        ...

    def select(self, field: ArtifactField, hidden: Tensor, tokens: Tensor, out: Tensor) -> None:
        """Have the field select its rows. `hidden` is what the forward pass returned."""
        ...

    def evidence(self, tokens: Tensor) -> Evidence | None:
        """Of these rows, without waiting for the device; None: a model may write any value."""
        ...

    def check_probe(self, num_tokens: int) -> None:
        """After a step behind `clear`: raises `ConfigError` unless all of it was written."""
        ...


class RouterTap:
    """Expert ids. The type is signed and wider than what is kept: -1 marks a cell that nobody wrote."""

    name = "router"

    def __init__(self, model: SupportsRouteTaps, max_tokens: int, device: torch.device) -> None:
        layers = model.routed_layers()
        self._model = model
        self._layer_ids = [layer.layer_id for layer in layers]
        self._num_experts, self._top_k = layers[0].num_experts, layers[0].top_k
        dtype = torch.int16 if self._num_experts <= 2**15 else torch.int32
        self.buffer = torch.full((len(layers), max_tokens, self._top_k), -1, dtype=dtype, device=device)

    def attach(self) -> None:
        self._model.set_route_taps(dict(zip(self._layer_ids, self.buffer, strict=True)))

    def detach(self) -> None:
        self._model.set_route_taps({})

    def clear(self, num_tokens: int) -> None:
        self.buffer[:, :num_tokens].fill_(-1)

    def select(self, field: ArtifactField, hidden: Tensor, tokens: Tensor, out: Tensor) -> None:
        field.select(self.buffer, tokens, out)

    def evidence(self, tokens: Tensor) -> Evidence | None:
        return Evidence(self.buffer.index_select(1, tokens), self._num_experts)

    def check_probe(self, num_tokens: int) -> None:
        for layer_id, ids in zip(self._layer_ids, self.buffer[:, :num_tokens], strict=True):
            ordered = ids.sort(dim=1).values
            inside = (ordered[:, 0] >= 0) & (ordered[:, -1] < self._num_experts)
            distinct = (ordered[:, 1:] != ordered[:, :-1]).all(1)
            wrong = (~(inside & distinct)).nonzero()
            if len(wrong):
                raise ConfigError(
                    f"capture.routed_experts=True: the router of layer {layer_id} does not tell which experts it chose "
                    f"(a trial step left {ids[int(wrong[0])].tolist()} where {self._top_k} different ids below "
                    f"{self._num_experts} belong); leave it off, or choose another platform or model plugin",
                    fields=("capture.routed_experts",),
                )


class HiddenTap:
    """Hidden states in the compute dtype. Whatever a model computes is the truth, so rows are not judged."""

    name = "hidden"

    def __init__(
        self, model: SupportsHiddenTaps, layers: tuple[int, ...], dtype: str, max_tokens: int, device: torch.device
    ) -> None:
        self._model, self._layers = model, layers
        size = model.hidden_shape()[1]
        self.buffer = torch.empty((len(layers), max_tokens, size), dtype=getattr(torch, dtype), device=device)

    def attach(self) -> None:
        self._model.set_hidden_taps(dict(zip(self._layers, self.buffer, strict=True)))

    def detach(self) -> None:
        self._model.set_hidden_taps({})

    def clear(self, num_tokens: int) -> None:
        self.buffer[:, :num_tokens].fill_(torch.nan)

    def select(self, field: ArtifactField, hidden: Tensor, tokens: Tensor, out: Tensor) -> None:
        field.select(self.buffer, tokens, out)

    def evidence(self, tokens: Tensor) -> Evidence | None:
        return None

    def check_probe(self, num_tokens: int) -> None:
        for layer, rows in zip(self._layers, self.buffer[:, :num_tokens], strict=True):
            if bool(rows.isnan().all(1).any()):
                raise ConfigError(
                    f"capture.hidden_layers={list(self._layers)}: a trial step left no hidden states of layer {layer}; "
                    "leave that layer out, or choose another model plugin",
                    fields=("capture.hidden_layers",),
                )


class LogitsTap:
    """Logits of the captured tokens, made when their rows are selected: those of a whole step would not fit in memory."""

    name = "logits"

    def __init__(self, model: CausalLM, vocab_size: int, device: torch.device) -> None:
        self._model = model
        self._most = prompt_rows(vocab_size)  # as many as log-probabilities of prompts take, which is planned for
        self.buffer = torch.empty((1, 0, vocab_size), dtype=torch.float32, device=device)

    def attach(self) -> None:
        """Nothing is written in the forward pass."""

    def detach(self) -> None:
        """Nothing was attached."""

    def clear(self, num_tokens: int) -> None:
        """There is nothing to clear."""

    def select(self, field: ArtifactField, hidden: Tensor, tokens: Tensor, out: Tensor) -> None:
        for first in range(0, len(tokens), self._most):
            piece = tokens[first : first + self._most]
            logits = self._model.logits(hidden, piece.to(hidden.device))
            places = torch.arange(len(piece), device=logits.device)
            field.select(logits.unsqueeze(0), places, out[first : first + len(piece)])

    def evidence(self, tokens: Tensor) -> Evidence | None:
        return None

    def check_probe(self, num_tokens: int) -> None:
        """Whatever the head computes is the truth."""


def make_tap(name: str, model: CausalLM, facts: TapFacts, max_tokens: int, device: torch.device) -> Tap:
    """The tap that a field reads. `facts` are the model's, with at least one layer for it."""
    if name == "router" and isinstance(model, SupportsRouteTaps):
        return RouterTap(model, max_tokens, device)
    if name == "hidden" and isinstance(model, SupportsHiddenTaps):
        return HiddenTap(model, facts.hidden_layers, facts.dtype, max_tokens, device)
    if name == "logits":
        return LogitsTap(model, facts.vocab_size, device)
    raise ConfigError(f"this model has no tap {name!r}", fields=("capture.fields",))
