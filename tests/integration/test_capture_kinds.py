"""A further kind of captured rows is one leaf file: no module of the life of a row knows any kind by name."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import infer
from infer import ArtifactRefusedError, ConfigError, PluginContractError
from infer.artifacts import ArtifactReader, ArtifactRequest, SinkTarget, open_artifact, rebuild_rows
from infer.testing.tiny_models import random_transformers_model
from integration.engine_support import NEAR_TIE, greedy, prompt, serve, write_checkpoint
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


def install(
    directory: Path, name: str, tap: str = "hidden", coordinate: str = "executed_token", leaf: str = LEAF
) -> None:
    """A distribution of one module."""
    text = leaf.replace("NAME", name).replace("TAP", tap).replace("COORDINATE", coordinate)
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
        for one, data in zip(done, objects, strict=True):
            reader = open_artifact(data)
            checked(reader, name, 209)
            for field, called in (("largest_units", name), ("hidden_states", "hidden_states")):
                rows = one.choices[0].captured[field]
                assert rebuild_rows(rows, store_dir).data == reader.field(called).values.tobytes()
        assert all(rows.keys for rows in done[1].choices[0].captured.values())
        prompts, squeezed = [prompt(100, seed) for seed in range(3)], greedy(90)
        many = engine.generate_many(prompts, squeezed, artifacts=[wanted] * 3)
        for one in many:
            assert one.artifact is not None and one.artifact.state == "ready" and one.timings is not None
            reader = open_artifact(objects[int(one.artifact.object_id or 0) - 1])
            assert reader.tokens().tolist() == [*one.prompt_token_ids, *one.token_ids]
            checked(reader, name, 189)
        preempted = [one for one in many if one.timings and one.timings.num_preemptions]
        assert preempted, "and their rows are among those that were checked"


def checked(reader: ArtifactReader, name: str, count: int) -> None:
    """The leaf's rows are those of the same tokens' hidden states."""
    largest, hidden = reader.field(name).values, reader.field("hidden_states").values
    assert len(largest) == len(hidden) == len(reader.field("moe_routes").values) == count
    assert largest.shape == (count, 2, 3)
    best = np.take_along_axis(hidden, largest.astype(np.int64), -1)
    assert np.array_equal(best, -np.sort(-hidden, -1)[..., :3])


@pytest.mark.row("X-AUX-KINDS", "no module of the life of a row names a kind")
def test_the_life_of_a_row_knows_no_kind() -> None:
    root = Path(str(infer.__file__)).parent
    files = [path for part in LIFE for path in ([root / part] if part.endswith(".py") else (root / part).glob("*.py"))]
    kinds = re.compile(r"moe_routes|hidden_states", re.IGNORECASE)
    named = {(path.name, found) for path in files for found in kinds.findall(path.read_text())}
    assert kinds.findall("from infer.config.capture import MOE_ROUTES")
    assert len(files) > 20 and not named


PREDICTIONS = (
    LEAF.replace("largest_units", "best_predictions")
    .replace("LargestUnits", "BestPredictions")
    .replace("row_shape=(len(facts.hidden_layers), 3)", "row_shape=(3,)")
    .replace("            layer_ids=facts.hidden_layers,\n", "")
    .replace(
        "tap.index_select(1, tokens).topk(3, -1).indices.transpose(0, 1)",
        "tap[0].index_select(0, tokens).topk(3, -1).indices",
    )
)
"""What the model would have said at every position, prompt included: a field of predicted tokens."""


@pytest.mark.row("X-AUX-KINDS", "what is predicted at every position, as prompt log-probabilities are: in one leaf")
def test_a_leaf_of_predicted_tokens(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row p tells what was predicted for position p, and transformers says the same of the same tokens; prefix hits and
    preemption change nothing."""
    install(tmp_path, "predictions_leaf", "logits", "predicted_token", PREDICTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    name, objects = "predictions-leaf.best_predictions", dict[str, bytes]()

    async def keep(data: bytes) -> str:
        objects[str(len(objects))] = bytes(data)
        return str(len(objects) - 1)

    contents = (name, "topk_logprobs", "prompt_logprobs", "moe_routes")
    plain = ArtifactRequest(target=SinkTarget(keep), contents=contents, format="generation_artifact_v2")
    reusing = ArtifactRequest(target=SinkTarget(keep), contents=(name,), format="generation_artifact_v2")
    capture = {"routed_experts": True, "fields": ["best_predictions"]}
    with serve(checkpoint, capture=capture, cache={"num_blocks": 24}) as engine:
        first = engine.generate(prompt(70), greedy(20, prompt_logprobs=3), artifact=plain)
        again = engine.generate(prompt(70), greedy(20), artifact=reusing)
        assert again.usage.cached_tokens == 64
        assert first.artifact is not None
        turn = [*first.prompt_token_ids, *first.token_ids]
        continued = replace(reusing, parent=first.artifact.as_parent(len(turn)))
        later = engine.generate([*turn, *prompt(9, 5)], greedy(5), artifact=continued)
        squeezed = engine.generate_many([prompt(100, n) for n in range(3)], greedy(90), artifacts=[reusing] * 3)
        assert any(one.timings.num_preemptions for one in squeezed if one.timings)
    model = random_transformers_model(MOE, 0).eval()
    for done in (first, again, later, *squeezed):
        assert done.artifact is not None and done.artifact.state == "ready"
        parent = open_artifact(objects["0"]) if done is later else None
        reader = open_artifact(objects[str(done.artifact.object_id)], parent=parent)
        rows = reader.field(name)
        ids = [*done.prompt_token_ids, *done.token_ids]
        assert (rows.row_start, rows.num_rows, rows.executed, rows.axis) == (1, len(ids) - 1, False, "token")
        with torch.inference_mode():
            best = model(torch.tensor([ids])).logits[0, :-1].float().topk(4)
        clear = (best.values[:, :-1] - best.values[:, 1:]).amin(1) > NEAR_TIE
        assert clear.sum() > len(ids) // 2
        assert np.array_equal(rows.values[clear.numpy()], best.indices[clear][:, :3].numpy())
    reader = open_artifact(objects["0"])
    rows, scored, top = (reader.field(field).extra for field in (name, "prompt_logprobs", "topk_logprobs"))
    values = reader.field(name).values
    assert np.array_equal(values[:69], scored["token_ids"][:, 1:4])
    assert np.array_equal(values[69:], top["token_ids"][:, :3]) and not rows


NAMES = """
from infer.config.capture import CaptureProfile
from infer.plugins import ArtifactFieldSpec, hookimpl


class Largest:
    def __init__(self, facts, name, row_shape):
        self._profile = CaptureProfile(name=name, dtype="float32", row_shape=row_shape, model_identity=facts.model_identity)

    def profile(self):
        return self._profile

    def select(self, tap, tokens, out):
        out.copy_(tap[0].index_select(0, tokens).amax(-1).view(out.shape))

    def encode(self, rows, count):
        return rows

    def decode(self, data, count):
        return data


def entropy(facts):
    return Largest(facts, "entropy", ())


def hyphens(facts):
    return Largest(facts, "best-logit", (1, 1))


def capitals(facts):
    return Largest(facts, "Best", ())


def routes(facts):
    return Largest(facts, "indexer_topk", (1,))


def field(name, factory):
    return ArtifactFieldSpec(
        name=name, api=1, factory=f"NAME:{factory}", coordinate="COORDINATE", reuse="REUSE", tap="TAP", encoding="raw",
        example={},
    )


@hookimpl
def infer_artifact_fields():
    names = {"entropy": "entropy", "best-logit": "hyphens", "Best": "capitals", "indexer_topk": "routes"}
    return [field(name, factory) for name, factory in names.items()]
"""


def test_any_name_that_is_taken_is_delivered(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin's field called as one that the format knows, with a hyphen, with a row that is one number: under its
    distribution's name. What artifacts could not carry is refused before anything is captured."""
    install(tmp_path, "names_leaf", "logits", "predicted_token", NAMES)
    monkeypatch.syspath_prepend(str(tmp_path))
    objects: list[bytes] = []

    async def keep(data: bytes) -> str:
        objects.append(bytes(data))
        return "0"

    shapes = {"names-leaf.entropy": (), "names-leaf.best-logit": (1, 1)}
    wanted = ArtifactRequest(target=SinkTarget(keep), contents=tuple(shapes), format="generation_artifact_v2")
    with serve(checkpoint, capture={"fields": ["entropy", "best-logit"]}, cache={"num_blocks": 24}) as engine:
        done = engine.generate(prompt(20), greedy(5), artifact=wanted)
        with pytest.raises(ArtifactRefusedError, match=r"does not record entropy; names-leaf\.entropy is there"):
            engine.generate(prompt(20), greedy(5), artifact=replace(wanted, contents=("entropy",)))
    assert done.artifact is not None and done.artifact.state == "ready"
    ids = [*done.prompt_token_ids, *done.token_ids]
    with torch.inference_mode():
        right = random_transformers_model(MOE, 0).eval()(torch.tensor([ids])).logits[0, :-1].float().amax(-1)
    reader = open_artifact(objects[0])
    for name, shape in shapes.items():
        assert reader.field(name).values.shape == (24, *shape)
        np.testing.assert_allclose(reader.field(name).values.reshape(-1), right.numpy(), atol=1e-4)
    for name, said in {"Best": "a field called 'names-leaf.Best'", "indexer_topk": "give it another name"}.items():
        with pytest.raises(PluginContractError, match=said):
            serve(checkpoint, capture={"fields": [name]}).__enter__()


@pytest.mark.row(
    "X-AUX-KINDS", "indexer top-k and sampling steps: their taps and coordinates are refused by name until they exist"
)
@pytest.mark.waits("X-AUX-KINDS")
@pytest.mark.parametrize(
    ("tap", "coordinate", "reason"),
    [
        ("sampled", "sampling_step", "the tap 'sampled', which is reserved"),
        ("hidden", "predicted_token", "rows per predicted_token of the tap 'hidden'; only the tap 'logits'"),
        ("logits", "sampling_step", "rows per sampling_step"),
        ("logits", "request", "rows per request"),
    ],
    ids=["sampled", "predicted", "step", "request"],
)
def test_kinds_that_are_not_there_are_refused_by_name(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tap: str, coordinate: str, reason: str
) -> None:
    name = f"kinds_{tap}_{coordinate}"
    install(tmp_path, name, tap, coordinate)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=reason) as caught:
        serve(checkpoint, capture={"fields": ["largest_units"]}).__enter__()
    assert caught.value.fields == ("capture.fields",)
