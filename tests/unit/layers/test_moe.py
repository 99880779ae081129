"""The sparse block: its shared expert, DeepSeek's router, taps, refused facts, and experts stacked by the weight table."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from infer.backends.reference.platform import OPS
from infer.config.model import RoutedLayer, StepBounds
from infer.engine.worker.footprint import measure_footprint
from infer.errors import ModelError, UnsupportedModelError, WeightError
from infer.layers.facts import Facts
from infer.layers.mlp import MLP
from infer.layers.moe import MoEFacts, SparseMoE, read_moe, sparse_layers
from infer.layers.parameter import Parameter, named_parameters
from infer.models import mixtral, qwen3_moe
from infer.plugins.model import BuildContext
from infer.plugins.platform import Routing
from infer.quantization.unquantized import UnquantizedMethod
from infer.testing.tiny_models import build_model, model_config
from infer.weights.mapping import WeightTable, add_experts

HIDDEN, SIZE, COUNT = 8, 6, 16
DEEPSEEK = MoEFacts(
    hidden_size=HIDDEN,
    intermediate_size=SIZE,
    num_experts=COUNT,
    routing=Routing(
        top_k=4,
        scoring="sigmoid",
        renormalize=True,
        num_groups=4,
        top_groups=2,
        group_score="top2_sum",
        scale=2.5,
    ),
    router_fp32=True,
    score_bias=True,
)


def context(dtype: torch.dtype = torch.float32, **ops: Any) -> BuildContext:
    return BuildContext(
        ops=dataclasses.replace(OPS, **ops), dtype=dtype, device=torch.device("cpu"), quant=UnquantizedMethod()
    )


def fill(layer: SparseMoE, seed: int = 0) -> dict[str, Tensor]:
    """Random weights for every slot -> what was drawn."""
    draw = torch.Generator().manual_seed(seed)
    drawn = {}
    for name, slot in named_parameters(layer).items():
        drawn[name] = torch.randn(slot.shape, generator=draw) * 0.5
        slot.load(drawn[name].to(slot.data.dtype))
    if layer.shared is not None:
        layer.shared.gate_up.finalize()
        layer.shared.down.finalize()
    return drawn


def test_deepseek_v3_against_transformers() -> None:
    """Grouped sigmoid routing with a correction bias and an ungated shared expert: transformers' own block is the judge."""
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        moe_intermediate_size=SIZE,
        n_routed_experts=COUNT,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        hidden_act="silu",
    )
    config._experts_implementation = "eager"
    oracle = DeepseekV3MoE(config).float().eval()
    layer = SparseMoE(context(), 3, DEEPSEEK, shared=MLP(context(), HIDDEN, 2 * SIZE))
    drawn = fill(layer)
    gate, up = drawn["shared.gate_up.weight"].chunk(2)
    oracle.load_state_dict(
        {
            "gate.weight": drawn["router"],
            "gate.e_score_correction_bias": drawn["score_bias"],
            "experts.gate_up_proj": drawn["gate_up"].view(COUNT, 2 * SIZE, HIDDEN),
            "experts.down_proj": drawn["down"].view(COUNT, HIDDEN, SIZE),
            "shared_experts.gate_proj.weight": gate,
            "shared_experts.up_proj.weight": up,
            "shared_experts.down_proj.weight": drawn["shared.down.weight"],
        }
    )
    x = torch.randn(30, HIDDEN, generator=torch.Generator().manual_seed(9))
    layer.route_tap = torch.full((30, 4), COUNT, dtype=torch.uint8)
    with torch.no_grad():
        expected = oracle(x[None])[0]
        chosen = oracle.gate(x[None])[2]
        got = layer(x)
        torch.testing.assert_close(got, expected)
        assert torch.equal(layer.route_tap.long().sort(-1).values, chosen.sort(-1).values)
        layer.score_bias = None
        assert (layer(x) - expected).abs().max() > 0.1, "the bias decides something"


def test_the_shared_expert_runs_beside_the_routed_ones() -> None:
    """Where the platform can; in whatever order it does the two, the result is the same to the bit."""
    asked: list[int] = []

    def beside(tokens: int, work: Any, other: Any) -> tuple[Tensor, Tensor]:
        asked.append(tokens)
        made = other()
        return work(), made

    layers = [
        SparseMoE(made, 0, DEEPSEEK, shared=MLP(made, HIDDEN, SIZE)) for made in (context(), context(beside=beside))
    ]
    for layer in layers:
        fill(layer)
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    assert torch.equal(layers[0](x), layers[1](x))
    assert asked == [5]
    alone = SparseMoE(context(beside=beside), 0, DEEPSEEK)
    fill(alone)
    alone(x)
    assert asked == [5], "nothing runs beside experts that are alone"


def test_deepseek_v2_routing_against_transformers() -> None:
    """Softmax scores, groups by their best expert, weights scaled and not renormalised."""
    from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter

    config = DeepseekV2Config(
        hidden_size=HIDDEN,
        num_attention_heads=2,
        n_routed_experts=COUNT,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
        topk_method="group_limited_greedy",
    )
    oracle = DeepseekV2TopkRouter(config)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        oracle.weight.copy_(torch.randn(COUNT, HIDDEN, generator=draw))
        logits, weights, ids = oracle(torch.randn(40, HIDDEN, generator=draw))
        order = weights.argsort(-1, descending=True)  # transformers leaves the order open
        rule = Routing(top_k=3, num_groups=4, top_groups=2, scale=1.5)
        assert OPS.topk_router is not None
        got, chosen = OPS.topk_router(logits, rule, None, None)
    assert torch.equal(chosen, ids.gather(1, order))
    torch.testing.assert_close(got, weights.gather(1, order))


