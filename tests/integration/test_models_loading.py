"""Checkpoints as a user has them: sharded, GGUF twins, damaged ones, memory planned and measured, what is refused first.
Random tiny Llamas through the public engine; memory is measured in fresh processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gguf_samples import to_llamacpp_order, write_gguf
from infer import ConfigError, ModelError, UnsupportedModelError, WeightError
from infer.models.llama import GGUF

from .engine_support import (
    ARCHITECTURES,
    BOS,
    CORPUS,
    EOS,
    Oracle,
    greedy,
    ids,
    prompt,
    same_tokens,
    serve,
    write_checkpoint,
)

LLAMA = ARCHITECTURES["llama"]
PROMPTS = [prompt(n) for n in (5, 40, 90)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), LLAMA | {"dtype": "float32"})


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "copy"))


def answers(path: Path, **sections: Any) -> list[tuple[int, ...]]:
    with serve(path, **sections) as engine:
        return ids(engine.generate_many(PROMPTS, greedy(16)))


# -- safetensors -------------------------------------------------------------------------------------------------------


@pytest.mark.row("LOAD-SAFETENSORS", "Hugging Face checkpoints load directly, sharded or not")
def test_a_sharded_checkpoint_answers_the_same(model: Path, tmp_path: Path) -> None:
    sharded = write_checkpoint(tmp_path / "sharded", LLAMA, max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) >= 3 and (sharded / "model.safetensors.index.json").is_file()
    oracle = Oracle.random(LLAMA)
    whole = answers(model)
    assert answers(sharded) == whole
    for token_ids, got in zip(PROMPTS, whole, strict=True):
        same_tokens(got, oracle.greedy(token_ids, 16))


def change_weights(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def change_config(path: Path, **values: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def truncate(path: Path, name: str = "model.safetensors", cut: int = 1000) -> None:
    os.truncate(path / name, (path / name).stat().st_size - cut)


def only_pickle(path: Path) -> None:
    (path / "model.safetensors").unlink()
    torch.save({}, path / "pytorch_model.bin")


def huge_header(path: Path) -> None:
    (path / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")


LAST = "model.layers.1.mlp.down_proj.weight"
DAMAGE: dict[str, tuple[Callable[[Path], Any], type[ModelError], tuple[str, ...]]] = {
    "missing tensor": (lambda p: change_weights(p, lambda t: t.pop(LAST)), WeightError, (LAST,)),
    "extra tensor": (
        lambda p: change_weights(p, lambda t: t.update({"model.stranger": torch.zeros(3)})),
        WeightError,
        ("model.stranger",),
    ),
    "wrong shape": (
        lambda p: change_weights(p, lambda t: t.update({LAST: torch.zeros(64, 95)})),
        WeightError,
        (LAST, "95", "96"),
    ),
    "config of another size": (lambda p: change_config(p, intermediate_size=80), WeightError, ("80", "96")),
    "truncated": (truncate, WeightError, ("model.safetensors",)),
    "hostile header": (huge_header, WeightError, ("model.safetensors", str(2**62))),
    "unknown architecture": (
        lambda p: change_config(p, architectures=["MegaForCausalLM"], model_type="mega"),
        UnsupportedModelError,
        ("MegaForCausalLM",),
    ),
    "pickle": (only_pickle, UnsupportedModelError, ("pytorch_model.bin", "pickle")),
    "remote code": (
        lambda p: change_config(p, architectures=["MyForCausalLM"], auto_map={"AutoModelForCausalLM": "my.My"}),
        UnsupportedModelError,
        ("code",),
    ),
    "unsupported rope": (
        lambda p: change_config(p, rope_scaling={"rope_type": "longrope", "factor": 2.0}),
        UnsupportedModelError,
        ("longrope",),
    ),
    "contradictory config": (
        lambda p: change_config(p, num_key_value_heads=3),
        ModelError,
        ("num_key_value_heads", "3"),
    ),
    "no config": (lambda p: (p / "config.json").unlink(), ModelError, ("config.json",)),
}


def open_files() -> set[str]:
    """What this process has open; a descriptor that vanishes meanwhile is left out."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.add(str(link.readlink()))
    return found


