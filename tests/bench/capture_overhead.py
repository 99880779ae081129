"""What capture of routed experts costs: throughput on/off in interleaved pairs, for all requests and for one in eight.
Run as a script; prints a table of ratios with 95 % intervals and, with --json FILE, writes the numbers. Asserts no time."""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import statistics
import struct
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from infer import Engine, EngineConfig, SamplingParams
from infer.testing.moe_from_dense import moe_from_dense
from infer.testing.tiny_models import make_checkpoint

REQUESTS = 8
TARGETS = {"demo, all capture": 0.98, "demo, one of eight captures": 0.98, "48 layers x top 8, all capture": 0.99}
MIN_STEP_MS = 50.0
INSTRUCTIONS = 1  # PERF_COUNT_HW_INSTRUCTIONS
OPEN_COUNTER = {"x86_64": 298, "aarch64": 241}


@dataclass
class Measured:
    """One run: of the requests that count, tokens per second; of the whole process, CPU seconds and instructions."""

    tokens_per_second: float
    cpu_seconds: float
    instructions: int | None


class Counter:
    """Instructions of this process and the threads it starts later, where the machine lets us count them."""

    def __init__(self) -> None:
        number = OPEN_COUNTER.get(os.uname().machine)
        self.descriptor = -1
        if number is not None:
            # perf_event_attr: type (hardware), size, config, then zeros; bit 1 of the flags is "inherit".
            attributes = struct.pack("<IIQQQQQ", 0, 112, INSTRUCTIONS, 0, 0, 0, 2 | 1 << 5).ljust(112, b"\0")
            self.descriptor = ctypes.CDLL(None, use_errno=True).syscall(number, attributes, 0, -1, -1, 0)

    def read(self) -> int | None:
        return None if self.descriptor < 0 else int(struct.unpack("<Q", os.read(self.descriptor, 8))[0])


def interval(ratios: list[float]) -> tuple[float, float]:
    """95 % for the median, from order statistics: nothing is assumed about how the noise is distributed."""
    ordered, count = sorted(ratios), len(ratios)
    rank, tail = 0, 0.0
    while tail + math.comb(count, rank) / 2**count <= 0.025:
        tail += math.comb(count, rank) / 2**count
        rank += 1
    return ordered[max(rank - 1, 0)], ordered[min(count - rank, count - 1)]


async def run(
    engine: Engine, captured: int, counted: range, tokens: int, vocab_size: int, counter: Counter
) -> Measured:
    """Eight requests at once; the first `captured` ask for routes. Timed until the last of `counted` has ended."""
    ended = [0.0] * REQUESTS

    async def one(index: int) -> None:
        prompt = [(7 * index + 13 * i) % (vocab_size - 10) + 5 for i in range(16)]
        params = SamplingParams(
            max_tokens=tokens, temperature=0, ignore_eos=True, return_routed_experts=index < captured
        )
        done = await engine.generate(prompt, params, cache_salt=str(time.monotonic_ns()))
        assert len(done.token_ids) == tokens
        if index < captured:
            rows = done.choices[0].captured["moe_routes"]
            assert (rows.count, rows.error) == (len(prompt) + tokens - 1, None), rows.error
        ended[index] = time.perf_counter()

    instructions, cpu, begin = counter.read(), time.process_time(), time.perf_counter()
    async with anyio.create_task_group() as group:
        for index in range(REQUESTS):
            group.start_soon(one, index)
    seconds = max(ended[i] for i in counted) - begin
    after = counter.read()
    used = None if instructions is None or after is None else after - instructions
    return Measured(len(counted) * tokens / seconds, time.process_time() - cpu, used)


