"""Intent and facts to decisions: `resolve` is pure, leaves no blanks, and refuses before any weight file is opened."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import msgspec

from infer.config import capture, kv_sizing
from infer.config.cache_dtype import check_cache_dtype, check_compute_dtype, choose_cache_dtype
from infer.config.engine import EngineConfig, check_together, check_whole_prompts
from infer.config.memory_plan import MemoryPlan, capture_words
from infer.config.model import ModelConfig, ModelFootprint, StepBounds
from infer.config.numerics import Numerics, choose_numerics
from infer.config.platform import PlatformLimits
from infer.config.units import format_bytes
from infer.errors import ConfigError

AUTO_IN_FLIGHT_DEPTH = 2
SHORTEST_TRIED = 1024
"""Tokens; a checkpoint's length is not lowered below this for the sake of the workspace."""
DEFAULT_CACHE_CAP = 2 * 2**30


class ResolvedScheduler(msgspec.Struct, frozen=True, kw_only=True):
    """Same meanings as `SchedulerSection`; 0 stands for "no limit"."""

    max_num_seqs: int
    max_num_active_seqs: int
    max_num_batched_tokens: int
    max_num_waiting: int | None
    policy: str
    chunked_prefill: bool
    long_prefill_threshold: int
    max_num_partial_prefills: int
    max_long_partial_prefills: int
    reserve_full_prompt: bool
    in_flight_depth: int
    stream_interval: int
    scheduler_class: str | None
    max_model_len: int


class CacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One KV group as decided: usable blocks, the null block not counted."""

    name: str
    window: int | None
    num_blocks: int
    bytes_per_block: int
    """Over all layers of the group."""


class ResolvedCache(msgspec.Struct, frozen=True, kw_only=True):
    block_size: int
    dtype: str
    prefix_caching: bool
    watermark: float
    groups: tuple[CacheGroup, ...]


class ResolvedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything decided. `notices` says in words what was chosen where the operator was silent or had to yield."""

    dtype: str
    platform: str
    threads: int
    scheduler: ResolvedScheduler
    cache: ResolvedCache
    memory: MemoryPlan
    notices: tuple[str, ...]
    numerics: Numerics = "fast"
    quantization: str | None = None
    """Method that quantised plain weights while they were loaded."""
    capture: capture.ResolvedCapture | None = None
    """None: no request can ask for captured rows, and nothing of it exists."""
    kernel_fingerprint: str = ""
    """As the platform says."""
    graphs: bool = True
    """Decode steps are recorded and repeated where the platform can."""


