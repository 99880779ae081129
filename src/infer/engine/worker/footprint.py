"""What a model will occupy, found by running it with ops that only make shapes and weights that only have them.

Runs while planning, on the thread that builds the worker; reads no weight and allocates next to nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from infer.config.capture import CaptureProfile
from infer.config.model import KVLayout, ModelFootprint
from infer.engine.sampling.sampler import workspace_bytes
from infer.layers.parameter import Layer, named_parameters
from infer.plugins.model import CausalLM, ForwardBatch
from infer.plugins.platform import AttentionMetadata, Ops, Routing
from infer.weights.loader import largest_parameter_bytes, parameter_bytes

CPU = torch.device("cpu")
TOKENS = (64, 192)
"""Step sizes that are traced: the difference gives the bytes per token, whatever is constant drops out."""
BLOCK_SIZE = 16
LARGEST_REAL = 2**16
"""Elements; larger tensors made while the model is built have a shape but no storage."""


def measure_footprint(
    build: Callable[[Ops, torch.device], CausalLM],
    vocab_size: int,
    captures: Callable[[CausalLM], tuple[CaptureProfile, ...]] = lambda model: (),
) -> ModelFootprint:
    """`build` makes the model with the given ops on the given device -> the model's footprint. `captures` says what is
    captured from it.

    Weights are on the meta device, everything small on CPU. (All on meta would be simpler, but arithmetic there
    imports torch's whole compiler: a second and a hundred megabytes.)
    """
    with _WeightsOnMeta():
        model = build(shape_ops(), CPU)
    profiles = captures(model)
    layout = model.kv_layout()
    try:
        per_token, per_row = _trace(model, layout)
    except Exception:  # the model looks at values, which are not there yet
        per_token, per_row = _widest_matrix(model), 2 * torch.float32.itemsize * vocab_size
    return ModelFootprint(
        weight_bytes=parameter_bytes(model),
        load_transient_bytes=largest_parameter_bytes(model),
        workspace_bytes_per_token=per_token,
        logits_bytes_per_row=per_row,
        sampler_bytes=workspace_bytes(vocab_size),
        kv_layout=layout,
        captures=profiles,
    )


def _trace(model: CausalLM, layout: KVLayout) -> tuple[int, int]:
    """Bytes per token of a forward pass, and per row of logits."""
    hidden: list[Tensor] = []
    batches = {count: _batch(count, layout) for count in TOKENS}

    def forward(count: int) -> None:
        hidden[:] = [model.forward(batches[count])]

    per_token = _slope(forward)
    return per_token, _slope(lambda count: model.logits(hidden[0], torch.arange(count)))


def _widest_matrix(model: CausalLM) -> int:
    """An estimate where tracing fails: twice the input and output of the widest weight, in fp32."""
    shapes = [p.shape for p in named_parameters(cast(Layer, model)).values() if len(p.shape) > 1]
    return max((2 * sum(shape[-2:]) * torch.float32.itemsize for shape in shapes), default=0)


def shape_ops() -> Ops:
    """Every op that models need reduced to the shape and dtype of its result, as `plugins.platform.Ops` documents them."""

    def halves(x: Tensor) -> Tensor:
        return x.new_empty(x.shape[0], x.shape[1] // 2)

    def route(logits: Tensor, rule: Routing, bias: Tensor | None, tap: Tensor | None) -> tuple[Tensor, Tensor]:
        shape = logits.shape[0], rule.top_k
        return torch.empty(shape), torch.zeros(shape, dtype=torch.int64)

    def experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        # At worst all tokens choose one expert while the outputs of all K choices are kept for their sum.
        kept, inner = x.new_empty(*ids.shape, x.shape[1]), x.new_empty(x.shape[0], gate_up.shape[1])
        halved = halves(inner)
        del inner, halved
        return torch.empty(x.shape, dtype=torch.float32).to(kept.dtype)

    return Ops(
        embedding=lambda ids, weight: torch.empty(ids.shape[0], weight.shape[1], dtype=weight.dtype),
        linear=lambda x, weight, bias: x.new_empty(x.shape[0], weight.shape[0]),
        rms_norm=lambda x, weight, eps: torch.empty_like(x),
        rotary=lambda q, k, cos, sin: (torch.empty_like(q), torch.empty_like(k)),
        silu_and_mul=halves,
        gelu_tanh_and_mul=halves,
        write_kv=lambda k, v, k_cache, v_cache, slot_mapping: None,
        attention=lambda q, k_cache, v_cache, metadata, scale, window, softcap: q.new_empty(
            *q.shape[:2], v_cache.shape[-1]
        ),
        gather_rows=lambda x, rows: x.new_empty(rows.shape[0], x.shape[1]),
        topk_router=route,
        moe=experts,
    )


def _slope(run: Callable[[int], object]) -> int:
    """Peak bytes per unit."""
    low, high = _peak_bytes(run, TOKENS[0]), _peak_bytes(run, TOKENS[1])
    return -(-(high - low) // (TOKENS[1] - TOKENS[0]))


def _peak_bytes(run: Callable[[int], object], count: int) -> int:
    live = _LiveBytes()
    with torch.no_grad(), live:
        run(count)
    return live.peak


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


class _LiveBytes(TorchFunctionMode):
    """Follows the bytes of the tensors that functions make, and their peak. Tensors from outside do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for item in tree_leaves((args, kwargs)):
            if isinstance(item, Tensor):
                self._follow(item, 0)
        out = func(*args, **(kwargs or {}))
        for item in tree_leaves(out):
            if isinstance(item, Tensor):
                self._follow(item, item.untyped_storage().nbytes())
        return out

    def _follow(self, tensor: Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _batch(count: int, layout: KVLayout) -> ForwardBatch:
    """One row of `count` tokens."""
    num_blocks = -(-count // BLOCK_SIZE)
    metadata = [
        AttentionMetadata(
            query_starts=torch.tensor([0, count], dtype=torch.int32),
            seq_lens=torch.tensor([count], dtype=torch.int32),
            block_table=torch.arange(1, num_blocks + 1, dtype=torch.int32)[None, :],
            slot_mapping=torch.arange(BLOCK_SIZE, BLOCK_SIZE + count),
            query_lens_host=[count],
            seq_lens_host=[count],
            num_decode_rows=int(count == 1),
        )
        for _ in layout.groups
    ]
    kv = {}
    for layer in layout.layers:
        shape = (num_blocks + 1, BLOCK_SIZE, layer.num_kv_heads)
        keys, values = (torch.empty(*shape, size) for size in layer.head_sizes)
        kv[layer.layer_id] = (keys, values)
    return ForwardBatch(
        token_ids=torch.zeros(count, dtype=torch.int64),
        positions=torch.arange(count),
        attention=tuple(metadata),
        kv=kv,
        group_of_layer={layer: g for g, group in enumerate(layout.groups) for layer in group.layer_ids},
    )
