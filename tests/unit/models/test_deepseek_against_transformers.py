"""DeepSeek-V2 and V3 against transformers in fp32 on random small configs: logits, routes, yarn, leading dense layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from infer.backends.reference.platform import OPS
from infer.config.model import KVLayer
from infer.layers.decoder import Decoder
from infer.models import deepseek_v2, deepseek_v3
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
V2, V3 = deepseek_v2.EXAMPLE, deepseek_v3.EXAMPLE
SPECS: dict[str, ModelSpec] = {
    spec.architectures[0]: spec for module in (deepseek_v2, deepseek_v3) for spec in module.infer_models()
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "v2": V2,
    "v2-lite": V2
    | {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
    | {"rope_scaling": YARN | {"type": "yarn", "mscale": 0.707, "mscale_all_dim": 0.707}},
    "v2-biased-tied-values-wider-than-keys": V2
    | {"attention_bias": True, "tie_word_embeddings": True, "v_head_dim": 20, "first_k_dense_replace": 0},
    "v3": V3,
    "v3-yarn": V3 | {"rope_scaling": YARN | {"type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.8}},
    "v3-new-rope-keys-not-renormalised": {k: v for k, v in V3.items() if k != "rope_theta"}
    | {"norm_topk_prob": False, "q_lora_rank": None, "n_group": 1, "topk_group": 1}
    | {"rope_parameters": YARN | {"rope_type": "yarn", "rope_theta": 5000.0, "mscale_all_dim": 1.0}},
    "v3-halves-biased-three-dense-layers": V3
    | {"rope_interleave": False, "attention_bias": True, "num_hidden_layers": 5, "first_k_dense_replace": 3},
    "v3-eps-only-of-the-blocks": V3 | {"rms_norm_eps": 0.5},
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


def random_oracle(config: dict[str, Any]) -> Any:
    oracle = random_transformers_model(config)
    generator = torch.Generator().manual_seed(1)
    for name, buffer in oracle.named_buffers():
        if name.endswith("e_score_correction_bias"):  # zero otherwise, and then it decides nothing
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.3)
    return oracle


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Twin]:
    known: dict[str, Twin] = {}

    def make(name: str) -> Twin:
        if name not in known:
            config = CONFIGS[name]
            oracle = random_oracle(config)
            directory = tmp_path_factory.mktemp("deepseek")
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


@pytest.mark.row("ATTN-MLA", "tokens equal transformers' DeepseekV2 and V3 on random weights")
def test_greedy_tokens(pair: Twin) -> None:
    ids = pair.prompt(24)
    expected = pair.oracle.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=None)[0]
    driver = pair.driver()
    tokens = [int(driver.step([("a", ids)])[0][-1].argmax())]
    for _ in range(23):
        tokens.append(int(driver.step([("a", [tokens[-1]])])[0].argmax()))
    assert tokens == expected[len(ids) :].tolist()


def recorded(pair: Twin, ids: list[int]) -> dict[int, tuple[Tensor, Tensor]]:
    """Layer -> (logits, experts) of transformers' routers, in a forward pass of its own."""
    found: dict[int, tuple[Tensor, Tensor]] = {}
    hooks = []
    for i, layer in enumerate(pair.oracle.model.layers):
        if hasattr(layer.mlp, "gate"):

            def record(_module: Any, _args: Any, output: Any, i: int = i) -> None:
                found[i] = (output[0].view(len(ids), -1), output[2].view(len(ids), -1))

            hooks.append(layer.mlp.gate.register_forward_hook(record))
    pair.expected(ids)
    for hook in hooks:
        hook.remove()
    return found


def test_routes_are_those_of_transformers(pair: Twin) -> None:
    """What the routers write into their taps, chunk by chunk, against what transformers' own routers chose."""
    ids, top_k = pair.prompt(40), pair.config["num_experts_per_tok"]
    oracle = recorded(pair, ids)
    routed = pair.model.routed_layers()
    first, count = pair.config["first_k_dense_replace"], pair.config["num_hidden_layers"]
    assert [layer.layer_id for layer in routed] == list(oracle) == list(range(first, count))
    taps = {layer.layer_id: torch.full((64, top_k), 255, dtype=torch.uint8) for layer in routed}
    pair.model.set_route_taps(taps)
    driver = pair.driver()
    rows: dict[int, list[Tensor]] = {i: [] for i in taps}
    for start, stop in ((0, 17), (17, 39), (39, 40)):
        driver.step([("a", ids[start:stop])])
        for i, tap in taps.items():
            rows[i].append(tap[: stop - start].clone())
    pair.model.set_route_taps({})
    for layer in routed:
        assert (layer.num_experts, layer.top_k) == (pair.config["n_routed_experts"], top_k)
        logits, chosen = oracle[layer.layer_id]
        scores = logits.softmax(-1)
        if "V3" in pair.config["architectures"][0]:
            bias = pair.tensors[f"model.layers.{layer.layer_id}.mlp.gate.e_score_correction_bias"]
            scores = logits.sigmoid() + bias
        # transformers leaves the order open; the router's own is by the score that decided.
        order = scores.gather(1, chosen).argsort(-1, descending=True)
        assert torch.equal(torch.cat(rows[layer.layer_id]).long(), chosen.gather(1, order))
        assert len(chosen.unique()) > top_k, "every token with the same experts proves little"


