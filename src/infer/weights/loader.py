"""Fill a model from a checkpoint, tensor by tensor, and say beforehand how much it will hold.

Runs on the worker thread; owns nothing: one tensor is in flight at a time.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, cast

from infer.errors import WeightError
from infer.layers.parameter import Layer, Parameter, named_layers, named_parameters
from infer.plugins.model_source import Progress

if TYPE_CHECKING:
    from infer.plugins.model import CausalLM
    from infer.plugins.model_source import ProgressCallback
    from infer.weights.checkpoint import Checkpoint


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
        _fill(name, parameters[target.path], target.rows, checkpoint)
        owner = _owner(target.path)
        waiting[owner] -= 1
        if waiting[owner] == 0:
            layers[owner].finalize()
        done += tensors[name].stored_bytes
        if progress is not None:
            progress(Progress("load", done, total, detail=name))
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
    """Bytes of the largest parameter: the transient of loading, while source and slot exist at once."""
    parameters = named_parameters(cast(Layer, model)).values()
    return max((p.data.numel() * p.data.element_size() for p in parameters), default=0)


def _owner(path: str) -> str:
    return path.rpartition(".")[0]


def _fill(name: str, parameter: Parameter, rows: tuple[int, int] | None, checkpoint: Checkpoint) -> None:
    # A shard is read in the slot's dtype; packed integers come as stored.
    dtype = parameter.data.dtype if parameter.data.is_floating_point() else None
    tensor = checkpoint.read(name, dtype) if parameter.blocks is None else checkpoint.read_blocks(name)
    try:
        parameter.load(tensor, rows)
    except WeightError as error:
        raise WeightError(f"tensor {name!r}: {error}", tensor=name) from None