def test_the_router_of_a_half_precision_model_stays_fp32_where_asked() -> None:
    layer = SparseMoE(context(torch.bfloat16), 0, DEEPSEEK)
    kinds = {name: slot.data.dtype for name, slot in named_parameters(layer).items()}
    assert kinds == {
        "router": torch.float32,
        "score_bias": torch.float32,
        "gate_up": torch.bfloat16,
        "down": torch.bfloat16,
    }
    fill(layer)
    x = torch.randn(5, HIDDEN).bfloat16()
    assert layer(x).dtype == torch.bfloat16


def test_the_shared_expert_is_scaled_by_its_gate() -> None:
    facts = dataclasses.replace(DEEPSEEK, routing=Routing(top_k=2), score_bias=False, router_fp32=False)
    layer = SparseMoE(context(), 0, facts, shared=MLP(context(), HIDDEN, SIZE), shared_gate=True)
    drawn = fill(layer)
    x = torch.randn(7, HIDDEN)
    alone = SparseMoE(context(), 0, facts)
    for name in ("router", "gate_up", "down"):
        named_parameters(alone)[name].load(drawn[name])
    assert layer.shared is not None
    share = (x @ drawn["shared_gate"].T).sigmoid() * layer.shared(x)
    torch.testing.assert_close(layer(x) - alone(x), share)
    assert share.abs().max() > 0.01


def test_a_platform_without_the_operations_is_refused() -> None:
    for missing in ("topk_router", "moe"):
        with pytest.raises(UnsupportedModelError, match="topk_router, moe"):
            SparseMoE(context(**{missing: None}), 0, DEEPSEEK)


def test_experts_are_stacked_and_each_is_needed_once() -> None:
    table = WeightTable()
    add_experts(table, "hf", "block", num_experts=3, hidden_size=2, intermediate_size=4)
    gate_up, down = Parameter(torch.empty(3 * 8, 2)), Parameter(torch.empty(3 * 2, 4))
    shapes = {"block.gate_up": gate_up.shape, "block.down": down.shape}
    stored = {f"hf.{e}.{part}_proj.weight": (4, 2) for e in range(3) for part in ("gate", "up")}
    stored |= {f"hf.{e}.down_proj.weight": (2, 4) for e in range(3)}
    table.check(stored, shapes)
    tensors = {name: torch.randn(shape) for name, shape in stored.items()}
    for name, target in table.targets.items():
        {"block.gate_up": gate_up, "block.down": down}[target.path].load(tensors[name], target.rows)
    for e in range(3):
        both = torch.cat((tensors[f"hf.{e}.gate_proj.weight"], tensors[f"hf.{e}.up_proj.weight"]))
        assert torch.equal(gate_up.data.view(3, 8, 2)[e], both)
        assert torch.equal(down.data.view(3, 2, 4)[e], tensors[f"hf.{e}.down_proj.weight"])
    with pytest.raises(WeightError, match=r"hf\.1\.up_proj"):
        table.check({name: shape for name, shape in stored.items() if name != "hf.1.up_proj.weight"}, shapes)
    with pytest.raises(WeightError, match=r"hf\.3\.gate_proj"):
        table.check(stored | {"hf.3.gate_proj.weight": (4, 2)}, shapes)


def test_planning_counts_all_experts_and_takes_no_memory() -> None:
    config = model_config(mixtral.EXAMPLE | {"hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8})
    (spec,) = mixtral.infer_models()

    def build(ops: Any, device: torch.device) -> Any:
        return build_model(spec, config, ops=ops, quant=UnquantizedMethod(), device=str(device))

    one, two = (
        measure_footprint(build, 96, StepBounds(num_tokens=tokens, num_rows=1, max_model_len=600))
        for tokens in (256, 512)
    )
    footprint, per_token = two, (two.workspace_bytes - one.workspace_bytes) / 256
    experts = 2 * 8 * 3 * 4096 * 14336 * 4
    assert experts < footprint.weight_bytes < experts + 2**30
    # two choices kept per token, one expert's gate and up, the router: traced, not the fallback's guess
    low, high = (2 * 4096 + 3 * 14336) * 4, (12 * 4096 + 4 * 14336) * 4
    assert low < per_token < high


def test_routed_layers_of_a_model() -> None:
    (spec,) = qwen3_moe.infer_models()
    changes = {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    model: Any = build_model(
        spec, model_config(spec.example | changes), ops=OPS, quant=UnquantizedMethod(), device="meta"
    )
    assert model.routed_layers() == (RoutedLayer(layer_id=1, num_experts=8, top_k=3),)
    assert model.blocks[1].mlp.route_tap is None, "nothing is allocated before somebody asks"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9.*num_experts=8"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok=0"),
        ({"num_experts": "8"}, "num_experts='8'"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size"),
        ({"mlp_only_layers": [2]}, r"mlp_only_layers=\[2\]"),
        ({"mlp_only_layers": 1}, "mlp_only_layers=1"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"norm_topk_prob": 1}, "norm_topk_prob=1"),
    ],
    ids=str,
)
def test_wrong_facts_name_key_and_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        qwen3_moe.config_view(model_config(qwen3_moe.EXAMPLE | changes))


def test_both_spellings_of_the_expert_count_are_read() -> None:
    renamed = {k: v for k, v in qwen3_moe.EXAMPLE.items() if k != "num_experts"} | {"num_local_experts": 5}
    facts = Facts(model_config(renamed))
    moe = read_moe(facts, size_key="moe_intermediate_size", num_experts=128, top_k=8, renormalize=True)
    assert moe.num_experts == 5
    assert sparse_layers(facts, 2) == (True, True)
