"""The example packages: pip installs them, their kits pass, and an engine does with them what their pages say."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from infer import ContextLengthError
from infer.artifacts import ArtifactRequest, ManagedTarget, SinkTarget, open_artifact
from infer.models.llama import EXAMPLE
from infer.testing.tiny_models import random_transformers_model
from integration.engine_support import (
    NEAR_TIE,
    VOCAB,
    Oracle,
    greedy,
    mostly_compared,
    prompt,
    same_tokens,
    serve,
    write_checkpoint,
)
from plugin_package.installing import EXAMPLES, install, python

MODEL = EXAMPLE | {"vocab_size": VOCAB}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": VOCAB,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PACKAGES = ("infer-entropy", "infer-gpt2", "infer-int8", "infer-slash", "infer-slow")
WEBDAV = "infer-webdav"
"""Its kit needs a server, which its own tests start."""
CHECK = "import sys; from infer.cli.app import main; sys.exit(main(['plugins', 'check', *sys.argv[1:]]))"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pip makes of them."""
    target = tmp_path_factory.mktemp("examples") / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    sources = [str(EXAMPLES / name) for name in (*PACKAGES, WEBDAV)]
    subprocess.run([*command, "--target", str(target), *sources], check=True, capture_output=True, timeout=240)
    return target


@pytest.mark.parametrize("name", PACKAGES)
def test_an_installed_example_passes_its_kit(site: Path, name: str) -> None:
    said = python(CHECK, site, name)
    assert "\n1 plugin: " in said and said.endswith(" checks passed, 0 failed\n")


def test_webdav_as_installed_passes_its_own_tests(site: Path, tmp_path: Path) -> None:
    for name in ("test_infer_webdav.py", "webdav_server.py"):
        shutil.copy(EXAMPLES / WEBDAV / name, tmp_path)
    code = "import sys, pytest; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '--rootdir', sys.argv[1], sys.argv[1]]))"
    said = python(code, site, str(tmp_path))
    assert " passed" in said and "skipped" not in said


