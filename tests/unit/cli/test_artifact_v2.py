"""`infer artifact` over the open format: fields and provenance shown, everything checked, deltas joined, drawn as PNG."""

from __future__ import annotations

import builtins
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from artifact_samples import G1
from artifact_v2_samples import GOLDEN
from infer.artifacts import RoutedExperts, encode
from infer.artifacts.v2.writer import encode_v2
from infer.cli.artifact import FORMATS
from infer.cli.route_plot import draw_routes_png

ENCODED = encode_v2(GOLDEN["N"], codec="none")


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "n.infgen"
    path.write_bytes(ENCODED.data)
    return str(path)


@pytest.fixture
def delta(tmp_path: Path) -> tuple[str, str]:
    """The child and its parent."""
    for name, vector in (("child", "D"), ("parent", "G1")):
        (tmp_path / name).write_bytes(encode_v2(GOLDEN[vector], codec="none").data)
    return str(tmp_path / "child"), str(tmp_path / "parent")


def test_inspect_shows_fields_and_provenance(infer: Any, file: str) -> None:
    done = infer("artifact", "inspect", file)
    assert done.code == 0 and done.err == ""
    assert done.out.startswith("generation_artifact_v2, none, ")
    for words in ("kept_logmass", "acme-probes.surprise (unknown", "prompt_token", "3 x 2 x 2 u8", "model: tiny-moe"):
        assert words in done.out
    assert "numerics.mode: fast" in done.out and "sampling.temperature: 0.5" in done.out
    shown = json.loads(infer("artifact", "inspect", "--json", file).out)
    assert shown["format"] == "generation_artifact_v2" and shown["actual_bytes"] == ENCODED.actual_bytes
    assert shown["provenance"]["sampling"]["logit_bias"] == {"7": -1.5}
    assert {field["name"] for field in shown["fields"] if field["choices"] == [0, 1]} >= {"token_ids", "moe_routes"}


def test_inspect_a_delta(infer: Any, delta: tuple[str, str]) -> None:
    done = infer("artifact", "inspect", delta[0])
    assert done.code == 0 and "whose 4 tokens are not repeated" in done.out
    shown = json.loads(infer("artifact", "inspect", "--json", delta[0]).out)
    assert shown["parent"]["sha256"] == encode_v2(GOLDEN["G1"], codec="none").sha256


def test_verify(infer: Any, file: str, tmp_path: Path) -> None:
    done = infer("artifact", "verify", file)
    assert (
        done.code == 0 and f"sha256 {ENCODED.sha256}" in done.out and f"body_sha256 {ENCODED.body_sha256}" in done.out
    )
    assert "every digest inside holds" in done.err
    assert infer("artifact", "verify", file, "--sha256", ENCODED.sha256).err == ""
    data = bytearray(ENCODED.data)
    data[-1] ^= 1
    Path(file).write_bytes(data)
    assert infer("artifact", "inspect", file).code == 0
    done = infer("artifact", "verify", file)
    assert done.code == 1 and "SHA-256" in done.err


@pytest.mark.parametrize("name", FORMATS)
def test_export_is_the_same_from_either_format(infer: Any, tmp_path: Path, name: str) -> None:
    made = []
    for version in ("generation_artifact_v1", "generation_artifact_v2"):
        path = tmp_path / version
        path.write_bytes(encode(G1, format=version))  # type: ignore[arg-type]
        target = tmp_path / f"{version}.npz"
        assert infer("artifact", "export", str(path), "--to", name, "-o", str(target)).code == 0
        if name == "verl":
            with np.load(target, allow_pickle=False) as loaded:
                made.append({key: loaded[key].tolist() for key in loaded.files})
        else:
            made.append(target.read_text())  # type: ignore[arg-type]
    assert made[0] == made[1] and made[0]


def test_export_all_fields_as_json(infer: Any, file: str) -> None:
    plain = json.loads(infer("artifact", "export", file, "--to", "json", "--choice", "1").out)
    assert plain["sequence_token_ids"] == [101, 102, 103, 203]
    assert plain["fields"]["kept_set"] == {"row_start": 3, "attributes": {}, "values": [203, 9, 7], "offsets": [0, 3]}
    assert plain["fields"]["weight_spans"]["attributes"] == {"versions": ["step-8", "step-9"]}
    assert plain["fields"]["acme-probes.summary"]["values"] == [[1.5], [2.5]]


def test_a_delta_needs_its_parent(infer: Any, delta: tuple[str, str], tmp_path: Path) -> None:
    child, parent = delta
    done = infer("artifact", "export", child, "--to", "sglang")
    assert done.code == 1 and "parent" in done.err
    made = json.loads(infer("artifact", "export", child, "--to", "json", "--parent", parent).out)
    assert made["sequence_token_ids"] == [101, 102, 201, 202, 103, 301] and len(made["moe_routes"]["expert_ids"]) == 5
    done = infer("artifact", "plot", child, "--parent", parent, "-o", str(tmp_path / "a.svg"))
    assert done.code == 0 and "5 tokens, 2 layers" in (tmp_path / "a.svg").read_text()
    done = infer("artifact", "plot", child, "--parent", child, "-o", str(tmp_path / "b.svg"))
    assert done.code == 1 and "not the parent" in done.err


def test_plot_png(infer: Any, file: str, tmp_path: Path) -> None:
    target = tmp_path / "routes.png"
    done = infer("artifact", "plot", file, "--choice", "0", "-o", str(target))
    assert (done.code, done.err) == (0, "")
    image = Image.open(target)
    assert image.format == "PNG" and image.width == 1800
    done = infer("artifact", "plot", file, "-o", str(tmp_path / "routes.gif"))
    assert done.code == 1 and ".png or .svg" in done.err


def test_the_pixels_are_the_load() -> None:
    """All tokens go to expert 1 first and 0 second in layer 5; expert 2 is never used. Title and labels are there."""
    image = Image.open(io.BytesIO(draw_routes_png(RoutedExperts(0, [[[1, 0]]] * 10, (5,), (3,)))))
    row = [image.getpixel((2 * (60 + 260 * column + 130), 2 * 67)) for column in range(3)]
    assert row == [(13, 59, 102), (13, 59, 102), (240, 246, 250)]
    below = {image.getpixel((2 * (60 + 78 * column + 39), 2 * (60 + 14 + 48 + 7))) for column in range(10)}
    assert len(below) == 1 and (255, 255, 255) not in below
    title = np.asarray(image.crop((100, 10, 800, 60)))
    assert title.min() < 64, "text is dark"


def test_without_pillow_the_cure_is_named(
    infer: Any, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = builtins.__import__

    def absent(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "PIL":
            raise ImportError(name)
        return original(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", absent)
    done = infer("artifact", "plot", file, "--choice", "0", "-o", str(tmp_path / "a.png"))
    assert done.code == 1 and "infer-engine[plot]" in done.err and not (tmp_path / "a.png").exists()