def resolve(
    config: EngineConfig, model: ModelConfig, limits: PlatformLimits, footprint: ModelFootprint
) -> ResolvedConfig:
    """Decide. Raises `ConfigError` naming both fields when two settings contradict, or the numbers when memory is short."""
    check_together(config)
    notices = list(footprint.notices)
    dtype = choose_dtype(config, model, limits)
    if dtype not in limits.dtypes:
        notices.append(f"{limits.name} does not compute {dtype} natively (natively: {', '.join(limits.dtypes)})")
    elif config.model.dtype == "auto" and dtype != model.dtype:
        notices.append(f"dtype {dtype}: {limits.name} does not compute the checkpoint's {model.dtype} natively")
    cache_dtype = choose_cache_dtype(config, dtype)
    check_cache_dtype(config, cache_dtype, limits)
    workspace = footprint.workspace_bytes
    wanted_len = _wanted_length(config, model)
    groups = kv_sizing.demands(
        footprint.kv_layout,
        block_size=config.cache.block_size,
        dtype=cache_dtype,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        watermark=config.cache.watermark,
    )
    depth = _in_flight_depth(config)
    steps = capture.step_bytes(footprint.captures, config.scheduler.max_num_batched_tokens, depth)
    stores = _store_demands(config, footprint)
    main_blocks = (
        _main_blocks(config, limits, footprint, groups, stores, workspace + steps, wanted_len) if groups else 0
    )
    plan = MemoryPlan(
        weights=footprint.weight_bytes,
        kv_cache=kv_sizing.usable_bytes(groups, main_blocks) + kv_sizing.null_bytes(groups),
        workspace=workspace,
        load_transient=footprint.load_transient_bytes,
        available=limits.available_memory,
        capture_steps=steps,
        capture_store=kv_sizing.usable_bytes(stores, main_blocks),
    )
    _refuse_if_too_big(config, plan, limits)
    max_model_len = wanted_len
    if groups:
        capacity = kv_sizing.longest_sequence(
            groups,
            main_blocks,
            config.cache.block_size,
            config.scheduler.max_num_batched_tokens,
            config.cache.watermark,
        )
        planned_len = footprint.bounds.max_model_len
        if planned_len < wanted_len:  # longer sequences would need more workspace than was planned
            capacity = planned_len if capacity is None else min(capacity, planned_len)
        max_model_len = _fit_length(config, plan, capacity, wanted_len, notices)
    check_whole_prompts(config, max_model_len)
    counts = kv_sizing.block_counts(groups, main_blocks)
    return ResolvedConfig(
        dtype=dtype,
        platform=limits.name,
        threads=config.platform.threads or limits.threads,
        graphs=config.platform.graphs,
        scheduler=_resolve_scheduler(config, max_model_len),
        cache=ResolvedCache(
            block_size=config.cache.block_size,
            dtype=cache_dtype,
            prefix_caching=config.cache.prefix_caching,
            watermark=config.cache.watermark,
            groups=tuple(
                CacheGroup(name=g.name, window=g.window, num_blocks=count, bytes_per_block=g.bytes_per_block)
                for g, count in zip(groups, counts, strict=True)
            ),
        ),
        memory=plan,
        notices=tuple(notices),
        numerics=choose_numerics(config.numerics.mode, limits),
        quantization=config.model.quantization,
        capture=_resolve_capture(config, footprint, stores, main_blocks, depth),
        kernel_fingerprint=limits.kernel_fingerprint,
    )


def resolve_within(
    config: EngineConfig, model: ModelConfig, limits: PlatformLimits, measure: Callable[[StepBounds], ModelFootprint]
) -> ResolvedConfig:
    """`resolve` with the footprint of the steps that will be: the workspace grows with the longest sequence, and the
    longest sequence is what the rest of the memory holds."""
    scheduler = config.scheduler
    length = _wanted_length(config, model)
    while True:
        footprint = measure(
            StepBounds(
                num_tokens=scheduler.max_num_batched_tokens, num_rows=scheduler.max_num_seqs, max_model_len=length
            )
        )
        try:
            resolved = resolve(config, model, limits, footprint)
        except ConfigError as error:
            stated = config.model.max_model_len is not None
            if stated or length <= SHORTEST_TRIED or "scheduler.max_num_batched_tokens" not in error.fields:
                raise
            length //= 2  # the workspace of the checkpoint's longest sequence does not fit
            continue
        if resolved.scheduler.max_model_len >= length:
            return resolved
        length = resolved.scheduler.max_model_len


def choose_dtype(config: EngineConfig, model: ModelConfig, limits: PlatformLimits) -> str:
    """Compute dtype: the stated one, else the checkpoint's where the platform runs it natively, else float32. Raises
    `ConfigError` for one that the platform cannot compute in."""
    stated = config.model.dtype
    if stated != "auto":
        check_compute_dtype(stated, limits)
        return stated
    return model.dtype if model.dtype in limits.dtypes else "float32"


def expands_quantized(config: EngineConfig) -> bool:
    """Whether blocks that could stay are expanded."""
    model = config.model
    exact = model.dtype == "float32" and model.quantization is None
    return exact if model.expand_quantized is None else model.expand_quantized


def _wanted_length(config: EngineConfig, model: ModelConfig) -> int:
    wanted = config.model.max_model_len
    if wanted is None:
        return model.max_position
    if wanted > model.max_position:
        raise ConfigError(
            f"model.max_model_len={wanted} is more than the {model.max_position} positions the checkpoint was trained "
            "for (max_position_embeddings); lower it",
            fields=("model.max_model_len",),
        )
    return wanted


