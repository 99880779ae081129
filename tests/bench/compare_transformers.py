"""Plain-torch engine against `transformers.generate`, in interleaved rounds of one run. Prints a table; asserts nothing.

    python tests/bench/compare_transformers.py [GGUF or directory] [--rounds 3] [--threads 2]

Both use the same weights and dtype (a GGUF is dequantised by both), greedy, 128 tokens in, 64 out.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import anyio
import torch

from infer import Engine, EngineConfig
from infer.cli.measure import Workload, measure_decode


def load_peer(path: Path, dtype: torch.dtype) -> Any:
    import transformers

    if path.suffix != ".gguf":
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    config = transformers.GgufConfig(dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=dtype, quantization_config=config
    ).eval()


def peer_decode(model: Any, batch: int, workload: Workload, rng: random.Random) -> float:
    """Decode tokens per second: the time of `output_len` tokens less the time of one."""
    ids = torch.tensor(
        [[rng.randrange(model.config.vocab_size) for _ in range(workload.input_len)] for _ in range(batch)]
    )
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    times = []
    for length in (1, workload.output_len):
        started = time.perf_counter()
        with torch.inference_mode():
            model.generate(ids, max_new_tokens=length, min_new_tokens=length, **options)
        times.append(time.perf_counter() - started)
    return batch * (workload.output_len - 1) / (times[1] - times[0])


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    workload = Workload()
    config = EngineConfig(
        model=str(args.model), platform={"name": "reference", "threads": args.threads}, cache={"memory": 2**28}
    )
    rates: dict[str, list[float]] = {name: [] for name in ("infer 1", "infer 8", "transformers 1", "transformers 8")}
    async with Engine(config) as engine:
        peer = await anyio.to_thread.run_sync(load_peer, args.model, getattr(torch, engine.resolved.dtype))
        rng = random.Random(0)
        for _ in range(args.rounds):
            for count in (1, 8):
                rates[f"infer {count}"].append((await measure_decode(engine, count, workload, rng)).decode_rate)
                rates[f"transformers {count}"].append(
                    await anyio.to_thread.run_sync(peer_decode, peer, count, workload, rng)
                )
        dtype = engine.resolved.dtype
    print(f"decode tokens/s, {dtype}, {args.threads} threads, {args.rounds} interleaved rounds: median (min - max)")
    for name, values in rates.items():
        print(f"  {name:16} {statistics.median(values):8.1f}  ({min(values):.1f} - {max(values):.1f})")
    median = {name: statistics.median(values) for name, values in rates.items()}
    ratios = {
        "infer / transformers at batch 1 (>= 1)": median["infer 1"] / median["transformers 1"],
        "infer at 8 / infer at 1 (>= 3)": median["infer 8"] / median["infer 1"],
    }
    for name, ratio in ratios.items():
        print(f"  {name}: {ratio:.2f}")
    if args.json:
        args.json.write_text(json.dumps({"rates": rates, "ratios": ratios}, indent=1))


if __name__ == "__main__":
    anyio.run(main)