@pytest.mark.row("LOAD-SAFETENSORS", "missing or extra tensors stop the load with their names")
@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_leaves_nothing(name: str, copy: Path) -> None:
    damage, kind, words = DAMAGE[name]
    damage(copy)
    files, threads = open_files(), set(threading.enumerate())
    with pytest.raises(kind) as caught, serve(copy):
        pass
    assert type(caught.value) is kind
    for word in words:
        assert word in str(caught.value)
    assert not [f for f in open_files() - files if str(copy) in f]
    assert not [t for t in set(threading.enumerate()) - threads if t.name == "infer-worker"]


def test_a_load_after_a_failed_one_serves(model: Path, copy: Path) -> None:
    truncate(copy)
    with pytest.raises(WeightError), serve(copy):
        pass
    assert answers(model)


# -- GGUF --------------------------------------------------------------------------------------------------------------


def write_twin(directory: Path, kind: str) -> tuple[Path, Path]:
    """The same weights (rounded to fp16, so that both files hold them exactly) as safetensors and as one GGUF file
    with the tokenizer inside, in llama.cpp's names, order and metadata."""
    path = write_checkpoint(directory / "twin", LLAMA | {"tie_word_embeddings": False})
    change_weights(path, lambda t: t.update({name: value.half().float() for name, value in t.items()}))
    tensors: dict[str, tuple[np.ndarray, str]] = {}
    weights = {name: value.numpy() for name, value in load_file(path / "model.safetensors").items()}
    for short, long in GGUF.tensors.items():
        for layer in range(LLAMA["num_hidden_layers"]) if "{i}" in short else (0,):
            value = weights.pop(long.replace("{i}", str(layer)))
            if long.endswith(("q_proj.weight", "k_proj.weight")):
                heads = LLAMA["num_attention_heads" if "q_proj" in long else "num_key_value_heads"]
                value = to_llamacpp_order(value, heads)
            tensors[short.replace("{i}", str(layer))] = (value, kind if value.ndim > 1 else "F32")
    assert not weights
    tokenizer = json.loads((path / "tokenizer.json").read_text())["model"]
    vocab = sorted(tokenizer["vocab"], key=tokenizer["vocab"].get)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["merges"]]
    metadata: dict[str, Any] = {
        "general.name": "twin",
        **{f"llama.{key}": LLAMA[field] for field, key in GGUF.config_keys.items() if field in LLAMA},
        "llama.attention.value_length": LLAMA["head_dim"],
        "llama.rope.dimension_count": LLAMA["head_dim"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": vocab,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [int(gguf.TokenType.CONTROL)] * 3
        + [int(gguf.TokenType.NORMAL)] * (len(vocab) - 3),
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.add_bos_token": False,
    }
    return path, write_gguf(directory / f"twin-{kind}.gguf", tensors, metadata)


@pytest.mark.row("LOAD-GGUF", "a synthetic F16 or F32 GGUF gives tokens equal to its safetensors twin")
@pytest.mark.row("LOAD-GGUF", "the tokenizer built from metadata equals the HF one on a text corpus")
@pytest.mark.parametrize("kind", ["F32", "F16"])
def test_a_gguf_answers_as_its_twin(kind: str, tmp_path: Path) -> None:
    plain, packed = write_twin(tmp_path, kind)
    texts = [CORPUS, "naïve 1234 fox's\n\n  then", "日本語 😀 the the", CORPUS[20:60]]
    with serve(plain) as engine, serve(packed) as other:
        assert ids(other.generate_many(PROMPTS, greedy(16))) == ids(engine.generate_many(PROMPTS, greedy(16)))
        for text in texts:
            mine, theirs = (e.generate(text, greedy(12)) for e in (engine, other))
            assert theirs.prompt_token_ids == mine.prompt_token_ids
            assert theirs.token_ids == mine.token_ids and theirs.text == mine.text
        assert other.engine.model_config.format == "gguf" and other.engine.max_model_len == engine.engine.max_model_len


@pytest.mark.row("LOAD-GGUF", "a damaged file is refused by name and leaves nothing")
def test_a_truncated_or_hostile_gguf_is_refused(tmp_path: Path) -> None:
    _, file = write_twin(tmp_path, "F16")
    whole = file.read_bytes()
    threads = set(threading.enumerate())
    hostile = bytearray(whole)
    hostile[8:16] = (2**60).to_bytes(8, "little")  # as many tensors
    text = bytearray(whole)
    text[24:32] = (2**40).to_bytes(8, "little")  # the first key's length
    for content in (whole[:-2000], whole[:100], whole[:4], bytes(hostile), bytes(text)):
        file.write_bytes(content)
        with pytest.raises((WeightError, ModelError), match=r"twin-F16\.gguf"), serve(file):
            pass
    assert not [t for t in set(threading.enumerate()) - threads if t.name == "infer-worker"]
    file.write_bytes(whole)
    assert answers(file)


# -- memory ------------------------------------------------------------------------------------------------------------

OPENS = """
import json, sys
opened = []
def watch(event, args):
    if event == "open" and str(args[0]).endswith((".safetensors", ".gguf")):
        opened.append(str(args[0]))
sys.addaudithook(watch)
import anyio
from infer import ConfigError, Engine, EngineConfig
async def main():
    for sections in json.loads(sys.argv[1]):
        opened.clear()
        try:
            async with Engine(EngineConfig(**sections)):
                print(json.dumps([None, len(opened), []]))
        except ConfigError as error:
            print(json.dumps([str(error), len(opened), list(error.fields)]))
anyio.run(main)
"""


def opened(path: Path, *caches: dict[str, Any]) -> list[tuple[str | None, int, list[str]]]:
    """Per cache section, in one fresh process: the refusal, weight files opened until then, the fields it names."""
    model = {"ref": str(path), "dtype": "float32"}
    sections = [{"platform": {"threads": 1}, "model": model, "cache": cache} for cache in caches]
    command = [sys.executable, "-c", OPENS, json.dumps(sections)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.mark.row("X-MEMPLAN", "refusal happens before any weight file is opened")
@pytest.mark.row("KV-SIZING", "asking for more than exists fails before weights load with the numbers in the message")
def test_what_cannot_fit_is_refused_before_a_weight_file_is_opened(model: Path) -> None:
    much, many, enough = opened(model, {"memory": 2**50}, {"num_blocks": 2**40}, {"num_blocks": 64})
    for (message, count, fields), field, number in ((much, "memory", 2**50), (many, "num_blocks", 2**40)):
        assert message is not None and "does not fit" in message and "available" in message
        assert f"cache.{field}={number}" in message and fields == [f"cache.{field}"]
        assert count == 0
    assert enough[0] is None and enough[1] > 0  # the watcher sees an open when there is one


def blocks_within(groups: Sequence[Any], memory: int) -> int:
    """By trying: the most blocks of the main group that fit, a sliding group having as many or all it can ever use."""

    def spent(count: int) -> int:
        return sum(g.bytes_per_block * (count if g.window is None else min(count, g.num_blocks)) for g in groups)

    return next(count for count in range(memory) if spent(count + 1) > memory)


@pytest.mark.row("KV-SIZING", "kv_cache_memory=N gives exactly floor(N/page_bytes) blocks")
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_bytes_become_blocks_exactly(name: str, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, ARCHITECTURES[name])
    config = ARCHITECTURES[name]
    for memory in (1_000_000, 1_234_567, 3 * 2**20):
        with serve(path, cache={"memory": memory}) as engine:
            groups = engine.engine.resolved.cache.groups
            page = 2 * 16 * config["num_key_value_heads"] * config["head_dim"] * 4 * config["num_hidden_layers"]
            assert sum(group.bytes_per_block for group in groups) == page  # keys and values, 16 tokens, fp32
            main = next((g for g in groups if g.window is None), groups[0])
            assert main.num_blocks == blocks_within(groups, memory)
            if len(groups) == 1:
                assert main.num_blocks == memory // page
            parts = engine.engine._parts
            assert parts is not None
            kv = parts.executor._worker._kv  # type: ignore[attr-defined]
            assert {keys.shape[0] for keys, _ in kv.values()} == {
                g.num_blocks + 1 for g in groups
            }  # and the null block


def test_the_plan_is_logged_before_loading(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="infer"), serve(model):
        pass
    plans = [record.getMessage() for record in caplog.records if "memory plan" in record.getMessage()]
    assert len(plans) == 1 and all(word in plans[0] for word in ("weights", "KV cache", "workspace", "available"))


def test_a_stated_size_that_is_too_small_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"cache\.memory"), serve(model, cache={"memory": 100}):
        pass
