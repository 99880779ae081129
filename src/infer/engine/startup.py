"""From a configuration to the parts of a running engine: plugins, model, memory plan, worker, scheduler, loop.

Runs in the task that enters the engine; blocking work happens on the worker thread. Part of the facade.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from infer.artifacts.destination import check_targets
from infer.config.cache_dtype import choose_cache_dtype
from infer.config.engine import EngineConfig, PlatformSection
from infer.config.env import Environment, read_environment
from infer.config.memory_plan import format_memory_plan
from infer.config.model import ModelConfig
from infer.config.resolve import ResolvedConfig, choose_dtype, expands_quantized, resolve_within
from infer.config.step_log import StepLogSection
from infer.engine.admission import Admission
from infer.engine.answers import AnswerFormat
from infer.engine.connector import ChosenConnector, choose_connector
from infer.engine.executor.executor import Executor
from infer.engine.executor.thread import ThreadExecutor
from infer.engine.kv_cache.manager import KVCacheManager
from infer.engine.loop import EngineLoop
from infer.engine.mailbox import Mailbox
from infer.engine.processor_admission import ProcessorAdmission
from infer.engine.scheduler.scheduler import Scheduler
from infer.engine.stat_feed import StatFeed, engine_facts
from infer.engine.step_log.log_file import LogFile
from infer.engine.step_log.recording import StepLog, recorded
from infer.engine.structured import GrammarStore, vocabulary_of
from infer.engine.structured_admission import GuidedAdmission, reasoning_parser
from infer.errors import ConfigError, EngineClosedError
from infer.plugins.manager import build_registry
from infer.plugins.model_reference import resolve_reference
from infer.plugins.model_source import Progress, ProgressCallback
from infer.plugins.options import options_of
from infer.plugins.registry import Registry, import_reference
from infer.text.chat_template import ChatTemplate
from infer.text.token_ids_only import NoTokenizer

if TYPE_CHECKING:
    from infer.engine.worker.builder import WorkerBuilder
    from infer.plugins.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """Everything an engine runs on."""

    registry: Registry
    model: ModelConfig
    resolved: ResolvedConfig
    tokenizer: Tokenizer
    template: ChatTemplate | None
    guided: GuidedAdmission
    executor: Executor
    scheduler: Scheduler
    mailbox: Mailbox
    loop: EngineLoop
    stats: StatFeed
    step_log: LogFile | None


Start = Callable[[EngineConfig, ProgressCallback], Any]
"""An async function like `start`; tests put a scripted executor behind the same facade."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """What is known before any weight is read."""

    registry: Registry
    model: ModelConfig
    builder: WorkerBuilder
    resolved: ResolvedConfig
    tokenizer: Tokenizer
    template: ChatTemplate | None
    grammars: GrammarStore
    guided: GuidedAdmission
    connector: ChosenConnector | None


async def start(config: EngineConfig, on_progress: ProgressCallback) -> EngineParts:
    """Load and assemble. On any failure or cancellation nothing is left behind."""
    executor = ThreadExecutor()
    cancelled = threading.Event()
    log_file = open_step_log(config.step_log)

    def progress(report: Progress) -> None:
        if cancelled.is_set():
            raise EngineClosedError("the engine was closed while it was starting")
        on_progress(report)

    try:
        planned = await executor.call(lambda: _plan(config, read_environment(), progress))
        resolved = planned.resolved
        for notice in resolved.notices:
            logger.info("%s", notice)
        logger.info("memory plan: %s", format_memory_plan(resolved.memory))
        connector, timeout = planned.connector, config.kv_connector.timeout
        connect = None if connector is None else connector.worker_half
        await executor.start(lambda: planned.builder.build(resolved, progress, planned.grammars, connect, timeout))
        return await with_stat_loggers(
            assemble(planned, executor, log_file, connector, log_token_ids=config.step_log.token_ids), config
        )
    except BaseException:
        cancelled.set()
        if log_file is not None:
            log_file.close(timeout=0)
        await executor.aclose()
        raise


def open_step_log(section: StepLogSection) -> LogFile | None:
    """Raises `ConfigError` when it cannot be written."""
    return None if section.path is None else LogFile(section.path, section.max_bytes)


def assemble(
    planned: Any,
    executor: Executor,
    log_file: LogFile | None = None,
    connector: ChosenConnector | None = None,
    *,
    log_token_ids: bool = False,
) -> EngineParts:
    """The control plane over an executor whose worker is ready."""
    resolved: ResolvedConfig = planned.resolved
    identity = planned.model.identity if connector is None else connector.facts.namespace.hex()
    kv = KVCacheManager(resolved.cache, identity, record_events=log_file is not None)
    made = scheduler_class(resolved.scheduler.scheduler_class)
    external = None if connector is None else connector.external(kv)
    scheduler: Scheduler
    if log_file is None:
        scheduler = made(resolved.scheduler, kv, capture=resolved.capture, external=external)
    else:
        scheduler = watched = recorded(made)(resolved.scheduler, kv, capture=resolved.capture)
        watched.log = StepLog(
            scheduler, log_file, cache=resolved.cache, capture=resolved.capture, token_ids=log_token_ids
        )
    mailbox = Mailbox()
    stats = StatFeed(scheduler)
    depth = resolved.scheduler.in_flight_depth
    loop = EngineLoop(scheduler, executor, mailbox, depth=depth, on_step=stats.step)
    return EngineParts(
        registry=planned.registry,
        model=planned.model,
        resolved=resolved,
        tokenizer=planned.tokenizer,
        template=planned.template,
        guided=planned.guided,
        executor=executor,
        scheduler=scheduler,
        mailbox=mailbox,
        loop=loop,
        stats=stats,
        step_log=log_file,
    )


async def with_stat_loggers(parts: EngineParts, config: EngineConfig) -> EngineParts:
    """The same parts, with the loggers that the config names at work. Raises `PluginError`."""
    facts = engine_facts(config.model.ref, parts.resolved, parts.resolved.scheduler.max_model_len)
    section = config.plugins
    await parts.stats.open(parts.registry, section.stat_loggers, facts, section.stat_logger_options)
    return parts


def make_admission(parts: EngineParts, config: EngineConfig) -> Admission:
    """What checks requests against the loaded model and what its KV cache can hold."""
    limit, max_len = parts.scheduler.kv.max_request_tokens(), parts.resolved.scheduler.max_model_len
    return Admission(
        parts.model,
        parts.resolved.scheduler,
        parts.tokenizer,
        parts.template,
        guided=parts.guided,
        processors=ProcessorAdmission(parts.registry, parts.model.vocab_size),
        answers=AnswerFormat(
            parts.registry,
            parts.tokenizer,
            "" if parts.template is None else parts.template.source,
            config.structured_output.reasoning_parser,
        ),
        use_generation_config=config.model.use_generation_config,
        max_model_len=max_len if limit is None else min(max_len, limit),
    )


def _plan(config: EngineConfig, environment: Environment, progress: ProgressCallback) -> _Planned:
    """On the worker thread: everything that can be refused before a weight file is opened."""
    # The data plane comes with torch; the control plane must be importable without it.
    from infer.engine.worker.builder import WorkerBuilder  # noqa: PLC0415
    from infer.weights.facts import read_model_config  # noqa: PLC0415

    registry = build_registry(config.plugins)
    check_targets(config.artifacts, registry)
    check_named(config, registry)
    found = resolve_reference(
        config.model.ref,
        registry,
        environment.cache_dir,
        offline=environment.offline,
        token=environment.hub_token,
        progress=progress,
    )
    identity, quantization = found.identity, config.model.quantization
    if quantization is not None:  # other weights: nothing that was computed with the plain ones may be taken for these
        identity = f"{identity}+{quantization}"
    model = read_model_config(found.path, identity, registry.specs("model"))
    tokenizer: Tokenizer = NoTokenizer()
    if not config.model.skip_tokenizer:
        tokenizer = _load_tokenizer(registry, Path(config.model.tokenizer) if config.model.tokenizer else found.path)
    template = _chat_template(config.model.chat_template or tokenizer.chat_template, tokenizer)
    platform = config.platform
    builder = WorkerBuilder(
        registry,
        model,
        platform.name,
        platform.threads,
        environment.cache_dir,
        config.capture,
        expand_quantized=expands_quantized(config),
        quantization=quantization,
        progress=progress,
        stated=_stated(platform),
        numerics=config.numerics.mode,
    )
    limits = builder.limits()
    dtype = choose_dtype(config, model, limits)
    cache_dtype = choose_cache_dtype(config, dtype)
    resolved = resolve_within(config, model, limits, lambda bounds: builder.footprint(dtype, cache_dtype, bounds))
    grammars, guided = guidance_parts(config, registry, tokenizer, model)
    connector = choose_connector(config, registry, model, resolved)
    return _Planned(registry, model, builder, resolved, tokenizer, template, grammars, guided, connector)


def check_named(config: EngineConfig, registry: Registry) -> None:
    """Plugins that are made late are there at least, and take their options: what is wrong is told before weights are read.
    Raises `PluginError` or `ConfigError`."""
    for name in config.plugins.stat_loggers:
        options_of(registry, "stat_logger", name, config.plugins.stat_logger_options)
    for name in config.api.endpoints:
        options_of(registry, "endpoint", name, config.api.endpoint_options)


def _stated(section: PlatformSection) -> dict[str, Any]:
    """Settings that only some platforms take, where they are given."""
    stated: dict[str, Any] = {}
    if section.cpus is not None:
        stated["cpus"] = section.cpus
    if section.kernels is not None:
        stated["kernels"] = Path(section.kernels).expanduser()
    return stated


def guidance_parts(
    config: EngineConfig, registry: Registry, tokenizer: Tokenizer, model: ModelConfig
) -> tuple[GrammarStore, GuidedAdmission]:
    """What admits and compiles grammars. Raises `ConfigError` or `PluginError` for a backend or parser that is not there."""
    section, api = config.structured_output, config.api
    grammars = GrammarStore(registry, section, lambda: vocabulary_of(tokenizer, model))
    for name in (api.tool_parser, api.reasoning_parser):  # a wrong name is told before weights are read
        if name not in ("auto", "none"):
            registry.get("parser", name)
    chosen = section.reasoning_parser
    if chosen == "auto" and api.reasoning_parser != "none":
        chosen = api.reasoning_parser
    template = _template_source(config.model.chat_template or tokenizer.chat_template)
    return grammars, GuidedAdmission(grammars, tokenizer, reasoning_parser(registry, chosen, template))


def _load_tokenizer(registry: Registry, path: Path) -> Tokenizer:
    """The tokenizer of highest priority that finds its files there."""
    for spec in sorted(registry.specs("tokenizer"), key=lambda spec: -spec.priority):
        if registry.probe("tokenizer", spec.name, path).available:
            tokenizer: Tokenizer = registry.create("tokenizer", spec.name, path)
            return tokenizer
    names = ", ".join(spec.name for spec in registry.specs("tokenizer")) or "none"
    raise ConfigError(
        f"no tokenizer plugin ({names}) finds its files in {path.name!r}; set model.tokenizer to a directory that "
        "holds tokenizer.json",
        fields=("model.tokenizer",),
    )


def _chat_template(source: str | dict[str, str] | None, tokenizer: Tokenizer) -> ChatTemplate | None:
    source = _template_source(source)
    return None if source is None else ChatTemplate(source, tokenizer.special_tokens())


def _template_source(source: str | dict[str, str] | None) -> str | dict[str, str] | None:
    """A template, or the text of the file that is named instead."""
    if isinstance(source, str) and "\n" not in source and "{" not in source and Path(source).is_file():
        return Path(source).read_text("utf-8")
    return source


def scheduler_class(reference: str | None) -> type[Scheduler]:
    """The scheduler of that import path, or ours. Raises `ConfigError`."""
    if reference is None:
        return Scheduler
    try:
        found = import_reference(reference)
    except Exception as error:
        raise ConfigError(
            f"scheduler.scheduler_class={reference!r} cannot be imported: {type(error).__name__}: {error}; write "
            '"module:Class"',
            fields=("scheduler.scheduler_class",),
        ) from error
    if not (isinstance(found, type) and issubclass(found, Scheduler)):
        raise ConfigError(
            f"scheduler.scheduler_class={reference!r} is not a subclass of infer.engine.scheduler.scheduler.Scheduler",
            fields=("scheduler.scheduler_class",),
        )
    return found


async def stop(parts: EngineParts) -> None:
    """Free the worker and let the statistics loggers end. The loop task has ended by now."""
    with anyio.CancelScope(shield=True):
        try:
            await parts.executor.aclose()
        finally:
            await parts.stats.aclose()
            for ended in (parts.step_log, parts.scheduler.external):
                if ended is not None:
                    await anyio.to_thread.run_sync(ended.close)
