"""Captured rows returned as keys: another process makes the same bytes of them, whatever happened to the request."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infer import (
    ArtifactCorruptError,
    ArtifactError,
    CapturedBlockMissingError,
    CapturedRows,
    ConfigError,
    InvalidRequestError,
)
from infer.artifacts import rebuild_rows
from infer.config.capture import CaptureProfile
from infer.engine.aux.rows import CACHED
from infer.engine.blocking import BlockingEngine
from infer.testing.tiny_models import random_transformers_model
from integration.engine_support import engine_config, greedy, prompt, serve, write_checkpoint
from integration.test_route_scenarios import MOE, Oracle

BLOCK = 16
READER = """
import base64, json, sys
from infer.artifacts import rebuild_rows
from infer.types import CapturedRows
for line in sys.stdin:
    facts = json.loads(line)
    for name in ("data", "digest", "status"):
        facts[name] = base64.b64decode(facts[name])
    facts["keys"] = tuple(base64.b64decode(key) for key in facts["keys"])
    print(base64.b64encode(rebuild_rows(CapturedRows(**facts), sys.argv[1]).data).decode(), flush=True)
assert "torch" not in sys.modules and "infer.engine" not in sys.modules
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("keys") / "moe", MOE)


@pytest.fixture(scope="module")
def store_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


@pytest.fixture(scope="module")
def engine(checkpoint: Path, store_dir: Path) -> Iterator[BlockingEngine]:
    """24 KV blocks: three of the prompts below do not fit at once. 200 objects."""
    with serve(checkpoint, **keeping(store_dir, max_bytes=200 * BLOCK * 4), cache={"num_blocks": 24}) as running:
        yield running


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Iterator[BlockingEngine]:
    with serve(checkpoint, capture={"routed_experts": True}) as running:
        yield running


def keeping(store_dir: Path, **more: Any) -> dict[str, Any]:
    return {"capture": {"routed_experts": True, "store_dir": str(store_dir), **more}}


def asked(max_tokens: int, captured_as: str = "keys", **more: Any) -> Any:
    return greedy(max_tokens, return_routed_experts=True, captured_as=captured_as, **more)


def keyed(done: Any, choice: int = 0) -> CapturedRows:
    rows = done.choices[choice].routed_experts
    assert rows is not None and rows.error is None
    assert isinstance(rows, CapturedRows)
    return rows


