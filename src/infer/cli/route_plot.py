"""Routes as a picture: expert load per layer, and which expert comes first for each token and layer. SVG, no library."""

from __future__ import annotations

from xml.sax.saxutils import escape

import numpy as np
from numpy.typing import NDArray

from infer.artifacts.generation import RoutedExperts

_WIDTH, _MARGIN, _GAP = 900, 60, 48
_MAX_COLUMNS = 300
_DARK, _LIGHT = (13, 59, 102), (240, 246, 250)


def draw_routes(routes: RoutedExperts) -> str:
    """An SVG document. Above: share of choices per layer and expert (dark is busy; an even load is one tone).
    Below: for token (left to right) and layer, the expert that the router put first."""
    ids = np.asarray(routes.expert_ids).astype(np.int64)
    load = _load(ids, max(routes.expert_counts))
    chosen = _thinned(ids[:, :, 0].T)
    layers = [str(layer) for layer in routes.router_ids]
    top = _MARGIN
    parts, height = _heat_map(load / max(float(load.max(initial=0)), 1e-9), layers, top)
    second = top + height + _GAP
    scaled = chosen / np.maximum(np.asarray(routes.expert_counts)[:, None] - 1, 1)
    more, lower = _heat_map(scaled, layers, second, coloured=True)
    total = second + lower + _MARGIN
    rows, end = len(ids), routes.token_start + len(ids)
    labels = [
        _text(_MARGIN, top - 10, f"expert load per layer (columns: experts 0 to {load.shape[1] - 1})"),
        _text(_MARGIN, second - 10, f"first expert per layer (columns: tokens {routes.token_start} to {end - 1})"),
    ]
    title = f"{rows} tokens, {len(layers)} layers, {ids.shape[2]} of {max(routes.expert_counts)} experts"
    body = "\n".join([_text(_MARGIN, 24, title, 16), *labels, *parts, *more])
    size = f'width="{_WIDTH}" height="{total}" viewBox="0 0 {_WIDTH} {total}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    return f'{head}\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'


def _load(ids: NDArray[np.int64], experts: int) -> NDArray[np.float64]:
    """[layers, experts]: how often each expert was chosen."""
    load = np.zeros((ids.shape[1], experts))
    for layer in range(ids.shape[1]):
        load[layer] = np.bincount(ids[:, layer].ravel(), minlength=experts)
    return load


def _thinned(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """At most so many columns that each is still visible; every n-th token is shown."""
    step = -(-values.shape[1] // _MAX_COLUMNS) or 1
    return values[:, ::step]


def _heat_map(
    values: NDArray[np.float64], labels: list[str], top: int, *, coloured: bool = False
) -> tuple[list[str], int]:
    """Rectangles of a matrix of 0 to 1, one row per label, and the height they take."""
    row_height = 14 if len(labels) <= 60 else 6
    columns = max(1, values.shape[1])
    width = (_WIDTH - 2 * _MARGIN) / columns
    parts = []
    for row, label in enumerate(labels):
        y = top + row * row_height
        if len(labels) <= 60 or row % 5 == 0:
            parts.append(_text(_MARGIN - 8, y + row_height - 3, label, 9, anchor="end"))
        for column, value in enumerate(values[row]):
            x = _MARGIN + column * width
            fill = f"hsl({value * 300:.0f} 60% 55%)" if coloured else _tone(float(value))
            parts.append(f'<rect x="{x:.2f}" y="{y}" width="{width + 0.05:.2f}" height="{row_height}" fill="{fill}"/>')
    return parts, row_height * len(labels)


def _tone(value: float) -> str:
    mixed = [round(light + (dark - light) * value) for light, dark in zip(_LIGHT, _DARK, strict=True)]
    return f"#{mixed[0]:02x}{mixed[1]:02x}{mixed[2]:02x}"


def _text(x: float, y: float, content: str, size: int = 12, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}">{escape(content)}</text>'