def _main_blocks(
    config: EngineConfig,
    limits: PlatformLimits,
    footprint: ModelFootprint,
    groups: tuple[kv_sizing.GroupDemand, ...],
    stores: tuple[kv_sizing.GroupDemand, ...],
    workspace: int,
    wanted_len: int,
) -> int:
    """Usable blocks of the main group: as stated, or as much as is useful and fits, with the rows kept for its blocks."""
    cache = config.cache
    if cache.num_blocks is not None:
        return cache.num_blocks
    if cache.memory is not None:
        return kv_sizing.blocks_within(groups, cache.memory)
    free = limits.available_memory - footprint.weight_bytes - workspace
    ceiling = free - footprint.load_transient_bytes - kv_sizing.null_bytes(groups)
    most = kv_sizing.blocks_within(groups + stores, ceiling)
    if cache.memory_fraction is not None:
        return min(most, kv_sizing.blocks_within(groups, int(free * cache.memory_fraction)))
    window = next(group.window for group in groups if group.cap is None)
    tokens = config.scheduler.max_num_batched_tokens
    one = kv_sizing.blocks_per_sequence(window, wanted_len, cache.block_size, tokens)
    budget = min(free // 2, DEFAULT_CACHE_CAP)
    if config.model.max_model_len is not None:  # a stated length is kept if memory allows it at all
        budget = max(budget, kv_sizing.usable_bytes(groups, kv_sizing.with_watermark(one, cache.watermark)))
    enough = kv_sizing.with_watermark(one * config.scheduler.max_num_seqs, cache.watermark)
    return min(enough, most, kv_sizing.blocks_within(groups, budget))


def _store_demands(config: EngineConfig, footprint: ModelFootprint) -> tuple[kv_sizing.GroupDemand, ...]:
    """The stores of captured rows, as groups with one object per block of the main group, or fewer."""
    size = config.cache.block_size
    most = capture.object_limits(config.capture, footprint.captures, size)
    return tuple(
        kv_sizing.GroupDemand(
            name=p.name,
            window=None,
            bytes_per_block=0 if config.capture.store_dir else size * p.row_bytes,  # files take no memory
            cap=most[p.name],
        )
        for p in footprint.captures
    )


def _resolve_capture(
    config: EngineConfig,
    footprint: ModelFootprint,
    stores: tuple[kv_sizing.GroupDemand, ...],
    main_blocks: int,
    depth: int,
) -> capture.ResolvedCapture | None:
    asked, planned = config.capture.names(), {profile.name for profile in footprint.captures}
    for name in asked:
        if name not in planned or not main_blocks:
            what = "it has no KV cache, whose blocks rows are keyed by" if name in planned else "it does not offer it"
            field = config.capture.setting(name)
            raise ConfigError(f"{field}: {name} cannot be captured from this model: {what}", fields=(field,))
    if not asked:
        return None
    return capture.ResolvedCapture(
        profiles=footprint.captures,
        block_size=config.cache.block_size,
        num_objects={
            store.name: store.cap if config.capture.store_dir and store.cap else count  # keys may outlive KV blocks
            for store, count in zip(stores, kv_sizing.block_counts(stores, main_blocks), strict=True)
        },
        max_step_tokens=config.scheduler.max_num_batched_tokens,
        num_snapshots=depth,
        queue_size=2 * config.scheduler.max_num_seqs,
        shared_memory=config.capture.shared_memory,
        store_dir=config.capture.store_dir,
        run=secrets.token_bytes(16) if config.capture.store_dir else b"",
    )


def _fit_length(
    config: EngineConfig, plan: MemoryPlan, capacity: int | None, wanted_len: int, notices: list[str]
) -> int:
    """The longest sequence the KV cache holds when it runs alone, up to the wanted one."""
    size_field = _size_field(config)
    if capacity == 0:
        field = size_field or "cache.memory"
        raise ConfigError(
            f"the KV cache would hold no block at all: {_cache_words(config, plan)}; raise {field}, or lower "
            f"cache.block_size={config.cache.block_size}",
            fields=(field, "cache.block_size"),
        )
    if capacity is None or wanted_len <= capacity:
        return wanted_len
    if config.model.max_model_len is not None:
        field = size_field or "cache.memory"
        raise ConfigError(
            f"model.max_model_len={wanted_len} needs more KV cache than there is: {_cache_words(config, plan)} hold "
            f"{capacity} tokens; lower model.max_model_len to {capacity} or raise {field}",
            fields=("model.max_model_len", field),
        )
    notices.append(
        f"max_model_len {capacity}, not the checkpoint's {wanted_len}: the KV cache holds no more "
        f"({_cache_words(config, plan)}); raise {size_field or 'cache.memory'} for longer sequences"
    )
    return capacity


def _size_field(config: EngineConfig) -> str | None:
    for name in ("memory", "num_blocks", "memory_fraction"):
        if getattr(config.cache, name) is not None:
            return f"cache.{name}"
    return None


def _cache_words(config: EngineConfig, plan: MemoryPlan) -> str:
    field = _size_field(config)
    if field is None:
        return f"{format_bytes(plan.kv_cache)} of the {format_bytes(plan.available)} available"
    return f"{field}={getattr(config.cache, field.removeprefix('cache.'))} ({format_bytes(plan.kv_cache)})"


def _refuse_if_too_big(config: EngineConfig, plan: MemoryPlan, limits: PlatformLimits) -> None:
    """Before any weight file is opened."""
    total = plan.total + plan.load_transient
    if total <= plan.available:
        return
    numbers = (
        f"weights {format_bytes(plan.weights)} + KV cache {format_bytes(plan.kv_cache)} + workspace "
        f"{format_bytes(plan.workspace)}{capture_words(plan)} + "
        f"{format_bytes(plan.load_transient)} while loading = {format_bytes(total)}, "
        f"and {limits.name} has {format_bytes(plan.available)} available of {format_bytes(limits.total_memory)}"
    )
    fields: tuple[str, ...]
    size_field = _size_field(config)
    rest = plan.available - plan.weights - plan.load_transient
    if rest <= 0:
        fields, cure = ("model.ref",), "free memory, or take a smaller or more strongly quantised model"
        if config.model.dtype == "float32" and len(limits.dtypes) > 1:
            fields, cure = ("model.dtype", "model.ref"), f"{cure}, or set model.dtype={limits.dtypes[0]}"
    elif plan.capture_store and total - plan.capture_store <= plan.available:
        fields = ("capture.max_bytes",)
        cure = f"set capture.max_bytes: {format_bytes(plan.available - total + plan.capture_store)} are left for captured rows"
    elif plan.workspace >= rest:
        fields = ("scheduler.max_num_batched_tokens", "scheduler.max_num_seqs")
        cure = (
            f"lower scheduler.max_num_batched_tokens={config.scheduler.max_num_batched_tokens} or "
            f"scheduler.max_num_seqs={config.scheduler.max_num_seqs}"
        )
    else:
        fields = (size_field or "cache.block_size",)
        value = getattr(config.cache, fields[0].removeprefix("cache."))
        left = rest - plan.workspace - plan.capture_steps - plan.capture_store
        cure = f"lower {fields[0]}={value}: {format_bytes(left)} are left for the KV cache"
    raise ConfigError(f"the model does not fit in memory: {numbers}; {cure}", fields=fields)


def _resolve_scheduler(config: EngineConfig, max_model_len: int) -> ResolvedScheduler:
    asked = config.scheduler
    if asked.policy == "longest_prefix" and not config.cache.prefix_caching:
        names = ("scheduler.policy", "cache.prefix_caching")
        raise ConfigError(f"{names[0]}='longest_prefix' needs {names[1]}=True; change one of them", fields=names)
    return ResolvedScheduler(
        max_num_seqs=asked.max_num_seqs,
        max_num_active_seqs=asked.max_num_active_seqs or asked.max_num_seqs,
        max_num_batched_tokens=asked.max_num_batched_tokens,
        max_num_waiting=asked.max_num_waiting,
        policy=asked.policy,
        chunked_prefill=asked.chunked_prefill,
        long_prefill_threshold=asked.long_prefill_threshold,
        max_num_partial_prefills=asked.max_num_partial_prefills or 0,
        max_long_partial_prefills=asked.max_long_partial_prefills or 0,
        reserve_full_prompt=asked.reserve_full_prompt,
        in_flight_depth=_in_flight_depth(config),
        stream_interval=asked.stream_interval,
        scheduler_class=asked.scheduler_class,
        max_model_len=max_model_len,
    )


def _in_flight_depth(config: EngineConfig) -> int:
    asked = config.scheduler.in_flight_depth
    return AUTO_IN_FLIGHT_DEPTH if asked == "auto" else asked
