"""DeepSeek's config.json: transformers' defaults, refusals by name, routing rules, cache sizes, and what is left out."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from infer.artifacts.router_layout import check_agreement, declared_layout, derived_layout
from infer.backends.reference.platform import OPS
from infer.config.engine import PluginsSection
from infer.config.kv_sizing import bytes_per_block
from infer.config.model import KVGroup, KVLayer, KVLayout, StepBounds
from infer.engine.worker.builder import choose_model, choose_quant_method
from infer.engine.worker.footprint import measure_footprint
from infer.errors import ModelError, UnsupportedModelError, WeightError
from infer.layers.decoder import Decoder
from infer.layers.moe import MoEFacts, SparseMoE
from infer.layers.parameter import named_parameters
from infer.models import deepseek_v2, deepseek_v3
from infer.plugins import build_registry
from infer.plugins.model import BuildContext
from infer.plugins.platform import Routing
from infer.quantization.unquantized import UnquantizedMethod
from infer.testing.tiny_models import DictCheckpoint, PagedDriver, build_model, model_config, random_transformers_model
from infer.weights.loader import check_weights, load_weights

V2, V3 = deepseek_v2.EXAMPLE, deepseek_v3.EXAMPLE
MODULES: dict[str, Any] = {"v2": deepseek_v2, "v3": deepseek_v3}


def plan(config: dict[str, Any], device: str = "meta", ops: Any = OPS) -> Decoder:
    (spec,) = MODULES[config["model_type"][-2:]].infer_models()
    model = build_model(spec, model_config(config), ops=ops, quant=UnquantizedMethod(), device=device)
    return cast(Decoder, model)


def source_shapes(model: Decoder) -> dict[str, tuple[int, ...]]:
    parameters = named_parameters(model)
    shapes = {}
    for name, target in model.weight_table().targets.items():
        whole = parameters[target.path].shape
        shapes[name] = whole if target.rows is None else (target.rows[1] - target.rows[0], *whole[1:])
    return shapes


# -- facts -------------------------------------------------------------------------------------------------------------


def test_a_silent_config_means_transformers_defaults() -> None:
    from transformers import DeepseekV2Config, DeepseekV3Config

    for module, config, chosen in (
        (deepseek_v2, DeepseekV2Config(num_experts_per_tok=6), 6),
        (deepseek_v3, DeepseekV3Config(), None),
    ):
        said = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
        raw = {name: getattr(config, name) for name in said} | {"architectures": module.EXAMPLE["architectures"]}
        view = module.config_view(model_config(raw | ({"num_experts_per_tok": chosen} if chosen else {})))
        attention, moe = view.attention, view.moe
        assert (view.intermediate_size, view.eps, view.tied) == (
            config.intermediate_size,
            config.rms_norm_eps,
            config.tie_word_embeddings,
        )
        assert view.num_dense_layers == config.first_k_dense_replace
        assert view.shared_size == config.moe_intermediate_size * config.n_shared_experts
        assert (attention.q_rank, attention.kv_rank) == (config.q_lora_rank, config.kv_lora_rank)
        assert (attention.nope_size, attention.rope_size) == (config.qk_nope_head_dim, config.qk_rope_head_dim)
        assert (attention.value_size, attention.bias) == (config.v_head_dim, config.attention_bias)
        assert attention.scale == pytest.approx(config.qk_head_dim**-0.5)
        assert (moe.num_experts, moe.intermediate_size) == (config.n_routed_experts, config.moe_intermediate_size)
        assert (moe.routing.top_k, moe.routing.scale) == (config.num_experts_per_tok, config.routed_scaling_factor)
        assert moe.routing.renormalize == config.norm_topk_prob
        assert view.rope.theta == config.rope_parameters["rope_theta"]
        groups = (moe.routing.num_groups, moe.routing.top_groups)
        assert groups == ((1, 1) if module is deepseek_v2 else (config.n_group, config.topk_group))
        if module is deepseek_v3:
            assert (attention.interleaved, view.num_extra_layers) == (config.rope_interleave, config.num_mtp_layers)


WRONG: list[tuple[str, dict[str, Any], type[ModelError], str]] = [
    (name, changes, error, message)
    for name in MODULES
    for changes, error, message in [
        ({"num_experts_per_tok": 5}, ModelError, "num_experts_per_tok=5"),
        ({"num_experts_per_tok": 0}, ModelError, "num_experts_per_tok=0"),
        ({"n_group": 3}, ModelError, "n_group=3"),
        ({"topk_group": 5}, ModelError, "topk_group=5"),
        ({"n_routed_experts": 2**40}, ModelError, "n_routed_experts"),
        ({"n_routed_experts": "8"}, ModelError, "n_routed_experts='8'"),
        ({"n_shared_experts": 0}, ModelError, "n_shared_experts=0"),
        ({"first_k_dense_replace": -1}, ModelError, "first_k_dense_replace=-1"),
        ({"moe_intermediate_size": 0}, ModelError, "moe_intermediate_size=0"),
        ({"routed_scaling_factor": 0}, ModelError, "routed_scaling_factor=0"),
        ({"kv_lora_rank": 0}, ModelError, "kv_lora_rank=0"),
        ({"q_lora_rank": "none"}, ModelError, "q_lora_rank='none'"),
        ({"qk_rope_head_dim": 5}, ModelError, "qk_rope_head_dim=5"),
        ({"v_head_dim": -2}, ModelError, "v_head_dim=-2"),
        ({"num_key_value_heads": 2}, UnsupportedModelError, "num_key_value_heads=2"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act='gelu'"),
        ({"moe_layer_freq": 2}, UnsupportedModelError, "moe_layer_freq=2"),
        ({"scoring_func": "sqrtsoftplus"}, UnsupportedModelError, "scoring_func='sqrtsoftplus'"),
        ({"topk_method": "hash"}, UnsupportedModelError, "topk_method='hash'"),
        ({"num_hash_layers": 3}, UnsupportedModelError, "num_hash_layers=3"),
    ]
]
WRONG += [
    ("v2", {"num_experts_per_tok": None}, ModelError, "num_experts_per_tok"),
    ("v2", {"n_group": None}, ModelError, "n_group"),
    ("v2", {"topk_method": "noaux_tc"}, UnsupportedModelError, "topk_method='noaux_tc'"),
    ("v2", {"scoring_func": "sigmoid"}, UnsupportedModelError, "scoring_func='sigmoid'"),
    ("v2", {"mlp_bias": True}, UnsupportedModelError, "mlp_bias=True"),
    ("v2", {"norm_topk_prob": True}, UnsupportedModelError, "norm_topk_prob=True beside routed_scaling_factor=2.0"),
    ("v3", {"topk_method": "greedy"}, UnsupportedModelError, "topk_method='greedy'"),
    ("v3", {"scoring_func": "softmax"}, UnsupportedModelError, "scoring_func='softmax'"),
    ("v3", {"n_group": 8, "topk_group": 4}, ModelError, "n_group=8"),  # groups of one have no two best
    ("v3", {"num_nextn_predict_layers": -1}, ModelError, "num_nextn_predict_layers=-1"),
]


@pytest.mark.parametrize(("name", "changes", "error", "message"), WRONG, ids=lambda v: str(v)[:40])
def test_wrong_facts_name_key_and_value(
    name: str, changes: dict[str, Any], error: type[ModelError], message: str
) -> None:
    module = MODULES[name]
    with pytest.raises(error, match=re.escape(message)) as caught:
        module.config_view(model_config(module.EXAMPLE | changes))
    assert type(caught.value) is error


@pytest.mark.parametrize("architecture", ["DeepseekV4ForCausalLM", "DeepseekV32ForCausalLM"])
def test_relatives_with_other_routers_or_attention_are_refused(architecture: str) -> None:
    """RE-07: V4 routes its first layers by the hash of the token; V3.2 attends sparsely."""
    with pytest.raises(UnsupportedModelError, match=architecture):
        choose_model(build_registry(PluginsSection()), architecture)


def test_the_router_layout_that_artifacts_derive_is_the_models_own() -> None:
    """RE-11: whoever reads config.json and who asks the model name the same absolute layers."""
    for example in (V2, V3):
        config = example | {"num_hidden_layers": 6, "first_k_dense_replace": 3}
        declared = declared_layout(plan(config).routed_layers())
        check_agreement(declared, derived_layout([config]))
        assert declared.router_ids == (3, 4, 5)
    assert plan(V3 | {"first_k_dense_replace": 3}).routed_layers() == ()


# -- weights -----------------------------------------------------------------------------------------------------------


def test_scales_of_fp8_belong_to_an_fp8_checkpoint() -> None:
    """Without its quantization section such a checkpoint would be read without its scales."""
    section = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    config = msgspec.structs.replace(model_config(V3 | {"quantization_config": section}), quantization=section)
    assert choose_quant_method(build_registry(PluginsSection()), config).name == "fp8"
    model = plan(V3)
    scale = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    stored = {name: torch.empty(shape, device="meta") for name, shape in source_shapes(model).items()}
    check_weights(model, DictCheckpoint(stored))
    with pytest.raises(WeightError, match=re.escape(scale)):
        check_weights(model, DictCheckpoint(stored | {scale: torch.empty(1, 1, device="meta")}))


def extra_layer(number: int, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The tensors of a multi-token-prediction layer: a sparse decoder layer, norms, a projection, a head of its own."""
    inner = {name.replace("layers.1.", f"layers.{number}.") for name in shapes if "layers.1." in name}
    own = ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head")
    return {name: torch.zeros(1) for name in inner | {f"model.layers.{number}.{part}.weight" for part in own}}


