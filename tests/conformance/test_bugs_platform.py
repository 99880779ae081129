"""Planted bugs: the kit of platforms names the promise that a wrong one breaks."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import sampling_kernels
from infer.plugins import PlatformSpec, Registry
from infer.testing.kits import platform
from infer.testing.kits._platform_ops import OPTIONAL as WATCHED
from planted_bugs import PlantBug, failures, plant_bug, registry

__all__ = ["plant_bug", "registry"]


def _with_bug(plant_bug: PlantBug, registry: Registry, name: str, op: str, bug: Any) -> PlatformSpec:
    """A platform of ours, one of its operations called through `bug`."""

    def make(threads: int | None) -> Any:
        made = registry.create("platform", name, threads)
        original = getattr(made.ops, op)
        assert original is not None
        made.ops = dataclasses.replace(made.ops, **{op: lambda *arguments: bug(original, *arguments)})
        return made

    return dataclasses.replace(registry.get("platform", name), factory=plant_bug(make))


@pytest.mark.row("X-PLUGIN-KIT", "the kit fails six planted plugin bugs")
@pytest.mark.parametrize(
    ("op", "bug", "broken"),
    [
        (
            "attention",
            lambda o, q, k, v, meta, scale, window, cap, *rest: o(
                q, k, v, meta, scale, window and window + 1, cap, *rest
            ),
            "attention",
        ),
        (
            "attention",
            lambda o, q, k, v, meta, scale, window, cap, *rest: o(q, k, v, meta, scale, window, None, *rest),
            "attention",
        ),
        ("attention", lambda o, q, k, v, *rules_and_scales: o(q, k, v, *rules_and_scales[:4]), "fp8_cache"),
        ("write_kv", lambda o, k, v, kc, vc, slots, *scales: o(k, v, kc, vc, slots), "fp8_cache"),
        ("rms_norm", lambda o, x, weight, eps: o(x, weight, 0.0), "rms_norm"),
        ("rotary", lambda o, q, k, cos, sin: o(q, k, cos, -sin), "rotary"),
        ("silu_and_mul", lambda o, x: o(x.roll(x.shape[-1] // 2, -1)), "gated"),
        (
            "write_kv",
            lambda o, k, v, kc, vc, slots, *scales: (
                o(k, v, kc, vc, slots, *scales) if scales else o(v, k, kc, vc, slots)
            ),
            "write_kv",
        ),
        ("linear", lambda o, x, weight, bias: o(x, weight, None), "linear"),
        ("gather_rows", lambda o, x, rows: o(x, rows.sort().values), "gather"),
        ("embedding", lambda o, ids, weight: o(ids.clamp(max=9), weight), "embedding"),
    ],
)
def test_platform_op(plant_bug: PlantBug, registry: Registry, op: str, bug: Any, broken: str) -> None:
    assert failures(platform.checks(_with_bug(plant_bug, registry, "reference", op, bug))) == {broken}


OPTIONAL = [
    ("topk_router", lambda o, x, rule, bias, tap: o(x, rule, bias, None), "topk_router"),
    ("topk_router", lambda o, x, rule, bias, tap: o(x, rule, None, tap), "topk_router"),
    ("topk_router", lambda o, x, rule, bias, tap: o(x, dataclasses.replace(rule, scale=1.0), bias, tap), "topk_router"),
    (
        "topk_router",
        lambda o, x, rule, bias, tap: o(x, dataclasses.replace(rule, num_groups=1), bias, tap),
        "topk_router",
    ),
    ("topk_router", lambda o, x, rule, bias, tap: tuple(t.flip(1) for t in o(x, rule, bias, tap)), "topk_router"),
    ("topk_router", lambda o, x, rule, bias, tap: tap.zero_() is not None and o(x, rule, bias, tap), "topk_router"),
    ("moe", lambda o, x, ids, w, up, down: o(x, ids, w.flip(1), up, down), "moe"),
    ("moe", lambda o, x, ids, w, up, down: o(x, ids, w, up.roll(up.shape[1] // 2, 1), down), "moe"),
    ("moe", lambda o, x, ids, w, up, down: o(x, ids, w, up, down) + 0 * down.sum(), "moe"),
    ("pack", lambda o, weight: o(weight * 1.5), "packed"),
    ("pack", lambda o, weight: o(weight.flip(0)), "packed"),
    ("head_logits", lambda o, hidden, weight: o(hidden, weight).bfloat16().float(), "head_logits"),
    ("rotary_angles", lambda o, positions, frequencies, factor: o(positions, frequencies, 1.0), "rotary_angles"),
    ("scale", lambda o, x, factor: o(x, -factor), "small"),
    ("sigmoid", lambda o, x: o(-x), "small"),
    ("tanh", lambda o, x: o(x / 2), "small"),
    ("add_shared", lambda o, x, shared, gate: o(x, shared, None), "small"),
]


@pytest.mark.parametrize(("op", "bug", "broken"), OPTIONAL, ids=[f"{op}-{i}" for i, (op, _, _) in enumerate(OPTIONAL)])
def test_optional_platform_op(plant_bug: PlantBug, registry: Registry, op: str, bug: Any, broken: str) -> None:
    """On the platform that has them all."""
    checks = [
        check
        for check in platform.checks(_with_bug(plant_bug, registry, "cpu", op, bug))
        if check.name.partition("[")[0] in {f.__name__.strip("_") for f in WATCHED}
    ]
    assert broken in failures(checks)


SAMPLING = [
    ("uniforms", lambda o, seeds, positions: o(positions, seeds)),
    ("uniforms", lambda o, seeds, positions: o(seeds & 0xFFFFFFFF, positions)),
    ("uniforms", lambda o, seeds, positions: o(seeds, positions & 0xFFFFFFFF)),
    ("uniforms", lambda o, seeds, positions: o(seeds, positions).float().double()),
    ("penalties", lambda o, x, at, n, rows, rep, freq, pres: o(x, at, n, rows, 1 / rep, freq, pres)),
    ("penalties", lambda o, x, at, n, rows, rep, freq, pres: o(x, at, n.clamp(max=1), rows, rep, freq, pres)),
    ("penalties", lambda o, x, at, n, rows, rep, freq, pres: o(x, at, n, rows, rep, freq, 0 * pres)),
    ("penalties", lambda o, x, at, n, rows, rep, freq, pres: o(x.clone(), at, n, rows, rep, freq, pres)),
    ("penalties", lambda o, x, at, n, rows, rep, freq, pres: o(x, at, n, rows * 0 + 1, rep, freq, pres)),
]


@pytest.mark.parametrize(("op", "bug"), SAMPLING, ids=[f"{op}-{i}" for i, (op, _) in enumerate(SAMPLING)])
def test_optional_sampling_op(plant_bug: PlantBug, registry: Registry, op: str, bug: Any) -> None:
    """On a platform with the definitions themselves, which pass."""
    right = {"uniforms": sampling_kernels.uniforms, "penalties": sampling_kernels.penalties}

    def make(threads: int | None, planted: bool) -> Any:
        made = registry.create("platform", "reference", threads)
        wrong = {op: lambda *arguments: bug(right[op], *arguments)} if planted else {}
        made.ops = dataclasses.replace(made.ops, **right | wrong)
        return made

    for planted in (False, True):
        spec = registry.get("platform", "reference")
        spec = dataclasses.replace(spec, factory=plant_bug(lambda threads, planted=planted: make(threads, planted)))
        checks = [check for check in platform.checks(spec) if check.name in right]
        assert failures(checks) == ({op} if planted else set())


BESIDE = [
    lambda tokens, work, other: (work(), other()),
    lambda tokens, work, other: (other(), work()),
    lambda tokens, work, other: (work(), work()),
    lambda tokens, work, other: (work(), other() if tokens < 100 else other() * 2),
    lambda tokens, work, other: (work(), _forgiven(other)),
]
"""The first is right."""


def _forgiven(work: Any) -> Any:
    try:
        return work()
    except ZeroDivisionError:
        return None


@pytest.mark.parametrize("number", range(len(BESIDE)))
def test_work_beside_other_work(plant_bug: PlantBug, registry: Registry, number: int) -> None:
    def make(threads: int | None) -> Any:
        made = registry.create("platform", "reference", threads)
        made.ops = dataclasses.replace(made.ops, beside=BESIDE[number])
        return made

    spec = dataclasses.replace(registry.get("platform", "reference"), factory=plant_bug(make))
    checks = [check for check in platform.checks(spec) if check.name == "beside[float32]"]
    assert failures(checks) == ({"beside"} if number else set())


class _Replays:
    """A graph that gives again what the work gave when it was recorded."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def replay(self) -> Any:
        return self.result


