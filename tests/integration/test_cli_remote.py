"""`infer chat` and `infer complete` in a real terminal against servers: ours, and a stub with the manners of another vendor."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pexpect
import pytest

from infer import Engine, EngineConfig
from infer.engine.step import SamplingSpec
from infer.testing.fake_engine import EOS, fake_engine

from .live_server import LiveServer, live_server

ROW = "SERVE-CLI-CHAT"
WAIT = 60


def counts(token_ids: Sequence[int], sampling: SamplingSpec) -> int:
    """Says how many questions the conversation has; a text that begins with "long" never ends."""
    prompt = bytes(token for token in token_ids if token < 256)
    if b"long" in prompt:
        return ord("x")
    said = prompt.rpartition(b"<assistant>")[2]
    answer = b"questions: %d." % prompt.count(b"<user>")
    return answer[len(said)] if len(said) < len(answer) else EOS


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    def engine(config: EngineConfig) -> Engine:
        return fake_engine(counts, config, latency=0.005, max_position=100_000)

    settings = {"served_model_names": ("our-model", "other"), "api_keys": ("secret",)}
    with live_server(engine, api=settings, cache={"num_blocks": 8192}) as running:
        yield running


class Vendor(BaseHTTPRequestHandler):
    """CRLF line ends, comments, reasoning, tool calls, a usage chunk with no choices, and no chunked encoding."""

    requests: list[dict[str, Any]] = []  # noqa: RUF012 - one list, as a log is

    def log_message(self, format: str, *args: Any) -> None:
        return None

    def do_GET(self) -> None:
        data = json.dumps({"object": "list", "data": [{"id": "vendor-large-2", "object": "model"}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.requests.append({"path": self.path, **body})
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b": hello\r\n\r\n")
        pieces: list[dict[str, Any]] = [{"content": "Of "}, {"content": "course."}]
        if self.path.endswith("/chat/completions"):
            call = {"index": 0, "function": {"name": "look_up", "arguments": '{"q": 1}'}}
            pieces = [{"role": "assistant", "reasoning_content": "Hmm... \x1b[2J"}, *pieces, {"tool_calls": [call]}]
        for piece in pieces:
            choice = {"index": 0, "delta": piece} if "chat" in self.path else {"index": 0, "text": piece["content"]}
            self._event({"model": "vendor-large-2-0611", "choices": [choice]})
        self._event({"model": "vendor-large-2-0611", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        self._event({"model": "vendor-large-2-0611", "choices": [], "usage": {"completion_tokens": 7}})
        self.wfile.write(b"data: [DONE]\r\n\r\n")
        self.close_connection = True

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\r\n\r\n")
        self.wfile.flush()


@contextlib.contextmanager
def serving_stub(handler: type[Vendor]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def vendor() -> Iterator[str]:
    Vendor.requests.clear()
    with serving_stub(Vendor) as url:
        yield url


@contextlib.contextmanager
def terminal(*arguments: str, **variables: str) -> Iterator[pexpect.spawn]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("INFER_")}
    environment |= {"TERM": "dumb", "INPUTRC": "/dev/null"} | variables
    command = ["-m", "infer", *arguments]
    child = pexpect.spawn(
        sys.executable, command, env=environment, timeout=WAIT, encoding="utf-8", dimensions=(40, 200)
    )
    try:
        yield child
    finally:
        child.close(force=True)


def finished(child: pexpect.spawn) -> int:
    child.expect(pexpect.EOF)
    child.wait()
    return int(child.exitstatus)


@pytest.mark.row(ROW, "a pexpect session has a two-turn chat, interrupts a stream, and sees the right model name")
def test_a_conversation_with_our_server(server: LiveServer, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    with terminal("chat", "--url", server.url, "--api-key-file", str(key)) as child:
        child.expect("our-model at http://")
        child.expect("> ")
        child.sendline("first")
        child.expect("questions: 1\\.")
        child.expect(r"\[\d+ tokens.*our-model\]")
        child.expect("> ")
        child.sendline("second")
        child.expect("questions: 2\\.")
        child.expect("> ")
        child.sendline("a long one")
        child.expect("xxxx")
        assert server.wait_for(lambda now: now.running == 1)
        child.sendintr()
        child.expect(r"\[stopped\]")
        server.wait_for(lambda now: now.running == 0 and now.waiting == 0)
        child.expect("> ")
        child.sendline("/reset")
        child.expect("forgotten")
        child.sendline("again")
        child.expect("questions: 1\\.")
        child.expect("> ")
        child.sendeof()
        assert finished(child) == 0


@pytest.mark.row(ROW, "sees the right model name: the one that was asked for")
def test_a_model_by_name_and_one_that_is_not_there(server: LiveServer) -> None:
    with terminal("chat", "other", "--url", server.url, "--api-key", "secret") as child:
        child.expect("other at http://")
        child.sendline("hi")
        child.expect("questions: 1\\.")
        child.expect(r", other\]")
        child.sendline("/exit")
        assert finished(child) == 0
    with terminal("chat", "missing", "--url", server.url, "--api-key", "secret") as child:
        child.expect("> ")
        child.sendline("hi")
        child.expect("HTTP 404.*'missing' is not served here")
        child.sendline("/exit")
        assert finished(child) == 0
    with terminal("chat", "--url", server.url) as child:
        child.expect("HTTP 401.*key is missing")
        assert finished(child) == 1


@pytest.mark.row(ROW, "also against another vendor's server stub: reasoning and tool calls shown")
def test_another_vendors_server(vendor: str) -> None:
    with terminal("chat", "--url", vendor + "/v1", "--system", "Be brief.", "--temperature", "0.5") as child:
        child.expect("vendor-large-2 at http://")
        child.sendline("can you?")
        child.expect("Hmm\\.\\.\\. \\\\x1b\\[2J\r\nOf course\\.")  # no control character reaches the terminal
        child.expect(r"\[7 tokens.*vendor-large-2-0611\]")
        child.expect(r'\[calls look_up\(\{"q": 1\}\)\]')
        child.expect("> ")
        child.sendline("and?")
        child.expect("Of course\\.")
        child.expect("> ")
        child.sendeof()
        assert finished(child) == 0
    first, second = Vendor.requests
    assert first["path"] == "/v1/chat/completions"
    assert (first["model"], first["temperature"], first["stream"]) == ("vendor-large-2", 0.5, True)
    assert first["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "can you?"}]
    assert [turn["role"] for turn in second["messages"]] == ["system", "user", "assistant", "user"]
    assert second["messages"][2]["content"] == "Of course.", "what was thought is not said again"
    assert "max_tokens" not in first, "only what was typed is sent"


@pytest.mark.row(ROW, "against a server, reasoning is dimmed on a terminal, and plain with NO_COLOR")
@pytest.mark.parametrize("variables", [{"TERM": "xterm"}, {"TERM": "xterm", "NO_COLOR": "1"}], ids=["dim", "NO_COLOR"])
def test_what_is_thought_looks_different_from_the_answer(vendor: str, variables: dict[str, str]) -> None:
    with terminal("chat", "--url", vendor, **variables) as child:
        child.expect("> ")
        child.sendline("can you?")
        child.expect(r"Of course\.")
        styles = re.findall(r"(\x1b\[[0-9;]*m)Hmm\.\.\.", child.before)
        assert styles == ([] if "NO_COLOR" in variables else ["\x1b[2m"])
        child.expect("calls look_up")
        child.sendline("/exit")
        assert finished(child) == 0


@pytest.mark.row(ROW, "`infer complete` works remotely too")
def test_complete_remotely(server: LiveServer, vendor: str) -> None:
    with terminal("complete", "<user>b<assistant>", "--url", server.url, "--api-key", "secret") as child:
        child.expect("questions: 1\\.")
        child.expect("our-model")
        assert finished(child) == 0
    with terminal("complete", "vendor-large-2", "One", "--url", vendor, "--max-tokens", "5") as child:
        child.expect("Of course\\.")
        assert finished(child) == 0
    (asked,) = Vendor.requests
    assert (asked["path"], asked["prompt"], asked["max_tokens"]) == ("/v1/completions", "One", 5)


class Odd(Vendor):
    """Speaks the protocol with values of the wrong kinds, then answers."""

    broken = False

    def do_POST(self) -> None:
        self.send_response(200)
        self.end_headers()
        self._event({"model": 5, "usage": [], "choices": "no"})
        wrong: list[Any] = [7, None, {"delta": "text"}, {"text": 3, "finish_reason": 9}, {"delta": {"content": ["a"]}}]
        calls: list[Any] = [1, {"index": []}, {"index": 0, "function": "f"}, {"function": {"name": 4, "arguments": {}}}]
        for choice in [*wrong, {"delta": {"reasoning": 1, "tool_calls": 2}}, {"delta": {"tool_calls": calls}}]:
            self._event({"choices": [choice]})
        self._event({"choices": [{"delta": {"content": "Yes."}}]})
        if self.broken:
            self.wfile.write(b"data: {broken\n\n")
        self.close_connection = True


@pytest.mark.parametrize("broken", [False, True], ids=["odd", "broken"])
def test_what_a_server_says_wrong_is_left_out_or_an_error(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Odd, "broken", broken)
    with serving_stub(Odd) as url, terminal("chat", "--url", url) as child:
        child.expect("> ")
        child.sendline("well?")
        child.expect("infer: error: .*JSON" if broken else r"Yes\.\r\n\[first after [^,]*, vendor-large-2\]\r\n")
        child.expect("> ")
        child.sendline("/exit")
        assert finished(child) == 0


def test_a_server_that_is_not_there() -> None:
    began = time.monotonic()
    with terminal("complete", "hi", "--url", "http://127.0.0.1:9") as child:
        child.expect("infer: error: the connection to 127.0.0.1:9 failed")
        assert finished(child) == 1
    assert time.monotonic() - began < WAIT
