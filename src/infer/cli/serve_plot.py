"""The picture of a serve benchmark as SVG: how long requests waited, how even the tokens came, and when each ran.

Pure: records in, text out.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar
from xml.sax.saxutils import escape

from infer.cli.measure_serve import PERCENTILES, RequestTimes, ServeReport

Item = TypeVar("Item")
WIDTH, LEFT, RIGHT = 860, 64, 28
PANEL = 190
MAX_ROWS = 400
"""Requests drawn in the timeline; of more, an even selection."""
STYLE = """
svg { --ground: #ffffff; --ink: #24292f; --soft: #6e7681; --grid: #e4e7eb; --one: #0f766e; --two: #d97706; --wait: #c9d1d9;
  --bad: #b42318; background: var(--ground); font: 12px system-ui, "DejaVu Sans", sans-serif; }
@media (prefers-color-scheme: dark) { svg { --ground: #15171a; --ink: #e6e6e3; --soft: #9a9fa6; --grid: #2d3136;
  --one: #4fd1c1; --two: #f5a524; --wait: #474d55; --bad: #ff9d92; } }
text { fill: var(--ink); } .soft { fill: var(--soft); } .title { font-size: 14px; font-weight: 600; }
.grid { stroke: var(--grid); } .curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
"""


def draw(report: ServeReport) -> str:
    """An SVG document with three panels; readable on light and on dark ground."""
    done = [request for request in report.requests if request.error is None and request.arrivals]
    first = [request.arrivals[0] - request.due for request in done]
    gaps = [b - a for request in done for a, b in itertools.pairwise(request.arrivals)]
    rows = _chosen(report.requests)
    row = max(1.5, min(14.0, 420 / max(1, len(rows))))
    height = 84 + 2 * (PANEL + 62) + 40 + row * len(rows) + 58
    summary = report.summary
    head = (
        f"{summary['completed']} requests, {summary['output_tokens_per_s']:.0f} output tokens/s, "
        f"{summary['requests_per_s']:.2f} requests/s, at most {summary['most_at_once']} at once"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'height="{height:.0f}" role="img" aria-label="{escape(head)}"><style>{STYLE}</style>',
        _text(20, 32, "infer bench serve", "title"),
        _text(20, 54, f"{report.workload.base_url}: {head}", "soft"),
        _shares("Time to first token", first, 84, "one"),
        _shares("Time between tokens", gaps, 84 + PANEL + 62, "two"),
        _timeline(rows, 84 + 2 * (PANEL + 62), row, summary["seconds"]),
        "</svg>\n",
    ]
    return "".join(parts)


def _shares(title: str, values: Sequence[float], top: float, colour: str) -> str:
    """What share of all values is at most x: the steeper, the more even."""
    ordered = sorted(values)
    parts = [_text(20, top + 4, title, "title")]
    if not ordered:
        return "".join([*parts, _text(LEFT, top + 40, "nothing was measured", "soft")])
    bottom, inner = top + PANEL, WIDTH - LEFT - RIGHT
    step, unit, factor = _scale(ordered[-1])
    end = step * (int(ordered[-1] * factor / step) + 1)
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = bottom - share * (PANEL - 30)
        parts.append(_line(LEFT, y, WIDTH - RIGHT, y))
        parts.append(_text(LEFT - 8, y + 4, f"{share:.0%}", "soft", "end"))
    ticks = round(end / step)
    for tick in range(ticks + 1):
        parts.append(_text(LEFT + inner * tick / ticks, bottom + 18, f"{tick * step:g}", "soft", "middle"))
    parts.append(_text(WIDTH - RIGHT, bottom + 34, unit, "soft", "end"))

    def at(value: float) -> float:
        return LEFT + inner * value * factor / end

    thinned = _chosen(list(enumerate(ordered, start=1)))
    path = f"M{at(ordered[0]):.1f} {bottom:.1f}"
    path += "".join(f"H{at(v):.1f}V{bottom - (PANEL - 30) * i / len(ordered):.1f}" for i, v in thinned)
    parts.append(f'<path class="curve" stroke="var(--{colour})" d="{path}"/>')
    marks = []
    for percent in PERCENTILES:
        value = ordered[max(0, -(-percent * len(ordered) // 100) - 1)]
        y = bottom - (PANEL - 30) * percent / 100
        parts.append(f'<circle cx="{at(value):.1f}" cy="{y:.1f}" r="4" fill="var(--{colour})"/>')
        marks.append(f"p{percent} {value * factor:.3g}")
    parts.append(_text(WIDTH - RIGHT, top + 4, f"{' · '.join(marks)} {unit}", "", "end"))
    return "".join(parts)


def _timeline(rows: Sequence[RequestTimes], top: float, row: float, seconds: float) -> str:
    """One line per request: waiting for its first token, then writing."""
    inner = WIDTH - LEFT - RIGHT
    start = min((request.due for request in rows), default=0.0)
    step, unit, factor = _scale(seconds)
    end = max(seconds * factor, 1e-9)
    bottom = top + 26 + row * len(rows)
    parts = [_text(20, top + 4, "When each request waited (grey) and was written (green)", "title")]
    for tick in range(int(end / step) + 1):
        x = LEFT + inner * tick * step / end
        parts.append(_line(x, top + 20, x, bottom))
        parts.append(_text(x, bottom + 18, f"{tick * step:g}", "soft", "middle"))
    parts.append(_text(WIDTH - RIGHT, bottom + 34, unit, "soft", "end"))
    for place, request in enumerate(rows):
        y = top + 24 + row * place
        first = request.arrivals[0] if request.arrivals else request.ended
        colours = ("wait", "one") if request.error is None else ("bad", "bad")
        for began, stopped, colour in ((request.due, first, colours[0]), (first, request.ended, colours[1])):
            x, width = LEFT + inner * (began - start) * factor / end, inner * (stopped - began) * factor / end
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{row * 0.8:.1f}" '
                f'fill="var(--{colour})"/>'
            )
    return "".join(parts)


def _scale(largest: float) -> tuple[float, str, float]:
    """(distance of ticks, unit, factor from seconds) for an axis up to `largest` seconds with 4 to 10 ticks."""
    factor, unit = (1.0, "seconds") if largest >= 2 else (1e3, "milliseconds") if largest >= 2e-3 else (1e6, "µs")
    shown = max(largest * factor, 1e-9)
    power = 10.0 ** (len(f"{int(shown)}") - 1)
    step = next(power * share for share in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0) if shown / (power * share) <= 10)
    return step, unit, factor


def _chosen(items: Sequence[Item]) -> list[Item]:
    if len(items) <= MAX_ROWS:
        return list(items)
    return [items[round(place * (len(items) - 1) / (MAX_ROWS - 1))] for place in range(MAX_ROWS)]


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="grid" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
