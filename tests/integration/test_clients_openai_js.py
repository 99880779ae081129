"""The openai JavaScript client runs a fixed script against a real server: both endpoints, streams, errors, unicode, stop.
Node runs in a process of its own; the client is fetched by npm once and kept in the test cache."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from infer import Engine, EngineConfig
from infer.testing.fake_engine import fake_engine, scripted
from integration.live_server import live_server

HERE = Path(__file__).parent / "js"
KEY = "a-key-of-the-test"
ANSWER = "Käse 🧀 ist gut: ein Stück, zwei Stücke."

pytestmark = pytest.mark.row("SERVE-OAI-BASIC", "the openai JS client's fixed script, no client-side exception")


@pytest.fixture(scope="session")
def client_directory(test_cache: Path) -> Path:
    """The script beside an installed client. Node and npm come with the Debian package nodejs (see .ci/packages)."""
    directory = test_cache / "openai-js"
    with FileLock(test_cache / "openai-js.lock"):
        directory.mkdir(exist_ok=True)
        wanted = (HERE / "package.json").read_text("utf-8")
        stamp = directory / "installed.json"
        if not stamp.is_file() or stamp.read_text("utf-8") != wanted:
            (directory / "package.json").write_text(wanted, "utf-8")
            options = ["--no-audit", "--no-fund", "--ignore-scripts", "--no-package-lock"]
            done = subprocess.run(
                ["npm", "install", *options], cwd=directory, capture_output=True, text=True, check=False, timeout=240
            )
            assert done.returncode == 0, f"npm cannot install the openai client: {done.stderr}"
            stamp.write_text(wanted, "utf-8")
        shutil.copy(HERE / "openai_client.mjs", directory)
    return directory


def answering(config: EngineConfig) -> Engine:
    return fake_engine(scripted(ANSWER), config, latency=0.002)


def seen_by_client(directory: Path, model: str | None) -> dict[str, Any]:
    """What the script saw; fails if it met any exception of its own, or left a request behind."""
    api = {"api_keys": [KEY], "served_model_names": ["small"]}
    make = answering if model is None else Engine
    with live_server(make, api=api, **({} if model is None else {"model": model})) as server:
        done = subprocess.run(
            ["node", "openai_client.mjs", server.url + "/v1", KEY, "small"],
            cwd=directory,
            capture_output=True,
            text=True,
            encoding="utf-8",
            check=False,
            timeout=150,
        )
        server.wait_for(lambda now: now.running == 0 and now.waiting == 0)
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


@pytest.fixture(scope="module")
def seen(client_directory: Path) -> Iterator[dict[str, Any]]:
    yield seen_by_client(client_directory, None)


def joined(chunks: list[dict[str, Any]]) -> str:
    return "".join(
        choice.get("text") or choice.get("delta", {}).get("content") or "" for c in chunks for choice in c["choices"]
    )


def reasons(chunks: list[dict[str, Any]]) -> list[str]:
    found = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert found[-1], "the finish reason is on the last chunk"
    return [reason for reason in found if reason]


def check_streams_equal_replies(seen: dict[str, Any]) -> None:
    for name in ("chat", "chat_stop"):
        choice, chunks = seen[name]["choices"][0], seen[name + "_stream"]
        assert joined(chunks) == choice["message"]["content"]
        assert reasons(chunks) == [choice["finish_reason"]]
    first = seen["chat_stream"][0]["choices"][0]["delta"]
    assert first["role"] == "assistant"
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert seen["chat_stream"][-1]["usage"][count] == seen["chat"]["usage"][count]
    choice, chunks = seen["completion"]["choices"][0], seen["completion_stream"]
    assert joined(chunks) == choice["text"]
    assert reasons(chunks) == [choice["finish_reason"]]
    assert seen["helper"]["final"] == seen["helper"]["joined"] == seen["chat"]["choices"][0]["message"]["content"]


def test_models_are_listed(seen: dict[str, Any]) -> None:
    assert [model["id"] for model in seen["models"]] == ["small"]
    assert seen["model"] == seen["models"][0]
    assert seen["model"]["object"] == "model"


@pytest.mark.row("SERVE-OAI-BASIC", "joined stream text equals the non-streamed text (JS client)")
def test_streams_equal_whole_replies(seen: dict[str, Any]) -> None:
    check_streams_equal_replies(seen)
    assert seen["completion"]["choices"][0]["text"] == "Käse 🧀 ist gut: ein Stück, zwei St\ufffd", (
        "40 bytes: half an ü"
    )
    assert "🧀" in seen["chat"]["choices"][0]["message"]["content"], "unicode arrives whole"


def test_stop_choices_and_token_prompts(seen: dict[str, Any]) -> None:
    stopped = seen["chat_stop"]["choices"][0]
    assert stopped["message"]["content"] == ANSWER.split("e")[0]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", "e")
    several = seen["completion_several"]["choices"]
    assert [choice["index"] for choice in several] == [0, 1, 2, 3]
    assert seen["completion_ids"]["usage"]["prompt_tokens"] == 3
    entries = seen["chat_logprobs"]["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in entries] == [-1.0] * 3
    assert seen["abandoned"] == 3


@pytest.mark.parametrize(
    ("name", "kind", "status", "param"),
    [
        ("embedding", "NotFoundError", 404, None),
        ("structured", "BadRequestError", 400, "response_format"),
        ("tools", "BadRequestError", 400, "tools"),
        ("wrong_model", "NotFoundError", 404, "model"),
        ("wrong_value", "BadRequestError", 400, "temperature"),
        ("unknown_field", "BadRequestError", 400, "temperatur"),
        ("wrong_stream", "BadRequestError", 400, "temperature"),
        ("wrong_key", "AuthenticationError", 401, None),
    ],
)
def test_refusals_are_the_client_s_own_errors(
    seen: dict[str, Any], name: str, kind: str, status: int, param: str | None
) -> None:
    error = seen[name]
    assert error["refused"], f"{name} was not refused"
    assert (error["kind"], error["status"], error.get("param")) == (kind, status, param)
    assert error["message"]


@pytest.mark.model
def test_the_script_runs_with_a_real_model(client_directory: Path, smollm2_gguf: Path) -> None:
    seen = seen_by_client(client_directory, str(smollm2_gguf))
    check_streams_equal_replies(seen)
    assert seen["chat"]["usage"]["completion_tokens"] <= 40
    assert seen["chat"]["choices"][0]["message"]["content"]
