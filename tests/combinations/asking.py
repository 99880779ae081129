"""From a row of values to what an engine and a request are given. Pure, but for the directory of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from combinations.checkpoints import Shelf
from combinations.declared import Feature, Row
from combinations.engine_features import ENGINE, TMP
from combinations.request_features import MAX_TOKENS, REQUEST
from infer import Engine, EngineConfig, SamplingParams
from infer.artifacts import ArtifactRequest, SinkTarget
from integration.engine_support import CORPUS, prompt

SEED = 3
ROOMY, TIGHT = 4096, 144
"""Tokens of the KV cache."""
FILLERS, FILLER_PROMPT, FILLER_TOKENS = 3, 36, 32
"""Requests that a tight pool cannot hold together to their ends."""


def merged(features: tuple[Feature, ...], row: Row) -> dict[str, Any]:
    """What all the row's values ask for; sections and params are joined key by key."""
    found: dict[str, Any] = {}
    for feature in features:
        for key, value in feature.value(row[feature.name]).asks.items():
            joined = isinstance(value, dict) and key in found
            found[key] = {**found[key], **value} if joined else value
    return found


def engine_config(row: Row, shelf: Shelf, tmp: Path) -> EngineConfig:
    """Raises `ConfigError` for what contradicts itself."""
    sections: dict[str, Any] = json.loads(json.dumps(merged(ENGINE, row)).replace(TMP, str(tmp)))
    tokens = TIGHT if row["pool"] == "tight" else ROOMY
    sections["model"] = {**sections["model"], "ref": str(shelf.path(row["model"], row["weights"]))}
    sections["cache"]["num_blocks"] = tokens // int(row["block size"])
    sections["scheduler"]["max_num_seqs"] = 8
    return EngineConfig(**sections)


def plain_row(row: Row) -> dict[str, str]:
    """The engine whose answers those of `row` must equal: the same numbers in the plainest way of computing them. Everything
    can be captured."""
    kept = ("model", "weights", "compute", "platform", "kv dtype", "reasoning")
    routed = row["model"] in ("moe", "latent")
    plain = {feature.name: feature.values[0].name for feature in ENGINE} | {"graphs": "off", "depth": "1"}
    return plain | {name: row[name] for name in kept} | {"capture": "all" if routed else "both"}


@dataclass
class Shelved:
    """A sink that keeps what it gets."""

    objects: list[bytes] = field(default_factory=list)

    async def __call__(self, data: bytes) -> str:
        self.objects.append(bytes(data))
        return str(len(self.objects))


@dataclass(frozen=True)
class Ask:
    """A request of a row, ready to be given to any engine."""

    row: Mapping[str, str]
    prompt: Any
    params: SamplingParams
    arguments: Mapping[str, Any]
    artifact: Mapping[str, Any] | None

    @property
    def is_delta(self) -> bool:
        return self.row["artifact"] == "v2 delta"


def request(row: Row, seed: int) -> Ask:
    """Raises `InvalidRequestError` for parameters that contradict each other."""
    asked = merged(REQUEST, row)
    params = SamplingParams(**({"max_tokens": MAX_TOKENS, "seed": SEED} | asked.pop("params", {})))
    artifact = asked.pop("artifact", None)
    return Ask(dict(row), prompt_of(row["prompt"], seed), params, asked, artifact)


def prompt_of(form: str, seed: int) -> Any:
    start = seed % 40
    if form == "ids":
        return prompt(30 + seed % 7, seed)
    if form == "text":
        return CORPUS[start : start + 60]
    return [{"role": "user", "content": CORPUS[start : start + 30]}]


def filler(row: Row, number: int) -> Ask:
    """A plain greedy request of some length."""
    params = SamplingParams(temperature=0, max_tokens=FILLER_TOKENS, ignore_eos=True, seed=SEED)
    return Ask(dict(row), prompt(FILLER_PROMPT, 100 + number), params, {}, None)


def in_plain_engine(ask: Ask) -> Ask:
    """An engine without files for rows returns them as rows."""
    return replace(ask, params=SamplingParams(**{**_given(ask.params), "captured_as": "rows"}))


def _given(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.model_fields_set}


async def artifact_request(engine: Engine, ask: Ask, sink: Shelved) -> ArtifactRequest | None:
    """For an artifact on top of another, that one is made first: it holds the first tokens of the prompt."""
    if ask.artifact is None:
        return None
    wanted = ArtifactRequest(target=SinkTarget(sink), **ask.artifact)
    if not ask.is_delta:
        return wanted
    tools = ask.arguments.get("tools")
    ids = list(await engine.prompts.encode(ask.prompt, tools=tools))
    first = SamplingParams(temperature=0, forced_token_ids=tuple(ids[6:9]))
    done = await engine.generate(ids[:6], first, artifact=wanted, cache_salt="parent")
    assert done.artifact is not None and done.artifact.state == "ready", done.artifact
    return ArtifactRequest(target=SinkTarget(sink), parent=done.artifact.as_parent(9), **ask.artifact)


def plain_request() -> dict[str, str]:
    return {feature.name: feature.values[0].name for feature in REQUEST}


def probe(length: int) -> Ask:
    """What finds out whether a cache is at work."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
    return Ask(plain_request(), prompt(length, 77), params, {}, None)
