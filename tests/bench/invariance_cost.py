"""What batch invariance costs on the CPU: our kernels against variants of them that give it up where that could gain.

`python tests/bench/invariance_cost.py [--rounds 9] [--threads 2] [--only TEXT]`. The variants are our own sources with a few
lines replaced, built into a temporary directory; shapes are those of SmolLM2-135M. All are timed in turns on the same memory.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from infer.backends.cpu.build import NATIVE, SOURCES, build_library, compile_library, find_compiler
from infer.backends.cpu.library import Library
from infer.backends.cpu.ops import make_kernels, make_ops
from infer.backends.cpu.tape import Arena, Tape, record
from infer.plugins.platform import AttentionMetadata, Ops

LAYERS, HEADS, KV_HEADS, HEAD_SIZE, BLOCK = 30, 9, 3, 64, 16
LINEARS = ((960, 576), (576, 576), (3072, 576), (576, 1536))
"""Outputs and inputs of a layer's linears."""
SPLITS = (64, 256, 512, 2048)
CASES = ((1, 128, 1), (1, 512, 1), (1, 1500, 1), (1, 4096, 1), (8, 300, 1), (32, 150, 1), (1, 512, 512))
"""Attention: requests, their contexts, and how many tokens of each are computed."""
Work = Callable[[Ops], tuple[Tensor, ...]]
Result = dict[str, list[float]]
"""Seconds by name and round."""


@dataclass(frozen=True)
class Change:
    """Text of one source that occurs once, and what a variant has there."""

    source: str
    old: str
    new: str


def keys_per_split(count: int) -> tuple[Change, ...]:
    """Attention with another number of keys to a partial result. An engine without invariance would take the best for the
    batch and the threads at hand."""
    old = "constexpr int SPLIT = 128;"
    return (Change("attention_math.h", old, f"constexpr int SPLIT = {count};"),)


TWO_SUMS = (
    # bf16: as long as registers are left over, even and odd steps of k have accumulators of their own.
    Change("packed.h", "    vf acc[M][N];\n", "    constexpr int TWO = M * N <= 12;\n    vf sums[2][M][N] = {};\n"),
    Change(
        "packed.h",
        "    for (int m = 0; m < M; ++m)\n        for (int n = 0; n < N; ++n) acc[m][n] = splat(0.0f);\n"
        "    for (int64_t i = 0; i < k; i += P) {\n",
        "    auto one = [&](int64_t i, vf (*acc)[N]) __attribute__((always_inline)) {\n",
    ),
    Change(
        "packed.h",
        "acc[m][n] = Lane<T>::step(acc[m][n], wv[n], x[m] + i);\n    }\n",
        "acc[m][n] = Lane<T>::step(acc[m][n], wv[n], x[m] + i);\n    };\n"
        "    int64_t i = 0;\n    for (; i + 2 * P <= k; i += 2 * P) one(i, sums[0]), one(i + P, sums[TWO]);\n"
        "    if (i < k) one(i, sums[0]);\n",
    ),
    Change("packed.h", "acc[m][n] + add);", "sums[0][m][n] + sums[1][m][n] + add);"),
    # blocks: the same for the float sums of even and odd blocks.
    Change(
        "blocks.h",
        "    vf out[M][N];\n    for (int m = 0; m < M; ++m)\n        for (int n = 0; n < N; ++n) out[m][n] = splat(0.0f);\n"
        "    int64_t b = 0;\n    do {  // there is at least one, and sums stay in registers\n",
        "    constexpr int TWO = M * N <= 6;\n    vf sums[2][M][N] = {};\n"
        "    auto one = [&](int64_t b, vf (*out)[N]) __attribute__((always_inline)) {\n",
    ),
    Change(
        "blocks.h",
        "    } while (++b < blocks);\n",
        "    };\n    int64_t b = 0;\n"
        "    for (; b + 2 <= blocks; b += 2) one(b, sums[0]), one(b + 1, sums[TWO]);\n    if (b < blocks) one(b, sums[0]);\n",
    ),
    Change("blocks.h", "result[m][n] = out[m][n];", "result[m][n] = sums[0][m][n] + sums[1][m][n];"),
)
"""Matrix products that sum up in another way when there are few tokens."""


def build(directory: Path, compiler: str, name: str, changes: Sequence[Change]) -> Path:
    """The library of a variant. Raises `SystemExit` when a source no longer has the text that is to be replaced."""
    sources = Path(shutil.copytree(SOURCES, directory / name))
    for change in changes:
        path = sources / change.source
        text = path.read_text("utf-8")
        if text.count(change.old) != 1:
            raise SystemExit(f"variant {name!r} is out of date: {change.source} must hold this once:\n{change.old}")
        path.write_text(text.replace(change.old, change.new), "utf-8")
    library = directory / f"{name}.so"
    compile_library(compiler, NATIVE, library, sources)
    return library


class Kernels:
    """A library with threads of its own; work is recorded once and repeated without Python."""

    def __init__(self, path: Path, threads: int) -> None:
        self.library = Library(path, threads)
        self.kernels = make_kernels(self.library)
        self.ops = make_ops(*self.kernels)
        self.arena = Arena()
        self.arena.reserve(1 << 28)

    def tape(self, work: Work) -> Tape[tuple[Tensor, ...]]:
        _, tape = record(self.library, self.kernels, self.arena, lambda: work(self.ops))
        assert tape is not None, "all of it is calls of the library"
        return tape

    def close(self) -> None:
        self.arena.release()
        self.library.close()