def test_a_prediction_layer_is_left_out_and_never_routed() -> None:
    """RE-36: its tensors lie in the checkpoint as one more sparse layer; no layer, cache or router comes of it."""
    oracle_tensors = source_shapes(plan(V3))
    draw = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=draw) * 0.2 for name, shape in oracle_tensors.items()}
    with_extra = tensors | extra_layer(2, oracle_tensors)
    logits = []
    for stored in (tensors, with_extra):
        model = plan(V3, "cpu")
        load_weights(model, DictCheckpoint(stored))
        assert [layer.layer_id for layer in model.routed_layers()] == [1]
        assert [layer.layer_id for layer in model.kv_layout().layers] == [0, 1]
        logits.append(PagedDriver(model).step([("a", list(range(3, 20)))])[0])
    assert torch.equal(*logits)


def test_only_the_announced_prediction_layers_are_left_out() -> None:
    shapes = source_shapes(plan(V3))
    stored = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    for config, number in ((V3 | {"num_nextn_predict_layers": 0}, 2), (V3, 3), (V2, 2)):
        model = plan(config)
        complete = {name: torch.empty(shape, device="meta") for name, shape in source_shapes(model).items()}
        with pytest.raises(WeightError, match=rf"model\.layers\.{number}\."):
            check_weights(model, DictCheckpoint(complete | extra_layer(number, shapes)))
    check_weights(plan(V3 | {"num_nextn_predict_layers": 2}), DictCheckpoint(stored | extra_layer(3, shapes)))
    # A prefix ends at a dot: layer 20 is not below layer 2.
    with pytest.raises(WeightError, match=r"model\.layers\.20\."):
        check_weights(plan(V3), DictCheckpoint(stored | extra_layer(20, shapes)))


