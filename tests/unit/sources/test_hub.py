"""The Hub source against a hub on loopback: what is fetched, pinned, resumed, and what each refusal says."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from infer.errors import EngineClosedError, ModelError, UnsupportedModelError
from infer.plugins.model_cache import list_entries
from infer.plugins.model_source import Progress
from infer.sources._hub_client import HubSource

COMMIT = "c0ffee" + "0" * 34
SAFETENSORS = {
    "config.json": b"{}",
    "tokenizer.json": b"{}" * 50,
    "model.safetensors": b"w" * 300_000,
    "chat_template.jinja": b"{{ x }}",
    "pytorch_model.bin": b"pickle",
    "modeling_custom.py": b"raise SystemExit",
    "original/consolidated.safetensors": b"twice the download",
}


class FakeHub:
    """The few endpoints that fetching a repository uses."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.gated: set[str] = set()
        self.requests: list[str] = []
        self.tokens: set[str | None] = set()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *args: Any) -> None:
                return None

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path.partition("?")[0].strip("/")
        token = handler.headers.get("Authorization")
        self.requests.append(path)
        self.tokens.add(token)
        parts = path.removeprefix("api/models/").split("/")
        repo, files = "/".join(parts[:2]), self.repos.get("/".join(parts[:2]))
        if files is None or (repo in self.private and token != "Bearer right"):
            return self.send(handler, 401 if token is None else 404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if repo in self.gated:
            return self.send(handler, 403, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"})
        if parts[2] in ("revision", "tree") and parts[3] not in ("main", "v1", COMMIT):
            return self.send(handler, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if path.startswith("api/") and parts[2] == "tree":
            tree = [{"type": "file", "path": n, "size": len(d), "oid": _oid(d)} for n, d in files.items()]
            return self.send(handler, 200, json.dumps(tree).encode())
        if path.startswith("api/"):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
            facts = {"id": repo, "sha": COMMIT, "siblings": siblings, "private": False, "gated": False, "tags": []}
            return self.send(handler, 200, json.dumps(facts).encode())
        data = files["/".join(parts[4:])]
        return self.send(handler, 200, data, {"ETag": f'"{_oid(data)}"', "X-Repo-Commit": COMMIT})

    def send(
        self, handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str] | None = None
    ) -> None:
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(body)

    def downloads(self) -> list[str]:
        return sorted({path.split("/", 4)[-1] for path in self.requests if "/resolve/" in path})


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    made = FakeHub()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


def ignore(_: Progress) -> None:
    return None


def source(hub: FakeHub, cache: Path, *, offline: bool = False, token: str | None = "right") -> HubSource:
    return HubSource(cache, offline, token, endpoint=hub.url)


def test_weights_configuration_and_tokenizer_only(hub: FakeHub, tmp_path: Path, seen: list[Progress]) -> None:
    hub.repos["org/tiny"] = SAFETENSORS
    found = source(hub, tmp_path).resolve("hf:org/tiny", seen.append)
    wanted = ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(path.name for path in found.path.rglob("*") if path.is_file()) == wanted
    assert (found.path / "model.safetensors").read_bytes() == SAFETENSORS["model.safetensors"]
    assert found.identity == f"hf:org/tiny@{COMMIT}"
    assert hub.downloads() == wanted
    assert (seen[-1].stage, seen[-1].done) == ("download", sum(len(SAFETENSORS[name]) for name in wanted))


def test_once_fetched_the_hub_is_not_asked(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["org/tiny"] = SAFETENSORS
    first = source(hub, tmp_path).resolve("org/tiny@v1", ignore)
    hub.requests.clear()
    for reference in ("org/tiny@v1", f"hf:org/tiny@{COMMIT}"):
        assert source(hub, tmp_path, offline=True).resolve(reference, ignore).path == first.path
    assert hub.requests == []
    assert list_entries(tmp_path)[0].reference == f"hf:org/tiny@{COMMIT}"


def test_the_only_gguf_of_a_repository(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["org/gguf"] = {"README.md": b"x", "sub/model-Q4.gguf": b"GGUF"}
    assert source(hub, tmp_path).resolve("org/gguf", ignore).path.name == "model-Q4.gguf"


@pytest.mark.parametrize(
    ("files", "kind", "said"),
    [
        ({"a.gguf": b"", "b.gguf": b""}, ModelError, r"2 \.gguf files \(a\.gguf, b\.gguf\)"),
        ({"config.json": b"{}", "pytorch_model.bin": b""}, UnsupportedModelError, "pickle"),
        ({"README.md": b""}, ModelError, "holds no model"),
    ],
)
def test_what_cannot_be_chosen(
    hub: FakeHub, tmp_path: Path, files: dict[str, bytes], kind: type[ModelError], said: str
) -> None:
    hub.repos["org/odd"] = files
    with pytest.raises(kind, match=said):
        source(hub, tmp_path).resolve("org/odd", ignore)
    assert hub.downloads() == []


def test_the_token_opens_a_private_repository(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["org/private"] = SAFETENSORS
    hub.private.add("org/private")
    with pytest.raises(ModelError, match=r"hf:org/private does not exist or is private.*HF_TOKEN"):
        source(hub, tmp_path, token="wrong").resolve("hf:org/private", ignore)
    source(hub, tmp_path, token="right").resolve("hf:org/private", ignore)
    assert "Bearer right" in hub.tokens


def test_refusals_say_what_to_do(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["org/gated"] = hub.repos["org/tiny"] = SAFETENSORS
    hub.gated.add("org/gated")
    with pytest.raises(ModelError, match=r"org/gated is gated: accept its terms"):
        source(hub, tmp_path).resolve("org/gated", ignore)
    with pytest.raises(ModelError, match=r"no revision 'v9'"):
        source(hub, tmp_path).resolve("org/tiny@v9", ignore)
    with pytest.raises(ModelError, match=r"offline mode is on.*infer pull org/tiny"):
        source(hub, tmp_path, offline=True).resolve("org/tiny", ignore)
    with pytest.raises(ModelError, match="not of the form"):
        source(hub, tmp_path).resolve("hf:only-a-name", ignore)


def test_no_server_is_a_network_message(tmp_path: Path) -> None:
    absent = HubSource(tmp_path, False, None, endpoint="http://127.0.0.1:9")
    with pytest.raises(ModelError, match="check the network"):
        absent.resolve("org/tiny", ignore)


def test_an_interrupted_download_leaves_no_entry_and_goes_on(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["org/tiny"] = SAFETENSORS

    def close(report: Progress) -> None:
        if report.done:
            raise EngineClosedError("closed while starting")

    with pytest.raises(EngineClosedError):
        source(hub, tmp_path).resolve("org/tiny", close)
    assert list_entries(tmp_path) == []
    hub.requests.clear()
    found = source(hub, tmp_path).resolve("org/tiny", ignore)
    assert (found.path / "model.safetensors").read_bytes() == SAFETENSORS["model.safetensors"]
    assert len(list_entries(tmp_path)) == 1


@pytest.mark.parametrize(
    ("reference", "answers"),
    [
        ("hf:a/b", True),
        ("a/b", True),
        ("a/b@v1.0", True),
        ("hf://a/b", False),
        ("a", False),
        ("a/b/c", False),
        ("./a", False),
    ],
)
def test_matches(reference: str, answers: bool, tmp_path: Path) -> None:
    assert HubSource(tmp_path, False, None).matches(reference) is answers


def test_an_existing_path_is_not_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not HubSource(tmp_path, False, None).matches("org/name")