def linears(tokens: int, kind: str, weights: list[list[Tensor]]) -> Work:
    inputs = {inner: torch.randn(tokens, inner).to(torch.bfloat16) for _, inner in LINEARS}

    def work(ops: Ops) -> tuple[Tensor, ...]:
        out = []
        for layer in weights:
            for (_, inner), weight in zip(LINEARS, layer, strict=True):
                if kind == "bf16":
                    out.append(ops.linear(inputs[inner], weight, None))
                else:
                    assert ops.blocks is not None
                    out.append(ops.blocks.linear(inputs[inner], weight, kind, None, torch.bfloat16))
        return tuple(out)

    return work


def make_weights(ops: Ops, kind: str) -> list[list[Tensor]]:
    """Of 30 layers, in the kernels' order: each is read from memory, as in a model."""
    assert ops.pack is not None and ops.blocks is not None
    made = []
    for _ in range(LAYERS):
        layer = []
        for outer, inner in LINEARS:
            weight = torch.randn(outer, inner).mul_(inner**-0.5).to(torch.bfloat16)
            if kind == "bf16":
                layer.append(ops.pack(weight))
                continue
            form = ops.blocks.formats[kind]
            stored = torch.empty(outer, inner // form.size * form.num_bytes, dtype=torch.uint8)
            encode = next(encode for (name, _), encode in ops.blocks.encoders.items() if name == kind)
            assert encode(weight, stored)
            layer.append(ops.blocks.pack(stored, kind))
        made.append(layer)
    return made


def attention(rows: int, context: int, tokens: int = 1) -> Work:
    """`tokens` of each of `rows` requests, which then have `context`; blocks of 16 in random order."""
    each = -(-context // BLOCK)
    table = (torch.randperm(rows * each) + 1).to(torch.int32).view(rows, each)
    shape = (rows * each + 1, BLOCK, KV_HEADS, HEAD_SIZE)
    caches = [[torch.randn(shape).to(torch.bfloat16) for _ in range(2)] for _ in range(LAYERS)]
    q = torch.randn(rows * tokens, HEADS, HEAD_SIZE).to(torch.bfloat16)
    metadata = AttentionMetadata(
        query_starts=torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32),
        seq_lens=torch.full((rows,), context, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.zeros(rows * tokens, dtype=torch.int64),
        query_lens_host=[tokens] * rows,
        seq_lens_host=[context] * rows,
        num_decode_rows=rows if tokens == 1 else 0,
    )

    def work(ops: Ops) -> tuple[Tensor, ...]:
        return tuple(ops.attention(q, k, v, metadata, HEAD_SIZE**-0.5, None, None) for k, v in caches)

    return work


def compare(ours: Kernels, others: dict[str, Kernels], work: Work, rounds: int, seconds: float) -> Result:
    """All in turns, every second round backwards; a ratio is taken within a round."""
    tapes = {"ours": ours.tape(work)} | {name: kernels.tape(work) for name, kernels in others.items()}
    expected = [out.float().clone() for out in tapes["ours"].replay()]
    for name, tape in tapes.items():
        for got, wanted in zip(tape.replay(), expected, strict=True):
            error = (got.float() - wanted).norm() / wanted.norm()
            assert error < 0.01, f"{name} computes something else: relative error {error:.3g}"
    began = time.perf_counter()
    tapes["ours"].replay()
    repeats = max(1, round(seconds / (time.perf_counter() - began)))
    times: dict[str, list[float]] = {name: [] for name in tapes}
    for number in range(rounds):
        for name in list(tapes)[:: -1 if number % 2 else 1]:
            tapes[name].replay()  # what it needs is in place again
            began = time.perf_counter()
            for _ in range(repeats):
                tapes[name].replay()
            times[name].append((time.perf_counter() - began) / repeats)
    return times


def report(label: str, times: Result) -> None:
    ours = times.pop("ours")
    cells = [f"{label:<22} {1000 * statistics.median(ours):7.2f} ms"]
    for name, taken in times.items():
        low, middle, high = statistics.quantiles([other / own for other, own in zip(taken, ours, strict=True)], n=4)
        cells.append(f"{name} {middle:.2f} ({low:.2f} to {high:.2f})")
    print(" | ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.03, help="of one measurement")
    parser.add_argument("--libraries", type=Path, help="keep the variants here, and take those that are there")
    parser.add_argument("--only", default="", help="lines whose name has this text")
    options = parser.parse_args()
    compiler = find_compiler()
    if compiler is None:
        raise SystemExit("the variants need a C++ compiler (g++ or clang++) on the path")
    torch.manual_seed(0)
    with ExitStack() as stack:
        directory = options.libraries or Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def kernels(path: Path) -> Kernels:
            return stack.enter_context(closing(Kernels(path, options.threads)))

        def variant(name: str, changes: Sequence[Change]) -> Kernels:
            library = directory / f"{name}.so"
            return kernels(library if library.is_file() else build(directory, compiler, name, changes))

        ours = kernels(build_library(directory))
        print("ours; then the time of each variant over ours: median (quartiles)")
        two_sums = {"two sums": variant("two-sums", TWO_SUMS)}
        for kind in ("bf16", "Q8_0", "Q4_1"):
            if options.only in kind:
                weights = make_weights(ours.ops, kind)
                for tokens in (1, 2, 4):
                    work = linears(tokens, kind, weights)
                    report(f"{kind}, {tokens} tokens", compare(ours, two_sums, work, options.rounds, options.seconds))
        labels = [
            f"attention {rows} x {context}" if new == 1 else f"attention, prompt {new}" for rows, context, new in CASES
        ]
        chosen = [(label, case) for label, case in zip(labels, CASES, strict=True) if options.only in label]
        counts = SPLITS if chosen else ()
        splits = {f"{count} keys": variant(f"split-{count}", keys_per_split(count)) for count in counts}
        for label, case in chosen:
            report(label, compare(ours, splits, attention(*case), options.rounds, options.seconds))


if __name__ == "__main__":
    main()