def test_webdav_takes_what_an_engine_delivers(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(EXAMPLES / WEBDAV, tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    server = importlib.import_module("webdav_server")
    store = server.WebDAVServer(tmp_path / "store")
    profile = {
        "url": f"{store.uri}/artifacts",
        "storage_options": {"username": server.USER, "password": server.PASSWORD},
        "allowed_prefixes": ["runs"],
        "create_only": True,
    }
    wanted = ArtifactRequest(
        target=ManagedTarget(profile="dav", object_key="runs/one.bin"),
        contents=("selected_logprobs",),
        format="generation_artifact_v2",
    )
    artifacts = {"enable_managed_fsspec": True, "storage_profiles": {"dav": profile}}
    try:
        with serve(checkpoint, artifacts=artifacts, cache={"num_blocks": 24}) as engine:
            first, second = [engine.generate(prompt(20), greedy(8), artifact=wanted) for _ in range(2)]
    finally:
        store.stop()
    assert first.artifact is not None and first.artifact.state == "ready"
    stored = open_artifact((tmp_path / "store" / "artifacts" / "runs" / "one.bin").read_bytes())
    assert stored.field("selected_logprobs").num_rows == len(first.token_ids)
    assert second.artifact is not None and second.artifact.state != "ready"
    assert server.PASSWORD not in repr(second.artifact) and "artifact_conflict" in repr(second.artifact)


def test_every_example_has_what_a_package_needs() -> None:
    for name in (*PACKAGES, WEBDAV):
        module = name.replace("-", "_")
        files = {path.name for path in (EXAMPLES / name).iterdir() if path.is_file()}
        assert {"pyproject.toml", "README.md", f"{module}.py", f"test_{module}.py"} <= files


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("examples") / "llama", MODEL)


def test_entropy_is_that_of_transformers(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every predicted token, prompt included, also where a prefix hit brings the rows along."""
    install(EXAMPLES / "infer-entropy", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    stored: list[bytes] = []

    async def keep(data: bytes) -> str:
        stored.append(bytes(data))
        return str(len(stored) - 1)

    name = "infer-entropy.token_entropy"
    wanted = ArtifactRequest(target=SinkTarget(keep), contents=(name,), format="generation_artifact_v2")
    with serve(checkpoint, capture={"fields": ["token_entropy"]}, cache={"num_blocks": 24}) as engine:
        made = [engine.generate(prompt(70), greedy(20), artifact=wanted) for _ in range(2)]
    assert made[1].usage.cached_tokens == 64
    model = random_transformers_model(MODEL, 0).eval().double()
    for done in made:
        assert done.artifact is not None and done.artifact.state == "ready"
        rows = open_artifact(stored[int(done.artifact.object_id or 0)]).field(name)
        ids = [*done.prompt_token_ids, *done.token_ids]
        assert (rows.row_start, rows.num_rows) == (1, len(ids) - 1)
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, :-1]
        right = torch.distributions.Categorical(logits=logits).entropy()
        assert right.std() > 1e-3
        np.testing.assert_allclose(rows.values.reshape(-1), right.numpy(), atol=2e-4)


def test_the_slow_platform_says_what_transformers_says(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(EXAMPLES / "infer-slow", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with serve(checkpoint, platform={"name": "slow"}, cache={"num_blocks": 24}) as engine:
        done = engine.generate(prompt(20), greedy(12))
    model = random_transformers_model(MODEL, 0).eval().double()
    ids = [*done.prompt_token_ids, *done.token_ids]
    with torch.inference_mode():
        best = model(torch.tensor([ids])).logits[0, len(done.prompt_token_ids) - 1 : -1].topk(2)
    clear = (best.values[:, 0] - best.values[:, 1]) > NEAR_TIE
    assert clear.sum() > len(done.token_ids) // 2
    found = torch.tensor(done.token_ids)
    assert torch.equal(found[clear], best.indices[clear, 0])


@pytest.mark.parametrize(
    "changes",
    [{"tie_word_embeddings": False}, {"tie_word_embeddings": False, "n_inner": 80, "layer_norm_epsilon": 0.01}, {}],
    ids=["untied", "other sizes", "as published"],
)
def test_gpt2_says_what_transformers_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> None:
    """Prompts in chunks, in one batch, and one that goes on until the table of positions ends."""
    install(EXAMPLES / "infer-gpt2", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = GPT2 | changes
    path, oracle = write_checkpoint(tmp_path / "model", config), Oracle.random(config)
    prompts, limits = [prompt(5), prompt(33), prompt(70)], [24, 24, 26]
    chunked = {"max_num_batched_tokens": 16}
    with serve(path, cache={"num_blocks": 64}, scheduler=chunked) as engine:
        together = engine.generate_many(prompts, greedy(24))
        longest = engine.generate(prompts[-1], greedy(limits[-1]))
        with pytest.raises(ContextLengthError, match="96"):
            engine.generate(prompt(97), greedy(1))
    assert len(longest.prompt_token_ids) + len(longest.token_ids) == config["n_positions"]
    right = [oracle.greedy(ids, 24) for ids in prompts]
    counts = [same_tokens(done.token_ids, answer) for done, answer in zip(together, right, strict=True)]
    counts.append(same_tokens(longest.token_ids, oracle.greedy(prompts[-1], limits[-1])))
    mostly_compared(counts, sum(len(answer.token_ids) for answer in right) + limits[-1])
    assert len(set(longest.token_ids)) > 1


def test_slash_commands_are_read_in_a_fresh_process(tmp_path: Path) -> None:
    code = """
from infer import EngineConfig
from infer.plugins.manager import build_registry

registry = build_registry(EngineConfig().plugins)
parser = registry.create("parser", "slash", [])
events = [*parser.feed('I look.<|slash|>get_time {"zone": ', []), *parser.feed('"UTC"}<|/slash|>', []), *parser.finish()]
print([(event.kind, event.text) for event in events if event.kind in ("text", "tool_start")])
print("".join(event.text for event in events if event.kind == "tool_args"))
"""
    install(EXAMPLES / "infer-slash", tmp_path)
    said = python(code, tmp_path).splitlines()
    assert said == ["[('text', 'I look.'), ('tool_start', 'get_time')]", '{"zone": "UTC"}']
