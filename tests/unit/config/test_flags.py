"""Flags follow the settings; vLLM's names are taken or refused by name."""

from __future__ import annotations

import pytest

from infer.config.engine import EngineConfig, setting_names
from infer.config.flags import ALIASES, REFUSED, flags, nest, refusal
from infer.errors import ConfigError

VLLM_SERVE = [
    "model",
    "tokenizer",
    "dtype",
    "max-model-len",
    "max-num-seqs",
    "max-num-batched-tokens",
    "scheduling-policy",
    "enable-chunked-prefill",
    "long-prefill-token-threshold",
    "max-num-partial-prefills",
    "max-long-partial-prefills",
    "stream-interval",
    "scheduler-cls",
    "block-size",
    "kv-cache-memory-bytes",
    "num-gpu-blocks-override",
    "gpu-memory-utilization",
    "kv-cache-dtype",
    "enable-prefix-caching",
    "chat-template",
    "seed",
    "trust-remote-code",
    "revision",
    "hf-token",
    "download-dir",
    "tensor-parallel-size",
    "pipeline-parallel-size",
    "data-parallel-size",
    "enable-expert-parallel",
    "enable-lora",
    "max-loras",
    "lora-modules",
    "limit-mm-per-prompt",
    "cudagraph-capture-sizes",
    "compilation-config",
    "host",
    "port",
    "api-key",
    "served-model-name",
    "ssl-keyfile",
    "tool-call-parser",
    "enable-auto-tool-choice",
    "reasoning-parser",
    "quantization",
    "load-format",
    "enforce-eager",
    "swap-space",
    "cpu-offload-gb",
    "speculative-config",
    "kv-transfer-config",
    "kv-events-config",
    "hf-overrides",
    "generation-config",
    "override-generation-config",
    "logits-processors",
    "max-logprobs",
    "logprobs-mode",
    "async-scheduling",
    "distributed-executor-backend",
    "otlp-traces-endpoint",
    "disable-log-stats",
    "enable-log-requests",
    "uvicorn-log-level",
    "runner",
    "convert",
    "pooler-config",
    "tokenizer-mode",
    "skip-tokenizer-init",
    "structured-outputs-config",
    "additional-config",
    "attention-backend",
    "prefix-caching-hash-algo",
    "mamba-cache-dtype",
    "kv-offloading-size",
    "all2all-backend",
    "enable-eplb",
    "worker-cls",
    "headless",
    "api-server-count",
    "calculate-kv-scales",
    "disable-sliding-window",
    "disable-cascade-attn",
    "rope-scaling",
    "allowed-local-media-path",
]


@pytest.mark.row("LOAD-CONFIG-SURFACE", "every field has a flag and help text")
def test_every_setting_has_a_flag_and_help() -> None:
    made = flags()
    assert [flag.setting for flag in made] == list(setting_names())
    for flag in made:
        assert flag.names[0] == "--" + flag.setting.replace("_", "-")
        assert len(flag.help) > 10
        assert bool(flag.values) != bool(flag.off_names)


@pytest.mark.row("LOAD-CONFIG-SURFACE", "vLLM's serve flag names are accepted as aliases or refused by name")
@pytest.mark.parametrize("name", VLLM_SERVE)
def test_vllm_names_are_taken_or_refused(name: str) -> None:
    taken = any(f"--{name}" in flag.names for flag in flags())
    reason = refusal(f"--{name}")
    assert taken != bool(reason)
    assert reason is None or len(reason) > 10


def test_names_are_not_both_taken_and_refused() -> None:
    names = [name for flag in flags() for name in (*flag.names, *flag.off_names)]
    assert len(names) == len(set(names))
    assert [name for name in names if refusal(name)] == []
    assert set(ALIASES.values()) <= set(setting_names()) and not set(ALIASES) & set(REFUSED)


def test_refusal_knows_spellings() -> None:
    assert refusal("--trust_remote_code") == refusal("--trust-remote-code") == refusal("--no-trust-remote-code")
    assert refusal("--never-heard-of") is None


def test_nest_leaves_out_what_was_not_given() -> None:
    settings = nest({"cache.memory": "2GiB", "cache.dtype": None, "scheduler.max_num_seqs": "3"})
    assert settings == {"cache": {"memory": "2GiB"}, "scheduler": {"max_num_seqs": "3"}}
    config = EngineConfig(**settings)
    assert (config.cache.memory, config.scheduler.max_num_seqs) == (2**31, 3)


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-3,8", (0, 1, 2, 3, 8)), ("5", (5,)), (" 2 , 0 ", (2, 0)), ([4, 1], (4, 1)), ("7-7", (7,))]
)
def test_cpus_are_a_list_or_ranges(text: object, cpus: tuple[int, ...]) -> None:
    assert EngineConfig(platform={"cpus": text}).platform.cpus == cpus


@pytest.mark.parametrize(
    ("platform", "words"),
    [
        ({"cpus": "3-1"}, "no range of CPUs"),
        ({"cpus": "0-99999"}, "no range of CPUs"),
        ({"cpus": "0-" + "9" * 40}, "neither a CPU nor a range"),
        ({"cpus": "a"}, "neither a CPU nor a range"),
        ({"cpus": "1-2-3"}, "neither a CPU nor a range"),
        ({"cpus": ""}, "at least one CPU"),
        ({"cpus": "1,1"}, "each once"),
        ({"cpus": [-1]}, "greater than or equal to 0"),
        ({"cpus": "0-1", "threads": 3}, "threads=3 are more than the 2 CPUs"),
    ],
)
def test_what_is_no_list_of_cpus_is_refused(platform: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig(platform=platform)