# -- routing -----------------------------------------------------------------------------------------------------------


def independent_top_k(logits: list[float], rule: Routing, bias: list[float]) -> tuple[list[int], list[float]]:
    """The definition in float64, for one token: ids best first, and their weights."""
    powers = [math.exp(v) for v in logits]
    scores = [p / (1 + p) for p in powers] if rule.scoring == "sigmoid" else [p / sum(powers) for p in powers]
    ranking = [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(logits) // rule.num_groups
    groups = [sorted(ranking[g * size : (g + 1) * size], reverse=True) for g in range(rule.num_groups)]
    marks = [sum(group[: 2 if rule.group_score == "top2_sum" else 1]) for group in groups]
    allowed = sorted(range(rule.num_groups), key=lambda g: -marks[g])[: rule.top_groups]
    ids = sorted((i for i in range(len(logits)) if i // size in allowed), key=lambda i: -ranking[i])[: rule.top_k]
    total = sum(scores[i] for i in ids) if rule.renormalize else 1.0
    return ids, [scores[i] / total * rule.scale for i in ids]


RULES: dict[str, MoEFacts] = {
    "v2-grouped": deepseek_v2.config_view(model_config(V2)).moe,
    "v2-greedy": deepseek_v2.config_view(model_config(V2 | {"topk_method": "greedy"})).moe,
    "v3": deepseek_v3.config_view(model_config(V3)).moe,
    "v3-one-group": deepseek_v3.config_view(model_config(V3 | {"n_group": 1, "topk_group": 1})).moe,
}


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_all_negative_logits_route_as_an_independent_top_k(name: str, renormalize: bool) -> None:
    """RE-18: fused kernels of others started their search at zero, or read "renormalise" otherwise."""
    rule = dataclasses.replace(RULES[name].routing, renormalize=renormalize)
    facts = dataclasses.replace(RULES[name], routing=rule)
    context = BuildContext(ops=OPS, dtype=torch.float32, device=torch.device("cpu"), quant=UnquantizedMethod())
    layer = SparseMoE(context, 0, facts)
    draw = torch.Generator().manual_seed(3)
    tokens, hidden, count = 50, facts.hidden_size, facts.num_experts
    layer.router.load(-torch.rand(count, hidden, generator=draw))
    layer.gate_up.load(torch.randn(layer.gate_up.shape, generator=draw))
    layer.down.load(torch.randn(layer.down.shape, generator=draw))
    bias = torch.randn(count, generator=draw) * 0.01
    if layer.score_bias is not None:
        layer.score_bias.load(bias)
    x = torch.rand(tokens, hidden, generator=draw) * 0.2
    layer.route_tap = torch.full((tokens, rule.top_k), 255, dtype=torch.uint8)
    weights: list[Tensor] = []

    def experts(*args: Tensor) -> Tensor:
        weights.append(args[2])
        return cast(Any, OPS.moe)(*args)

    layer.experts = experts
    layer(x)
    logits = (x.double() @ layer.router.data.double().T).tolist()
    assert max(max(row) for row in logits) < 0
    biases = bias.double().tolist() if layer.score_bias is not None else [0.0] * count
    for t, row in enumerate(logits):
        ids, exact = independent_top_k(row, rule, biases)
        assert layer.route_tap[t].tolist() == ids
        torch.testing.assert_close(weights[0][t].double(), torch.tensor(exact, dtype=torch.float64), rtol=1e-5, atol=0)
    assert len(layer.route_tap.unique()) > rule.top_k


def test_v2_renormalises_where_the_scale_is_one(tmp_path: Path) -> None:
    """transformers ignores V2's norm_topk_prob; DeepSeek's own code does not. Its router, corrected, is the judge."""
    config = V2 | {"norm_topk_prob": True, "routed_scaling_factor": 1.0}
    oracle = random_transformers_model(config)

    def renormalised(_module: Any, _args: Any, output: Any) -> Any:
        logits, weights, ids = output
        return logits, weights / weights.sum(-1, keepdim=True), ids

    oracle.save_pretrained(tmp_path)
    model = plan(config, "cpu")
    load_weights(model, DictCheckpoint(load_file(tmp_path / "model.safetensors")))
    ids = list(range(3, 43))
    got = PagedDriver(model).step([("a", ids)])[0]
    with torch.no_grad():
        ignored = oracle(torch.tensor([ids])).logits[0]
        oracle.model.layers[1].mlp.gate.register_forward_hook(renormalised)
        expected = oracle(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
    assert (got - ignored).abs().max() > 1e-2


# -- the cache ---------------------------------------------------------------------------------------------------------


@pytest.mark.row("ATTN-MLA", "prefill (expanded) and decode (absorbed) forms agree")
@pytest.mark.waits("KV-MLA-SPEC")
def test_the_cache_is_accounted_as_it_is_kept() -> None:
    """Expanded: every head's keys (nope and rope part) and values. There is no absorbed form yet."""
    layout = plan(V3 | {"v_head_dim": 10}).kv_layout()
    assert layout.layers == tuple(
        KVLayer(layer_id=i, num_kv_heads=4, head_size=8 + 4, value_head_size=10) for i in range(2)
    )
    assert bytes_per_block(layout, layout.groups[0], 16, "bfloat16") == 2 * 16 * 4 * (12 + 10) * 2


def test_values_without_a_size_are_as_wide_as_keys() -> None:
    layer = KVLayer(layer_id=0, num_kv_heads=3, head_size=16)
    group = KVGroup(name="full", layer_ids=(0,))
    assert layer.head_sizes == (16, 16)
    assert bytes_per_block(KVLayout(groups=(group,), layers=(layer,)), group, 4, "float32") == 2 * 3 * 16 * 4 * 4


@pytest.mark.parametrize("config", [V2, V3], ids=["v2", "v3"])
def test_planning_traces_the_model(config: dict[str, Any]) -> None:
    """The workspace is found by running on shapes, not guessed: a fallback would not grow with the heads' sizes."""
    huge = config | {"hidden_size": 4096, "num_attention_heads": 128, "num_key_value_heads": 128, "v_head_dim": 128}
    huge |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "kv_lora_rank": 512, "q_lora_rank": 1536}

    def footprint(changes: dict[str, Any]) -> Any:
        bounds = StepBounds(num_tokens=256, num_rows=1, max_model_len=256)
        return measure_footprint(lambda ops, device: plan(huge | changes, str(device), ops), 96, bounds)

    wide, narrow = footprint({}), footprint({"v_head_dim": 64})
    assert wide.kv_layout.layers[0].head_sizes == (192, 128)
    kept_at_once = 4 * 128 * (2 * 192 + 128)
    assert 256 * kept_at_once <= wide.workspace_bytes < 4 * 256 * kept_at_once
    assert wide.workspace_bytes > narrow.workspace_bytes
    assert wide.weight_bytes - narrow.weight_bytes == 2 * 4 * 128 * 64 * (512 + 4096)
