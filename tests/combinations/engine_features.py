"""What an engine can be started with: how each value is asked for. How it is seen to be at work is in `engine_checks`."""

from __future__ import annotations

from combinations.checkpoints import AT_LOAD, GGUF_TYPES, KINDS, WEIGHTS
from combinations.declared import Feature, Value, setting

TMP = "{tmp}"
"""In a setting: a directory of the run's own."""
_WEIGHT_NAMES = {"gguf-" + name: ("GGUF", "gguf") for name in GGUF_TYPES}


def _engine(name: str, values: tuple[Value, ...], *named: str, shown: str) -> Feature:
    return Feature(name=name, scope="engine", values=values, named=named, shown=shown)


ENGINE = (
    _engine(
        "model",
        tuple(Value(name=name) for name in KINDS),
        *("model", "architecture", "mixture-of-experts"),
        shown="the architecture that was loaded",
    ),
    _engine(
        "weights",
        tuple(
            Value(
                name=name,
                asks={"model": {"quantization": name}} if name in AT_LOAD else {},
                named=_WEIGHT_NAMES.get(name, ()),
            )
            for name in WEIGHTS
        ),
        *("model.quantization", "quantization"),
        shown="the quantization that was found or made; numbers against transformers",
    ),
    _engine(
        "compute",
        tuple(setting("model", name, dtype=name) for name in ("float32", "bfloat16", "float16")),
        "model.dtype",
        shown="the dtype that was decided",
    ),
    _engine(
        "platform",
        tuple(setting("platform", name, name=name) for name in ("cpu", "reference")),
        "platform",
        shown="the platform that was chosen",
    ),
    _engine(
        "numerics",
        tuple(setting("numerics", name, mode=name) for name in ("auto", "fast", "invariant")),
        "numerics.mode",
        shown="invariant: answers equal a plain engine's to the bit",
    ),
    _engine(
        "graphs",
        (setting("platform", "on", graphs=True), setting("platform", "off", graphs=False)),
        "platform.graphs",
        shown="decode steps that were replayed, or none",
    ),
    _engine(
        "threads",
        (setting("platform", "1", threads=1), setting("platform", "2", threads=2)),
        "platform.threads",
        shown="the number that was decided",
    ),
    _engine(
        "kv dtype",
        tuple(setting("cache", name, dtype=name) for name in ("auto", "float32", "bfloat16", "float16", "fp8_e4m3")),
        "cache.dtype",
        shown="the dtype that was decided",
    ),
    _engine(
        "block size",
        (setting("cache", "16", block_size=16), setting("cache", "4", block_size=4)),
        "cache.block_size",
        shown="the size that was decided",
    ),
    _engine(
        "prefix cache",
        (setting("cache", "on", prefix_caching=True), setting("cache", "off", prefix_caching=False)),
        "cache.prefix_caching",
        shown="cached tokens of a prompt that comes again, or none",
    ),
    _engine(
        "pool",
        (Value(name="roomy"), Value(name="tight")),
        "cache.num_blocks",
        shown="preemptions, or none",
    ),
    _engine(
        "prefill",
        (
            setting("scheduler", "whole", max_num_batched_tokens=512, chunked_prefill=False),
            setting("scheduler", "chunks", max_num_batched_tokens=16),
            setting(
                "scheduler",
                "threshold",
                max_num_batched_tokens=64,
                long_prefill_threshold=8,
                max_num_partial_prefills=2,
            ),
        ),
        *("scheduler.chunked_prefill", "scheduler.max_num_batched_tokens"),
        shown="the size of the largest step",
    ),
    _engine(
        "policy",
        tuple(setting("scheduler", name, policy=name) for name in ("fcfs", "priority", "longest_prefix")),
        "scheduler.policy",
        shown="the policy that was decided",
    ),
    _engine(
        "depth",
        (setting("scheduler", "1", in_flight_depth=1), setting("scheduler", "2", in_flight_depth=2)),
        "scheduler.in_flight_depth",
        shown="the most steps that were in flight",
    ),
    _engine(
        "capture",
        (
            Value(name="off"),
            setting("capture", "routes", routed_experts=True),
            setting("capture", "hidden", hidden_layers=[0, 1]),
            setting("capture", "plugin", fields=["token_entropy"]),
            setting("capture", "both", hidden_layers=[0, 1], fields=["token_entropy"]),
            setting("capture", "all", routed_experts=True, hidden_layers=[0, 1], fields=["token_entropy"]),
        ),
        *("capture.routed_experts", "capture.hidden_layers", "capture.fields", "captured"),
        shown="the fields that can be asked for",
    ),
    _engine(
        "row store",
        (
            Value(name="memory"),
            setting("capture", "shared", shared_memory=True),
            setting("capture", "files", store_dir=f"{TMP}/rows"),
        ),
        *("capture.shared_memory", "capture.store_dir"),
        shown="files of rows where they were asked for",
    ),
    _engine(
        "kv connector",
        (Value(name="none"), setting("kv_connector", "directory", name="directory", options={"path": f"{TMP}/kv"})),
        "kv_connector.name",
        shown="hits for a prompt that comes again after the cache was emptied",
    ),
    _engine(
        "step log",
        (Value(name="none"), setting("step_log", "written", path=f"{TMP}/steps.log")),
        "step_log.path",
        shown="a replay in which every decision comes out the same",
    ),
    _engine(
        "stat loggers",
        (Value(name="none"), setting("plugins", "log", stat_loggers=["log"])),
        "plugins.stat_loggers",
        shown="the line that it writes",
    ),
    _engine(
        "tokenizer",
        (Value(name="loaded"), setting("model", "skipped", skip_tokenizer=True)),
        "model.skip_tokenizer",
        shown="text in the answers, or none",
    ),
    _engine(
        "reasoning",
        (
            setting("structured_output", "none", reasoning_parser="none"),
            setting("structured_output", "qwen3", reasoning_parser="qwen3"),
        ),
        *("structured_output.reasoning_parser", "reasoning"),
        shown="reasoning told apart in chats, or not",
    ),
    _engine(
        "forced tokens",
        (
            setting("structured_output", "skipped", skip_forced_tokens=True),
            setting("structured_output", "stepped", skip_forced_tokens=False),
        ),
        "structured_output.skip_forced_tokens",
        shown="output tokens that took no step of their own, or none",
    ),
)
