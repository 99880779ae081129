"""KV blocks outside the engine, with real models: the same bits with and without, across processes, models and outages."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from infer import Completion, ConfigError, Engine, SamplingParams, UnknownPluginError
from infer.connectors.directory import DirectoryStore
from infer.engine.blocking import BlockingEngine
from infer.engine.worker.kv_blocks import TensorKVBlocks
from infer.models import qwen3_moe
from infer.plugins import kv_store

from .documented_code import run, told
from .engine_support import ARCHITECTURES, assert_nothing_held, engine_config, promised, prompt, serve, write_checkpoint

REDIS = Path(__file__).parents[2] / "examples" / "plugins" / "infer-kv-redis"
PARAMS = SamplingParams(max_tokens=6, temperature=0.8, seed=3, ignore_eos=True, logprobs=2)
PROMPTS = [prompt(150, seed=1), [*prompt(150, seed=1)[:100], *prompt(20, seed=2)], prompt(64, seed=3)]
CACHED = [144, 96, 63]
"""Tokens of each that a second engine need not compute: whole blocks, but at least the last token is."""
REAL = """
import json, sys
from infer import Engine, EngineConfig, SamplingParams
config = EngineConfig(platform={"threads": 1}, kv_connector=json.loads(sys.argv[1]))
story = "Once upon a time a fox and a dog lived by the river and looked for a word. " * 20
with Engine.blocking(config) as engine:
    done = engine.generate(story, SamplingParams(max_tokens=12, temperature=0, logprobs=3))
    while engine.engine.statistics().kv_usage: pass
    print(json.dumps([done.usage.cached_tokens, done.usage.prompt_tokens,
        [[one.token_id, one.logprob.hex(), [[i, p.hex()] for i, p in one.top]] for one in done.logprobs]]))
"""


def bits(done: Completion) -> list[tuple[int, float]]:
    """Floats that are equal have the same bits: none of them is 0 or NaN."""
    return [(one.token_id, one.logprob) for one in done.logprobs or ()]


def saved(engine: BlockingEngine) -> None:
    """Wait until everything that was computed is outside."""
    deadline = time.monotonic() + 60
    while engine.engine.statistics().kv_usage:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def files(path: Path) -> dict[str, Any]:
    return {"name": "directory", "options": {"path": str(path)}}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), ARCHITECTURES["llama"])


@pytest.mark.row("KV-EXTERNAL-CACHE", "a second process skips prefill and gives the same bits")
@pytest.mark.model
@pytest.mark.platform("cpu", "it starts programs of their own, which get the default platform")
def test_a_second_process_gives_the_real_model_the_same_bits(tmp_path: Path, test_cache: Path) -> None:
    answers = []
    for connector in ({}, files(tmp_path / "kv"), files(tmp_path / "kv")):
        done = run([sys.executable, "-c", REAL, json.dumps(connector)], test_cache, cwd=tmp_path)
        assert done.returncode == 0, told(done)
        answers.append(json.loads(done.stdout))
    assert [cached for cached, _, _ in answers][:2] == [0, 0]
    cached, length, _ = answers[2]
    assert cached == (length - 1) // 16 * 16 and length > 300
    assert answers[0][2] == answers[1][2] == answers[2][2]


@pytest.mark.row("KV-EXTERNAL-CACHE", "multi-group models: blocks of a sliding window too")
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3"])
def test_loaded_blocks_change_no_bit(name: str, dtype: str, tmp_path: Path) -> None:
    """One group and, with gemma3, a second one whose window slides; 16 and 8 bits; recorded decode steps; depth 2."""
    model = write_checkpoint(tmp_path / "model", ARCHITECTURES[name])
    cache = {"dtype": dtype}
    with serve(model, cache=cache) as engine:
        expected = [promised(engine, bits(done)) for done in engine.generate_many(PROMPTS, PARAMS)]
    with serve(model, cache=cache, kv_connector=files(tmp_path / "kv")) as engine:
        assert [bits(engine.generate(p, PARAMS)) for p in PROMPTS] == expected
        saved(engine)
    with serve(model, cache=cache, kv_connector=files(tmp_path / "kv")) as engine:
        done = engine.generate_many([PROMPTS[0], PROMPTS[2]], PARAMS)
        done.insert(1, engine.generate(PROMPTS[1], PARAMS))
        assert [bits(one) for one in done] == expected
        seen = engine.engine.statistics().kv_connector
        assert seen is not None and seen.hits >= 2 and seen.load_failures == seen.lookup_failures == 0
        assert [done[0].usage.cached_tokens, done[2].usage.cached_tokens] == [CACHED[0], CACHED[2]]
        assert_nothing_left(engine)


def test_a_wrong_block_would_be_seen(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the test above."""
    with serve(llama, kv_connector=files(tmp_path / "kv")) as engine:
        expected = bits(engine.generate(PROMPTS[0], PARAMS))
        saved(engine)
    write = TensorKVBlocks.write
    monkeypatch.setattr(
        TensorKVBlocks, "write", lambda self, group, block, data: write(self, group, block, bytes(len(data)))
    )
    with serve(llama, kv_connector=files(tmp_path / "kv")) as engine:
        got = bits(engine.generate(PROMPTS[0], PARAMS))
    assert len(got) == len(expected) == PARAMS.max_tokens and got != expected


