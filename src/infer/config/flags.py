"""Command-line flags of the settings, derived from the types: names, help, aliases, and names that are refused.

Pure; the command line turns `Flag` into options and hands their values back to `nest`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from infer.config.engine import setting_names

ALIASES: dict[str, str] = {
    "--model": "model.ref",
    "--dtype": "model.dtype",
    "--max-model-len": "model.max_model_len",
    "--tokenizer": "model.tokenizer",
    "--chat-template": "model.chat_template",
    "--max-num-seqs": "scheduler.max_num_seqs",
    "--max-num-batched-tokens": "scheduler.max_num_batched_tokens",
    "--scheduling-policy": "scheduler.policy",
    "--enable-chunked-prefill": "scheduler.chunked_prefill",
    "--long-prefill-token-threshold": "scheduler.long_prefill_threshold",
    "--max-num-partial-prefills": "scheduler.max_num_partial_prefills",
    "--max-long-partial-prefills": "scheduler.max_long_partial_prefills",
    "--stream-interval": "scheduler.stream_interval",
    "--scheduler-cls": "scheduler.scheduler_class",
    "--block-size": "cache.block_size",
    "--kv-cache-memory-bytes": "cache.memory",
    "--num-gpu-blocks-override": "cache.num_blocks",
    "--gpu-memory-utilization": "cache.memory_fraction",
    "--kv-cache-dtype": "cache.dtype",
    "--enable-prefix-caching": "cache.prefix_caching",
    "--enable-return-routed-experts": "capture.routed_experts",
    "--host": "api.host",
    "--port": "api.port",
    "--uds": "api.uds",
    "--ssl-certfile": "api.tls_cert",
    "--ssl-keyfile": "api.tls_key",
    "--served-model-name": "api.served_model_names",
    "--allowed-origins": "api.cors_origins",
    "--h11-max-incomplete-event-size": "api.max_header_bytes",
    "--api-key": "api.api_keys",
    "--max-logprobs": "api.max_logprobs",
    "--shutdown-timeout": "api.drain_seconds",
    "--enable-force-include-usage": "api.force_include_usage",
}
"""Flag names of vLLM's serve command that mean one of our settings."""

_LATER = "infer does not have this yet"
_PARALLEL = "infer runs a model on one device in one process"
_LORA = "infer does not serve LoRA adapters yet"
_MULTIMODAL = "infer takes text only"
_CUDA = "it tunes CUDA; infer has no such knob"
_SAMPLING = "sampling is a matter of each request: see SamplingParams"
_SERVER = "infer's server has no such setting; see the api settings"
_OBSERVE = "infer does not export this yet"
_CODE = "infer never runs code from a checkpoint"

REFUSED: dict[str, str] = {
    "--seed": "an engine has no seed; give `infer run --seed N`, or SamplingParams(seed=N), to a request",
    "--trust-remote-code": _CODE,
    "--revision": "write the revision into the reference: hf:org/name@REVISION",
    "--code-revision": _CODE,
    "--tokenizer-revision": "write --tokenizer DIRECTORY; a tokenizer comes with its checkpoint",
    "--hf-token": "set HF_TOKEN; a token on the command line can be read by every user of the machine",
    "--download-dir": "set INFER_CACHE_DIR",
    "--swap-space": "preempted requests are computed again, not swapped",
    "--disable-sliding-window": "a model's sliding window is part of the model",
    "--generation-config": "use --model.use-generation-config or --no-model.use-generation-config",
    "--async-scheduling": "use --scheduler.in-flight-depth 2 (on) or 1 (off)",
    "--enforce-eager": "there are no graphs to switch off",
    "--quantization": "the checkpoint says how it is quantised",
    "--load-format": "the checkpoint's files say what they are",
    "--logprobs-mode": _SAMPLING,
    "--override-generation-config": _SAMPLING,
    "--logits-processors": _LATER,
    "--distributed-executor-backend": _PARALLEL,
    "--speculative-config": _LATER,
    "--kv-transfer-config": "use --kv-connector.name and --kv-connector.options",
    "--kv-events-config": _LATER,
    "--aux-output-config": "use --capture.routed-experts, and --capture.max-bytes for the size of its store",
    "--prefix-caching-hash-algo": "blocks are always keyed by SHA-256",
    "--cpu-offload-gb": _LATER,
    "--disable-log-stats": "nothing is logged unless you ask: see --log-level",
    "--enable-log-requests": "prompts are never logged at the default level; see --log-level",
    "--disable-log-requests": "prompts are never logged at the default level; see --log-level",
    "--uvicorn-log-level": "use --log-level",
    "--config-format": "the checkpoint's files say what they are",
    "--attention-backend": "use --platform.name; a platform brings its own kernels",
    "--reasoning-parser": _LATER,
    "--enable-sleep-mode": _LATER,
}
"""Flag names of vLLM's serve command that have no meaning here, and why. Groups with one reason are added below."""

