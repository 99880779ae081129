"""What each form of the weights costs in accuracy: perplexity, and KL divergence over the vocabulary from transformers in fp32.

    python tests/bench/accuracy.py DIR [--windows 100]

DIR is a model folder that `peers/prepare.py` made (`hf/` and GGUF files). The text is Python's own language reference, out of the
standard library (`pydoc_data.topics`), so that anyone has it. The models run on the platform an engine would choose, through the
worker of an engine that was opened as a user's; only the logits are read on the way. Prints a table; asserts nothing.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import anyio
import torch
from torch import Tensor

from infer import Engine, EngineConfig
from infer.testing.tiny_models import PagedDriver

BLOCK = 16
ROWS = 64
"""Positions whose whole distributions are compared at a time."""


@dataclass
class Scores:
    """Of one form of the weights; one entry per scored position."""

    nll: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)
    """The most likely token is the reference's."""
    weights: int = 0
    """Bytes as held."""

    def add(self, reference: Tensor, weighting: Tensor, logits: Tensor, targets: Tensor) -> None:
        """[T, V] log-probabilities of the reference and their exponentials, fp32 logits of ours; [T] the ids that follow."""
        ours = logits.log_softmax(dim=-1)
        self.nll += (-ours.gather(1, targets[:, None]).squeeze(1)).tolist()
        self.same += (reference.argmax(dim=-1) == ours.argmax(dim=-1)).tolist()
        # In place, for these are the largest tensors here; rounding alone can be below 0.
        self.kl += ours.neg_().add_(reference).mul_(weighting).sum(dim=-1).clamp(min=0.0).tolist()

    def brief(self) -> str:
        return f"{math.exp(statistics.fmean(self.nll)):.3f} / {statistics.fmean(self.kl):.5f}"

    def row(self, name: str, base: float) -> str:
        perplexity = math.exp(statistics.fmean(self.nll))
        ordered = sorted(self.kl)
        same = f"{100 * statistics.fmean(self.same):.2f} %"
        return (
            f"| {name} | {self.weights / 1e6:.0f} | {perplexity:.3f} | {100 * (perplexity / base - 1):+.2f} % | "
            f"{statistics.fmean(self.kl):.5f} | {ordered[int(0.99 * len(ordered))]:.4f} | {same} |"
        )


class Candidate:
    """An engine whose model is run on its own worker thread, window by window."""

    def __init__(self, engine: Engine, window: int) -> None:
        parts: Any = engine._parts
        self._executor: Any = parts.executor
        self._window = window
        self.scores = Scores(weights=engine.resolved.memory.weights)

    async def logits(self, ids: list[int]) -> Tensor:
        """-> [T, V] fp32, of a prompt without anything before it."""
        found: Tensor = await self._executor.call(lambda: self._run(ids))
        return found

    def _run(self, ids: list[int]) -> Tensor:
        runner = self._executor._worker
        dtype = next(iter(runner._kv.values()))[0].dtype
        driver = PagedDriver(runner._loaded(), BLOCK, num_blocks=self._window // BLOCK + 2, dtype=dtype)
        with runner._platform.step_context():
            return driver.step([("text", ids)])[0]


def text() -> str:
    """Prose about one subject after the other, in the order of their names."""
    return "\n\n".join(topics[name].strip() for name in sorted(topics))


def candidates(directory: Path) -> dict[str, dict[str, Any]]:
    """Settings of the model section, by the name of the row; those whose files are there."""
    plain = {"ref": str(directory / "hf")}
    found: dict[str, dict[str, Any]] = {"bf16": {**plain, "dtype": "bfloat16"}}
    found |= {method: {**plain, "quantization": method} for method in ("int8", "int4")}
    for name in ("Q8_0", "Q4_0", "Q4_1", "Q4_K_M"):
        path = directory / f"{name.lower()}.gguf"
        if path.exists():
            found[name] = {"ref": str(path)}
    return found


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--windows", type=int, default=100)
    parser.add_argument("--window", type=int, default=512, help="tokens")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", action="append")
    options = parser.parse_args()
    import transformers

    torch.set_num_threads(options.threads)
    load = transformers.AutoModelForCausalLM.from_pretrained
    oracle: Any = load(options.directory / "hf", dtype=torch.float32)
    oracle.eval()
    reference = Scores(weights=4 * sum(parameter.numel() for parameter in oracle.parameters()))
    async with AsyncExitStack() as stack:
        running: dict[str, Candidate] = {}
        for name, model in candidates(options.directory).items():
            if options.only and name not in options.only:
                continue
            settings: dict[str, Any] = {
                "model": {**model, "max_model_len": options.window},
                "cache": {"num_blocks": options.window // BLOCK + 2, "block_size": BLOCK},
                "scheduler": {"max_num_seqs": 1, "max_num_batched_tokens": options.window},
                "platform": {"threads": options.threads},
            }
            engine = await stack.enter_async_context(Engine(EngineConfig(**settings)))
            running[name] = Candidate(engine, options.window)
            ids = engine.tokenizer.encode(text())
        scored = min(options.windows, len(ids) // options.window)
        for number in range(scored):
            window = ids[number * options.window : (number + 1) * options.window]
            targets = torch.tensor(window[1:])
            with torch.inference_mode():
                theirs = oracle(torch.tensor([window])).logits[0, :-1].float().log_softmax(dim=-1)
            found = {name: (await candidate.logits(window))[:-1] for name, candidate in running.items()}
            for rows in range(0, len(targets), ROWS):
                part = slice(rows, rows + ROWS)
                weighting = theirs[part].exp()
                reference.add(theirs[part], weighting, theirs[part], targets[part])
                for name, candidate in running.items():
                    candidate.scores.add(theirs[part], weighting, found[name][part], targets[part])
            so_far = ", ".join(f"{name} {candidate.scores.brief()}" for name, candidate in running.items())
            begin = f"{time.strftime('%H:%M:%S')} window {number + 1} of {scored}; perplexity / KL so far:"
            print(f"{begin} fp32 {reference.brief()}, {so_far}", file=sys.stderr, flush=True)
    base = math.exp(statistics.fmean(reference.nll))
    print(
        f"{len(reference.nll):,} positions of {scored} windows of {options.window} tokens; Python {sys.version.split()[0]}\n"
    )
    print("| weights | MB | perplexity | against fp32 | mean KL | 99 % of KL below | same best token |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    print(reference.row("fp32, transformers", base))
    for name, candidate in running.items():
        print(candidate.scores.row(name, base))


if __name__ == "__main__":
    anyio.run(main)
