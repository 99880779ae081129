"""Replays a rollout: forces its tokens through an engine and judges tokens, log-probabilities and routes.

Runs in the caller's task; knows an engine only by what it calls of it; owns nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from infer.artifacts.generation import ArtifactChoice, GenerationArtifact, RoutedExperts
from infer.artifacts.judgement import (
    Judgement,
    Tolerance,
    Verdict,
    judge_logprobs,
    judge_routes,
    judge_tokens,
    worst,
)
from infer.artifacts.record import Provenance
from infer.errors import ArtifactError
from infer.types import Completion, Prompt, SamplingParams, TokenLogprob

GREEDY_BELOW = 1e-5
REPLACED = frozenset(
    {
        "forced_token_ids",
        "max_tokens",
        "min_tokens",
        "n",
        "stop",
        "logprobs",
        "prompt_logprobs",
        "repetition_detection",
        "return_routed_experts",
        "captured_as",
    }
)
"""Of the parameters that the rollout had, those that a replay decides itself."""


class ReplayEngine(Protocol):
    """What `infer.Engine` offers."""

    async def generate_many(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams | None], /
    ) -> list[Completion]: ...


RouteSource = Callable[[Completion], RoutedExperts]
"""(completion of a forced choice) -> its routes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceReport:
    """None: not recorded, or (tokens) not the best by intent, because the choice was sampled."""

    choice_index: int
    prompt_tokens: int
    output_tokens: int
    tokens: Judgement | None
    logprobs: Judgement | None
    routes: Judgement | None
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What `verify_artifact` found."""

    verdict: Verdict
    tolerance: Tolerance
    choices: tuple[ChoiceReport, ...]


async def verify_artifact(
    artifact: GenerationArtifact,
    engine: ReplayEngine,
    *,
    params: SamplingParams | None = None,
    tolerance: Tolerance | None = None,
    routes_of: RouteSource | None = None,
) -> VerifyReport:
    """Score every choice again by forced decoding and judge what the artifact recorded of it.

    params: as the rollout was sampled, as far as it matters: temperature=0 has the tokens themselves judged, and
    logprobs_mode (with the processors' parameters) says what kind of log-probabilities were recorded; default raw.
    tolerance: default `Tolerance.of("float32")`. routes_of: where a replay's routes come from; default the
    engine. Raises `ArtifactError` when nothing could be judged, and what `generate` raises.
    """
    asked, tolerance = params or SamplingParams(), tolerance or Tolerance.of("float32")
    greedy = "temperature" in asked.model_fields_set and asked.temperature < GREEDY_BELOW
    choices = [choice for choice in artifact.choices if _output(choice)]
    if choices and not greedy and not any(choice.selected_logprobs or choice.moe_routes for choice in choices):
        raise ArtifactError(
            "the artifact holds token ids only, and sampled tokens need not be the likeliest: there is nothing to judge; "
            "if they were chosen greedily, say so with temperature=0"
        )
    replays = await _replay(engine, choices, asked, routes_of is None)
    best = replays
    if greedy and asked.logprobs_mode.startswith("raw") and any(_is_processed(done.sampling) for done in replays):
        processed = asked.model_copy(update={"logprobs_mode": "processed"})
        best = await _replay(engine, choices, processed, asks_routes=False)
    source, reports = routes_of or engine_routes, {}
    for choice, done, chosen in zip(choices, replays, best, strict=True):
        reports[choice.choice_index] = _report(choice, done, chosen if greedy else None, tolerance, source)
    made = tuple(reports.get(choice.choice_index) or _empty(choice) for choice in artifact.choices)
    kinds = [kind for one in made for kind in (one.tokens, one.logprobs, one.routes)]
    return VerifyReport(verdict=worst(kinds), tolerance=tolerance, choices=made)


def recorded_params(provenance: Provenance | None) -> SamplingParams:
    """How the rollout was sampled, as far as the artifact says it; format v1 says nothing."""
    if provenance is None:
        return SamplingParams()
    values: dict[str, Any] = {
        name: value
        for name, value in provenance.sampling.items()
        if name in SamplingParams.model_fields and name not in REPLACED
    }
    if isinstance(biases := values.get("logit_bias"), dict):
        values["logit_bias"] = {int(token_id): bias for token_id, bias in biases.items()}
    if isinstance(form := values.get("structured_output"), dict) and isinstance(form.get("choice"), str):
        values["structured_output"] = {**form, "choice": json.loads(form["choice"])}
    if labels := values.get("logits_processors"):
        values["logits_processors"] = [json.loads(one) if one.startswith("{") else one for one in labels]
    if provenance.logprobs_mode:
        values["logprobs_mode"] = provenance.logprobs_mode
    return SamplingParams(**values)


def engine_routes(done: Completion) -> RoutedExperts:
    """The routes that an engine returned with `return_routed_experts`."""
    rows = done.choices[0].routed_experts
    if rows is None or rows.error is not None:
        reason = "it returned none" if rows is None else rows.error
        raise ArtifactError(f"the engine has no routes for the replay to compare: {reason}")
    ids = np.frombuffer(rows.data, dtype=np.dtype(rows.dtype).newbyteorder("<")).reshape(rows.count, *rows.row_shape)
    return RoutedExperts(rows.start, ids, rows.layer_ids, (rows.num_experts,) * len(rows.layer_ids))


async def _replay(
    engine: ReplayEngine, choices: Sequence[ArtifactChoice], asked: SamplingParams, asks_routes: bool
) -> list[Completion]:
    kept = {name: getattr(asked, name) for name in asked.model_fields_set - REPLACED}
    prompts: list[Prompt] = []
    forced = []
    for choice in choices:
        output = tuple(_output(choice))
        values: dict[str, Any] = kept | {"forced_token_ids": output, "logprobs": 1}
        values["min_tokens"] = min(asked.min_tokens, len(output))
        if asks_routes and choice.moe_routes is not None:
            first = min(choice.moe_routes.token_start, choice.prompt_token_count)
            values |= {"return_routed_experts": True, "routed_experts_prompt_start": first}
        prompts.append(np.asarray(choice.sequence_token_ids)[: choice.prompt_token_count].tolist())
        forced.append(SamplingParams(**values))
    return await engine.generate_many(prompts, forced)


def _report(
    choice: ArtifactChoice, done: Completion, chosen: Completion | None, tolerance: Tolerance, routes_of: RouteSource
) -> ChoiceReport:
    output, start = _output(choice), choice.prompt_token_count
    tokens = logprobs = routes = None
    if chosen is not None:
        entries = _entries(chosen, output)
        best = [entry.top[0] for entry in entries]
        gaps = [value - entry.logprob for entry, (_, value) in zip(entries, best, strict=True)]
        tokens = judge_tokens(output, [token_id for token_id, _ in best], gaps, start, tolerance)
    if choice.selected_logprobs is not None:
        ours = [entry.logprob for entry in _entries(done, output)]
        logprobs = judge_logprobs(output, choice.selected_logprobs.logprobs, ours, start, tolerance)
    if choice.moe_routes is not None:
        routes = judge_routes(choice.sequence_token_ids, choice.moe_routes, routes_of(done), tolerance)
    return ChoiceReport(
        choice_index=choice.choice_index,
        prompt_tokens=start,
        output_tokens=len(output),
        tokens=tokens,
        logprobs=logprobs,
        routes=routes,
        verdict=worst([tokens, logprobs, routes]),
    )


def _empty(choice: ArtifactChoice) -> ChoiceReport:
    """Nothing was generated: nothing can be wrong."""
    return ChoiceReport(
        choice_index=choice.choice_index,
        prompt_tokens=choice.prompt_token_count,
        output_tokens=0,
        tokens=None,
        logprobs=None,
        routes=None,
        verdict="equal",
    )


def _output(choice: ArtifactChoice) -> list[int]:
    output: list[int] = np.asarray(choice.sequence_token_ids)[choice.prompt_token_count :].tolist()
    return output


def _entries(done: Completion, output: Sequence[int]) -> tuple[TokenLogprob, ...]:
    entries = done.logprobs or ()
    if [entry.token_id for entry in entries] != list(output):
        raise ArtifactError(f"the replay ended after {len(entries)} of {len(output)} tokens ({done.finish_reason})")
    return entries


def _is_processed(params: SamplingParams) -> bool:
    """Whether something stands between the model's best token and the greedy choice."""
    return bool(
        params.allowed_token_ids
        or params.bad_words
        or params.logit_bias
        or params.min_tokens
        or params.repetition_penalty != 1
        or params.frequency_penalty
        or params.presence_penalty
    )
