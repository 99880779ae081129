"""Every mixture-of-experts architecture against transformers in fp32 on random two-layer configs: logits and routes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from infer.backends.reference.platform import OPS
from infer.layers.decoder import Decoder
from infer.models import mixtral, olmoe, qwen2_moe, qwen3_moe
from infer.plugins.model import ModelSpec
from infer.plugins.platform import Routing
from infer.quantization.unquantized import UnquantizedMethod
from infer.testing.tiny_models import (
    DictCheckpoint,
    PagedDriver,
    build_model,
    model_config,
    random_transformers_model,
)
from infer.weights.loader import load_weights

TOLERANCE = 1e-4
QWEN3, MIXTRAL, OLMOE, QWEN2 = (module.EXAMPLE for module in (qwen3_moe, mixtral, olmoe, qwen2_moe))
SPECS: dict[str, ModelSpec] = {
    spec.architectures[0]: spec for module in (qwen3_moe, mixtral, olmoe, qwen2_moe) for spec in module.infer_models()
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": QWEN3,
    "qwen3-not-renormalised-every-second-layer": QWEN3 | {"norm_topk_prob": False, "decoder_sparse_step": 2},
    "qwen3-dense-first-layer-sliding": QWEN3
    | {"mlp_only_layers": [0], "use_sliding_window": True, "sliding_window": 16, "tie_word_embeddings": True},
    "mixtral": MIXTRAL,
    "mixtral-sliding": MIXTRAL | {"sliding_window": 16, "head_dim": 16},
    "olmoe": OLMOE,
    "olmoe-renormalised-biased": OLMOE | {"norm_topk_prob": True, "attention_bias": True, "num_key_value_heads": None},
    "qwen2": QWEN2,
    "qwen2-sliding-without-bias": QWEN2
    | {"qkv_bias": False, "norm_topk_prob": True, "use_sliding_window": True, "sliding_window": 16}
    | {"mlp_only_layers": [1], "max_window_layers": 1},
}


@dataclasses.dataclass
class Twin:
    """One set of random weights, here and in transformers; `tensors` as a checkpoint of it names them."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    model: Decoder
    oracle: Any

    def expected(self, ids: list[int]) -> Tensor:
        with torch.no_grad():
            logits: Tensor = self.oracle(torch.tensor([ids])).logits[0]
        return logits

    def driver(self, block_size: int = 4) -> PagedDriver:
        return PagedDriver(self.model, block_size)

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, self.config["vocab_size"], (length,), generator=generator).tolist()


def build(config: dict[str, Any], tensors: dict[str, Tensor], **ops: Any) -> Decoder:
    model = build_model(
        SPECS[config["architectures"][0]],
        model_config(config),
        ops=dataclasses.replace(OPS, **ops),
        quant=UnquantizedMethod(),
    )
    load_weights(model, DictCheckpoint(tensors))
    return cast(Decoder, model)


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Twin]:
    known: dict[str, Twin] = {}

    def make(name: str) -> Twin:
        if name not in known:
            config = CONFIGS[name]
            oracle = random_transformers_model(config)
            directory: Path = tmp_path_factory.mktemp("moe")
            oracle.save_pretrained(directory)  # transformers fuses experts in memory; a checkpoint has them one by one
            tensors = load_file(directory / "model.safetensors")
            known[name] = Twin(config, tensors, build(config, tensors), oracle)
        return known[name]

    return make


@pytest.fixture(params=CONFIGS)
def pair(request: pytest.FixtureRequest, twin: Callable[[str], Twin]) -> Twin:
    return twin(request.param)


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)


def test_prefill_logits(pair: Twin) -> None:
    ids = pair.prompt(40)
    close(pair.driver().step([("a", ids)])[0], pair.expected(ids))


def test_token_by_token(pair: Twin) -> None:
    ids = pair.prompt(40)
    driver = pair.driver(block_size=3)
    close(torch.cat([driver.step([("a", [token])])[0] for token in ids]), pair.expected(ids))


def test_chunked_prefill(pair: Twin) -> None:
    ids = pair.prompt(50)
    driver = pair.driver()
    chunks = [ids[i : i + 7] for i in range(0, len(ids), 7)]
    close(torch.cat([driver.step([("a", piece)])[0] for piece in chunks]), pair.expected(ids))


