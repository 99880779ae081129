"""`infer batch`: a row for every line, the same as the server's answers, bad lines told apart, and going on after a stop."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from api_server import in_process
from infer.cli.app import main
from infer.cli.session import Session
from infer.config.env import read_environment
from infer.engine.step import SamplingSpec
from infer.testing.fake_engine import fake_engine
from infer.testing.fake_executor import FakeWorker, PlanViolation
from served import letters

ROW = "SERVE-BATCH-API"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def chat_line(custom_id: str, text: str, **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "seed": 5, **more}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def text_line(custom_id: str, text: str, **more: Any) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": TEXT,
        "body": {"prompt": text, "max_tokens": 6, "seed": 9, **more},
    }


def written(path: Path, lines: Sequence[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines), "utf-8")
    return path


def rows(path: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert len({row["id"] for row in found}) == len(found)
    return {row["id"]: row for row in found}


class Command:
    """Runs `infer batch` over a scripted model and counts the engines it made."""

    def __init__(self, on_worker: Callable[[FakeWorker], None] = lambda worker: None) -> None:
        self.engines = 0
        self.on_worker = on_worker

    def __call__(self, *arguments: str | Path) -> int:
        def make(config: Any, report: Any) -> Any:
            self.engines += 1
            return fake_engine(letters, config, on_worker=self.on_worker)

        session = Session(make_engine=make, stated_environment=read_environment({}))
        return main(["batch", *map(str, arguments), "--served-model-name", "m", "--cache.num-blocks", "500"], session)


def comparable(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in ("id", "created")}


@pytest.mark.anyio
@pytest.mark.row(
    ROW, "every input line gives one output line with the same custom_id, and results equal the online endpoint"
)
async def test_answers_are_those_of_the_server(tmp_path: Path) -> None:
    lines = [chat_line(f"c{i}", f"question {i}", n=1 + i % 3, logprobs=True) for i in range(12)]
    lines += [text_line(f"t{i}", f"text {i}", logprobs=2, echo=bool(i % 2)) for i in range(12)]
    source, target = written(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert await anyio.to_thread.run_sync(Command(), source, target) == 0
    found = rows(target)
    assert set(found) == {f"batch_req_{i + 1}" for i in range(24)}
    async with in_process(letters, settings={"served_model_names": ("m",)}) as (client, _):
        for number, line in enumerate(lines, start=1):
            row = found[f"batch_req_{number}"]
            assert (row["custom_id"], row["error"]) == (line["custom_id"], None)
            online = await client.post(line["url"], json=line["body"])
            assert row["response"]["status_code"] == online.status_code == 200
            assert comparable(row["response"]["body"]) == comparable(online.json())
            assert row["response"]["request_id"] in row["response"]["body"]["id"]


BAD: list[tuple[Any, str | None, str]] = [
    ("{not json", None, "invalid_json_line"),
    ("[1, 2]", None, "invalid_json_line"),
    ("[" * 100_000, None, "invalid_json_line"),
    ({"method": "POST", "url": CHAT, "body": {}}, None, "invalid_custom_id"),
    ({**chat_line("x", "a"), "custom_id": 7}, None, "invalid_custom_id"),
    ({**chat_line("get", "a"), "method": "GET"}, "get", "invalid_method"),
    ({**chat_line("url", "a"), "url": "/v1/embeddings"}, "url", "invalid_url"),
    ({**chat_line("admin", "a"), "url": "/reset_prefix_cache"}, "admin", "invalid_url"),
    ({**chat_line("body", "a"), "body": "text"}, "body", "invalid_body"),
    (chat_line("stream", "a", stream=True), "stream", "invalid_body"),
    ({**chat_line("more", "a"), "priority": 1}, "more", "unknown_field"),
    (chat_line("good", "again"), "good", "duplicate_custom_id"),
]


@pytest.mark.row(ROW, "a bad line becomes an error row")
def test_a_bad_line_is_an_error_row_and_nobody_elses_business(tmp_path: Path) -> None:
    lines = [chat_line("good", "hi"), *(line for line, _, _ in BAD), "", chat_line("last", "hi")]
    target = tmp_path / "out.jsonl"
    assert Command()(written(tmp_path / "in.jsonl", lines), target) == 0
    found = rows(target)
    assert len(found) == len(BAD) + 2, "a blank line is no request"
    for number, (_, custom_id, code) in enumerate(BAD, start=2):
        row = found[f"batch_req_{number}"]
        assert (row["custom_id"], row["error"]["code"], row["response"]) == (custom_id, code, None)
        assert row["error"]["message"]
    for number in (1, len(lines)):
        assert found[f"batch_req_{number}"]["error"] is None


@pytest.mark.row(ROW, "a bad line becomes an error row: what the route refuses, with the route's own words")
def test_what_the_route_refuses_is_told_as_the_route_tells_it(tmp_path: Path) -> None:
    lines = [
        chat_line("range", "a", temperature=-1),
        chat_line("model", "a", model="other"),
        chat_line("long", "a", max_tokens=10**6),
        text_line("unknown", "a", no_such=1),
    ]
    target = tmp_path / "out.jsonl"
    assert Command()(written(tmp_path / "in.jsonl", lines), target) == 0
    found = list(rows(target).values())
    status = {row["custom_id"]: row["response"]["status_code"] for row in found}
    assert status == {"range": 400, "model": 404, "long": 400, "unknown": 400}
    for row in found:
        said = row["response"]["body"]["error"]
        assert row["error"]["message"] == said["message"] and row["error"]["code"] in (said["code"], said["type"])


@pytest.mark.row(ROW, "resumable: an interrupted run goes on, and no line is answered twice")
@pytest.mark.parametrize("keep", [0, 1, 7, 19, 20])
@pytest.mark.parametrize("torn", [b"", b'{"id": "batch_req_3", "cus', b"{"])
def test_it_goes_on_where_it_was(tmp_path: Path, keep: int, torn: bytes) -> None:
    lines = [text_line(f"t{i}", f"text {i}") for i in range(19)] + ["{broken"]
    source, whole, target = written(tmp_path / "in.jsonl", lines), tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert Command()(source, whole) == 0
    begun = whole.read_bytes().splitlines(keepends=True)[:keep]
    target.write_bytes(b"".join(begun) + torn)
    command = Command()
    assert command(source, target) == 0
    assert command.engines == (1 if keep < 20 else 0), "nothing is loaded when nothing is left"
    first, second = rows(whole), rows(target)
    assert target.read_bytes().startswith(b"".join(begun))
    assert set(first) == set(second)
    for name, row in first.items():
        assert row["custom_id"] == second[name]["custom_id"]
        if row["response"] is not None:
            assert comparable(row["response"]["body"]) == comparable(second[name]["response"]["body"])


def test_a_duplicate_of_an_answered_line_is_still_one(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    written(source, [text_line("a", "x")])
    assert Command()(source, target) == 0
    written(source, [text_line("a", "x"), text_line("a", "y")])
    assert Command()(source, target) == 0
    assert rows(target)["batch_req_2"]["error"]["code"] == "duplicate_custom_id"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"id": "batch_req_1", "custom_id": "other", "response": null, "error": null}\n', "of another input"),
        ('{"id": "batch_req_9", "custom_id": "t0", "response": null, "error": null}\n', "does not have"),
        ('{"id": "chatcmpl-1"}\n', "did not write"),
        ("hello\n", "did not write"),
    ],
)
def test_an_output_of_something_else_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, words: str
) -> None:
    source, target = written(tmp_path / "in.jsonl", [text_line("t0", "x")]), tmp_path / "out.jsonl"
    target.write_text(content)
    command = Command()
    assert command(source, target) == 1
    assert words in " ".join(capsys.readouterr().err.split())
    assert target.read_text() == content and command.engines == 0


def test_files_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = written(tmp_path / "in.jsonl", [text_line("t0", "x")])
    assert Command()(tmp_path / "none.jsonl", tmp_path / "out") == 1
    assert "is no file" in capsys.readouterr().err
    assert Command()(source, source) == 1
    assert "is the input itself" in " ".join(capsys.readouterr().err.split())
    assert source.read_text() == json.dumps(text_line("t0", "x")) + "\n"


def test_a_dead_engine_is_no_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines that could not be answered are left for the next run."""

    def planted(token_ids: Sequence[int], sampling: SamplingSpec) -> int:
        raise PlanViolation("planted")

    def dies(worker: FakeWorker) -> None:
        worker.next_token = planted

    source, target = written(tmp_path / "in.jsonl", [text_line(f"t{i}", "x") for i in range(5)]), tmp_path / "out.jsonl"
    assert Command(dies)(source, target) == 1
    assert "could not be answered" in " ".join(capsys.readouterr().err.split())
    assert target.read_text() == ""
    assert Command()(source, target) == 0
    assert len(rows(target)) == 5
