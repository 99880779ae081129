"""The table of a fake GPU: the reference's operations, each a kernel of which only the arguments are seen from outside.

For tests. As kernels do, they read row lengths on the device: what the host thought when a graph was captured is not theirs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fakes.cuda_device import FakeDevice
from fakes.order import flatten
from fakes.watch import Entry
from infer.backends.cuda.device import DeviceFacts
from infer.backends.cuda.launch import Launch
from infer.backends.reference.platform import OPS
from infer.engine.sampling import min_p, temperature, top_k, top_p
from infer.engine.sampling.draw import invert
from infer.plugins.platform import AttentionMetadata, Ops

WRITES = {"write_kv": (2, 3), "topk_router": (3,)}
"""Arguments that an operation changes, by their place."""


def table_of(device: FakeDevice) -> Callable[[DeviceFacts, bool, Launch], Ops]:
    """For `CudaPlatform(table=)`."""

    def table(facts: DeviceFacts, invariant: bool, launch: Launch) -> Ops:
        ops = replace(OPS, attention=attention, draw=draw, best=best)
        made = {f.name: getattr(ops, f.name) for f in fields(Ops) if callable(getattr(ops, f.name))}
        return replace(ops, **{name: kernel(device, name, function) for name, function in made.items()})

    return table


def kernel(device: FakeDevice, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def launched(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            out = function(*args, **kwargs)
        if device.watching:
            given, made = flatten((args, kwargs)), flatten(out)
            written = [args[place] for place in WRITES.get(name, ()) if place < len(args) and args[place] is not None]
            places = [k for k, tensor in enumerate(given) if any(tensor is one for one in written)]
            device.launched(Entry(name, function, args, kwargs, made, places), given, written)
        return out

    return launched


def attention(q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata, *args: Any) -> Tensor:
    starts = metadata.query_starts.tolist()
    seen = AttentionMetadata(
        query_starts=metadata.query_starts,
        seq_lens=metadata.seq_lens,
        block_table=metadata.block_table,
        slot_mapping=metadata.slot_mapping,
        query_lens_host=[last - first for first, last in itertools.pairwise(starts)],
        seq_lens_host=metadata.seq_lens.tolist(),
        num_decode_rows=metadata.num_decode_rows,
    )
    return OPS.attention(q, k, v, seen, *args)


def best(logits: Tensor) -> tuple[Tensor, Tensor]:
    ids = logits.argmax(dim=-1)
    return ids, logits.gather(-1, ids[:, None])[:, 0]


def draw(logits: Tensor, rows: Tensor, heat: Tensor, k: Tensor, p: Tensor, least: Tensor, number: Tensor) -> Tensor:
    """By the engine's own transforms."""
    chosen = logits[rows]
    specs: list[Any] = [
        SimpleNamespace(spec=SimpleNamespace(temperature=a, top_k=b, top_p=c, min_p=d))
        for a, b, c, d in zip(heat.tolist(), k.tolist(), p.tolist(), least.tolist(), strict=True)
    ]
    every = list(range(len(specs)))
    for transform, asked in (
        (temperature.apply, [i for i in every if specs[i].spec.temperature != 1.0]),
        (top_k.apply, [i for i in every if specs[i].spec.top_k > 0]),
        (top_p.apply, [i for i in every if specs[i].spec.top_p < 1.0]),
        (min_p.apply, [i for i in every if specs[i].spec.min_p > 0.0]),
    ):
        if asked:
            transform(chosen, asked, specs)
    return invert(torch.softmax(chosen, dim=-1), number)
