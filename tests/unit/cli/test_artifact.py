"""`infer artifact`: what it shows, checks, draws and exports, and how it refuses."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from artifact_samples import G1, G1_SHA256, A
from infer.artifacts import ArtifactChoice, GenerationArtifact, RoutedExperts, decode, encode
from infer.cli.artifact import FORMATS
from infer.cli.route_plot import draw_routes


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "g1.dynexp"
    path.write_bytes(encode(G1, "none"))
    return str(path)


def test_inspect(infer: Any, file: str) -> None:
    done = infer("artifact", "inspect", file)
    assert done.code == 0 and done.err == ""
    assert "generation_artifact_v1, none, 398 B" in done.out
    assert "moe_routes, selected_logprobs" in done.out and "3 x 2 x 2 u8 from 0" in done.out
    shown = json.loads(infer("artifact", "inspect", "--json", file).out)
    assert shown["choices"][0]["router_ids"] == [3, 7] and shown["actual_bytes"] == 398


def test_verify(infer: Any, file: str, tmp_path: Path) -> None:
    done = infer("artifact", "verify", file)
    assert done.code == 0 and G1_SHA256 in done.out and "without the receipt" in done.err
    done = infer("artifact", "verify", file, "--sha256", G1_SHA256)
    assert done.code == 0 and done.err == ""
    for receipt in (
        {"sha256": G1_SHA256, "actual_bytes": 398},
        {"nvext": {"generation_artifact": {"sha256": G1_SHA256}}},
    ):
        (tmp_path / "receipt.json").write_text(json.dumps(receipt))
        assert infer("artifact", "verify", file, "--receipt", str(tmp_path / "receipt.json")).code == 0
    (tmp_path / "receipt.json").write_text(json.dumps("ArtifactReceipt(...)"))
    done = infer("artifact", "verify", file, "--receipt", str(tmp_path / "receipt.json"))
    assert done.code == 1 and "receipt.to_json()" in done.err
    (tmp_path / "receipt.json").write_text(json.dumps({"sha256": G1_SHA256, "actual_bytes": 399}))
    done = infer("artifact", "verify", file, "--receipt", str(tmp_path / "receipt.json"))
    assert done.code == 1 and "398 bytes; the receipt says 399" in done.err
    done = infer("artifact", "verify", file, "--sha256", "0" * 64)
    assert done.code == 1 and "SHA-256" in done.err


def test_a_damaged_file(infer: Any, file: str) -> None:
    data = bytearray(Path(file).read_bytes())
    data[380] = 9  # an expert of four
    Path(file).write_bytes(data)
    assert infer("artifact", "inspect", file).code == 0
    done = infer("artifact", "verify", file)
    assert done.code == 1 and "infer: error:" in done.err
    Path(file).write_bytes(data[:100])
    assert infer("artifact", "inspect", file).code == 1
    done = infer("artifact", "inspect", file + "x")
    assert done.code == 1 and "does not exist" in done.err


@pytest.mark.parametrize("name", FORMATS)
def test_export(infer: Any, file: str, tmp_path: Path, name: str) -> None:
    target = tmp_path / f"out.{name}.npz"
    done = infer("artifact", "export", file, "--to", name, "--output", str(target), "--num-hidden-layers", "8")
    assert (done.code, done.err) == (0, "") and target.stat().st_size > 0
    if name == "verl":
        loaded = np.load(target, allow_pickle=False)
        assert loaded["routed_experts"].shape == (4, 8, 2) and loaded["replay_mask"].tolist() == [True] * 3 + [False]
    elif name == "nemo-rl":
        assert target.read_text().startswith("nrlre1:int8:3x8x2:")
    else:
        assert json.loads(target.read_text())


def test_export_to_stdout(infer: Any, file: str) -> None:
    made = json.loads(infer("artifact", "export", file, "--to", "sglang").out)
    assert made["routed_experts_start_len"] == 0
    plain = json.loads(infer("artifact", "export", file, "--to", "json").out)
    assert plain["sequence_token_ids"] == [101, 102, 201, 202]
    assert plain["selected_logprobs"] == {"token_start": 2, "logprobs": [-0.25, -0.5]}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--to", "yaml"], "no such encoding"),
        (["--to", "json", "--choice", "3"], "no such choice"),
        (["--to", "verl"], "--output"),
        (["--to", "vllm", "--num-hidden-layers", "4"], "layer 7"),
    ],
)
def test_export_refuses(infer: Any, file: str, arguments: list[str], words: str) -> None:
    done = infer("artifact", "export", file, *arguments)
    assert done.code == 1 and words in done.err and done.out == ""


def test_plot(infer: Any, file: str, tmp_path: Path) -> None:
    target = tmp_path / "routes.svg"
    assert infer("artifact", "plot", file, "-o", str(target)).code == 0
    root = ElementTree.parse(target).getroot()
    rectangles = [element for element in root if element.tag.endswith("rect")]
    assert len(rectangles) == 1 + 2 * 4 + 2 * 3, "background, load of 2 layers x 4 experts, 2 layers x 3 tokens"
    assert any("3 tokens, 2 layers, 2 of 4 experts" in (element.text or "") for element in root)
    assert infer("artifact", "plot", file).out == target.read_text()


def test_plot_without_routes(infer: Any, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(encode(A))
    done = infer("artifact", "plot", str(tmp_path / "a"))
    assert done.code == 1 and "holds no moe_routes" in done.err


def test_a_busy_expert_is_darker() -> None:
    """All tokens go to expert 1 first and 0 second in layer 5; expert 2 is never used."""
    drawing = draw_routes(RoutedExperts(0, [[[1, 0]]] * 10, (5,), (3,)))
    fills = [element.get("fill") for element in ElementTree.fromstring(drawing) if element.tag.endswith("rect")][1:]
    assert fills[:3] == ["#0d3b66", "#0d3b66", "#f0f6fa"]
    assert len(set(fills[3:])) == 1 and len(fills) == 13


def test_a_plot_of_a_long_generation_is_bounded() -> None:
    ids = np.zeros((50_000, 2, 1), np.uint8)
    assert draw_routes(RoutedExperts(0, ids, (0, 1), (64, 64))).count("<rect") < 1 + 2 * 64 + 2 * 301
    empty = RoutedExperts(3, np.zeros((0, 2, 1), np.uint8), (0, 1), (4, 4))
    assert "0 tokens" in draw_routes(empty)


def test_the_samples_are_what_they_were() -> None:
    assert decode(encode(GenerationArtifact([ArtifactChoice(0, 1, [101, 201])]))) == A