def elsewhere(all_rows: list[CapturedRows], store_dir: Path) -> list[bytes]:
    """What a second process, which has never seen the engine, makes of them."""
    lines = []
    for rows in all_rows:
        facts = dataclasses.asdict(rows)
        for name in ("data", "digest", "status"):
            facts[name] = base64.b64encode(facts[name]).decode()
        facts["keys"] = [base64.b64encode(key).decode() for key in rows.keys]
        lines.append(json.dumps(facts))
    done = subprocess.run(
        [sys.executable, "-c", READER, str(store_dir)],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return [base64.b64decode(line) for line in done.stdout.split()]


@pytest.mark.row(
    "X-AUX-KEYS", "another process rebuilds the bytes of the same request as rows: chunks, hits, start offset, n"
)
def test_another_process_rebuilds_the_rows(engine: BlockingEngine, plain: BlockingEngine, store_dir: Path) -> None:
    """150 tokens are three chunks of at most 64; the second request reuses them."""
    ids = prompt(150)
    cases: list[tuple[list[int], dict[str, Any]]] = [
        (ids, {}),
        (ids, {}),
        (ids[:140] + prompt(7), {"routed_experts_prompt_start": 37}),
        (ids, {"n": 2}),
    ]
    results = [engine.generate(given, asked(30, **more)) for given, more in cases]
    expected = [plain.generate(given, asked(30, "rows", **more)) for given, more in cases]
    assert results[1].usage.cached_tokens == 144
    pairs = [
        (keyed(done, i), keyed(other, i))
        for done, other in zip(results, expected, strict=True)
        for i in range(len(done.choices))
    ]
    assert elsewhere([rows for rows, _ in pairs], store_dir) == [bytes(rows.data) for _, rows in pairs]
    for rows, other in pairs:
        profile = CaptureProfile(
            name=rows.field,
            dtype=rows.dtype,
            row_shape=rows.row_shape,
            layer_ids=rows.layer_ids,
            num_experts=rows.num_experts,
            model_identity=rows.model_identity,
        )
        assert rows.model_identity and all(key[16:48] == profile.digest for key in rows.keys)
        assert (rows.start, rows.count, len(rows.status)) == (other.start, other.count, len(other.status))
        held = (rows.start // BLOCK + len(rows.keys)) * BLOCK if rows.keys else rows.start
        assert held >= rows.start + rows.status.count(CACHED), "what came from the store is in the store"
        assert len(rows.data) == (rows.start + rows.count - held) * profile.row_bytes
        assert not (other.keys or other.digest or other.block_size)
    assert [rows.status.count(CACHED) for rows, _ in pairs] == [0, 144, 128 - 37, 144, 144]
    shared = pairs[0][0].keys
    assert shared == pairs[1][0].keys[: len(shared)]


@pytest.mark.row(
    "X-AUX-KEYS", "rows of a preempted request are rebuilt to the same bytes, and are those of transformers"
)
def test_preemption(engine: BlockingEngine, store_dir: Path) -> None:
    prompts = [prompt(100, seed) for seed in range(3)]
    done = engine.generate_many(prompts, asked(90))
    assert sum(one.timings.num_preemptions for one in done if one.timings) > 0
    oracle = Oracle(random_transformers_model(MOE, 0))
    rebuilt = elsewhere([keyed(one) for one in done], store_dir)
    assert sum(len(keyed(one).keys) for one in done) > 6
    for one, data in zip(done, rebuilt, strict=True):
        rows = keyed(one)
        ids = np.frombuffer(data, rows.dtype).reshape(rows.count, *rows.row_shape)
        oracle.check(ids, [*one.prompt_token_ids, *one.token_ids])


@pytest.mark.row("X-AUX-KEYS", "a key that capture.max_bytes has forced out is a typed error that names it")
def test_an_evicted_object_is_named(checkpoint: Path, tmp_path: Path) -> None:
    """Room for 12 objects of 16 rows of 2 x 2 ids."""
    with serve(checkpoint, **keeping(tmp_path, max_bytes=12 * BLOCK * 4)) as engine:
        engine.generate(prompt(150), asked(4))
        rows = keyed(engine.generate(prompt(150), asked(4)))
        whole = rebuild_rows(rows, tmp_path)
        assert hashlib.sha256(whole.data).digest() == rows.digest and len(rows.keys) >= 8
        for seed in (1, 2):
            keyed(engine.generate(prompt(150, seed), asked(4)))
        assert len(list(tmp_path.glob("*/*.rows"))) <= 12
        with pytest.raises(CapturedBlockMissingError, match="evicted") as caught:
            rebuild_rows(rows, tmp_path)
        assert caught.value.key in rows.keys and caught.value.key.hex() in str(caught.value)


@pytest.mark.row(
    "X-AUX-KEYS", "kill -9 of the engine's process: keys that were given out can be read, also beside the next run"
)
def test_keys_outlive_a_killed_engine(checkpoint: Path, tmp_path: Path) -> None:
    code = (
        "import sys, pickle, base64\n"
        "sys.path.insert(0, 'tests')\n"
        "from pathlib import Path\n"
        "from integration.test_captured_keys import asked, keeping, keyed, prompt, serve\n"
        "with serve(Path(sys.argv[1]), **keeping(Path(sys.argv[2]))) as engine:\n"
        "    rows = [keyed(engine.generate(prompt(100), asked(40, c))) for c in ('rows', 'keys')]\n"
        "    print(base64.b64encode(pickle.dumps((rows[1], bytes(rows[0].data)))).decode(), flush=True)\n"
        "    engine.generate_many([prompt(200, seed) for seed in range(1, 8)], asked(400))\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(checkpoint), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    line = child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    child.wait(30)
    child.stdout.close()
    rows, expected = pickle.loads(base64.b64decode(line))
    assert len(rows.keys) >= 6 and rebuild_rows(rows, tmp_path).data == expected
    size = BLOCK * 4
    assert {path.stat().st_size for path in tmp_path.glob("*/*.rows")} == {size}
    with serve(checkpoint, **keeping(tmp_path)) as engine:
        assert rebuild_rows(rows, tmp_path).data == expected
        again = keyed(engine.generate(prompt(100), asked(40)))
        assert not set(again.keys) & set(rows.keys), "a key says which run it is from"
        assert rebuild_rows(again, tmp_path).data == expected


def test_refusals_name_the_setting(
    plain: BlockingEngine, engine: BlockingEngine, checkpoint: Path, store_dir: Path
) -> None:
    with pytest.raises(InvalidRequestError, match=r"set capture\.store_dir") as caught:
        plain.generate([5, 6], asked(2))
    assert (caught.value.parameter, caught.value.value) == ("captured_as", "keys")
    with pytest.raises(InvalidRequestError, match="needs return_routed_experts=True") as caught:
        engine.generate([5, 6], greedy(2, captured_as="keys"))
    assert caught.value.parameter == "captured_as"
    with pytest.raises(InvalidRequestError, match="captured_as"):
        greedy(2, captured_as="both")
    with pytest.raises(ConfigError, match="give one of them") as refused:
        engine_config(checkpoint, **keeping(store_dir, shared_memory=True))
        serve(checkpoint, **keeping(store_dir, shared_memory=True)).__enter__()
    assert refused.value.fields == ("capture.store_dir", "capture.shared_memory")
    with pytest.raises(ConfigError, match="another engine writes there"):
        serve(checkpoint, **keeping(store_dir)).__enter__()


@pytest.fixture(scope="module")
def rows(engine: BlockingEngine) -> CapturedRows:
    """Of a prompt whose first nine blocks were in the store before."""
    found = [keyed(engine.generate(prompt(150, 9), asked(20, routed_experts_prompt_start=5))) for _ in range(2)]
    assert len(found[1].keys) >= 9
    return found[1]


class TestReader:
    """What is not the request's rows is never returned."""

    def test_rows_without_keys_come_back_as_they_are(self, rows: CapturedRows, store_dir: Path) -> None:
        whole = rebuild_rows(rows, store_dir)
        assert (whole.keys, whole.block_size, whole.digest) == ((), 0, b"")
        assert len(whole.data) == rows.count * 4
        assert rebuild_rows(whole, store_dir) is whole
        with pytest.raises(ArtifactError, match="there are no rows: broken"):
            rebuild_rows(dataclasses.replace(rows, error="broken"), store_dir)

    @pytest.mark.parametrize(
        "change",
        [
            {"count": 1},
            {"data": b""},
            {"start": 6},
            {"start": -16},
            {"block_size": 0},
            {"block_size": 8},
            {"dtype": "uint16"},
            {"dtype": "object"},
            {"row_shape": (4,)},
            {"row_shape": (-2, -2)},
            {"layer_ids": (0, 1)},
            {"num_experts": 9},
            {"model_identity": "another"},
            {"field": "other"},
            {"digest": bytes(32)},
        ],
        ids=str,
    )
    def test_wrong_facts(self, rows: CapturedRows, store_dir: Path, change: dict[str, Any]) -> None:
        with pytest.raises(ArtifactCorruptError):
            rebuild_rows(dataclasses.replace(rows, **change), store_dir)

    @pytest.mark.parametrize("how", ["reversed", "swapped", "repeated", "short", "empty", "path"])
    def test_wrong_keys(self, rows: CapturedRows, store_dir: Path, how: str) -> None:
        keys = list(rows.keys)
        wrong = {
            "reversed": keys[::-1],
            "swapped": [keys[1], keys[0], *keys[2:]],
            "repeated": [*keys[:-1], keys[0]],
            "short": [keys[0][:-1], *keys[1:]],
            "empty": [b"", *keys[1:]],
            "path": [b"../../" + keys[0], *keys[1:]],
        }[how]
        with pytest.raises((ArtifactCorruptError, CapturedBlockMissingError)):
            rebuild_rows(dataclasses.replace(rows, keys=tuple(wrong)), store_dir)

    @pytest.mark.parametrize("damage", ["flipped", "cut", "grown", "gone", "directory"])
    def test_damaged_objects(self, rows: CapturedRows, tmp_path: Path, store_dir: Path, damage: str) -> None:
        digest = rows.keys[0][16:48].hex()
        (tmp_path / digest).mkdir()
        for key in rows.keys:
            name = f"{digest}/{key.hex()}.rows"
            (tmp_path / name).write_bytes((store_dir / name).read_bytes())
        assert rebuild_rows(rows, tmp_path).count == rows.count
        path = tmp_path / digest / f"{rows.keys[3].hex()}.rows"
        data = path.read_bytes()
        path.unlink()
        if damage == "directory":
            path.mkdir()
        elif damage != "gone":
            path.write_bytes(
                {"flipped": bytes([data[0] ^ 1]) + data[1:], "cut": data[:-1], "grown": data + b"\0"}[damage]
            )
        with pytest.raises(ArtifactError) as caught:
            rebuild_rows(rows, tmp_path)
        assert isinstance(caught.value, CapturedBlockMissingError) == (damage == "gone")

    def test_ids_that_no_model_gives(self, tmp_path: Path) -> None:
        """Even if the rows are the request's."""
        facts: dict[str, Any] = {"dtype": "uint8", "row_shape": (2,), "layer_ids": (0,), "num_experts": 8}
        profile = CaptureProfile(name="moe_routes", model_identity="m", **facts)
        key = bytes(16) + profile.digest + bytes(40)
        (tmp_path / profile.digest.hex()).mkdir()
        data = bytes([0, 7, 8, 1])
        (tmp_path / profile.digest.hex() / f"{key.hex()}.rows").write_bytes(data)
        rows = CapturedRows(
            field="moe_routes",
            start=0,
            count=2,
            data=b"",
            model_identity="m",
            keys=(key,),
            block_size=2,
            digest=hashlib.sha256(data).digest(),
            **facts,
        )
        with pytest.raises(ArtifactCorruptError, match="expert 8 is not one of the 8"):
            rebuild_rows(rows, tmp_path)
