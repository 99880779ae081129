"""From facts and decisions to a runner: chooses the plugins, says what the model will occupy, then loads it.

Every method but `limits` runs on the thread that will execute steps; owns the platform until `build` hands it over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from infer.config.capture import CaptureProfile, CaptureSection, ResolvedCapture
from infer.config.model import KVLayout, ModelConfig, ModelFootprint, StepBounds
from infer.config.platform import PlatformLimits
from infer.config.resolve import ResolvedConfig
from infer.engine.sampling.guide import Grammars
from infer.engine.sampling.processor_row import Processors
from infer.engine.worker.background_store import BackgroundStore
from infer.engine.worker.block_store import BlockStore, private_store, shared_store
from infer.engine.worker.capture import RowCapture
from infer.engine.worker.captured_fields import CapturedField, captured_fields
from infer.engine.worker.directory_store import directory_store
from infer.engine.worker.footprint import measure_footprint
from infer.engine.worker.input_batch import KVTensors
from infer.engine.worker.kv_blocks import TensorKVBlocks
from infer.engine.worker.kv_transfers import KVTransfers
from infer.engine.worker.platforms import open_platform
from infer.engine.worker.runner import Runner
from infer.engine.worker.taps import make_tap
from infer.errors import ConfigError, PluginConflictError, UnsupportedModelError
from infer.plugins.artifact_field import TapFacts
from infer.plugins.kv_connector import WorkerConnector
from infer.plugins.model import BuildContext, CausalLM, ModelSpec
from infer.plugins.model_source import ProgressCallback
from infer.plugins.platform import Ops, Platform, SupportsGraphSizes, SupportsWorkspace
from infer.plugins.quant_method import LoadTimeMethod, QuantMethod, QuantMethodSpec
from infer.plugins.registry import Registry
from infer.weights.at_load import quantize_at_load
from infer.weights.blocks import keep_stored_blocks
from infer.weights.large_pages import LARGE_PAGE, place_together
from infer.weights.loader import load_weights, parameter_bytes
from infer.weights.opening import open_checkpoint
from infer.weights.quantized_checkpoint import QuantizedCheckpoint, take_forms

ALIGNMENT = 64
"""Bytes; where KV tensors begin, for the widest vector loads of a CPU."""


class WorkerBuilder:
    """One model on one platform. The order of use is `limits`, `footprint`, `build`."""

    def __init__(
        self,
        registry: Registry,
        model: ModelConfig,
        platform: str,
        threads: int | None,
        cache_dir: Path | None = None,
        capture: CaptureSection | None = None,
        *,
        expand_quantized: bool = False,
        quantization: str | None = None,
        progress: ProgressCallback | None = None,
        stated: Mapping[str, Any] | None = None,
        numerics: str = "auto",
    ) -> None:
        """Choose the plugins. `platform` is a name or "auto". `cache_dir` keeps compiled kernels, and `progress` is told when
        they must be built first; `stated` and `numerics` are further settings of the platform (`open_platform`).
        `quantization` names the method that makes blocks of plain weights.

        Raises `ConfigError`, `UnsupportedModelError` or `PluginError`.
        """
        self._registry = registry
        self._config = model
        self._capture = capture or CaptureSection()
        self._expand = expand_quantized
        self._model_spec = choose_model(registry, model.architecture)
        self._quant_spec = choose_quant_method(registry, model)
        self._quantized = self._read_format()
        self._at_load = None if quantization is None else choose_load_time_method(registry, model, quantization)
        self._platform = open_platform(registry, platform, threads, cache_dir, progress, stated, numerics)

    def limits(self) -> PlatformLimits:
        """What the platform offers now."""
        return self._platform.limits()

    def footprint(self, dtype: str, cache_dtype: str, bounds: StepBounds) -> ModelFootprint:
        """What the model will occupy in this compute dtype. Nothing is allocated and no weight file is opened."""
        kv_dtype = tensor_dtype(cache_dtype)
        for spec in (self._quant_spec, self._at_load):
            if spec is not None and dtype not in spec.dtypes:
                raise ConfigError(
                    f"model.dtype={dtype}: the quantization {spec.name!r} computes in {', '.join(spec.dtypes)}; choose one "
                    "of these",
                    fields=("model.dtype",),
                )
        notices: list[str] = []
        footprint = measure_footprint(
            lambda ops, device: self._create_model(ops, dtype, device),
            self._config.vocab_size,
            bounds,
            self._platform.planning_ops if isinstance(self._platform, SupportsWorkspace) else None,
            kv_dtype,
            lambda model: tuple(captured.profile for captured in self._captured_fields(model, dtype)[1]),
            lambda model: notices.extend(self._keep_blocks(model)),
            recorded=isinstance(self._platform, SupportsGraphSizes),
        )
        return msgspec.structs.replace(footprint, notices=tuple(dict.fromkeys(notices)))

    def build(
        self,
        resolved: ResolvedConfig,
        progress: ProgressCallback | None = None,
        grammars: Grammars | None = None,
        connect: Callable[[], WorkerConnector] | None = None,
        transfer_timeout: float = 10.0,
    ) -> Runner:
        """Load the weights, allocate the KV cache, and run the widest step once. `connect` makes the worker half of a KV
        connector, and a step waits for it `transfer_timeout` seconds at most."""
        platform = self._platform
        model = self._create_model(platform.ops, resolved.dtype, platform.device)
        self._keep_blocks(model)
        if platform.device.type == "cpu":
            place_together(model)
        checkpoint = self._quantized or open_checkpoint(self._config, self._registry.specs("model"))
        try:
            with torch.no_grad():
                load_weights(model, checkpoint, progress)
        finally:
            checkpoint.close()
        kv = allocate_kv(model.kv_layout(), resolved, platform.device)
        if isinstance(platform, SupportsWorkspace):
            platform.reserve_workspace(resolved.memory.workspace)
        capture = None
        if resolved.capture is not None:
            facts, fields = self._captured_fields(model, resolved.dtype)
            capture = make_capture(facts, fields, model, resolved.capture, platform)
        vocab_size = self._config.vocab_size
        processors = Processors(lambda name: self._registry.create("logits_processor", name, vocab_size))
        transfers = None
        try:
            if connect is not None:
                transfers = make_transfers(connect(), kv, model.kv_layout(), platform, transfer_timeout)
            runner = Runner(
                model,
                platform,
                resolved,
                kv,
                vocab_size,
                parameter_bytes(model),
                capture,
                grammars,
                processors,
                transfers,
            )
            runner.warm_up()
        except BaseException:
            for part in (transfers, capture):
                if part is not None:
                    part.close()
            raise
        return runner

    def close(self) -> None:
        """Give the platform back when no runner was built."""
        self._platform.close()

    def _captured_fields(self, model: CausalLM, dtype: str) -> tuple[TapFacts, tuple[CapturedField, ...]]:
        return captured_fields(self._registry, self._capture, model, self._config, dtype)

    def _keep_blocks(self, model: CausalLM) -> list[str]:
        """Weights take the form they live in: blocks of a GGUF that the platform multiplies with, or blocks that are made
        while loading -> what the operator should know."""
        blocks = None if self._expand else self._platform.ops.blocks
        if self._at_load is not None:
            method: LoadTimeMethod = self._registry.create("quant_method", self._at_load.name, None)
            made = quantize_at_load(model, method, blocks, tensor_dtype(self._config.dtype))
            return made.notices(method.name, self._platform.name)
        if self._quantized is not None:
            return take_forms(model, self._quantized, blocks, self._quant_spec.name, self._platform.name)
        if blocks is not None and self._config.stored_types:
            keep_stored_blocks(model, self._config.stored_types, blocks)
        return []

    def _read_format(self) -> QuantizedCheckpoint | None:
        """How a checkpoint that was quantised before stores its weights; only headers are read."""
        if self._quant_spec.reader is None:
            return None
        form = self._registry.create("quant_method", self._quant_spec.name, self._config.quantization, field="reader")
        return QuantizedCheckpoint(open_checkpoint(self._config, self._registry.specs("model")), form)

    def _create_model(self, ops: Ops, dtype: str, device: torch.device) -> CausalLM:
        quant: QuantMethod = self._registry.create("quant_method", self._quant_spec.name, self._config.quantization)
        context = BuildContext(ops=ops, dtype=tensor_dtype(dtype), device=device, quant=quant)
        model: CausalLM = self._registry.create("model", self._model_spec.name, self._config, context)
        return model


def choose_model(registry: Registry, architecture: str) -> ModelSpec:
    """The plugin of an architecture."""
    specs = registry.specs("model")
    for spec in specs:
        if architecture in spec.architectures:
            return spec
    known = sorted({name for spec in specs for name in spec.architectures})
    raise UnsupportedModelError(
        f"no model plugin implements {architecture!r}; installed are {', '.join(known) or 'none'}"
    )


def choose_quant_method(registry: Registry, model: ModelConfig) -> QuantMethodSpec:
    """The one method that answers for the checkpoint's quantization section."""
    specs = [spec for spec in registry.specs("quant_method") if not spec.at_load]
    found = [s for s in specs if registry.create("quant_method", s.name, model.quantization, field="matches")]
    if len(found) == 1:
        return found[0]
    names = ", ".join(spec.name for spec in found or specs)
    if found:
        raise PluginConflictError(
            f"several quantization methods answer for {model.path}: {names}; keep one with plugins.block"
        )
    raise UnsupportedModelError(
        f"{model.path} is quantized as {model.quantization!r:.200}, which no quantization plugin handles; "
        f"installed are {names or 'none'}"
    )


