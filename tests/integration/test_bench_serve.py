"""`infer bench` against a real server and in process: its summary follows from the times it wrote, and the three modes
agree on what they counted. The command runs in the test's thread, the server in its own."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from infer import Engine, EngineConfig
from infer.cli.app import main
from infer.cli.session import Session
from infer.testing.fake_engine import fake_engine
from integration.live_server import LiveServer, live_server

pytestmark = pytest.mark.row("SERVE-CLI-BENCH", "bench writes raw per-request times its summary can be recomputed from")
LENGTHS = ["--input-len", "20", "--output-len", "12"]


def letters(config: EngineConfig) -> Engine:
    return fake_engine(lambda ids, sampling: ord("abcdefgh"[len(ids) % 8]), config, latency=0.001)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(letters, api={"served_model_names": ["small"], "api_keys": ["key"]}) as running:
        yield running


def bench(tmp_path: Path, server: LiveServer, *arguments: str) -> dict[str, Any]:
    file = tmp_path / "figures.json"
    command = [
        "bench",
        "serve",
        "--base-url",
        server.url,
        "--api-key",
        "key",
        "--vocab-size",
        "256",
        "--json",
        str(file),
    ]
    assert main([*command, *LENGTHS, *arguments]) == 0
    found: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return found


def nearest_rank(values: list[float], percent: int) -> float:
    return sorted(values)[math.ceil(percent / 100 * len(values)) - 1]


def recomputed(values: list[float]) -> dict[str, float]:
    ranks = {f"p{percent}": nearest_rank(values, percent) for percent in (50, 90, 99)}
    return {"mean": statistics.fmean(values), "min": min(values), "max": max(values), **ranks}


def check_summary(report: dict[str, Any]) -> None:
    """By the definitions in the documentation, from the raw times only."""
    summary, requests = report["summary"], report["requests"]
    seconds = max(r["ended"] for r in requests) - min(r["due"] for r in requests)
    out = sum(r["output_tokens"] for r in requests)
    both = out + sum(r["prompt_tokens"] for r in requests)
    gaps = [b - a for r in requests for a, b in itertools.pairwise(r["arrivals"])]
    per_token = [(r["arrivals"][-1] - r["arrivals"][0]) / (r["output_tokens"] - 1) for r in requests]
    assert summary["seconds"] == pytest.approx(seconds)
    assert summary["output_tokens_per_s"] == pytest.approx(out / seconds)
    assert summary["total_tokens_per_s"] == pytest.approx(both / seconds)
    assert summary["requests_per_s"] == pytest.approx(len(requests) / seconds)
    assert summary["ttft_s"] == pytest.approx(recomputed([r["arrivals"][0] - r["due"] for r in requests]))
    assert summary["itl_s"] == pytest.approx(recomputed(gaps))
    assert summary["tpot_s"] == pytest.approx(recomputed(per_token))
    assert summary["e2e_s"] == pytest.approx(recomputed([r["ended"] - r["due"] for r in requests]))
    for request in requests:
        assert request["due"] <= request["sent"] <= request["arrivals"][0]
        assert request["arrivals"] == sorted(request["arrivals"])
        assert request["arrivals"][-1] <= request["ended"]


def test_concurrency_mode(tmp_path: Path, server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "plot.svg"
    report = bench(tmp_path, server, "--num-prompts", "10", "--concurrency", "3", "--plot", str(plot))
    check_summary(report)
    assert [r["index"] for r in report["requests"]] == list(range(10))
    assert {(r["prompt_tokens"], r["output_tokens"], len(r["arrivals"])) for r in report["requests"]} == {(20, 12, 12)}
    assert report["summary"]["most_at_once"] <= 3
    assert report["left_out"] == []
    assert "key" not in json.dumps(report["workload"]), "the API key is not written down"
    table = capsys.readouterr().out
    assert f"{report['summary']['output_tokens_per_s']:.1f}" in table
    assert f"{report['summary']['ttft_s']['p99'] * 1e3:.1f}" in table
    picture = ElementTree.parse(plot).getroot()
    assert picture.tag.endswith("svg")
    assert len(picture.findall(".//{*}rect")) == 20, "each request waits, then is written"


def test_rate_mode_keeps_to_its_plan(tmp_path: Path, server: LiveServer) -> None:
    arguments = ["--num-prompts", "12", "--request-rate", "40", "--seed", "3"]
    first, second = (bench(tmp_path, server, *arguments) for _ in range(2))
    check_summary(first)
    planned = [r["due"] for r in first["requests"]]
    assert planned == [r["due"] for r in second["requests"]], "the same seed asks at the same times"
    gaps = [b - a for a, b in itertools.pairwise(planned)]
    assert len({round(gap, 9) for gap in gaps}) == len(gaps) and min(gaps) > 0
    assert all(r["sent"] >= r["due"] for r in first["requests"])


def test_chat_with_words(tmp_path: Path, server: LiveServer) -> None:
    report = bench(tmp_path, server, "--num-prompts", "3", "--endpoint", "chat")
    check_summary(report)
    assert all(r["prompt_tokens"] > 20 and r["output_tokens"] == 12 for r in report["requests"])


@pytest.mark.row("SERVE-CLI-BENCH", "latency, throughput and serve modes agree on token counts")
def test_three_modes_agree_on_token_counts(tmp_path: Path, server: LiveServer) -> None:
    counts: dict[str, set[tuple[int, int, int]]] = {}
    for mode in ("latency", "throughput"):
        file = tmp_path / f"{mode}.json"
        session = Session(make_engine=lambda config, report: letters(config))
        arguments = ["bench", mode, *LENGTHS, "--prefill-len", "30", "--repeat", "2", "--json", str(file)]
        assert main([*arguments, *(["--concurrency", "3"] if mode == "throughput" else [])], session) == 0
        report = json.loads(file.read_text("utf-8"))
        requests = [request for run in report["runs"] for request in run["requests"]]
        counts[mode] = {(r["prompt_tokens"], r["output_tokens"], len(r["arrivals"])) for r in requests}
        check_in_process(report)
    served = bench(tmp_path, server, "--num-prompts", "4")
    counts["serve"] = {(r["prompt_tokens"], r["output_tokens"], len(r["arrivals"])) for r in served["requests"]}
    assert counts["latency"] == counts["throughput"] == counts["serve"] == {(20, 12, 12)}


def check_in_process(report: dict[str, Any]) -> None:
    """The figures of latency and throughput, from their raw times."""
    prefill = [p["prompt_tokens"] / p["seconds"] for p in report["prefills"]]
    assert report["prefill_rate"]["median"] == pytest.approx(statistics.median(prefill))
    for concurrency, figures in report["concurrency"].items():
        runs = [run for run in report["runs"] if run["concurrency"] == int(concurrency)]
        assert len(runs) == 2
        first = [r["arrivals"][0] for run in runs for r in run["requests"]]
        gaps = [b - a for run in runs for r in run["requests"] for a, b in itertools.pairwise(r["arrivals"])]
        output = [sum(r["output_tokens"] for r in run["requests"]) / run["wall"] for run in runs]
        assert figures["ttft_s"]["median"] == pytest.approx(statistics.median(first))
        assert figures["itl_s"]["median"] == pytest.approx(statistics.median(gaps))
        assert figures["output_tokens_per_s"]["max"] == pytest.approx(max(output))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--api-key", "wrong"], "HTTP 401"),
        (["--model", "other"], "the model 'other' is not served here"),
        (["--endpoint", "chat", "--prompts", "ids"], "a chat takes no token ids"),
        (["--endpoint", "embeddings"], "--endpoint 'embeddings' is none of completions, chat"),
        (["--extra-body", "[]"], "is no JSON object"),
        (["--extra-body", '{"temperature": -1}'], "temperature"),
        (["--base-url", "http://127.0.0.1:9"], "the connection to 127.0.0.1:9 failed"),
        (["--base-url", "ftp://x"], "is no http:// or https:// address"),
        (["--api-key-file", "/nowhere/key"], "holds no key"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line(
    server: LiveServer, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    command = ["bench", "serve", "--base-url", server.url, "--vocab-size", "256", "--num-prompts", "2", *LENGTHS]
    key = [] if "--api-key-file" in arguments or "--api-key" in arguments else ["--api-key", "key"]
    assert main([*command, *key, *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_failed_requests_are_counted_and_named(
    tmp_path: Path, server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trial asks for two tokens and fits the context of 2048; the requests themselves do not."""
    file = tmp_path / "figures.json"
    command = ["bench", "serve", "--base-url", server.url, "--api-key", "key", "--vocab-size", "256"]
    lengths = ["--input-len", "2040", "--output-len", "60", "--num-prompts", "3", "--json", str(file)]
    assert main([*command, *lengths]) == 1
    shown = capsys.readouterr()
    assert "3 of 3 requests failed; the first: HTTP 400" in shown.err
    assert "0, 3" in shown.out
    assert [bool(r["error"]) for r in json.loads(file.read_text("utf-8"))["requests"]] == [True] * 3