@pytest.mark.row("KV-EXTERNAL-CACHE", "a key for other weights is refused: it is another key")
def test_other_weights_dtypes_and_block_sizes_share_nothing(llama: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", ARCHITECTURES["llama"], seed=1)
    sections: list[tuple[Path, dict[str, Any]]] = [
        (llama, {}),
        (other, {}),
        (llama, {"cache": {"dtype": "fp8_e4m3"}}),
        (llama, {"cache": {"block_size": 8}}),
        (llama, {"platform": {"name": "reference"}}),
    ]
    native: dict[str, Any] = {"platform": {"name": "cpu"}}
    for model, settings in sections:
        with serve(model, **(native | settings), kv_connector=files(tmp_path / "kv")) as engine:
            assert engine.generate(PROMPTS[0], PARAMS).usage.cached_tokens == 0
            saved(engine)
    with serve(llama, **native, kv_connector=files(tmp_path / "kv")) as engine:
        assert engine.generate(PROMPTS[0], PARAMS).usage.cached_tokens == CACHED[0]


def test_damaged_files_are_computed_again(llama: Path, tmp_path: Path) -> None:
    with serve(llama, kv_connector=files(tmp_path / "kv")) as engine:
        expected = bits(engine.generate(PROMPTS[0], PARAMS))
        saved(engine)
    values = sorted((tmp_path / "kv").rglob("*.kv"))
    assert len(values) == 9
    for path in values:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    with serve(llama, kv_connector=files(tmp_path / "kv")) as engine:
        done = engine.generate(PROMPTS[0], PARAMS)
        assert bits(done) == expected and done.usage.cached_tokens == 0
        seen = engine.engine.statistics().kv_connector
        assert seen is not None and (seen.hits, seen.load_failures, seen.loaded_blocks) == (1, 1, 0)


def test_routes_of_loaded_blocks_are_complete(tmp_path: Path) -> None:
    """RE-03: an engine that has the blocks of another but not their rows computes them."""
    model = write_checkpoint(
        tmp_path / "model", qwen3_moe.EXAMPLE | {"vocab_size": 320, "max_position_embeddings": 640}
    )
    asked = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, return_routed_experts=True)
    plain = asked.model_copy(update={"return_routed_experts": False})
    settings: dict[str, Any] = {"capture": {"routed_experts": True}, "kv_connector": files(tmp_path / "kv")}
    with serve(model, **settings) as engine:
        expected = engine.generate(PROMPTS[0], asked)
        saved(engine)
    with serve(model, **settings) as engine:
        assert engine.generate(PROMPTS[0], plain).usage.cached_tokens == CACHED[0]
    with serve(model, **settings) as engine:
        done = engine.generate(PROMPTS[0], asked)
        assert done.usage.cached_tokens == 0
        rows, right = (one.choices[0].captured["moe_routes"] for one in (done, expected))
        assert rows.error is None and rows.count == right.count == len(PROMPTS[0]) + 3
        assert bytes(rows.data) == bytes(right.data)


@pytest.mark.parametrize("moment", [0.0, 0.01, 0.05, 0.2])
def test_leaving_while_blocks_are_on_their_way_frees_everything(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: float
) -> None:
    with serve(llama, kv_connector=files(tmp_path / "kv")) as engine:
        expected = bits(engine.generate(PROMPTS[0], PARAMS))
        saved(engine)
    get = DirectoryStore.get

    def slow(self: DirectoryStore, keys: Sequence[str]) -> list[bytes | None]:
        time.sleep(0.1)
        return get(self, keys)

    monkeypatch.setattr(DirectoryStore, "get", slow)

    async def leave() -> None:
        async with Engine(engine_config(llama, kv_connector=files(tmp_path / "kv"))) as engine:
            with anyio.move_on_after(moment):
                await engine.generate(PROMPTS[0], PARAMS)
            other = await engine.generate(PROMPTS[2], PARAMS)  # the engine goes on beside what is left of the first
            assert len(other.token_ids) == PARAMS.max_tokens
            with anyio.move_on_after(moment):
                await engine.generate([*PROMPTS[0], 7], PARAMS)

    before = set(threading.enumerate())
    anyio.run(leave)
    left = set(threading.enumerate()) - before
    assert [thread.name for thread in left if thread.name.startswith("infer-")] == []
    monkeypatch.undo()
    with serve(llama, kv_connector=files(tmp_path / "kv")) as engine:
        assert bits(engine.generate(PROMPTS[0], PARAMS)) == expected