async def compare(model: Path, captured: int, counted: range, options: argparse.Namespace, counter: Counter) -> Any:
    """Pairs of runs, with and without requests that ask, the first of a pair taking turns. On one engine, for two copies
    of the weights are not equally fast; with --two-engines the other run is on one that has no capture at all."""
    settings: dict[str, Any] = {
        "model": {"ref": str(model), "skip_tokenizer": True, "max_model_len": 512, "use_generation_config": False},
        "scheduler": {"max_num_seqs": REQUESTS},
        "platform": {"name": options.platform, "threads": options.threads},
    }
    pairs: list[tuple[Measured, Measured]] = []
    async with AsyncExitStack() as stack:
        on = off = await stack.enter_async_context(Engine(EngineConfig(capture={"routed_experts": True}, **settings)))
        if options.two_engines:
            off = await stack.enter_async_context(Engine(EngineConfig(**settings)))
        vocab_size = on._parts.model.vocab_size
        for number in range(options.pairs + 1):
            found = {}
            for asking in (True, False) if number % 2 else (False, True):
                engine, asked = (on, captured) if asking else (off, 0)
                found[asking] = await run(engine, asked, counted, options.tokens, vocab_size, counter)
            if number:  # the first pair warms up
                pairs.append((found[True], found[False]))
    ratios = [a.tokens_per_second / b.tokens_per_second for a, b in pairs]
    low, high = interval(ratios)
    counts = [a.instructions / b.instructions for a, b in pairs if a.instructions and b.instructions]
    return {
        "pairs": len(pairs),
        "ratio": statistics.median(ratios),
        "low": low,
        "high": high,
        "cpu_ratio": statistics.median(b.cpu_seconds / a.cpu_seconds for a, b in pairs),
        "instruction_ratio": statistics.median(counts) if counts else None,
        "step_ms": 1e3 * len(counted) / statistics.median(b.tokens_per_second for _, b in pairs),
    }


def deep_model(directory: Path, options: argparse.Namespace) -> Path:
    """48 layers of experts, 8 chosen."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 1024,
        "hidden_size": options.hidden,
        "intermediate_size": options.hidden,
        "moe_intermediate_size": options.hidden // 2,
        "num_experts": options.experts,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    }
    return make_checkpoint(config, directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, help="SmolLM2 as GGUF; without it the demo model is left out")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--platform", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--hidden", type=int, default=128, help="of the 48-layer model")
    parser.add_argument("--experts", type=int, default=64, help="of the 48-layer model")
    parser.add_argument("--two-engines", action="store_true", help="compare with an engine that has no capture")
    parser.add_argument("--only", choices=sorted(TARGETS), action="append")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    counter, found = Counter(), {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.only or TARGETS:
            if name.startswith("demo") and options.gguf is None:
                print(f"{name}: left out, needs --gguf")
                continue
            path = Path(scratch) / ("demo" if name.startswith("demo") else "deep")
            if not path.exists():
                path = moe_from_dense(options.gguf, path) if path.name == "demo" else deep_model(path, options)
            captured = 1 if "one of eight" in name else REQUESTS
            counted = range(captured % REQUESTS, REQUESTS)
            found[name] = anyio.run(compare, path, captured, counted, options, counter)
            print(row(name, found[name]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2))


def row(name: str, numbers: dict[str, Any]) -> str:
    target = TARGETS[name]
    verdict = "reached" if numbers["high"] >= target else "MISSED"
    if "48" in name and numbers["step_ms"] < MIN_STEP_MS:
        verdict += f", but a step takes less than {MIN_STEP_MS:.0f} ms: raise --hidden"
    instructions = numbers["instruction_ratio"]
    shown = "no instruction counters here" if instructions is None else f"instructions x {instructions:.4f}"
    return (
        f"{name}: {numbers['ratio']:.4f} [{numbers['low']:.4f}, {numbers['high']:.4f}] of {numbers['pairs']} pairs; "
        f"CPU time {numbers['cpu_ratio']:.4f}; {shown}; step {numbers['step_ms']:.1f} ms; target {target}: {verdict}"
    )


if __name__ == "__main__":
    main()
