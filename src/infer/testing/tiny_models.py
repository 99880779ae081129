"""Random models of a few thousand parameters, and a driver that runs any model over a paged cache without an engine.

For tests and conformance kits, on the calling thread; a driver owns its blocks and caches.
"""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from infer.config.model import GenerationDefaults, KVGroup, ModelConfig
from infer.errors import WeightError
from infer.plugins.model import BuildContext, CausalLM, ForwardBatch, ModelSpec
from infer.plugins.platform import AttentionMetadata
from infer.weights.checkpoint import TensorInfo

if TYPE_CHECKING:
    from infer.plugins.platform import Ops
    from infer.plugins.quant_method import QuantMethod

Work = tuple[str, Sequence[int]]
"""(sequence name, the next token ids of that sequence)."""


def random_transformers_model(config_json: Mapping[str, Any], seed: int = 0) -> Any:
    """A transformers model with every weight drawn (norms and biases too, so that none is a no-op), fp32, eval mode."""
    import transformers  # noqa: PLC0415 - tests only, and slow to import

    settings = dict(config_json) | {"initializer_range": 0.2}
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        build: Any = transformers.AutoModelForCausalLM.from_config
        model = build(config, attn_implementation="eager").float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model


def make_checkpoint(config_json: Mapping[str, Any], directory: Path, seed: int = 0) -> Path:
    """Save a random transformers model as config.json and model.safetensors; returns the directory."""
    random_transformers_model(config_json, seed).save_pretrained(directory)
    # What the caller wrote, not transformers' rendering of it: older key spellings must be read too.
    (directory / "config.json").write_text(json.dumps(dict(config_json)))
    return directory


def model_config(config_json: Mapping[str, Any], path: Path = Path("tiny")) -> ModelConfig:
    """The facts of a tiny config.json, as the checkpoint reader would give them."""
    return ModelConfig(
        path=path,
        format="safetensors",
        architecture=config_json["architectures"][0],
        identity="tiny",
        vocab_size=config_json["vocab_size"],
        max_position=config_json["max_position_embeddings"],
        dtype="float32",
        bos_token_id=None,
        eos_token_ids=(),
        quantization=None,
        generation=GenerationDefaults(),
        raw=dict(config_json),
    )


