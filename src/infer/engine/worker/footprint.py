"""What a model will occupy, found by building it with weights that only have a shape.

Runs while planning, on the thread that builds the worker; reads no weight and allocates next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode

from infer.config.capture import CaptureProfile
from infer.config.model import ModelFootprint, StepBounds
from infer.engine.sampling.sampler import workspace_bytes
from infer.engine.worker.workspace import PlanningOps, shape_ops, slot_bytes, trace_worst_step
from infer.layers.parameter import Layer, Parameter, named_layers, named_parameters
from infer.plugins.model import CausalLM
from infer.plugins.platform import Ops
from infer.weights.loader import largest_parameter_bytes, parameter_bytes

CPU = torch.device("cpu")
LARGEST_REAL = 2**16
"""Elements; larger tensors made while the model is built have a shape but no storage."""


def measure_footprint(
    build: Callable[[Ops, torch.device], CausalLM],
    vocab_size: int,
    bounds: StepBounds,
    planning_ops: Callable[[], PlanningOps] | None = None,
    kv_dtype: torch.dtype = torch.float32,
    captures: Callable[[CausalLM], tuple[CaptureProfile, ...]] = lambda model: (),
    store: Callable[[CausalLM], object] = lambda model: None,
    *,
    recorded: bool = False,
) -> ModelFootprint:
    """`build` makes the model with the given ops on the given device -> the model's footprint. `planning_ops` is the
    platform's (`plugins.platform.SupportsWorkspace`), `captures` says what is captured from the model, `store` gives
    its weights the form in which they will live; `recorded` as of `trace_worst_step`.

    Weights are on the meta device, everything small on CPU. (All on meta would be simpler, but arithmetic there
    imports torch's whole compiler: a second and a hundred megabytes.)
    """
    ops, buffer_bytes = shape_ops() if planning_ops is None else planning_ops()
    with _WeightsOnMeta():
        model = build(ops, CPU)
        if planning_ops is not None:
            store(model)
    profiles = captures(model)
    layout = model.kv_layout()
    weights, largest = parameter_bytes(model), largest_parameter_bytes(model)
    if planning_ops is not None:
        _pack_blocks(model)
    try:
        step = trace_worst_step(model, layout, bounds, buffer_bytes, kv_dtype, vocab_size, recorded=recorded)
    except Exception:  # the model looks at values, which are not there yet
        rows = min(bounds.num_rows, bounds.num_tokens)
        step = bounds.num_tokens * _widest_matrix(model) + 2 * rows * vocab_size * torch.float32.itemsize
        step += workspace_bytes(vocab_size)
    if planning_ops is None:  # ops of shapes know numbers alone, so the model was traced with these
        with _WeightsOnMeta():
            store(model)
        weights, largest = parameter_bytes(model), largest_parameter_bytes(model)
    return ModelFootprint(
        weight_bytes=weights,
        load_transient_bytes=largest,
        workspace_bytes=step + slot_bytes(bounds, len(layout.groups)),
        bounds=bounds,
        kv_layout=layout,
        captures=profiles,
    )


def _pack_blocks(model: CausalLM) -> None:
    """As the loader does when it is done: layers whose weights stay in blocks multiply with these."""
    for _, layer in named_layers(cast(Layer, model)):
        if any(isinstance(part, Parameter) and part.blocks is not None for _, part in layer.children()):
            layer.finalize()


def _widest_matrix(model: CausalLM) -> int:
    """Bytes per token where tracing fails: twice the input and output of the widest weight, in fp32."""
    shapes = [p.shape for p in named_parameters(cast(Layer, model)).values() if len(p.shape) > 1]
    return max((2 * sum(shape[-2:]) * torch.float32.itemsize for shape in shapes), default=0)


class _WeightsOnMeta(TorchFunctionMode):
    """Large tensors come without storage."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.empty, torch.zeros, torch.ones):
            shape = func(*args, **(kwargs | {"device": "meta"}))
            if shape.numel() > LARGEST_REAL:
                return shape
        return func(*args, **kwargs)
