"""The tables that `compare_peers.py` prints, in Markdown: per work our weights against the best peer, then everybody."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from .catalog import CLASSES
from .floors import Rates, Shape, best_value, floor_seconds, served_positions, steps_of
from .results import Outcome, Spread, best, ratio, rivals
from .targets import CACHE_OFF_RATIO, LOWER_IS_BETTER, MAX_RSS_BEYOND, MAX_START_SECONDS, TITLES, Target, target
from .timing import Workload

OFF = "bf16, prefix cache off"


@dataclass(frozen=True)
class Run:
    """What is the same for the whole run."""

    work: Workload
    shape: Shape
    peaks: tuple[float, float, float] | None
    """G operations per second: fp32, bf16 dot, int8 dot. None: not measured here."""

    def rates(self, weight_class: str) -> Rates:
        fp32, bf16, int8 = self.peaks or (0.0, 0.0, 0.0)
        wide = bf16 or fp32
        return Rates(linear=wide if weight_class == "16-bit" else int8 or wide, attention=wide)


def tables(run: Run, outcomes: list[Outcome]) -> Iterator[str]:
    """Lines of Markdown."""
    ours = [outcome for outcome in outcomes if outcome.engine == "infer"]
    for work_name, title in TITLES.items():
        if work_name == "peak_rss":
            yield from _memory(run, ours)
            continue
        rows = [_row(run, one, outcomes, work_name) for one in ours if one.spread(work_name) is not None]
        if not rows:
            continue
        yield f"\n### {title.format(**vars(run.work))}\n"
        yield "| weights | infer | best peer | ratio | target | | floor | of it | a step reads / computes |"
        yield "|---|---:|---|---:|---:|---|---:|---:|---:|"
        yield from rows
        yield from _notes(ours, work_name)
    yield from everybody(outcomes)


def _row(run: Run, ours: Outcome, outcomes: list[Outcome], work_name: str) -> str:
    wanted = target(work_name, ours.weight_class, ours.weights)
    spread = ours.spread(work_name)
    assert spread is not None
    if ours.weights == OFF:
        return f"| {ours.weights} | {show(spread, work_name)} | | | | | | | |"
    peer = best(rivals(ours, outcomes, wanted), work_name)
    found = None if peer is None else ratio(ours, peer, work_name)
    theirs = "" if peer is None else f"{peer.name} {show(peer.spread(work_name), work_name)}"
    asked = "" if wanted is None else f">= {wanted.ratio:g}" + _against(wanted)
    cells = [ours.weights, show(spread, work_name), theirs, "" if found is None else show_ratio(found)]
    return f"| {' | '.join([*cells, asked, verdict(found, wanted), *_floor(run, ours, work_name)])} |"


def _against(wanted: Target) -> str:
    return {"class": "", "same": ", same in llama.cpp"}.get(wanted.against, f", {wanted.against}")


def verdict(found: Spread | None, wanted: Target | None) -> str:
    """By the median of the rounds."""
    if wanted is None:
        return ""
    if found is None:
        return "not run"
    return "reached" if found.median >= wanted.ratio else "missed"


def _floor(run: Run, ours: Outcome, work_name: str) -> list[str]:
    """The floor beside each sample, how much of it we reach (medians), and what a step reads and computes."""
    weights = ours.fact("weights")
    try:
        steps = steps_of(work_name, run.work, run.shape, weights or 0.0)
    except KeyError:
        return ["", "", ""]
    rates = run.rates(ours.weight_class)
    floors, shares = [], []
    for found in ours.rounds.values():
        samples, reads = found["samples"].get(work_name, []), found["reads"].get(work_name, [])
        for value, gigabytes in zip(samples, reads, strict=False):
            floor = best_value(work_name, run.work, floor_seconds(steps, gigabytes, rates))
            floors.append(floor)
            shares.append(floor / value if work_name in LOWER_IS_BETTER else value / floor)
    if not floors or not weights:
        return ["", "", ""]
    last = steps[-1]
    size = f"{last.nbytes / 1e6:.0f} MB / {(last.linear_ops + last.attention_ops) / 1e9:.2f} G"
    return [show(Spread.of(floors), work_name), f"{100 * statistics.median(shares):.0f} %", size]


def _notes(ours: list[Outcome], work_name: str) -> Iterator[str]:
    if work_name == "prefix_first_s":
        by_weights = {outcome.weights: outcome for outcome in ours}
        on, off = by_weights.get("bf16"), by_weights.get(OFF)
        found = None if on is None or off is None else ratio(on, off, work_name)
        if found is not None:
            reached = "reached" if found.median >= CACHE_OFF_RATIO else "missed"
            yield f"\nPrefix cache on against off: {show_ratio(found)} times faster (target >= {CACHE_OFF_RATIO:g}): {reached}."
    if work_name == "first_token_s":
        slow = [one.name for one in ours if (s := one.spread(work_name)) is not None and s.median >= MAX_START_SECONDS]
        words = f"missed by {', '.join(slow)}" if slow else "reached by all"
        yield f"\nUnder {MAX_START_SECONDS:g} s: {words}. llama.cpp: a whole process of llama-bench that reads 16 tokens."


def _memory(run: Run, ours: list[Outcome]) -> Iterator[str]:
    """What infer may take: its weights, the keys and values it wrote, and a constant."""
    yield f"\n### {TITLES['peak_rss']}\n"
    yield "| weights | infer | weights as held | KV written at most | allowed | |"
    yield "|---|---:|---:|---:|---:|---|"
    for one in ours:
        spread, weights = one.spread("peak_rss"), one.fact("weights")
        if spread is None or weights is None or one.weights == OFF:
            continue
        written = min(served_positions(run.work) * run.shape.kv_bytes, one.fact("kv_pool") or 0.0)
        allowed = weights + written + MAX_RSS_BEYOND
        reached = "reached" if spread.median <= allowed else "missed"
        sizes = " | ".join(f"{nbytes / 1e6:.0f}" for nbytes in (weights, written, allowed))
        yield f"| {one.weights} | {show(spread, 'peak_rss')} | {sizes} | {reached} |"


def everybody(outcomes: list[Outcome]) -> Iterator[str]:
    """All engines side by side."""
    works = [name for name in TITLES if any(outcome.spread(name) for outcome in outcomes)]
    yield "\n### Everybody: median (lowest to highest of the rounds)\n"
    yield f"| | | {' | '.join(works)} | arena read, GB/s |"
    yield f"|---|---|{'---:|' * (len(works) + 1)}"
    for weight_class in CLASSES:
        for outcome in (one for one in outcomes if one.weight_class == weight_class):
            cells = [show(outcome.spread(name), name) for name in works]
            reads = [rate for found in outcome.rounds.values() for rates in found["reads"].values() for rate in rates]
            beside = show(Spread.of(reads), "") if reads else ""
            yield f"| {weight_class} | {outcome.name} | {' | '.join(cells)} | {beside} |"


def show(spread: Spread | None, work_name: str) -> str:
    if spread is None:
        return ""
    scale = 1e-6 if work_name == "peak_rss" else 1.0
    median, low, high = (_number(value * scale) for value in (spread.median, spread.low, spread.high))
    return median if low == high else f"{median} ({low} to {high})"


def show_ratio(spread: Spread) -> str:
    return (
        f"{spread.median:.2f}"
        if spread.low == spread.high
        else f"{spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f})"
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