PEER_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


@pytest.mark.parametrize("framing", ["chunked", "until the end"])
def test_a_plain_peer_is_measured_too(tmp_path: Path, framing: str) -> None:
    """A server that refuses our extra fields, counts no usage, and sends the events in odd pieces."""
    asked: list[dict[str, Any]] = []

    async def answer(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            data = b""
            while b"\r\n\r\n" not in data or not data.endswith(b"}"):
                data += await stream.receive()
            body = json.loads(data.partition(b"\r\n\r\n")[2])
            asked.append(body)
            unknown = [name for name in ("return_token_ids", "ignore_eos", "stream_options") if name in body]
            if unknown:
                reply = json.dumps({"error": f"unknown field: {unknown[0]}"}).encode()
                head = b"HTTP/1.1 422 No\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(reply)
                await stream.send(head + reply)
                return
            events = b"".join(b'data: {"choices": [{"text": "%c"}]}\r\n\r\n' % c for c in b"abcd") + b"data: [DONE]\n\n"
            if framing == "chunked":
                await stream.send(PEER_HEAD + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
                for start in range(0, len(events), 7):
                    piece = events[start : start + 7]
                    await stream.send(b"%x\r\n" % len(piece) + piece + b"\r\n")
                await stream.send(b"0\r\n\r\n")
            else:
                await stream.send(PEER_HEAD + b"\r\n" + events)

    async def run() -> int:
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        async with listener, anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, answer)
            command = [
                "bench",
                "serve",
                "--base-url",
                f"http://127.0.0.1:{port}/v1",
                "--model",
                "m",
                "--num-prompts",
                "3",
            ]
            code = await anyio.to_thread.run_sync(main, [*command, *LENGTHS, "--json", str(tmp_path / "figures.json")])
            tasks.cancel_scope.cancel()
        return code

    assert anyio.run(run) == 0
    report = json.loads((tmp_path / "figures.json").read_text("utf-8"))
    check_summary(report)
    assert report["left_out"] == ["return_token_ids", "ignore_eos", "stream_options"]
    assert [(r["prompt_tokens"], r["output_tokens"], len(r["arrivals"])) for r in report["requests"]] == [
        (20, 4, 4)
    ] * 3
    assert set(asked[-1]) == {"model", "prompt", "max_tokens", "temperature", "stream"}
