"""Every architecture against transformers in fp32 on random two-layer configs: prefill, decode, chunks, mixed batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from infer.backends.reference.platform import OPS
from infer.models import gemma3, llama, qwen2, qwen3

from .conftest import Twin, build

TOLERANCE = 1e-4
LLAMA, MISTRAL = (spec.example for spec in llama.infer_models())
QWEN2, QWEN3, GEMMA3 = qwen2.EXAMPLE, qwen3.EXAMPLE, gemma3.EXAMPLE
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-biased-untied-mha": LLAMA
    | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False, "num_key_value_heads": None}
    | {"head_dim": None},
    "llama-llama3-rope": LLAMA | {"rope_scaling": LLAMA3_ROPE},
    "llama-linear-rope": LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama-dynamic-rope": LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
    "llama-yarn": LLAMA | {"rope_scaling": YARN | {"attention_factor": 1.3, "beta_fast": 8.0, "beta_slow": 2.0}},
    "qwen2-yarn": QWEN2 | {"use_sliding_window": False, "rope_scaling": YARN | {"type": "yarn", "truncate": False}},
    "qwen3-yarn-new-rope-keys": {k: v for k, v in QWEN3.items() if k != "rope_theta"}
    | {"rope_parameters": YARN | {"rope_theta": 20000.0}},
    "mistral": MISTRAL,
    "mistral-one-kv-head-no-window": MISTRAL | {"sliding_window": None, "num_key_value_heads": 1},
    "qwen2-upper-layers-slide": QWEN2,
    "qwen2-window-off": QWEN2 | {"use_sliding_window": False, "tie_word_embeddings": False},
    "qwen3": QWEN3,
    "qwen3-biased-sliding": QWEN3
    | {"attention_bias": True, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0},
    "gemma3": GEMMA3,
    "gemma3-biased-new-rope-keys": {k: v for k, v in GEMMA3.items() if not k.startswith(("rope_", "sliding_window_"))}
    | {"attention_bias": True, "tie_word_embeddings": False, "final_logit_softcapping": None}
    | {"layer_types": ["full_attention", "sliding_attention"]}
    | {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
        }
    },
}
SLIDING = ["mistral", "qwen2-upper-layers-slide", "qwen3-biased-sliding", "gemma3", "gemma3-biased-new-rope-keys"]
MakeTwin = Callable[[dict[str, Any]], Twin]


@pytest.fixture(params=CONFIGS)
def pair(request: pytest.FixtureRequest, twin: MakeTwin) -> Twin:
    return twin(CONFIGS[request.param])


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)


def test_prefill_logits(pair: Twin) -> None:
    ids = pair.prompt(40)
    close(pair.driver().step([("a", ids)])[0], pair.expected(ids))


def test_token_by_token(pair: Twin) -> None:
    ids = pair.prompt(40)
    driver = pair.driver(block_size=3)
    close(torch.cat([driver.step([("a", [token])])[0] for token in ids]), pair.expected(ids))


@pytest.mark.parametrize("chunk", [2, 7, 16, 33])
def test_chunked_prefill(pair: Twin, chunk: int) -> None:
    ids = pair.prompt(50)
    driver = pair.driver()
    chunks = [ids[i : i + chunk] for i in range(0, len(ids), chunk)]
    close(torch.cat([driver.step([("a", piece)])[0] for piece in chunks]), pair.expected(ids))


def test_mixed_batch(pair: Twin) -> None:
    """Rows of different lengths in one step: decoding, in the middle of a prompt, just begun; blocks scrambled."""
    prompts = {name: pair.prompt(length, seed=length) for name, length in zip("abcde", (61, 9, 30, 18, 4), strict=True)}
    done = {"a": 60, "b": 8, "c": 20, "d": 0, "e": 3}
    driver = pair.driver()
    for name, count in done.items():
        if count:
            driver.step([(name, prompts[name][:count])])
    names = ["d", "a", "c", "e", "b"]
    outputs = driver.step([(name, prompts[name][done[name] :]) for name in names])
    for name, got in zip(names, outputs, strict=True):
        close(got, pair.expected(prompts[name])[done[name] :])


def test_blocks_are_used_again(pair: Twin) -> None:
    """A sequence that takes over the blocks of a finished one does not see what was in them."""
    driver = pair.driver()
    for name, seed in (("a", 1), ("b", 2), ("c", 3)):
        ids = pair.prompt(37, seed)
        close(driver.step([(name, ids)])[0], pair.expected(ids))
        driver.finish(name)


@pytest.mark.row("ATTN-SLIDING-WINDOW", "a prompt four times the window gives tokens equal to transformers on CPU")
@pytest.mark.parametrize("name", SLIDING)
def test_a_prompt_four_times_the_window(name: str, twin: MakeTwin) -> None:
    pair = twin(CONFIGS[name])
    ids = pair.prompt(4 * 16)
    expected = pair.oracle.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=None)[0]
    driver = pair.driver()
    logits = driver.step([("a", ids)])[0]
    close(logits, pair.expected(ids))
    tokens = [int(logits[-1].argmax())]
    for _ in range(23):
        tokens.append(int(driver.step([("a", [tokens[-1]])])[0].argmax()))
    assert tokens == expected[len(ids) :].tolist()


@pytest.mark.row("ATTN-ROPE-LLAMA3", "tokens are equal")
def test_llama3_rope_generates_the_same_tokens(twin: MakeTwin) -> None:
    pair = twin(CONFIGS["llama-llama3-rope"])
    ids = pair.prompt(80)
    expected = pair.oracle.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=None)[0]
    driver = pair.driver()
    tokens = [int(driver.step([("a", ids)])[0][-1].argmax())]
    for _ in range(23):
        tokens.append(int(driver.step([("a", [tokens[-1]])])[0].argmax()))
    assert tokens == expected[len(ids) :].tolist()


@pytest.mark.row("ATTN-YARN", "logits beyond the trained length equal transformers' within 1e-4")
@pytest.mark.parametrize("name", ["llama-yarn", "qwen2-yarn", "qwen3-yarn-new-rope-keys"])
def test_yarn_beyond_the_trained_length(name: str, twin: MakeTwin) -> None:
    pair = twin(CONFIGS[name])
    ids = pair.prompt(5 * YARN["original_max_position_embeddings"])
    driver = pair.driver(block_size=16)
    got = [driver.step([("a", ids[start : start + 53])])[0] for start in range(0, len(ids), 53)]
    close(torch.cat(got), pair.expected(ids))
    plain = {k: v for k, v in pair.config.items() if k not in ("rope_scaling", "rope_parameters")}
    unscaled = Twin(plain, build(plain, pair.oracle), pair.oracle).driver(16).step([("a", ids)])[0]
    assert (unscaled - pair.expected(ids)).abs().max() > 100 * TOLERANCE


def test_gemma_attention_softcap(twin: MakeTwin) -> None:
    """transformers' Gemma 3 reads the key but does not hand it to attention; passed by hand it is the oracle."""
    plain = twin(GEMMA3)
    config = GEMMA3 | {"attn_logit_softcapping": 0.7}
    pair = Twin(config, build(config, plain.oracle), plain.oracle)
    ids = pair.prompt(40)
    expected = pair.expected(ids, softcap=0.7)
    assert (expected - pair.expected(ids)).abs().max() > 100 * TOLERANCE
    driver = pair.driver()
    got = [driver.step([("a", ids[:20])])[0], driver.step([("a", ids[20:39])])[0], driver.step([("a", ids[39:])])[0]]
    close(torch.cat(got), expected)


def test_without_rotation_the_comparison_fails(pair: Twin) -> None:
    ids = pair.prompt(40)
    unrotated = build(pair.config, pair.oracle, rotary=lambda q, k, cos, sin: (q, k))
    wrong = Twin(pair.config, unrotated, pair.oracle).driver().step([("a", ids)])[0]
    assert (wrong - pair.expected(ids)).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("name", SLIDING)
def test_without_the_window_the_comparison_fails(name: str, twin: MakeTwin) -> None:
    pair = twin(CONFIGS[name])
    ids = pair.prompt(40)
    blind = build(pair.config, pair.oracle, attention=lambda *args: OPS.attention(*args[:5], None, args[6]))
    wrong = Twin(pair.config, blind, pair.oracle).driver().step([("a", ids)])[0]
    assert (wrong - pair.expected(ids)).abs().max() > 100 * TOLERANCE