def choose_load_time_method(registry: Registry, model: ModelConfig, name: str) -> QuantMethodSpec:
    """The method of that name. Raises `ConfigError` when there is none, or nothing plain to quantise."""
    known = {spec.name: spec for spec in registry.specs("quant_method") if spec.at_load}
    if name not in known:
        raise ConfigError(
            f"model.quantization={name!r} is unknown; weights can be quantised while they are loaded to "
            f"{', '.join(sorted(known)) or 'nothing'}",
            fields=("model.quantization",),
        )
    if model.quantization is not None:
        types = ", ".join(sorted(set(model.stored_types.values()))) or model.quantization.get("quant_method")
        raise ConfigError(
            f"model.quantization={name}: {model.path} is quantised already ({types}); leave the setting out, or take a "
            "checkpoint with plain weights",
            fields=("model.quantization",),
        )
    return known[name]


def allocate_kv(layout: KVLayout, resolved: ResolvedConfig, device: torch.device) -> KVTensors:
    """Keys and values of each layer, [blocks + the null block, block_size, heads, head size], zero."""
    cache = resolved.cache
    dtype = tensor_dtype(cache.dtype)
    num_blocks = {
        layer: g.num_blocks for g, group in zip(cache.groups, layout.groups, strict=True) for layer in group.layer_ids
    }
    shapes = {
        layer.layer_id: tuple(
            (num_blocks[layer.layer_id] + 1, cache.block_size, layer.num_kv_heads, size) for size in layer.head_sizes
        )
        for layer in layout.layers
    }
    sizes = [_aligned(math.prod(shape) * dtype.itemsize) for pair in shapes.values() for shape in pair]
    arena = zeros((sum(sizes),), torch.uint8, device)  # one: a start of large pages for each tensor would add up
    pieces = iter(torch.split(arena, sizes))

    def tensor(shape: tuple[int, ...]) -> Tensor:
        piece: Tensor = next(pieces)[: math.prod(shape) * dtype.itemsize]
        return piece.view(dtype).view(shape)

    return {layer_id: (tensor(keys), tensor(values)) for layer_id, (keys, values) in shapes.items()}


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def make_capture(
    facts: TapFacts, fields: tuple[CapturedField, ...], model: CausalLM, resolved: ResolvedCapture, platform: Platform
) -> RowCapture:
    """Taps, and a store for each field. Raises `ConfigError` when the store cannot be had."""
    if tuple(captured.profile for captured in fields) != resolved.profiles:
        raise ConfigError(
            "the loaded model does not give the rows that were planned for: "
            f"{[captured.profile for captured in fields]}, not {list(resolved.profiles)}",
            fields=("capture.fields",),
        )
    taps = {
        name: make_tap(name, model, facts, resolved.max_step_tokens, platform.device)
        for name in dict.fromkeys(captured.tap for captured in fields)
    }
    stores: dict[str, BackgroundStore] = {}
    try:
        for captured in fields:
            store = make_store(captured.profile, resolved, platform)
            stores[captured.profile.name] = BackgroundStore(store, resolved.queue_size)
    except ConfigError:
        for opened in stores.values():
            opened.close()
        raise
    return RowCapture(fields, taps, stores, resolved)