class DictCheckpoint:
    """A `weights.checkpoint.Checkpoint` over tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)

    def tensors(self) -> dict[str, TensorInfo]:
        return {
            name: TensorInfo(name, tuple(tensor.shape), str(tensor.dtype), tensor.numel() * tensor.element_size())
            for name, tensor in self._tensors.items()
        }

    def read(self, name: str, dtype: torch.dtype | None) -> Tensor:
        tensor = self._tensors[name].detach()
        return tensor.to(dtype or tensor.dtype, copy=True)

    def read_blocks(self, name: str) -> Tensor:
        raise WeightError(f"tensor {name!r} is plain", tensor=name)

    def close(self) -> None:
        self._tensors.clear()

    def metadata(self) -> dict[str, Any]:
        return {}


def build_model(
    spec: ModelSpec,
    config: ModelConfig,
    *,
    ops: Ops,
    quant: QuantMethod,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> CausalLM:
    """The model of a spec with empty weights (on device "meta": no memory)."""
    module, _, attribute = spec.factory.partition(":")
    context = BuildContext(ops=ops, dtype=dtype, device=torch.device(device), quant=quant)
    return cast(CausalLM, getattr(importlib.import_module(module), attribute)(config, context))


class PagedDriver:
    """Runs a model step by step over its own paged cache.

    Block ids are handed out in random order, every cache position starts as NaN and becomes NaN again when its block
    is freed, and blocks that slide out of a window are given back: a kernel that reads what it must not shows at once.
    """

    def __init__(
        self,
        model: CausalLM,
        block_size: int = 4,
        *,
        num_blocks: int = 256,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        self.model = model
        self.block_size = block_size
        self.device = torch.device(device)
        layout = model.kv_layout()
        self.groups: tuple[KVGroup, ...] = layout.groups
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}
        for layer in layout.layers:
            shape = (num_blocks, block_size, layer.num_kv_heads)
            keys, values = (torch.full((*shape, n), torch.nan, dtype=dtype).to(device) for n in layer.head_sizes)
            self.kv[layer.layer_id] = (keys, values)
        self.group_of_layer = {layer_id: g for g, group in enumerate(self.groups) for layer_id in group.layer_ids}
        self.lengths: dict[str, int] = {}
        self.tables: list[dict[str, list[int]]] = [{} for _ in self.groups]
        self.free: list[list[int]] = []
        for g in range(len(self.groups)):
            ids = list(range(1, num_blocks))
            random.Random(seed + g).shuffle(ids)
            self.free.append(ids)

    def step(self, work: Sequence[Work]) -> list[Tensor]:
        """One forward pass. -> per work item, in its order, fp32 logits [tokens, vocab] at each of its new tokens."""
        order = sorted(range(len(work)), key=lambda i: len(work[i][1]) != 1)
        rows = [work[i] for i in order]
        batch = self.batch(rows)
        with torch.inference_mode():
            hidden = self.model.forward(batch)
            logits = self.model.logits(hidden, torch.arange(hidden.shape[0], device=self.device))
        for name, ids in rows:
            self.lengths[name] += len(ids)
            self._slide(name)
        pieces = dict(zip(order, logits.split_with_sizes([len(ids) for _, ids in rows]), strict=True))
        return [pieces[i] for i in range(len(work))]

    def batch(self, rows: Sequence[Work]) -> ForwardBatch:
        """Allocate blocks for rows (decode rows first) and lay out the step."""
        for name, _ in rows:
            self.lengths.setdefault(name, 0)
        starts = [self.lengths[name] for name, _ in rows]
        positions = [start + i for start, (_, ids) in zip(starts, rows, strict=True) for i in range(len(ids))]
        return ForwardBatch(
            token_ids=torch.tensor([token for _, ids in rows for token in ids], device=self.device),
            positions=torch.tensor(positions, device=self.device),
            attention=tuple(self._metadata(g, rows, starts) for g in range(len(self.groups))),
            kv=self.kv,
            group_of_layer=self.group_of_layer,
        )

    def finish(self, name: str) -> None:
        """Give a sequence's blocks back."""
        del self.lengths[name]
        for g, tables in enumerate(self.tables):
            self._release(g, tables.pop(name))

    def _metadata(self, g: int, rows: Sequence[Work], starts: Sequence[int]) -> AttentionMetadata:
        size, tables, slots = self.block_size, [], []
        counts = [len(ids) for _, ids in rows]
        for (name, _), start, count in zip(rows, starts, counts, strict=True):
            table = self.tables[g].setdefault(name, [])
            while len(table) * size < start + count:
                table.append(self.free[g].pop())
            tables.append(table)
            slots += [table[p // size] * size + p % size for p in range(start, start + count)]
        width = max(len(table) for table in tables)
        lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        query_starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
        padded = [table + [0] * (width - len(table)) for table in tables]
        return AttentionMetadata(
            query_starts=torch.tensor(query_starts, dtype=torch.int32, device=self.device),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=self.device),
            block_table=torch.tensor(padded, dtype=torch.int32, device=self.device),
            slot_mapping=torch.tensor(slots, device=self.device),
            query_lens_host=counts,
            seq_lens_host=lengths,
            num_decode_rows=next((i for i, count in enumerate(counts) if count != 1), len(counts)),
        )

    def _slide(self, name: str) -> None:
        for g, group in enumerate(self.groups):
            if group.window is None:
                continue
            table = self.tables[g][name]
            outside = max(0, self.lengths[name] - group.window + 1) // self.block_size
            self._release(g, table[:outside])
            table[:outside] = [0] * outside

    def _release(self, g: int, blocks: Sequence[int]) -> None:
        real = [block for block in blocks if block]
        self.free[g] = real + self.free[g]
        for layer_id in self.groups[g].layer_ids:
            for cache in self.kv[layer_id]:
                cache[real] = torch.nan
