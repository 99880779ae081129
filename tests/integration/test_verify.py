"""`infer verify` on rollouts of a random tiny model: itself, another dtype, a defect in its positions, changed facts."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from infer import Completion, SamplingParams
from infer.artifacts import ArtifactChoice, GenerationArtifact, SelectedLogprobs, encode
from infer.artifacts.record import Provenance
from infer.artifacts.v2.conversion import record_of
from infer.artifacts.v2.writer import encode_v2
from infer.artifacts.verify import engine_routes
from infer.cli.app import main
from infer.cli.session import Session
from infer.config.env import read_environment
from infer.models import qwen3_moe

from .engine_support import ARCHITECTURES, BOS, EOS, VOCAB, prompt, serve, write_checkpoint

PROMPTS = [prompt(length, seed=3) for length in (40, 70, 25, 90)]
SETTINGS = ["--platform.threads", "1", "--cache.num-blocks", "128"]


@dataclass
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture
def verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """verify(artifact, model, "--json") -> exit code, stdout, stderr."""

    def call(artifact: GenerationArtifact | Path, model: Path, *more: str) -> Outcome:
        file = tmp_path / "rollout.dynexp"
        if isinstance(artifact, Path):
            file = artifact
        else:
            file.write_bytes(encode(artifact))
        err = Console(file=io.StringIO(), soft_wrap=True, markup=False, highlight=False, color_system=None)
        environment = read_environment({"INFER_CACHE_DIR": str(tmp_path / "cache")})
        arguments = ["verify", str(file), "--model", str(model), *SETTINGS, *more]
        code = main(arguments, Session(stated_environment=environment, err=err))
        return Outcome(code, capsys.readouterr().out, err.file.getvalue())  # type: ignore[attr-defined]

    return call


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), ARCHITECTURES["llama"])


def artifact_of(completions: list[Completion]) -> GenerationArtifact:
    """What a rollout records."""
    choices = []
    for index, done in enumerate(completions):
        values = np.array([entry.logprob for entry in done.logprobs or ()], dtype=np.float32)
        ids = [*done.prompt_token_ids, *done.token_ids]
        start = len(done.prompt_token_ids)
        choices.append(ArtifactChoice(index, start, ids, selected_logprobs=SelectedLogprobs(start, values)))
    return GenerationArtifact(choices)


def rollout(model: Path, dtype: str = "float32", **params: Any) -> GenerationArtifact:
    settings = {"max_tokens": 40, "ignore_eos": True, "logprobs": 0, "seed": 7} | params
    with serve(model, model={"dtype": dtype}) as engine:
        return artifact_of(engine.generate_many(PROMPTS, SamplingParams(**settings)))


@pytest.fixture(scope="module")
def sampled(model: Path) -> GenerationArtifact:
    return rollout(model)


def changed(artifact: GenerationArtifact, choice: int, **fields: Any) -> GenerationArtifact:
    choices = list(artifact.choices)
    choices[choice] = dataclasses.replace(choices[choice], **fields)
    return GenerationArtifact(choices)


def test_the_same_model_says_the_same(model: Path, sampled: GenerationArtifact, verify: Any) -> None:
    done = verify(sampled, model, "--dtype", "float32")
    assert (done.code, done.out.splitlines()[-1]) == (0, "equal")
    assert done.out.splitlines()[1].split() == ["0", "40", "40", "-", "40", "equal", "-", "equal"]
    report = json.loads(verify(sampled, model, "--dtype", "float32", "--json").out)
    assert report["verdict"] == "equal" and len(report["choices"]) == len(PROMPTS)
    assert report["choices"][1]["logprobs"]["equal"] == 40 and report["choices"][1]["tokens"] is None


@pytest.mark.row("X-VERIFY", "a seeded wrong-rope bug is reported as wrong")
@pytest.mark.parametrize("temperature", ["0", "1"])
def test_a_wrong_rope_is_wrong(temperature: str, model: Path, tmp_path: Path, verify: Any) -> None:
    """The same weights, read with another rotary base: the first token that shows it is named."""
    recorded = rollout(model, temperature=float(temperature))
    wrong = tmp_path / "wrong"
    shutil.copytree(model, wrong)
    config = json.loads((wrong / "config.json").read_text())
    config["rope_theta"] = config.get("rope_theta", 10_000.0) * 3
    (wrong / "config.json").write_text(json.dumps(config))
    done = verify(recorded, wrong, "--dtype", "float32", "--temperature", temperature, "--json")
    report = json.loads(done.out)
    assert (done.code, report["verdict"]) == (1, "wrong")
    judged = report["choices"][0]["logprobs"]
    assert judged["wrong"] > 20
    first = judged["first_wrong"]
    assert first["position"] == judged["wrong_positions"][0] >= 40
    assert first["deviation"] == pytest.approx(abs(first["recorded"] - first["ours"]))
    assert (report["choices"][0]["tokens"] is not None) == (temperature == "0")
    shown = verify(recorded, wrong, "--dtype", "float32", "--rollout-dtype", "bfloat16")
    assert shown.code == 1 and shown.out.splitlines()[-1] == "wrong"
    assert "first wrong at position" in shown.out


@pytest.mark.row("X-VERIFY", "an fp32/bf16 near tie is reported as near tie")
@pytest.mark.parametrize(("made", "replayed"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_another_precision_is_a_near_tie(made: str, replayed: str, model: Path, verify: Any) -> None:
    """Greedy, so that tokens are judged too: some of them are the other program's second best by a hair."""
    recorded = rollout(model, made, temperature=0)
    arguments = ["--dtype", replayed, "--rollout-dtype", made, "--temperature", "0"]
    done = verify(recorded, model, *arguments, "--json")
    report = json.loads(done.out)
    assert (done.code, report["verdict"]) == (0, "near tie"), report
    tokens = [choice["tokens"] for choice in report["choices"]]
    assert sum(one["near"] for one in tokens) > 0 and sum(one["wrong"] for one in tokens) == 0
    near = next(one for one in tokens if one["near"])["first"]
    assert near["recorded"] != near["ours"] and 0 <= near["deviation"] < 0.25
    assert "near tie at position" in verify(recorded, model, *arguments).out


