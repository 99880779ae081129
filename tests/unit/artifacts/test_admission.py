"""Admission arithmetic with the figures of the format's description, and everything that is refused before inference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from infer.artifacts.admission import GenerationBounds, admit, check_request, longest_sequence, payload_bytes
from infer.artifacts.request import ArtifactRequest, ManagedTarget
from infer.artifacts.router_layout import RouterLayout, check_agreement, declared_layout, derived_layout
from infer.config.model import RoutedLayer
from infer.errors import ArtifactRefusedError, ConfigError

MIB64 = 2**26
ALL = ("moe_routes", "selected_logprobs")


def request(*contents: str, **changes: Any) -> ArtifactRequest:
    return ArtifactRequest(target=ManagedTarget("runs", "k"), contents=contents, **changes)


def bounds(prompt: int, generated: int, layout: RouterLayout | None = None, **changes: Any) -> GenerationBounds:
    return GenerationBounds(prompt_tokens=prompt, max_tokens=generated, router_layout=layout, **changes)


def layout(routers: int, experts: int, top_k: int) -> RouterLayout:
    return RouterLayout(tuple(range(routers)), experts, top_k)


SMALL = bounds(2, 2, layout(1, 4, 2))


def refusal(asked: ArtifactRequest, limits: GenerationBounds, decoded: int = MIB64, target: int = MIB64) -> str:
    with pytest.raises(ArtifactRefusedError) as caught:
        check_request(asked, limits)
        admit(asked, limits, decoded, target)
    return f"{caught.value.code}: {caught.value}"


def test_the_worked_example() -> None:
    """T58, T59, T64: 38 bytes fit in 64 and not in 32."""
    assert admit(request("moe_routes"), SMALL, 64, MIB64).payload_bytes == 38
    assert "artifact_limit_exceeded" in refusal(request("moe_routes"), SMALL, 32)
    assert admit(request("moe_routes"), SMALL, 38, MIB64).payload_bytes == 38
    refusal(request("moe_routes"), SMALL, 37)


def test_the_smallest_target() -> None:
    """T67."""
    assert admit(request(), bounds(1, 1), MIB64, 4215).encoded_bytes == 4215
    assert "may exceed target max_bytes" in refusal(request(), bounds(1, 1), target=4214)


def test_a_payload_just_below_64_mib_under_a_target_of_64_mib() -> None:
    tokens = 66_843_619 // 8
    assert admit(request(), bounds(1, tokens - 1), MIB64, MIB64).payload_bytes == tokens * 8
    assert "max_bytes" in refusal(request(), bounds(1, tokens))


@pytest.mark.parametrize(
    ("routers", "experts", "top_k", "thousands"),
    [(48, 128, 8, 169), (58, 256, 8, 141), (60, 384, 8, 69), (36, 128, 4, 430)],
)
def test_the_longest_sequence(routers: int, experts: int, top_k: int, thousands: int) -> None:
    """BR-31: the figures of the description, and each is exactly the edge."""
    limits = bounds(1, 1, layout(routers, experts, top_k))
    longest = longest_sequence(ALL, limits, MIB64)
    assert round(longest / 1000) == thousands
    edge = replace(limits, max_tokens=longest - 1)
    assert payload_bytes(ALL, 1, longest - 1, edge.router_layout) <= MIB64
    beyond = replace(limits, max_tokens=longest)
    assert f"at most {longest} tokens" in refusal(request(*ALL), beyond)


def test_choices_share_the_limits() -> None:
    """BR-17."""
    one = admit(request("moe_routes"), SMALL, MIB64, MIB64)
    four = admit(request("moe_routes"), replace(SMALL, num_choices=4), MIB64, MIB64)
    assert four.payload_bytes == 4 * one.payload_bytes
    refusal(request("moe_routes"), replace(SMALL, num_choices=4), 151)
    admit(request("moe_routes"), replace(SMALL, num_choices=4), 152, MIB64)


def test_too_many_routers_for_a_manifest() -> None:
    admit(request("moe_routes"), bounds(1, 1, layout(43_520, 4, 1)), MIB64, MIB64)
    assert "manifest" in refusal(request("moe_routes"), bounds(1, 1, layout(43_521, 4, 1)))


@pytest.mark.parametrize(
    ("asked", "limits", "code", "words"),
    [
        (request(format="generation_artifact_v9"), SMALL, "unsupported", "only generation_artifact_v1 and"),
        (request("topk_logprobs", "hidden"), SMALL, "unsupported", "'hidden'"),
        (request("topk_logprobs"), SMALL, "unsupported", "topk_logprobs"),
        (request("moe_routes", "moe_routes"), SMALL, "invalid_request", "duplicates"),
        (request(codec="none"), SMALL, "unsupported", "codec"),
        (request("moe_routes"), bounds(2, 2), "unsupported", "capture.routed_experts"),
        (request("moe_routes"), replace(SMALL, route_start=3), "invalid_request", "must not exceed the prompt length"),
        (request("moe_routes"), replace(SMALL, route_start=-1), "invalid_request", "negative"),
        (request("selected_logprobs"), replace(SMALL, explicit_logprob_ids=True), "unsupported", "logprob_token_ids"),
        (request(), replace(SMALL, has_token_ids=False), "unsupported", "require token ids"),
        (request(), replace(SMALL, prompt_tokens=0), "unsupported", "require token ids"),
        (request(), replace(SMALL, max_tokens=0), "unsupported", "at least one"),
    ],
)
def test_what_cannot_be_captured(asked: ArtifactRequest, limits: GenerationBounds, code: str, words: str) -> None:
    """Section 2.3; T49, T50, T53, T55, BR-18."""
    message = refusal(asked, limits)
    assert message.startswith(f"artifact_{code}: ") and words in message


def test_a_token_only_artifact_needs_no_route_capture() -> None:
    """T54."""
    check_request(request(), bounds(2, 2))
    check_request(request("moe_routes"), replace(SMALL, route_start=2))


BASE = {"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 6}


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, (0, 1, 2, 3, 4, 5)),
        ({"moe_layer_freq": 2, "first_k_dense_replace": 1}, (2, 4)),
        ({"decoder_sparse_step": 2}, (1, 3, 5)),
        ({"decoder_sparse_step": 1, "mlp_only_layers": [0, 3]}, (1, 2, 4, 5)),
        ({"moe_layer_freq": [0, 1, 1, 0, 1, True]}, (1, 2, 4, 5)),
        ({"first_k_dense_replace": 3}, (3, 4, 5)),
        ({"moe_layer_freq": 1, "decoder_sparse_step": 1}, (0, 1, 2, 3, 4, 5)),
    ],
)
def test_router_layouts(changes: dict[str, Any], layers: tuple[int, ...]) -> None:
    """T57."""
    assert derived_layout([BASE | changes]) == RouterLayout(layers, 8, 2)


@pytest.mark.parametrize(
    "configs",
    [
        [{"num_experts": 8, "num_experts_per_tok": 2}],
        [BASE | {"num_hidden_layers": 100_000}],
        [BASE | {"num_hidden_layers": True}],
        [BASE | {"num_experts": 0}],
        [BASE | {"num_experts": 8.0}],
        [BASE | {"n_routed_experts": 16}],
        [BASE, {"num_experts": 16}],
        [BASE, {"num_experts": 8.0}],
        [BASE | {"moe_layer_freq": 2, "decoder_sparse_step": 2}],
        [BASE | {"moe_layer_freq": [1, 1]}],
        [BASE | {"moe_layer_freq": [0] * 6}],
        [BASE | {"moe_layer_freq": 0}],
        [BASE | {"first_k_dense_replace": 7}],
        [BASE | {"num_experts_per_token": 4}],
    ],
)
def test_layouts_that_are_refused(configs: list[dict[str, Any]]) -> None:
    """T52, T62, T63, T69."""
    with pytest.raises(ConfigError):
        derived_layout(configs)


def test_the_models_own_word() -> None:
    layers = [RoutedLayer(layer_id=n, num_experts=8, top_k=2) for n in (3, 1)]
    declared = declared_layout(layers)
    assert declared == RouterLayout((1, 3), 8, 2) and declared.expert_counts == (8, 8)
    check_agreement(declared, derived_layout([BASE | {"decoder_sparse_step": 2, "num_hidden_layers": 4}]))
    with pytest.raises(ConfigError):
        check_agreement(declared, derived_layout([BASE]))
    for wrong in ([], [*layers, layers[0]], [*layers, RoutedLayer(layer_id=5, num_experts=4, top_k=2)]):
        with pytest.raises(ConfigError):
            declared_layout(wrong)
