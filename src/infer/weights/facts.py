"""The facts of a checkpoint, read from its small files and headers: `ModelConfig`, and which architecture it needs.

Any thread, blocking, no tensor library (planning happens before torch is needed). Owns nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from infer.config.model import GenerationDefaults, ModelConfig
from infer.errors import InvalidRequestError, ModelError, UnsupportedModelError
from infer.plugins.model import GGUFNames, ModelSpec
from infer.types import SamplingParams
from infer.weights.gguf import GGUFFile
from infer.weights.gguf_config import eos_token_ids, gguf_config, is_quantized, stored_dtype
from infer.weights.gguf_names import stored_types
from infer.weights.safetensors_header import PICKLE_SUFFIXES, read_header, refuse_pickle, safetensors_files

CONFIG_NAME: Final = "config.json"
GENERATION_NAME: Final = "generation_config.json"
MAX_JSON_BYTES: Final = 16 << 20
_DTYPES: Final = ("bfloat16", "float16", "float32")
_SAFETENSORS_DTYPES: Final = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_SAMPLING_FIELDS: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_GGUF_SAMPLING: Final = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def read_model_config(path: Path, identity: str, models: Iterable[ModelSpec]) -> ModelConfig:
    """Facts of the checkpoint at `path`: a directory with config.json, a .gguf file, or a directory with one of those.

    `models` are the architectures there are; the first that fits is taken. Weights are not read.
    Raises `UnsupportedModelError` for an unknown architecture, pickled weights or remote code, `ModelError` for facts
    that are missing or of the wrong type, and `WeightError` for a damaged GGUF header.
    """
    specs = tuple(models)
    gguf = find_gguf(path)
    return _gguf_model(gguf, identity, specs) if gguf is not None else _directory_model(path, identity, specs)


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that `path` stands for; None when it is a directory in the Hugging Face layout."""
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        if path.suffix in PICKLE_SUFFIXES:
            raise UnsupportedModelError(
                f"{path} is a pickle, which runs code when it is loaded; convert it to safetensors"
            )
        raise ModelError(f"{path} is neither a directory nor a .gguf file; give the directory that holds it")
    if not path.is_dir():
        raise ModelError(f"{path} does not exist")
    if safetensors_files(path):
        return None
    files = sorted(p for p in path.glob("*.gguf") if p.is_file() and not p.name.startswith("mmproj"))
    if len(files) == 1:
        return files[0]
    if files:
        raise ModelError(
            f"{path} holds {len(files)} GGUF files: {', '.join(p.name for p in files[:8])}; name one of them"
        )
    return None


def gguf_names(architecture: str, models: Iterable[ModelSpec]) -> GGUFNames:
    """The GGUF translation of a `config.json` architecture."""
    for spec in models:
        if spec.gguf is not None and spec.gguf.architecture == architecture:
            return spec.gguf
    raise UnsupportedModelError(f"no model plugin can read {architecture} from a GGUF")


def _gguf_model(path: Path, identity: str, specs: tuple[ModelSpec, ...]) -> ModelConfig:
    with GGUFFile.open(path) as file:
        arch = file.metadata.get("general.architecture")
        spec = next((s for s in specs if s.gguf is not None and s.gguf.arch == arch), None)
        if spec is None or spec.gguf is None:
            known = sorted({s.gguf.arch for s in specs if s.gguf is not None})
            raise UnsupportedModelError(
                f"{path} is a GGUF of architecture {arch!r:.80}; known are {', '.join(known) or 'none'}"
            )
        raw = gguf_config(file, spec.gguf)
        quantization = {"quant_method": "gguf"} if is_quantized(file) else None
        values = {
            field: file.metadata[f"general.sampling.{key}"]
            for field, key in _GGUF_SAMPLING.items()
            if f"general.sampling.{key}" in file.metadata
        }
        eos, dtype, types = eos_token_ids(file), stored_dtype(file), stored_types(file, spec.gguf)
    return _build(
        path=path,
        format_name="gguf",
        architecture=spec.gguf.architecture,
        identity=identity,
        facts=raw,
        raw=raw,
        source=str(path),
        dtype=dtype,
        quantization=quantization,
        generation=GenerationDefaults(values=_sampling_values(values, str(path)), eos_token_ids=eos),
        types=types,
    )


def _directory_model(path: Path, identity: str, specs: tuple[ModelSpec, ...]) -> ModelConfig:
    config_path = path / CONFIG_NAME
    if not config_path.is_file():
        raise ModelError(f"{path} holds neither {CONFIG_NAME} nor a .gguf file: it is no model")
    raw = _read_json(config_path)
    architecture = _architecture(raw, config_path, specs)
    if not safetensors_files(path):
        refuse_pickle(path)
    text = raw.get("text_config")
    facts = {**text, **raw} if isinstance(text, dict) else raw
    source = str(config_path)
    quantization = facts.get("quantization_config")
    if quantization is not None and not isinstance(quantization, dict):
        raise ModelError(f"{source}: quantization_config is {quantization!r:.80}, not an object")
    return _build(
        path=path,
        format_name="safetensors",
        architecture=architecture,
        identity=identity,
        facts=facts,
        raw=raw,
        source=source,
        dtype=_dtype(facts, path, source),
        quantization=quantization,
        generation=_generation(path / GENERATION_NAME),
    )


