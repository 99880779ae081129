"""A further kind of captured rows is one leaf file: no module of the life of a row knows any kind by name."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import infer
from infer import ConfigError
from infer.artifacts import ArtifactRequest, SinkTarget, open_artifact, rebuild_rows
from integration.engine_support import greedy, prompt, serve, write_checkpoint
from integration.test_route_scenarios import MOE

LEAF = """
from infer.config.capture import CaptureProfile
from infer.plugins import hookimpl
from infer.plugins.artifact_field import ArtifactFieldSpec


class LargestUnits:
    def __init__(self, facts):
        self._profile = CaptureProfile(
            name="largest_units",
            dtype="int32",
            row_shape=(len(facts.hidden_layers), 3),
            layer_ids=facts.hidden_layers,
            model_identity=facts.model_identity,
        )

    def profile(self):
        return self._profile

    def select(self, tap, tokens, out):
        out.copy_(tap.index_select(1, tokens).topk(3, -1).indices.transpose(0, 1))

    def encode(self, rows, count):
        return rows

    def decode(self, data, count):
        return data


@hookimpl
def infer_artifact_fields():
    return [
        ArtifactFieldSpec(
            name="largest_units",
            api=1,
            factory="NAME:LargestUnits",
            coordinate="COORDINATE",
            reuse="REUSE",
            tap="TAP",
            encoding="raw",
            example={},
        )
    ]
"""
LIFE = ("engine/aux", "engine/scheduler", "engine/worker", "engine/loop.py", "engine/request.py", "engine/step.py")


def install(directory: Path, name: str, tap: str = "hidden", coordinate: str = "executed_token") -> None:
    """A distribution of one module."""
    text = LEAF.replace("NAME", name).replace("TAP", tap).replace("COORDINATE", coordinate)
    (directory / f"{name}.py").write_text(text.replace("REUSE", "prefix_block"))
    info = directory / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[infer]\nfields = {name}\n")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("kinds") / "moe", MOE)


@pytest.mark.row(
    "X-AUX-KINDS", "hidden states and another reading of them in one leaf: hits, chunks, preemption, artifact, keys"
)
def test_a_leaf_rides_the_whole_life(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row is recomputed from the hidden states of the same token, which travelled beside it."""
    install(tmp_path, "kinds_leaf")
    monkeypatch.syspath_prepend(str(tmp_path))
    store_dir, name = tmp_path / "rows", "kinds-leaf.largest_units"
    capture = {
        **{"routed_experts": True, "hidden_layers": [0, 2], "fields": ["largest_units"]},
        **{"store_dir": str(store_dir), "max_bytes": 2**24},
    }
    objects: list[bytes] = []

    async def keep(data: bytes) -> str:
        objects.append(bytes(data))
        return str(len(objects))

    wanted = ArtifactRequest(
        target=SinkTarget(keep),
        contents=("moe_routes", "hidden_states", name),
        format="generation_artifact_v2",
    )
    params = greedy(60, return_routed_experts=True, captured_as="keys")
    with serve(checkpoint, capture=capture, cache={"num_blocks": 24}) as engine:
        done = [engine.generate(prompt(150), params, artifact=wanted) for _ in range(2)]
        assert [one.artifact.state for one in done if one.artifact] == ["ready", "ready"]
        assert done[1].usage.cached_tokens == 144
        many = engine.generate_many([prompt(100, seed) for seed in range(3)], greedy(90, return_routed_experts=True))
        assert sum(one.timings.num_preemptions for one in many if one.timings) > 0
        for one, data in zip(done, objects, strict=True):
            reader = open_artifact(data)
            largest, hidden = reader.field(name).values, reader.field("hidden_states").values
            assert len(largest) == len(hidden) == len(reader.field("moe_routes").values) == 209
            assert largest.shape == (209, 2, 3)
            best = np.take_along_axis(hidden, largest.astype(np.int64), -1)
            assert np.array_equal(best, -np.sort(-hidden, -1)[..., :3])
            for field, values in (("largest_units", largest), ("hidden_states", hidden)):
                rows = one.choices[0].captured[field]
                assert rebuild_rows(rows, store_dir).data == values.tobytes()
        assert all(rows.keys for rows in done[1].choices[0].captured.values())


@pytest.mark.row("X-AUX-KINDS", "no module of the life of a row names a kind")
def test_the_life_of_a_row_knows_no_kind() -> None:
    root = Path(str(infer.__file__)).parent
    files = [path for part in LIFE for path in ([root / part] if part.endswith(".py") else (root / part).glob("*.py"))]
    kinds = re.compile(r"moe_routes|hidden_states", re.IGNORECASE)
    named = {(path.name, found) for path in files for found in kinds.findall(path.read_text())}
    assert kinds.findall("from infer.config.capture import MOE_ROUTES")
    assert len(files) > 20 and not named


@pytest.mark.row(
    "X-AUX-KINDS", "indexer top-k and prompt logprobs: their taps and coordinates are refused by name until they exist"
)
@pytest.mark.waits("X-AUX-KINDS")
@pytest.mark.parametrize(
    ("tap", "coordinate", "reason"),
    [
        ("logits", "predicted_token", "the tap 'logits', which is reserved"),
        ("hidden", "predicted_token", "rows per predicted_token"),
    ],
    ids=["logits", "predicted"],
)
def test_kinds_that_are_not_there_are_refused_by_name(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tap: str, coordinate: str, reason: str
) -> None:
    name = f"kinds_{tap}"
    install(tmp_path, name, tap, coordinate)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=reason) as caught:
        serve(checkpoint, capture={"fields": ["largest_units"]}).__enter__()
    assert caught.value.fields == ("capture.fields",)