@pytest.mark.parametrize(
    ("connector", "error", "words"),
    [
        ({"name": "directroy"}, UnknownPluginError, "did you mean 'directory'"),
        ({"name": "directory"}, ConfigError, "needs path, an absolute directory, not None"),
        (
            {"name": "directory", "options": {"path": "/proc/nowhere"}},
            ConfigError,
            "name a directory that can be written",
        ),
        ({"name": "directory", "options": {"path": "/tmp", "size": 1}}, ConfigError, "has no option 'size'"),
        ({"name": "directory", "options": {"path": "/tmp", "max_bytes": "much"}}, ConfigError, "max_bytes='much'"),
    ],
    ids=["name", "no-path", "path", "option", "size"],
)
def test_a_named_connector_that_cannot_be_had_stops_the_start(
    llama: Path, connector: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words), serve(llama, kv_connector=connector):
        pass


def test_settings_that_contradict_a_connector_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_connector\.name='directory' needs cache\.prefix_caching=True"):
        serve("x", kv_connector=files(tmp_path), cache={"prefix_caching": False})
    with pytest.raises(ConfigError, match=r"kv_connector\.name='directory' and step_log\.path"):
        serve("x", kv_connector=files(tmp_path), step_log={"path": str(tmp_path / "log")})


# -- Redis ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def redis_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A real server, and the example plugin installed."""
    from plugin_package.installing import install

    install(REDIS, tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    from redis_server import RedisServer

    server = RedisServer(tmp_path / "redis")
    yield server
    server.close()


@pytest.mark.row("KV-EXTERNAL-CACHE", "over TCP, a stopped store only turns hits into misses")
def test_redis_away_is_one_warning_and_its_return_brings_the_hits_back(
    llama: Path, redis_server: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_store, "PAUSE", 0.2)
    caplog.set_level(logging.INFO, "infer.engine")
    connector = {"name": "redis", "options": {"url": redis_server.url}}
    later = prompt(80, seed=9)
    with serve(llama, kv_connector=connector) as engine:
        expected = [promised(engine, bits(engine.generate(p, PARAMS))) for p in (*PROMPTS, later)]
        saved(engine)
    with serve(llama, kv_connector=connector) as engine:
        with redis_server.outage():
            assert [bits(engine.generate(p, PARAMS)) for p in PROMPTS] == expected[:3]
            saved(engine)
        complaints = [record.message for record in caplog.records if "KV store failed" in record.message]
        assert len(complaints) == 1 and "failed in a lookup (ConnectionError" in complaints[0]
        time.sleep(0.3)  # what failed is left alone for PAUSE
        done = engine.generate(later, PARAMS)
        assert bits(done) == expected[3] and done.usage.cached_tokens == 79
        assert_nothing_left(engine)
    with serve(llama, kv_connector=connector) as engine:
        done = engine.generate(PROMPTS[0], PARAMS)
        assert bits(done) == expected[0] and done.usage.cached_tokens == CACHED[0]


@pytest.mark.row("KV-EXTERNAL-CACHE", "a TCP store lets a second process skip prefill with identical tokens")
def test_a_second_process_takes_from_redis_what_a_first_one_computed(
    llama: Path, redis_server: Any, tmp_path: Path, test_cache: Path
) -> None:
    code = """
import json, sys, time
from infer import Engine, EngineConfig, SamplingParams
config, prompt = json.loads(sys.argv[1]), json.loads(sys.argv[2])
with Engine.blocking(EngineConfig(**config)) as engine:
    done = engine.generate(prompt, SamplingParams(max_tokens=6, temperature=0, logprobs=0))
    while engine.engine.statistics().kv_usage: time.sleep(0.01)
    print(json.dumps([done.usage.cached_tokens, [[one.token_id, one.logprob.hex()] for one in done.logprobs]]))
"""
    connector = {"name": "redis", "options": {"url": redis_server.url}}
    config = engine_config(llama, platform={"name": "reference"}, kv_connector=connector).model_dump(
        mode="json", exclude_unset=True
    )
    answers = []
    for _ in range(2):
        command = [sys.executable, "-c", code, json.dumps(config), json.dumps(PROMPTS[0])]
        done = run(command, test_cache, cwd=tmp_path / "site")
        assert done.returncode == 0, told(done)
        answers.append(json.loads(done.stdout))
    assert [cached for cached, _ in answers] == [0, CACHED[0]]
    assert answers[0][1] == answers[1][1]


@pytest.mark.row("KV-EXTERNAL-CACHE", "LMCache's own server: refused by name until there is a connector for it")
@pytest.mark.waits("KV-EXTERNAL-CACHE")
def test_lmcache_is_refused_by_name(llama: Path) -> None:
    lmcache = {"name": "lmcache", "options": {"url": "lm://127.0.0.1:65432"}}
    with pytest.raises(UnknownPluginError, match="'lmcache'"), serve(llama, kv_connector=lmcache):
        pass


def assert_nothing_left(engine: BlockingEngine) -> None:
    saved(engine)
    assert_nothing_held(engine)


def test_the_redis_plugin_passes_its_own_tests(test_cache: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(REDIS), "."]
    done = run(command, test_cache, cwd=REDIS)
    assert done.returncode == 0, told(done)
    assert "passed" in done.stdout and "skipped" not in done.stdout
