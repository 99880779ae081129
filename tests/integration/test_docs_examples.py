"""Every example runs, and says what it promises."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import httpx2
import pytest

from integration.documented_code import ROOT, run, told

pytestmark = [
    pytest.mark.model,
    pytest.mark.platform("cpu", "it runs as a reader would run it, on the default platform"),
]
EXAMPLES = ROOT / "examples"


def output_of(example: str, cache: Path, cwd: Path, *options: str, timeout: float = 240) -> list[str]:
    done = run([sys.executable, str(EXAMPLES / example), *options], cache, cwd=cwd, timeout=timeout)
    assert done.returncode == 0, told(done)
    assert "Traceback" not in done.stderr, told(done)
    return done.stdout.splitlines()


def test_embed_in_script(test_cache: Path, tmp_path: Path) -> None:
    lines = output_of("embed_in_script.py", test_cache, tmp_path)
    assert lines[0].startswith("The capital of France is")
    assert "[8 tokens, length]" in lines[0]
    assert len(lines) >= 4


def test_two_engines(test_cache: Path, tmp_path: Path) -> None:
    lines = output_of("two_engines.py", test_cache, tmp_path)
    assert [line.split(":")[0] for line in lines] == ["first", "second"]
    assert lines[0].removeprefix("first") != lines[1].removeprefix("second")


def test_cancellation_and_deadlines(test_cache: Path, tmp_path: Path) -> None:
    lines = output_of("cancellation_and_deadlines.py", test_cache, tmp_path)
    assert lines[0].startswith("deadline: deadline, ")
    assert lines[1] == "abort: abort"
    assert lines[2].startswith("left after ")
    assert lines[3] == "cancelled: True"
    assert lines[4] == "afterwards: length"


SMALL = ("--rollouts", "6", "--replay", "2", "--max-tokens", "8", "--experts", "3", "--sparse-step", "10")
COUNTED = re.compile(r"(\d+) rollouts, (\d+) tokens sampled; (\d+) of (\d+) prompt tokens came with their routes")


@pytest.mark.heavy
@pytest.mark.row("X-REPLAY-TF", "forced routing in transformers' own model gives the recorded log-probabilities")
def test_rollouts_to_s3(test_cache: Path, tmp_path: Path) -> None:
    """A few short ones. What is apart beyond the tolerance, or differs from its receipt, ends the script with another code."""
    lines = output_of("rollouts_to_s3.py", test_cache, tmp_path, *SMALL)
    counted = COUNTED.match(next(line for line in lines if "prompt tokens" in line))
    assert counted is not None and counted[1] == "6" and 6 <= int(counted[2]) <= 48
    assert any(line.startswith("6 objects, ") for line in lines)
    assert [row[:2] for row in table(lines)] == REPLAYS
    exact = table(lines)[0]
    assert float(exact[2]) <= 1e-4 and exact[-1] == "within 0.0001"


@pytest.mark.heavy
@pytest.mark.row("X-REPLAY-TF", "forced routing in transformers' own model gives the recorded log-probabilities")
def test_64_rollouts_to_s3(test_cache: Path, tmp_path: Path) -> None:
    """All of them: where bf16 chooses other experts, forcing the recorded ones is what brings the values together."""
    lines = output_of("rollouts_to_s3.py", test_cache, tmp_path, "--all", timeout=1500)
    counted = COUNTED.match(next(line for line in lines if "prompt tokens" in line))
    assert counted is not None and counted[1] == "64" and int(counted[3]) > 0, "no prefix hit among them"
    exact, _, forced, own = table(lines)
    assert float(exact[2]) <= 1e-4
    assert float(own[4].rstrip("%")) > 0, "no near tie in bf16: this shows nothing"
    assert float(forced[2]) < float(own[2]) and float(forced[3]) < float(own[3])


REPLAYS = [[dtype, experts] for dtype in ("float32", "bfloat16") for experts in ("recorded", "its own")]


def table(lines: list[str]) -> list[list[str]]:
    """Cells of the rows that the script draws."""
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]


@pytest.mark.anyio
async def test_notebook_cell(
    test_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compiled the way IPython does it, inside a loop that already runs."""
    monkeypatch.setenv("INFER_CACHE_DIR", str(test_cache / "engine"))
    source = (EXAMPLES / "notebook_cell.py").read_text("utf-8")
    cell = compile(source, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    names: dict[str, Any] = {"__name__": "cell"}
    await eval(cell, names)
    assert len(names["done"].token_ids) == 8
    assert len(capsys.readouterr().out.splitlines()) >= 9


def load_app() -> ModuleType:
    spec = importlib.util.spec_from_file_location("starlette_stream", EXAMPLES / "starlette_stream.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.anyio
async def test_starlette_stream(test_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole answer through a client, pieces on the wire, a refusal, and a client that leaves in the middle."""
    monkeypatch.setenv("INFER_CACHE_DIR", str(test_cache / "engine"))
    app = load_app().app
    async with app.router.lifespan_context(app) as state:

        async def served(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, "state": dict(state)}, receive, send)

        transport = httpx2.ASGITransport(app=served)
        async with httpx2.AsyncClient(transport=transport, base_url="http://testserver") as client:
            whole = await client.post("/ask", params={"max_tokens": 12}, content="Name three fruits.")
            refused = await client.post("/ask", params={"max_tokens": 0}, content="Name three fruits.")
        assert whole.status_code == 200 and whole.text.strip()
        assert refused.status_code == 400 and "max_tokens" in refused.text

        pieces = [piece async for piece in body_pieces(served, leave_after=None)]
        assert len(pieces) >= 4 and b"".join(pieces).decode() == whole.text
        assert len([piece async for piece in body_pieces(served, leave_after=2)]) < 40
        with anyio.fail_after(60):
            while (statistics := state["engine"].statistics()).running or statistics.kv_usage:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        async with httpx2.AsyncClient(transport=transport, base_url="http://testserver") as client:
            assert (await client.post("/ask", params={"max_tokens": 2}, content="Still here?")).status_code == 200


async def body_pieces(app: Any, leave_after: int | None) -> AsyncIterator[bytes]:
    """Speak ASGI by hand: the client above collects the body. Disconnects after some pieces when asked to."""
    sent: list[bytes] = []
    gone = anyio.Event()
    requests = [{"type": "http.request", "body": b"Name three fruits.", "more_body": False}]

    async def receive() -> dict[str, Any]:
        if requests:
            return requests.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message.get("body"):
            sent.append(message["body"])
        if leave_after is not None and len(sent) >= leave_after:
            gone.set()

    limit = b"max_tokens=12" if leave_after is None else b"max_tokens=400"
    scope = {"type": "http", "method": "POST", "path": "/ask", "query_string": limit, "headers": []}
    with anyio.fail_after(60):
        await app(scope, receive, send)
    for piece in sent:
        yield piece
