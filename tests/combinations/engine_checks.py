"""Whether every value of an engine's features was at work. Each function looks at one feature of what was observed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from combinations.checkpoints import AT_LOAD, KINDS, PLAIN, SECTIONS
from infer.engine.step_log.replay import replay

if TYPE_CHECKING:
    from combinations.running import Observed
    from infer import Engine


def facts(engine: Engine) -> dict[str, Any]:
    """What the engine says of itself, taken while it lives."""
    resolved, model = engine.resolved, engine.model_config
    return {
        "model": model.architecture,
        "format": model.format,
        "section": model.quantization,
        "types": set(model.stored_types.values()),
        "quantization": resolved.quantization,
        "compute": resolved.dtype,
        "platform": resolved.platform,
        "numerics": resolved.numerics,
        "threads": resolved.threads,
        "kv dtype": resolved.cache.dtype,
        "block size": resolved.cache.block_size,
        "windows": [group.window for group in resolved.cache.groups],
        "policy": resolved.scheduler.policy,
        "depth": resolved.scheduler.in_flight_depth,
        "captured": () if resolved.capture is None else tuple(p.name for p in resolved.capture.profiles),
    }


def check(seen: Observed) -> None:
    for name, function in CHECKS.items():
        try:
            function(seen, seen.row[name])
        except AssertionError as error:
            raise AssertionError(f"{name}={seen.row[name]}: {error}") from error


def _model(seen: Observed, value: str) -> None:
    assert seen.facts["model"] == KINDS[value]["architectures"][0]
    assert (None not in seen.facts["windows"] or len(seen.facts["windows"]) > 1) == (value == "window")


def _weights(seen: Observed, value: str) -> None:
    assert seen.facts["quantization"] == (value if value in AT_LOAD else None)
    if value.startswith("gguf-"):
        kind = value.removeprefix("gguf-")
        assert seen.facts["format"] == "gguf" and seen.facts["types"] == (set() if kind == "F16" else {kind})
    elif value in SECTIONS:
        assert seen.facts["section"] == SECTIONS[value]
    else:
        assert value in (*PLAIN, *AT_LOAD) and seen.facts["section"] is None


def _decided(name: str) -> Any:
    def check(seen: Observed, value: str) -> None:
        assert str(seen.facts[name]) == value, seen.facts[name]

    return check


def _kv_dtype(seen: Observed, value: str) -> None:
    assert seen.facts["kv dtype"] == (seen.row["compute"] if value == "auto" else value)


def _numerics(seen: Observed, value: str) -> None:
    best = "invariant" if seen.row["platform"] == "cpu" else "fast"
    assert seen.facts["numerics"] == (best if value == "auto" else value)


def _graphs(seen: Observed, value: str) -> None:
    decodes = sum(set(plan.counts) == {1} for plan in seen.plans)
    # Keys of latent attention are put together by torch, and so are those of another dtype than what is computed in.
    same = seen.facts["kv dtype"] in (seen.row["compute"], "fp8_e4m3")
    possible = seen.row["platform"] == "cpu" and seen.row["model"] != "latent" and same
    if value == "off" or seen.row["platform"] != "cpu":
        assert seen.replays == 0
    elif possible:
        assert decodes < 20 or seen.replays > 0, f"none of {decodes} steps was replayed"


def _prefix_cache(seen: Observed, value: str) -> None:
    size = int(seen.row["block size"])
    prompt_len = len(seen.probes[0].prompt_token_ids)
    whole = prompt_len - 1 if seen.row["kv connector"] != "none" else (prompt_len - 1) // size * size
    assert seen.cached_again in ((prompt_len - 1) // size * size, whole) if value == "on" else not seen.cached_again
    assert len({done.token_ids for done in seen.probes}) == 1


def _pool(seen: Observed, value: str) -> None:
    assert seen.statistics is not None
    if value == "roomy":
        assert seen.statistics.preemptions == 0
    elif None in seen.facts["windows"]:  # what slides out of a window makes room
        assert seen.statistics.preemptions > 0


def _prefill(seen: Observed, value: str) -> None:
    largest = max(plan.num_tokens for plan in seen.plans)
    most = max(max(plan.counts, default=0) for plan in seen.plans)
    if value == "chunks":
        assert 2 <= most <= largest <= 16
    elif value == "threshold":
        assert 8 <= largest <= 64
    else:
        assert most >= len(seen.probes[0].prompt_token_ids) - 1 or seen.cached_outside


def _depth(seen: Observed, value: str) -> None:
    _decided("depth")(seen, value)
    assert seen.most_in_flight == int(value), seen.most_in_flight


def _capture(seen: Observed, value: str) -> None:
    fields = {
        "off": (),
        "routes": ("moe_routes",),
        "hidden": ("hidden_states",),
        "plugin": ("token_entropy",),
        "both": ("hidden_states", "token_entropy"),
        "all": ("moe_routes", "hidden_states", "token_entropy"),
    }
    assert set(seen.facts["captured"]) == set(fields[value])
    assert seen.statistics is not None and seen.statistics.capture_failures == 0
    asked = any(answer.ask.row["rows"] != "none" for answer in seen.answers)
    assert not asked or seen.statistics.captured_rows > 0


def _row_store(seen: Observed, value: str) -> None:
    files = list((seen.tmp / "rows").rglob("*.rows"))
    asked = any(answer.ask.row["rows"] != "none" for answer in seen.answers)
    assert bool(files) == (value == "files" and asked) or (value == "files" and not asked)


def _connector(seen: Observed, value: str) -> None:
    assert seen.statistics is not None
    found = seen.statistics.kv_connector
    if value == "none":
        assert found is None
        return
    assert found is not None and (found.hits > 0 or seen.row["pool"] == "tight"), found
    assert found.load_failures == found.lookup_failures == found.save_failures == 0, found
    # Of a cache that is full to the brim little can be held until it is saved.
    assert seen.row["pool"] == "tight" or seen.cached_outside >= len(seen.probes[0].prompt_token_ids) - int(
        seen.row["block size"]
    ), seen.cached_outside


def _step_log(seen: Observed, value: str) -> None:
    path = seen.tmp / "steps.log"
    assert path.exists() == (value == "written")
    if value == "written":
        report = replay(path)
        assert report.matches and report.steps == len(seen.plans) and report.requests >= len(seen.answers)


def _stat_loggers(seen: Observed, value: str) -> None:
    assert bool(seen.log_lines) == (value == "log"), seen.log_lines


def _tokenizer(seen: Observed, value: str) -> None:
    for answer in seen.answers:
        for choice in answer.done.choices:
            assert value == "loaded" or choice.text == ""
    assert (seen.probes[0].text == "") == (value == "skipped")


def _reasoning(seen: Observed, value: str) -> None:
    for answer in seen.answers:
        if answer.ask.row["prompt"] in ("chat", "tools"):
            for choice in answer.done.choices:
                assert choice.parsed is not None and (value == "qwen3" or not choice.reasoning)


def _forced_tokens(seen: Observed, value: str) -> None:
    assert seen.statistics is not None
    assert value == "skipped" or seen.statistics.draft_tokens == 0


CHECKS: dict[str, Any] = {
    "model": _model,
    "weights": _weights,
    "compute": _decided("compute"),
    "platform": _decided("platform"),
    "numerics": _numerics,
    "graphs": _graphs,
    "threads": _decided("threads"),
    "kv dtype": _kv_dtype,
    "block size": _decided("block size"),
    "prefix cache": _prefix_cache,
    "pool": _pool,
    "prefill": _prefill,
    "policy": _decided("policy"),
    "depth": _depth,
    "capture": _capture,
    "row store": _row_store,
    "kv connector": _connector,
    "step log": _step_log,
    "stat loggers": _stat_loggers,
    "tokenizer": _tokenizer,
    "reasoning": _reasoning,
    "forced tokens": _forced_tokens,
}