def test_mixed_batch(pair: Twin) -> None:
    """Rows that decode, that are in the middle of a prompt and that have just begun, in one step."""
    prompts = {name: pair.prompt(length, seed=length) for name, length in zip("abcd", (41, 9, 30, 18), strict=True)}
    done = {"a": 40, "b": 8, "c": 20, "d": 0}
    driver = pair.driver()
    for name, count in done.items():
        if count:
            driver.step([(name, prompts[name][:count])])
    names = ["d", "a", "c", "b"]
    outputs = driver.step([(name, prompts[name][done[name] :]) for name in names])
    for name, got in zip(names, outputs, strict=True):
        close(got, pair.expected(prompts[name])[done[name] :])


def test_routes_are_those_of_transformers(pair: Twin) -> None:
    """What the routers write into their taps, chunk by chunk, against top-k of transformers' own router logits."""
    ids = pair.prompt(40)
    with torch.no_grad():
        recorded = pair.oracle(torch.tensor([ids]), output_router_logits=True).router_logits
    routed = pair.model.routed_layers()
    assert [layer.layer_id for layer in routed] == sparse(pair.config)
    assert len(recorded) == len(routed) > 0
    experts = pair.config.get("num_experts", pair.config.get("num_local_experts"))
    top_k = pair.config["num_experts_per_tok"]
    taps = {layer.layer_id: torch.full((64, top_k), experts, dtype=torch.uint8) for layer in routed}
    pair.model.set_route_taps(taps)
    driver = pair.driver()
    rows: dict[int, list[Tensor]] = {i: [] for i in taps}
    for start, stop in ((0, 17), (17, 39), (39, 40)):
        driver.step([("a", ids[start:stop])])
        for i, tap in taps.items():
            rows[i].append(tap[: stop - start].clone())
    pair.model.set_route_taps({})
    for layer, logits in zip(routed, recorded, strict=True):
        assert (layer.num_experts, layer.top_k) == (experts, top_k)
        expected = logits.view(len(ids), -1).float().softmax(-1).topk(top_k, dim=-1).indices
        assert torch.equal(torch.cat(rows[layer.layer_id]).long(), expected)
        assert len(expected.unique()) > top_k, "every token with the same experts proves little"


def sparse(config: dict[str, Any]) -> list[int]:
    step, plain = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers", [])
    return [i for i in range(config["num_hidden_layers"]) if i not in plain and (i + 1) % step == 0]


def test_taps_are_written_only_where_they_are_set(twin: Callable[[str], Twin]) -> None:
    pair = twin("mixtral")
    ids = pair.prompt(12)
    tap = torch.full((20, 2), -1, dtype=torch.int32)
    pair.model.set_route_taps({1: tap})
    tapped = pair.driver().step([("a", ids)])[0]
    assert bool((tap[:12] >= 0).all()) and bool((tap[12:] == -1).all()), "rows past the step belong to the caller"
    pair.model.set_route_taps({})
    kept = tap.clone()
    untapped = pair.driver().step([("a", pair.prompt(12, seed=5))])[0]
    assert torch.equal(tap, kept)
    assert not torch.equal(tapped, untapped)
    assert torch.equal(pair.driver().step([("a", ids)])[0], tapped), "a tap changes nothing"


def test_other_experts_are_noticed(pair: Twin) -> None:
    """The comparison fails when the router's second choice is replaced by the expert after it."""

    def rerouted(logits: Tensor, rule: Routing, bias: Tensor | None, tap: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, ids = cast(Any, OPS.topk_router)(logits, rule, bias, tap)
        ids[:, 1] = (ids[:, 1] + 1) % logits.shape[1]
        return weights, ids

    ids = pair.prompt(40)
    wrong = PagedDriver(build(pair.config, pair.tensors, topk_router=rerouted)).step([("a", ids)])[0]
    assert (wrong - pair.expected(ids)).abs().max() > 100 * TOLERANCE


def test_other_weights_are_noticed(pair: Twin) -> None:
    """The comparison fails when (not) renormalising is the other way round."""

    def unscaled(logits: Tensor, rule: Routing, bias: Tensor | None, tap: Tensor | None) -> tuple[Tensor, Tensor]:
        other = dataclasses.replace(rule, renormalize=not rule.renormalize)
        routed: tuple[Tensor, Tensor] = cast(Any, OPS.topk_router)(logits, other, bias, tap)
        return routed

    ids = pair.prompt(40)
    wrong = PagedDriver(build(pair.config, pair.tensors, topk_router=unscaled)).step([("a", ids)])[0]
    assert (wrong - pair.expected(ids)).abs().max() > 10 * TOLERANCE