def make_transfers(
    connector: WorkerConnector, kv: KVTensors, layout: KVLayout, platform: Platform, timeout: float
) -> KVTransfers:
    """The connector bound to the cache."""
    transfers = KVTransfers(connector, timeout)
    try:
        connector.bind(TensorKVBlocks(kv, layout, platform.synchronize))
    except BaseException:
        transfers.close()
        raise
    return transfers


def make_store(profile: CaptureProfile, resolved: ResolvedCapture, platform: Platform) -> BlockStore:
    """Where the settings want it. Raises `ConfigError`."""
    size, count = resolved.block_size * profile.row_bytes, resolved.num_objects[profile.name]
    if resolved.store_dir is not None:
        return directory_store(Path(resolved.store_dir) / profile.digest.hex(), size, count)
    if resolved.shared_memory:
        return shared_store(size, count, platform.limits().available_memory)
    return private_store(size, count)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On CPU the pages come from the operating system when they are first written, so a large cache is free
    until it is used (torch.zeros would write them all). They are large ones (NumPy asks for them) from the first on: its
    start is written before the first request comes, and small pages there cost a prompt of 512 tokens a tenth more."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    alignment = LARGE_PAGE if num_bytes > 16 * LARGE_PAGE else ALIGNMENT
    raw = torch.from_numpy(np.zeros(num_bytes + alignment, dtype=np.uint8))
    start = -raw.data_ptr() % alignment
    return raw[start : start + num_bytes].view(dtype).view(shape)


def tensor_dtype(name: str) -> torch.dtype:
    """A dtype by its name in the settings."""
    dtype = torch.float8_e4m3fn if name == "fp8_e4m3" else getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"dtype {name!r} is unknown", fields=("model.dtype",))
    return dtype