def test_a_precision_that_nobody_stated_is_wrong(model: Path, verify: Any) -> None:
    recorded = rollout(model, "bfloat16")
    assert verify(recorded, model, "--dtype", "float32").code == 1
    assert verify(recorded, model, "--dtype", "float32", "--max-deviation", "0.5").code == 0


@pytest.mark.row("X-VERIFY", "the first token that differs is named")
def test_a_changed_token_is_found(model: Path, sampled: GenerationArtifact, verify: Any) -> None:
    choice = sampled.choices[2]
    ids = np.array(choice.sequence_token_ids)
    ids[25 + 11] = (ids[25 + 11] + 1) % 300
    report = json.loads(verify(changed(sampled, 2, sequence_token_ids=ids), model, "--dtype", "float32", "--json").out)
    assert [one["verdict"] for one in report["choices"]] == ["equal", "equal", "wrong", "equal"]
    first = report["choices"][2]["logprobs"]["first"]
    assert (first["position"], first["token_id"]) == (36, int(ids[36]))


def test_a_changed_log_probability_is_found(model: Path, sampled: GenerationArtifact, verify: Any) -> None:
    values = np.array(sampled.choices[1].selected_logprobs.logprobs)  # type: ignore[union-attr]
    values[30] -= 0.01
    other = changed(sampled, 1, selected_logprobs=SelectedLogprobs(70, values))
    report = json.loads(verify(other, model, "--dtype", "float32", "--json").out)
    assert report["choices"][1]["logprobs"]["wrong_positions"] == [100]


def test_processed_values_need_the_parameters_they_were_made_with(model: Path, verify: Any) -> None:
    recorded = rollout(model, logprobs_mode="processed", temperature=0.7, top_k=20)
    mode = ["--dtype", "float32", "--logprobs-mode", "processed"]
    assert verify(recorded, model, *mode, "--temperature", "0.7", "--top-k", "20").code == 0
    assert verify(recorded, model, *mode, "--temperature", "0.7").code == 1
    assert verify(recorded, model, "--dtype", "float32").code == 1


