"""Fill a model from a checkpoint, tensor by tensor, and say beforehand how much it will hold.

Runs on the worker thread; owns nothing: one tensor is in flight at a time.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, cast

import torch

from infer.errors import WeightError
from infer.layers.parameter import Layer, Parameter, named_layers, named_parameters
from infer.plugins.model_source import Progress

if TYPE_CHECKING:
    from infer.plugins.model import CausalLM
    from infer.plugins.model_source import ProgressCallback
    from infer.weights.checkpoint import Checkpoint
    from infer.weights.mapping import Target


def check_weights(model: CausalLM, checkpoint: Checkpoint) -> None:
    """Compare names and shapes without reading data; works on the meta device. Raises `WeightError`."""
    parameters = named_parameters(cast(Layer, model))
    stored = {name: info.shape for name, info in checkpoint.tensors().items()}
    model.weight_table().check(stored, {path: parameter.shape for path, parameter in parameters.items()})


def load_weights(model: CausalLM, checkpoint: Checkpoint, progress: ProgressCallback | None = None) -> None:
    """Fill every parameter, finalizing each layer as soon as it is full. Afterwards the model is ready to run.

    Tensors are read in the dtype of their parameter. An exception out of `progress` stops the load at once and leaves
    nothing behind but the half-filled model. Raises `WeightError` naming the tensor.
    """
    check_weights(model, checkpoint)
    root = cast(Layer, model)
    parameters = named_parameters(root)
    layers = dict(named_layers(root))
    tensors = checkpoint.tensors()
    targets = model.weight_table().targets
    waiting = Counter(_owner(target.path) for target in targets.values())
    total = sum(tensors[name].stored_bytes for name in targets)
    done = 0
    for name, target in targets.items():
        _fill(name, parameters[target.path], target, checkpoint)
        owner = _owner(target.path)
        waiting[owner] -= 1
        if waiting[owner] == 0:
            layers[owner].finalize()
        done += tensors[name].stored_bytes
        if progress is not None:
            progress(Progress("load", done, total, detail=name))
    for name, path in model.weight_table().scalars.items():
        if name in tensors:
            _load_scalar(name, path, layers, checkpoint)
    for owner in layers.keys() - waiting.keys():  # last: a head may share the embedding's weight
        layers[owner].finalize()


def parameter_bytes(model: CausalLM) -> int:
    """Bytes of all weights as they live in memory; on the meta device, as they will before any packing."""
    sizes: dict[int, int] = {}
    keep = []  # ids are unique only while the tensors live
    for _, layer in named_layers(cast(Layer, model)):
        for tensor in layer.tensors():
            keep.append(tensor)
            sizes[id(tensor)] = tensor.numel() * tensor.element_size()
    return sum(sizes.values())


def largest_parameter_bytes(model: CausalLM) -> int:
    """The transient of loading: the most bytes of one weight, or one expert's, that exist beside its slot at a time."""

    def transient(parameter: Parameter) -> int:
        if parameter.in_flight is not None:
            return parameter.in_flight
        return parameter.data.nbytes * parameter.unit // max(1, len(parameter.data))

    parameters = named_parameters(cast(Layer, model)).values()
    return max((transient(piece) for parameter in parameters for piece in parameter.pieces()), default=0)


def _load_scalar(name: str, path: str, layers: dict[str, Layer], checkpoint: Checkpoint) -> None:
    owner, _, attribute = path.rpartition(".")
    try:
        layers[owner].load_scalar(attribute, float(checkpoint.read(name, torch.float32)))
    except WeightError as error:
        raise WeightError(f"tensor {name!r}: {error}", tensor=name) from None


def _owner(path: str) -> str:
    return path.rpartition(".")[0]


def _fill(name: str, parameter: Parameter, target: Target, checkpoint: Checkpoint) -> None:
    # A shard is read in the slot's dtype; packed integers, and what is converted here, come as stored.
    dtype = parameter.data.dtype if parameter.convert is None and parameter.data.is_floating_point() else None
    stored = parameter.blocks is not None and parameter.convert is None
    tensor = checkpoint.read_blocks(name) if stored else checkpoint.read(name, dtype)
    try:
        parameter.load(tensor.t() if target.transposed else tensor, target.rows)
    except WeightError as error:
        raise WeightError(f"tensor {name!r}: {error}", tensor=name) from None
