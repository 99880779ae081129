"""Models that the engine has never heard of: registered as a plugin, loaded, run, and equal to dense references."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import infer
from infer.config.engine import PluginsSection
from infer.engine.step import SamplingSpec, SlotAdmission
from infer.plugins.manager import build_registry
from infer.plugins.registry import Registry
from unit.engine.worker import shape_models
from unit.engine.worker.built import build
from unit.engine.worker.toy_causal_lm import Blocks, plan

VOCAB = 50
Dense = Callable[[dict[str, torch.Tensor], list[int]], torch.Tensor]
MODELS: dict[str, tuple[dict[str, torch.Tensor], Dense, int]] = {
    "MixedHeadsForCausalLM": (shape_models.mixed_heads_weights(VOCAB), shape_models.dense_mixed_heads, 1),
    "NoAttentionForCausalLM": (shape_models.no_attention_weights(VOCAB), shape_models.dense_no_attention, 0),
}


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """With `shape_models` as an installed distribution."""
    info = tmp_path / "site" / "shape_models-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shape-models\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[infer]\nshapes = {shape_models.__name__}\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return build_registry(PluginsSection())


def checkpoint(directory: Path, architecture: str) -> Path:
    directory.mkdir()
    save_file(MODELS[architecture][0], directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(shape_models.example(architecture)))
    return directory


@pytest.mark.row(
    "ENG-RUNNER-MODELSHAPE", "mixed head sizes / no attention at all: register, run, match their reference"
)
@pytest.mark.parametrize("architecture", list(MODELS))
def test_a_model_of_a_new_shape_runs_and_matches_its_reference(
    architecture: str, registry: Registry, tmp_path: Path
) -> None:
    weights, dense, groups = MODELS[architecture]
    runner, resolved = build(checkpoint(tmp_path / "model", architecture), registry)
    assert len(resolved.cache.groups) == groups
    blocks = Blocks()
    everything = SamplingSpec(
        seed=0, temperature=0.0, logprobs=VOCAB, prompt_logprobs=VOCAB, logprobs_mode="raw_logits"
    )
    prompts = {0: [7, 3, 44, 3, 12, 9, 31], 2: [1, 49, 20]}
    ids = {slot: list(prompt) for slot, prompt in prompts.items()}
    found: dict[int, list[dict[int, float]]] = {0: [], 2: []}
    new = [
        SlotAdmission(slot, prompt, len(prompt), everything, tuple(blocks.take(5) for _ in range(groups)))
        for slot, prompt in prompts.items()
    ]
    # slot 0 in chunks of 4 and 3, slot 2 beside it, then both decode
    steps = [[(0, 0, 4, 0), (2, 0, 3, 1)], [(0, 4, 3, 1), (2, 3, 1, 1)]]
    steps += [[(0, 7 + i, 1, 1), (2, 4 + i, 1, 1)] for i in range(5)]
    for number, rows in enumerate(steps):
        result = runner.execute(plan(rows, new if number == 0 else ()))
        assert result.errors == {}
        for i, (slot, *_) in enumerate(rows):
            entries = result.prompt_logprobs.get(i, []) + (result.logprobs[i] or [])
            found[slot] += [dict(entry.top) for entry in entries]
            ids[slot] += result.token_ids[i]
    for slot in prompts:
        expected = dense(weights, ids[slot])[:-1]
        got = torch.tensor([[values[i] for i in range(VOCAB)] for values in found[slot]], dtype=torch.float64)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        outputs = ids[slot][len(prompts[slot]) :]
        assert outputs == expected[-len(outputs) :].argmax(-1).tolist()
    runner.close()


@pytest.mark.row("ENG-RUNNER-MODELSHAPE", "no engine file names them")
def test_no_file_of_the_engine_names_a_test_model() -> None:
    root = Path(infer.__file__).parent
    names = re.compile("mixed.?heads|no.?attention.?for", re.IGNORECASE)
    files = list(root.rglob("*.py"))
    assert len(files) > 50
    assert [str(path) for path in files if names.search(path.read_text())] == []