def _records_the_result(platform: Any, work: Any) -> Any:
    result = work()
    return result, _Replays(result)


def _overlooks_torch(platform: Any, work: Any) -> Any:
    """Records the platform's own calls and takes them for all there is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infer.backends.cpu.tape._looks_at", lambda args, out: True)
        return type(platform).record(platform, work)


@pytest.mark.parametrize("bug", [_records_the_result, _overlooks_torch])
def test_platform_graphs(plant_bug: PlantBug, registry: Registry, bug: Any) -> None:
    def make(threads: int | None) -> Any:
        made = registry.create("platform", "cpu", threads)
        made.record = lambda work: bug(made, work)
        return made

    spec = dataclasses.replace(registry.get("platform", "cpu"), factory=plant_bug(make))
    assert failures(platform.checks(spec)) == {"graphs"}


@pytest.mark.parametrize(
    "bug",
    [
        lambda o, x, rows, t, k, p, m, u: o(x, rows, t, k + 1, p, m, u),
        lambda o, x, rows, t, k, p, m, u: o(x, rows, t, k, p.clamp_min(1.0), m, u),
        lambda o, x, rows, t, k, p, m, u: o(x, rows, t, k, p, m * 0, u),
        lambda o, x, rows, t, k, p, m, u: o(x, rows, t.clamp(0.5, 2), k, p, m, u),
        lambda o, x, rows, t, k, p, m, u: o(x, rows * 0, t, k, p, m, u),
        lambda o, x, rows, t, k, p, m, u: o(x, rows, t, k, p, m, 1 - u),
        lambda o, x, rows, t, k, p, m, u: o(x.nan_to_num_(neginf=-1.0), rows, t, k, p, m, u),
    ],
    ids=["top_k", "top_p", "min_p", "temperature", "rows", "number", "in place"],
)
def test_platform_draw(plant_bug: PlantBug, registry: Registry, bug: Any) -> None:
    assert failures(platform.checks(_with_bug(plant_bug, registry, "cpu", "draw", bug))) == {"draw"}


@pytest.mark.parametrize(
    "bug",
    [
        lambda o, x, rows, t, *rest: o(x, rows, t, *rest[:-1], torch.full_like(rest[-1], 255)),
        lambda o, x, rows, t, *rest: o(x, rows, t, *rest[:-1], rest[-1] & torch.tensor([255] * 8 + [0] * 4).byte()),
        lambda o, x, rows, t, *rest: o(x, rows, t, *rest[:-1], rest[-1].flip(-1)),
        lambda o, x, rows, t, *rest: o(x, rows, t.clamp_min(0.5), *rest),
        lambda o, x, rows, t, *rest: o(x, rows, t * 0, *rest),
        lambda o, x, rows, t, *rest: o(x, rows * 0, t, *rest),
        lambda o, x, rows, t, *rest: o(x, rows, t, *rest).clamp_min(0),
        lambda o, x, rows, t, *rest: o(x.nan_to_num_(neginf=-9.0), rows, t, *rest),
    ],
    ids=["no mask", "first words", "order", "never greedy", "always greedy", "rows", "nothing left", "in place"],
)
def test_platform_draw_allowed(plant_bug: PlantBug, registry: Registry, bug: Any) -> None:
    assert failures(platform.checks(_with_bug(plant_bug, registry, "cpu", "draw_allowed", bug))) == {"draw_allowed"}


def test_platform_that_leaks_its_thread_count(plant_bug: PlantBug, registry: Registry) -> None:
    def make(threads: int | None) -> Any:
        made = registry.create("platform", "reference", threads)
        original = made.step_context

        @contextmanager
        def leaking() -> Any:
            with original():
                yield
            torch.set_num_threads(torch.get_num_threads() + 1)  # not when the step fails: not restored, then

        @contextmanager
        def context() -> Any:
            torch.set_num_threads(3)
            with leaking():
                yield

        made.step_context = context
        return made

    spec = dataclasses.replace(registry.get("platform", "reference"), factory=plant_bug(make))
    before = torch.get_num_threads()
    try:
        assert failures(platform.checks(spec)) == {"step_context_restores_what_it_changes"}
    finally:
        torch.set_num_threads(before)