_GROUPS: tuple[tuple[str, str], ...] = (
    (
        _PARALLEL,
        "pipeline-parallel-size tensor-parallel-size data-parallel-size data-parallel-rank data-parallel-start-rank "
        "data-parallel-size-local data-parallel-address data-parallel-rpc-port data-parallel-backend "
        "data-parallel-hybrid-lb data-parallel-external-lb data-parallel-supervisor-port decode-context-parallel-size "
        "prefill-context-parallel-size dcp-comm-backend dcp-kv-cache-interleave-size cp-kv-cache-interleave-size "
        "master-addr master-port nnodes node-rank distributed-timeout-seconds enable-expert-parallel all2all-backend "
        "enable-eplb eplb-config enable-elastic-ep expert-placement-strategy max-parallel-loading-workers "
        "ray-workers-use-nsight disable-custom-all-reduce disable-nccl-for-dp-synchronization worker-cls "
        "worker-extension-cls enable-dbo ubatch-size dbo-decode-token-threshold dbo-prefill-token-threshold headless "
        "api-server-count dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s "
        "dp-supervisor-probe-failure-threshold aggregate-engine-logging",
    ),
    (
        _LORA,
        "enable-lora enable-lora-bias max-loras max-lora-rank lora-dtype lora-extra-vocab-size lora-modules "
        "max-cpu-loras fully-sharded-loras default-mm-loras enable-tower-connector-lora specialize-active-lora "
        "long-lora-scaling-factors enable-prompt-adapter max-prompt-adapters max-prompt-adapter-token prompt-adapters",
    ),
    (
        _MULTIMODAL,
        "limit-mm-per-prompt enable-mm-embeds media-io-kwargs mm-processor-kwargs mm-processor-cache-gb "
        "mm-processor-cache-type mm-shm-cache-max-object-size-mb mm-encoder-only mm-encoder-tp-mode "
        "mm-encoder-attn-backend interleave-mm-strings skip-mm-profiling video-pruning-rate language-model-only "
        "allowed-local-media-path allowed-media-domains disable-chunked-mm-input disable-mm-preprocessor-cache "
        "ec-transfer-config",
    ),
    (
        _CUDA,
        "cudagraph-capture-sizes max-cudagraph-capture-size max-seq-len-to-capture disable-cascade-attn "
        "cudagraph-metrics compilation-config attention-config kernel-config optimization-level performance-mode "
        "enable-flashinfer-autotune moe-backend override-attention-dtype enable-layerwise-nvtx-tracing "
        "calculate-kv-scales kv-sharing-fast-prefill disable-hybrid-kv-cache-manager",
    ),
    (
        _SERVER,
        "allow-credentials allowed-methods allowed-headers "
        "ssl-ca-certs enable-ssl-refresh ssl-cert-reqs ssl-ciphers root-path middleware "
        "enable-request-id-headers disable-fastapi-docs h11-max-header-count "
        "enable-offline-docs disable-uvicorn-access-log disable-access-log-for-endpoints "
        "chat-template-content-format trust-request-chat-template default-chat-template-kwargs response-role "
        "return-tokens-as-token-ids enable-auto-tool-choice exclude-tools-when-tool-choice-none tool-call-parser "
        "tool-parser-plugin tool-server enable-prompt-tokens-details enable-server-load-tracking "
        "enable-tokenizer-info-endpoint tokens-only "
        "enable-per-request-metrics fingerprint-mode fingerprint-value log-error-stack",
    ),
    (
        _OBSERVE,
        "show-hidden-metrics-for-version otlp-traces-endpoint collect-detailed-traces kv-cache-metrics "
        "kv-cache-metrics-sample enable-mfu-metrics enable-logging-iteration-details profiler-config "
        "log-config-file max-log-len enable-log-outputs enable-log-deltas",
    ),
    (
        _LATER,
        "hf-overrides hf-config-path rope-scaling rope-theta runner task convert pooler-config model-impl "
        "tokenizer-mode skip-tokenizer-init enable-prompt-embeds io-processor-plugin safetensors-load-strategy "
        "model-loader-extra-config ignore-patterns use-tqdm-on-load pt-load-map-location reasoning-parser-plugin "
        "structured-outputs-config guided-decoding-backend additional-config weight-transfer-config "
        "mamba-cache-dtype mamba-ssm-cache-dtype mamba-block-size mamba-cache-mode kv-offloading-size "
        "kv-offloading-backend offload-backend cpu-offload-params offload-group-size offload-num-in-group "
        "offload-prefetch-step offload-params allow-deprecated-quantization num-lookahead-slots "
        "fail-on-environ-validation device",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One setting on the command line."""

    setting: str
    """Dotted name, such as "scheduler.max_num_seqs"."""
    names: tuple[str, ...]
    """The setting's own flag first, then aliases."""
    off_names: tuple[str, ...]
    """For a switch, the names that turn it off, in the order of `names`; else empty."""
    help: str
    values: str
    """What it takes, in a word: "INTEGER", "auto|float32"; empty for a switch."""

    @property
    def section(self) -> str:
        return self.setting.partition(".")[0]


def flags() -> tuple[Flag, ...]:
    """A flag for every setting, in the order of the settings."""
    found = []
    for setting, info in setting_names().items():
        own = "--" + setting.replace("_", "-")
        names = (own, *(alias for alias, target in ALIASES.items() if target == setting))
        switch = bool in (info.annotation, *get_args(info.annotation))
        default = info.get_default(call_default_factory=True)
        shown = "" if default is None or default in ((), {}) else f" (default: {_show(default)})"
        found.append(
            Flag(
                setting=setting,
                names=names,
                off_names=tuple(f"--no-{name.removeprefix('--')}" for name in names) if switch else (),
                help=" ".join((info.description or "").split()) + shown,
                values="" if switch else _values(info.annotation),
            )
        )
    return tuple(found)


def refusal(name: str) -> str | None:
    """Why a vLLM flag is not accepted; None for names that vLLM does not have either."""
    name = "--" + name.removeprefix("--").removeprefix("no-").replace("_", "-")
    if name in REFUSED:
        return REFUSED[name]
    return next((reason for reason, names in _GROUPS if name.removeprefix("--") in names.split()), None)


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """{"cache.memory": 1} -> {"cache": {"memory": 1}}; entries that are None were not given."""
    nested: dict[str, Any] = {}
    for setting, value in values.items():
        if value is not None:
            section, _, field = setting.partition(".")
            nested.setdefault(section, {})[field] = value
    return nested


def _show(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _values(annotation: Any) -> str:
    """The type in a word. Looks through Annotated, Optional and unions."""
    if get_origin(annotation) is Literal:
        return "|".join(str(value) for value in get_args(annotation))
    plain = {int: "INTEGER", float: "NUMBER", str: "TEXT"}
    if annotation in plain:
        return plain[annotation]
    if get_origin(annotation) is tuple:
        return "A,B,..."
    if get_origin(annotation) is dict:
        return "KEY=VALUE,..." if str in get_args(annotation)[1:] else "JSON"
    inner = [_values(part) for part in get_args(annotation) if part is not type(None) and _is_type(part)]
    return "|".join(inner) or "TEXT"


def _is_type(part: Any) -> bool:
    return isinstance(part, type) or get_origin(part) is not None
