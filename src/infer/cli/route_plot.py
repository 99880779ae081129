"""Routes as a picture: expert load per layer, and which expert comes first for each token and layer. SVG without any library,
PNG with Pillow (the extra `plot`)."""

from __future__ import annotations

import colorsys
import io
from dataclasses import dataclass
from xml.sax.saxutils import escape

import numpy as np
from numpy.typing import NDArray

from infer.artifacts.generation import RoutedExperts
from infer.errors import ConfigError

_WIDTH, _MARGIN, _GAP = 900, 60, 48
_MAX_COLUMNS = 300
_SCALE = 2
"""Pixels of a PNG for each unit of the drawing."""
_DARK, _LIGHT = (13, 59, 102), (240, 246, 250)


@dataclass(frozen=True, slots=True)
class _Cell:
    x: float
    y: float
    width: float
    height: float
    fill: str


@dataclass(frozen=True, slots=True)
class _Label:
    x: float
    y: float
    """Of the baseline."""
    content: str
    size: int = 12
    right: bool = False
    """`x` is where it ends."""


def draw_routes(routes: RoutedExperts) -> str:
    """An SVG document. Above: share of choices per layer and expert (dark is busy; an even load is one tone).
    Below: for token (left to right) and layer, the expert that the router put first."""
    cells, labels, height = _layout(routes)
    body = [
        f'<text x="{one.x}" y="{one.y}" font-size="{one.size}" text-anchor="{"end" if one.right else "start"}">'
        f"{escape(one.content)}</text>"
        for one in labels
    ]
    body += [
        f'<rect x="{one.x:.2f}" y="{one.y}" width="{one.width + 0.05:.2f}" height="{one.height}" fill="{one.fill}"/>'
        for one in cells
    ]
    size = f'width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    inner = "\n".join(body)
    return f'{head}\n<rect width="100%" height="100%" fill="white"/>\n{inner}\n</svg>\n'


def draw_routes_png(routes: RoutedExperts) -> bytes:
    """The same picture as a PNG. Raises `ConfigError` without Pillow."""
    try:
        from PIL import Image, ImageDraw, ImageFont  # noqa: PLC0415  optional
    except ImportError:
        raise ConfigError(
            "a PNG needs Pillow: pip install 'infer-engine[plot]', or name a file that ends in .svg"
        ) from None
    cells, labels, height = _layout(routes)
    image = Image.new("RGB", (_WIDTH * _SCALE, height * _SCALE), "white")
    pen = ImageDraw.Draw(image)
    for cell in cells:
        right, bottom = cell.x + cell.width, cell.y + cell.height
        corners = [round(value * _SCALE) for value in (cell.x, cell.y, right, bottom)]
        pen.rectangle((corners[0], corners[1], max(corners[0], corners[2] - 1), corners[3] - 1), fill=cell.fill)
    for label in labels:
        font = ImageFont.load_default(label.size * _SCALE)
        place = (label.x * _SCALE, label.y * _SCALE)
        pen.text(place, label.content, fill="black", font=font, anchor="rs" if label.right else "ls")
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def _layout(routes: RoutedExperts) -> tuple[list[_Cell], list[_Label], int]:
    """Cells, labels and the height of the whole."""
    ids = np.asarray(routes.expert_ids).astype(np.int64)
    load = _load(ids, max(routes.expert_counts))
    chosen = _thinned(ids[:, :, 0].T)
    layers = [str(layer) for layer in routes.router_ids]
    top = _MARGIN
    cells, names, height = _heat_map(load / max(float(load.max(initial=0)), 1e-9), layers, top)
    second = top + height + _GAP
    scaled = chosen / np.maximum(np.asarray(routes.expert_counts)[:, None] - 1, 1)
    more, other, lower = _heat_map(scaled, layers, second, coloured=True)
    rows, end = len(ids), routes.token_start + len(ids)
    title = f"{rows} tokens, {len(layers)} layers, {ids.shape[2]} of {max(routes.expert_counts)} experts"
    labels = [
        _Label(_MARGIN, 24, title, 16),
        _Label(_MARGIN, top - 10, f"expert load per layer (columns: experts 0 to {load.shape[1] - 1})"),
        _Label(_MARGIN, second - 10, f"first expert per layer (columns: tokens {routes.token_start} to {end - 1})"),
    ]
    return cells + more, labels + names + other, second + lower + _MARGIN


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
) -> tuple[list[_Cell], list[_Label], int]:
    """Cells of a matrix of 0 to 1, one row per label, and the height they take."""
    row_height = 14 if len(labels) <= 60 else 6
    width = (_WIDTH - 2 * _MARGIN) / max(1, values.shape[1])
    cells, names = [], []
    for row, label in enumerate(labels):
        y = top + row * row_height
        if len(labels) <= 60 or row % 5 == 0:
            names.append(_Label(_MARGIN - 8, y + row_height - 3, label, 9, right=True))
        for column, value in enumerate(values[row].tolist()):
            fill = _hue(value) if coloured else _tone(value)
            cells.append(_Cell(_MARGIN + column * width, y, width, row_height, fill))
    return cells, names, row_height * len(labels)


def _tone(value: float) -> str:
    mixed = [round(light + (dark - light) * value) for light, dark in zip(_LIGHT, _DARK, strict=True)]
    return f"#{mixed[0]:02x}{mixed[1]:02x}{mixed[2]:02x}"


def _hue(value: float) -> str:
    red, green, blue = (round(255 * part) for part in colorsys.hls_to_rgb(value * 300 / 360, 0.55, 0.6))
    return f"#{red:02x}{green:02x}{blue:02x}"