def test_three_leading_dense_layers_keep_absolute_layer_ids(twin: Callable[[str], Twin]) -> None:
    """RE-11: routers are named by the decoder layer they are in, however many layers before them have none."""
    pair = twin("v3-halves-biased-three-dense-layers")
    assert [layer.layer_id for layer in pair.model.routed_layers()] == [3, 4]
    tap = torch.full((12, 3), 255, dtype=torch.uint8)
    pair.model.set_route_taps({4: tap})
    ids = pair.prompt(12)
    pair.driver().step([("a", ids)])
    pair.model.set_route_taps({})
    last, before = recorded(pair, ids)[4][1], recorded(pair, ids)[3][1]
    assert torch.equal(tap.long().sort(-1).values, last.sort(-1).values)
    assert not torch.equal(tap.long().sort(-1).values, before.sort(-1).values)


@pytest.mark.parametrize("name", ["v2-lite", "v3"])
def test_the_cache_holds_what_the_layout_says(name: str, twin: Callable[[str], Twin]) -> None:
    pair = twin(name)
    layout = pair.model.kv_layout()
    layer = KVLayer(layer_id=0, num_kv_heads=4, head_size=12, value_head_size=10)
    assert layout.layers[0] == layer and layer.head_sizes == (12, 10)
    driver = pair.driver()
    driver.step([("a", pair.prompt(9))])
    keys, values = driver.kv[1]
    assert (keys.shape[2:], values.shape[2:]) == ((4, 12), (4, 10))
    assert int(keys[..., 0, 0].isfinite().sum()) == int(values[..., 0, 0].isfinite().sum()) == 9


def test_without_rotation_the_comparison_fails(pair: Twin) -> None:
    unrotated = build(pair.config, pair.tensors, rotary=lambda q, k, cos, sin: (q, k))
    noticed(pair, unrotated, 100)


def test_other_pairs_are_noticed(twin: Callable[[str], Twin]) -> None:
    """The comparison fails when halves are paired where neighbours are meant."""
    pair = twin("v3")
    noticed(pair, build(pair.config | {"rope_interleave": False}, pair.tensors), 100)


def test_other_experts_are_noticed(pair: Twin) -> None:
    """The comparison fails when the router's second choice is replaced by the expert after it."""

    def rerouted(logits: Tensor, rule: Routing, bias: Tensor | None, tap: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, ids = cast(Any, OPS.topk_router)(logits, rule, bias, tap)
        ids[:, 1] = (ids[:, 1] + 1) % logits.shape[1]
        return weights, ids

    noticed(pair, build(pair.config, pair.tensors, topk_router=rerouted), 100)


@pytest.mark.parametrize("change", ["renormalize", "scale", "groups", "bias"])
def test_every_part_of_the_rule_is_noticed(change: str, twin: Callable[[str], Twin]) -> None:
    def other(logits: Tensor, rule: Routing, bias: Tensor | None, tap: Tensor | None) -> tuple[Tensor, Tensor]:
        rules = {
            "renormalize": dataclasses.replace(rule, renormalize=not rule.renormalize),
            "scale": dataclasses.replace(rule, scale=1.0),
            "groups": dataclasses.replace(rule, num_groups=1),
            "bias": rule,
        }
        routed: tuple[Tensor, Tensor] = cast(Any, OPS.topk_router)(
            logits, rules[change], None if change == "bias" else bias, tap
        )
        return routed

    for name in ["v3"] if change == "bias" else ["v2", "v3"]:
        pair = twin(name)
        noticed(pair, build(pair.config, pair.tensors, topk_router=other), 10)


def noticed(pair: Twin, wrong: Decoder, times: int) -> None:
    ids = pair.prompt(40)
    difference = PagedDriver(wrong).step([("a", ids)])[0] - pair.expected(ids)
    assert difference.abs().max() > times * TOLERANCE