def _build(
    *,
    path: Path,
    format_name: str,
    architecture: str,
    identity: str,
    facts: dict[str, Any],
    raw: dict[str, Any],
    source: str,
    dtype: str,
    quantization: dict[str, Any] | None,
    generation: GenerationDefaults,
    types: dict[str, str] | None = None,
) -> ModelConfig:
    vocab_size = _size(facts, "vocab_size", source)
    bos = _token_ids(facts.get("bos_token_id"), "bos_token_id", source)
    eos = generation.eos_token_ids or _token_ids(facts.get("eos_token_id"), "eos_token_id", source)
    outside = [token_id for token_id in (*bos, *eos) if token_id >= vocab_size]
    if outside:
        raise ModelError(f"{source}: bos or eos token id {outside[0]} is outside the vocabulary of {vocab_size}")
    return ModelConfig(
        path=path,
        format=format_name,
        architecture=architecture,
        identity=identity,
        vocab_size=vocab_size,
        max_position=_max_position(facts, source),
        dtype=dtype,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=eos,
        quantization=quantization,
        generation=generation,
        raw=raw,
        stored_types=types or {},
    )


def _architecture(raw: dict[str, Any], source: Path, specs: tuple[ModelSpec, ...]) -> str:
    """The first architecture in config.json that somebody implements."""
    named = raw.get("architectures")
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise ModelError(f"{source}: architectures is {named!r:.80}, not a list of names")
    known = sorted({name for spec in specs for name in spec.architectures})
    for name in named:
        if name in known:
            return str(name)
    what = f"{source}: model type {raw.get('model_type')!r:.80} with the architectures {named!r:.200} is not supported"
    if raw.get("auto_map"):
        what += "; it brings its own code (auto_map), which is never run"
    raise UnsupportedModelError(f"{what}; known are {', '.join(known) or 'none'}")


def _dtype(facts: dict[str, Any], path: Path, source: str) -> str:
    """dtype of config.json, in its old or new spelling; else what most of the first weight file is stored in."""
    value = facts.get("dtype", facts.get("torch_dtype"))
    if value is None:
        totals = dict.fromkeys(_DTYPES, 0)
        for file in safetensors_files(path)[:1]:
            for tensor in read_header(file)[0].values():
                if tensor.dtype in _SAFETENSORS_DTYPES:
                    totals[_SAFETENSORS_DTYPES[tensor.dtype]] += tensor.nbytes
        return max(totals, key=lambda name: totals[name]) if any(totals.values()) else "float32"
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    if name not in _DTYPES:
        raise ModelError(f"{source}: dtype is {value!r:.80}; known are {', '.join(_DTYPES)}")
    return str(name)


def _generation(path: Path) -> GenerationDefaults:
    """Sampling defaults of generation_config.json.

    `do_sample: false` written out means greedy: temperature 0, and the filters that greedy ignores are dropped. A
    missing do_sample leaves the other values in force. max_length and max_new_tokens are not taken over: a limit the
    caller did not ask for would truncate silently.
    """
    if not path.is_file():
        return GenerationDefaults()
    raw = _read_json(path)
    source = str(path)
    do_sample = raw.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise ModelError(f"{source}: do_sample is {do_sample!r:.80}, not true or false")
    values = {field: raw[field] for field in _SAMPLING_FIELDS if raw.get(field) is not None}
    if do_sample is False:
        values = {"temperature": 0.0, **{k: v for k, v in values.items() if k == "repetition_penalty"}}
    return GenerationDefaults(
        values=_sampling_values(values, source),
        eos_token_ids=_token_ids(raw.get("eos_token_id"), "eos_token_id", source),
    )


def _sampling_values(values: dict[str, Any], source: str) -> dict[str, Any]:
    """The same values, in the types and ranges of `SamplingParams`."""
    result: dict[str, Any] = {}
    for field, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{source}: {field} is {value!r:.80}, not a number")
        if field == "top_k":
            integral = isinstance(value, int) or value.is_integer()
            result[field] = max(int(value), 0) if integral else value  # -1 is another way to keep all
        else:
            result[field] = float(value) if abs(value) < 1e300 else math.inf  # refused below
    try:
        SamplingParams(**result)
    except InvalidRequestError as error:
        raise ModelError(f"{source}: {error}; correct the file") from None
    return result


def _max_position(facts: dict[str, Any], source: str) -> int:
    """The stated context, or as far as yarn reaches: publishers who add it often leave the context as it was."""
    older = "max_position_embeddings" not in facts and "n_positions" in facts  # GPT-2's name for it
    stated = _size(facts, "n_positions" if older else "max_position_embeddings", source)
    section = facts.get("rope_scaling") or facts.get("rope_parameters")
    if not isinstance(section, dict) or section.get("rope_type", section.get("type")) != "yarn":
        return stated
    factor = section.get("factor")
    trained = facts.get("original_max_position_embeddings") or section.get("original_max_position_embeddings")
    if not isinstance(factor, int | float) or not isinstance(trained, int) or not 1 <= factor * trained < 2**31:
        return stated  # silent, or for the model's own reading to refuse
    return max(stated, int(factor * trained))


def _size(facts: dict[str, Any], key: str, source: str) -> int:
    value = facts.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        found = "missing" if value is None else f"{value!r:.80}"
        raise ModelError(f"{source}: {key} is {found}; a positive integer is needed")
    return value


def _token_ids(value: Any, key: str, source: str) -> tuple[int, ...]:
    """One id, a list of ids or null."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < 2**31 for i in ids):
        raise ModelError(f"{source}: {key} is {value!r:.80}; a token id or a list of them is needed")
    return tuple(dict.fromkeys(ids))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(f"{path} has {path.stat().st_size} bytes; such a file has a few thousand")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds {value!r:.80}, not a JSON object")
    return value