def test_a_greedy_token_behind_a_penalty_is_judged_by_what_was_chosen_from(model: Path, verify: Any) -> None:
    recorded = rollout(model, temperature=0, repetition_penalty=1.5)
    arguments = ["--dtype", "float32", "--temperature", "0"]
    assert verify(recorded, model, *arguments, "--repetition-penalty", "1.5").out.splitlines()[-1] == "equal"
    report = json.loads(verify(recorded, model, *arguments, "--json").out)
    assert report["choices"][0]["tokens"]["wrong"] > 0 and report["choices"][0]["logprobs"]["wrong"] == 0


def test_the_open_format_says_itself_how_it_was_sampled(model: Path, tmp_path: Path, verify: Any) -> None:
    """Processed values and greedy tokens are judged without an option; an option counts more."""
    params = {"temperature": 0.0, "repetition_penalty": 1.5, "logit_bias": {"9": 2.0}}
    recorded = rollout(model, logprobs_mode="processed", **params | {"logit_bias": {9: 2.0}})
    provenance = Provenance(logprobs_mode="processed", sampling=params | {"n": 1, "max_tokens": 40})
    file = tmp_path / "open.dynexp"
    file.write_bytes(encode_v2(record_of(recorded, provenance=provenance)).data)
    done = verify(file, model, "--dtype", "float32", "--json")
    report = json.loads(done.out)
    assert (done.code, report["verdict"]) == (0, "equal")
    assert [choice["tokens"]["equal"] for choice in report["choices"]] == [40] * 4
    assert verify(file, model, "--dtype", "float32", "--repetition-penalty", "1").code == 1


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    size = {"vocab_size": VOCAB, "max_position_embeddings": 640, "bos_token_id": BOS, "eos_token_id": EOS}
    return write_checkpoint(tmp_path_factory.mktemp("moe"), qwen3_moe.EXAMPLE | size)


@pytest.mark.row("X-VERIFY", "routes are compared in order; the first differing row and layer are named")
def test_routes_are_replayed(mixture: Path, verify: Any) -> None:
    """Of prompt and output, from a prefix hit on one side and computed on the other; one changed expert is found."""
    params = {"max_tokens": 12, "ignore_eos": True, "logprobs": 0, "seed": 7, "return_routed_experts": True}
    with serve(mixture, capture={"routed_experts": True}) as engine:
        made = engine.generate_many(PROMPTS, SamplingParams(**params))
    recorded = artifact_of(made)
    found = [engine_routes(done) for done in made]
    choices = [dataclasses.replace(one, moe_routes=rows) for one, rows in zip(recorded.choices, found, strict=True)]
    recorded = GenerationArtifact(choices)
    done = verify(recorded, mixture, "--dtype", "float32")
    assert (done.code, done.out.splitlines()[-1]) == (0, "equal"), done.out
    assert "102 equal" in done.out.splitlines()[1], "51 rows of 2 layers"
    ids = np.array(found[1].expert_ids)
    ids[75, 1, 0] = next(expert for expert in range(8) if expert not in ids[75, 1])
    other = changed(recorded, 1, moe_routes=dataclasses.replace(found[1], expert_ids=ids))
    done = verify(other, mixture, "--dtype", "float32")
    assert done.code == 1 and "choice 1, routes: first wrong at position 75" in done.out and "layer 1" in done.out
    dense = verify(recorded, mixture.parent / "nowhere")
    assert dense.code == 1 and dense.out == ""


def test_what_cannot_be_judged_is_refused(model: Path, sampled: GenerationArtifact, verify: Any) -> None:
    bare = GenerationArtifact([ArtifactChoice(0, 40, sampled.choices[0].sequence_token_ids)])
    done = verify(bare, model)
    assert done.code == 1 and "nothing to judge" in done.err and "temperature=0" in done.err
    assert verify(bare, model, "--temperature", "0").out.splitlines()[-1] == "wrong"
    assert "there is no such dtype" in verify(sampled, model, "--rollout-dtype", "int8").err
    assert "logprobs_mode" in verify(sampled, model, "--logprobs-mode", "cooked").err
    outside = ArtifactChoice(0, 1, [5, 100_000], selected_logprobs=SelectedLogprobs(1, [-1.0]))
    assert "100000" in verify(GenerationArtifact([outside]), model).err
    empty = GenerationArtifact([ArtifactChoice(0, 3, [4, 5, 6])])
    assert verify(empty, model).out.splitlines()[-1] == "equal"
