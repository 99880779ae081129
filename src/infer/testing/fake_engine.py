"""An engine without a model: the real facade, loop and scheduler over a scripted executor and a byte tokenizer.

For tests of applications and of the API; needs no torch and starts at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from infer.config.engine import EngineConfig
from infer.config.model import GenerationDefaults, KVGroup, KVLayer, KVLayout, ModelConfig, ModelFootprint, StepBounds
from infer.config.platform import PlatformLimits
from infer.config.resolve import resolve
from infer.engine.engine import Engine
from infer.engine.startup import EngineParts, assemble, guidance_parts, open_step_log, with_stat_loggers
from infer.engine.step import SamplingSpec
from infer.plugins.manager import build_registry
from infer.plugins.model_source import ProgressCallback
from infer.testing.fake_executor import FakeExecutor, FakeWorker, NextToken
from infer.text.chat_template import ChatTemplate
from infer.text.token_ids_only import NoTokenizer

BOS, EOS = 256, 257
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class ByteStream:
    """Incremental UTF-8."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token_id: int) -> str:
        return self._decoder.decode(bytes([token_id])) if token_id < 256 else ""

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteTokenizer:
    """One id per byte, then BOS (256) and EOS (257); special tokens decode to nothing."""

    vocab_size = 258
    bos_token_id = BOS
    eos_token_ids = (EOS,)
    chat_template = CHAT_TEMPLATE
    special_token_ids = frozenset({BOS, EOS})

    def token_bytes(self, token_id: int) -> bytes | None:
        return bytes([token_id]) if token_id < 256 else b""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(token_id for token_id in token_ids if token_id < 256).decode("utf-8", "replace")

    def decode_stream(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True) -> ByteStream:
        return ByteStream()

    def special_tokens(self) -> dict[str, str]:
        return {}


def scripted(text: str) -> NextToken:
    """Answers every prompt with `text` and then EOS. Works because the script is told how much was answered already.

    The number of answered tokens is read off the longest suffix of the tokens that begins the script.
    """
    script: list[int] = [*text.encode(), EOS]

    def next_token(token_ids: Sequence[int], sampling: SamplingSpec) -> int:
        for answered in range(min(len(script) - 1, len(token_ids)), -1, -1):
            if list(token_ids[len(token_ids) - answered :]) == script[:answered]:
                return script[answered]
        return script[0]

    return next_token


def fake_engine(
    next_token: NextToken,
    config: EngineConfig | None = None,
    *,
    latency: float = 0.0,
    max_position: int = 2048,
    generation: GenerationDefaults | None = None,
    on_worker: Callable[[FakeWorker], None] = lambda worker: None,
) -> Engine:
    """An engine whose model is `next_token`. `on_worker` is given the worker, to watch plans or plant faults."""
    config = config or EngineConfig()
    model = ModelConfig(
        path=Path("fake"),
        format="safetensors",
        architecture="FakeForCausalLM",
        identity="fake",
        vocab_size=ByteTokenizer.vocab_size,
        max_position=max_position,
        dtype="float32",
        bos_token_id=BOS,
        eos_token_ids=(EOS,),
        quantization=None,
        generation=generation or GenerationDefaults(),
        raw={},
    )
    footprint = ModelFootprint(
        weight_bytes=0,
        load_transient_bytes=0,
        workspace_bytes=0,
        bounds=StepBounds(num_tokens=0, num_rows=0, max_model_len=max_position),
        kv_layout=KVLayout(
            groups=(KVGroup(name="full", layer_ids=(0,)),), layers=(KVLayer(layer_id=0, num_kv_heads=1, head_size=4),)
        ),
    )
    limits = PlatformLimits(name="fake", total_memory=2**33, available_memory=2**33, dtypes=("float32",), threads=1)

    async def start(asked: EngineConfig, on_progress: ProgressCallback) -> EngineParts:
        resolved = resolve(asked, model, limits, footprint)
        tokenizer: Any = NoTokenizer() if asked.model.skip_tokenizer else ByteTokenizer()
        registry = build_registry(asked.plugins)
        grammars, guided = guidance_parts(asked, registry, tokenizer, model)
        worker = FakeWorker(resolved.cache.groups, resolved.cache.block_size, next_token, grammars=grammars)
        on_worker(worker)
        planned = SimpleNamespace(
            registry=registry,
            guided=guided,
            model=model,
            resolved=resolved,
            tokenizer=tokenizer,
            template=None
            if asked.model.skip_tokenizer
            else ChatTemplate(asked.model.chat_template or CHAT_TEMPLATE, {}),
        )
        log_file = open_step_log(asked.step_log)
        parts = assemble(
            planned, FakeExecutor(worker, latency=latency), log_file, log_token_ids=asked.step_log.token_ids
        )
        return await with_stat_loggers(parts, asked)

    return Engine(config, _start=start)
