"""`infer verify ARTIFACT --model M`: does this model, computed here, say the same of the rollout? A table or JSON; the exit code
is 1 when something is wrong."""

from __future__ import annotations

import dataclasses
import json
import math
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import typer
from rich.table import Table

from infer.cli.artifact import Parents, open_with_parents
from infer.cli.options import with_options
from infer.cli.progress import ProgressDisplay
from infer.cli.session import Session
from infer.config.engine import EngineConfig
from infer.errors import ConfigError
from infer.types import SamplingParams

if TYPE_CHECKING:
    from infer.artifacts import GenerationArtifact
    from infer.artifacts.judgement import Difference, Judgement, Tolerance
    from infer.artifacts.verify import VerifyReport

WRONG = 1
KINDS = ("tokens", "logprobs", "routes")
DTYPES = ("float32", "float16", "bfloat16")


@with_options(sampling=True)
def verify(
    session: Session,
    *,
    artifact: Annotated[str, typer.Argument(metavar="ARTIFACT", help="A path or any fsspec URL.")],
    parent: Parents = None,
    rollout_dtype: Annotated[
        str | None,
        typer.Option(
            "--rollout-dtype", metavar="|".join(DTYPES), help="What the rollout was computed in; left out: as here."
        ),
    ] = None,
    logprobs_mode: Annotated[
        str | None, typer.Option("--logprobs-mode", help="Kind of the recorded log-probabilities; left out: raw.")
    ] = None,
    max_deviation: Annotated[
        float | None,
        typer.Option("--max-deviation", min=0, help="Log-probabilities this far apart are still a near tie."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
    config: EngineConfig,
    params: SamplingParams,
) -> None:
    """Score a rollout again by forced decoding and judge it: equal, near tie, or wrong.

    Log-probabilities and routes are compared where the artifact has them; the tokens themselves with --temperature 0,
    which says that the rollout was greedy. Other sampling options matter for processed log-probabilities only. An
    artifact of format v2 says itself how it was sampled; options that are given count more.
    """
    from infer.artifacts.verify import recorded_params  # noqa: PLC0415  numpy

    if rollout_dtype is not None and rollout_dtype not in DTYPES:
        raise ConfigError(f"--rollout-dtype {rollout_dtype}: there is no such dtype; one of {', '.join(DTYPES)}")
    reader = open_with_parents(artifact, parent)
    recorded = recorded_params(reader.provenance)
    given: dict[str, Any] = {
        name: getattr(source, name) for source in (recorded, params) for name in source.model_fields_set
    }
    if logprobs_mode is not None:
        given["logprobs_mode"] = logprobs_mode
    content = reader.artifact()
    if any(choice.moe_routes is not None for choice in content.choices):
        config = _capturing(config)
    report = anyio.run(_verify, session, config, content, SamplingParams(**given), (rollout_dtype, max_deviation))
    if as_json:
        session.write(json.dumps(_plain(dataclasses.asdict(report)), allow_nan=False) + "\n")
    else:
        _show(session, report)
    if report.verdict == "wrong":
        raise typer.Exit(WRONG)


async def _verify(
    session: Session,
    config: EngineConfig,
    content: GenerationArtifact,
    params: SamplingParams,
    allowed: tuple[str | None, float | None],
) -> VerifyReport:
    from infer.artifacts.verify import verify_artifact  # noqa: PLC0415  numpy

    async with AsyncExitStack() as stack:
        with ProgressDisplay(session) as report:
            engine = await stack.enter_async_context(session.make_engine(config, report))
        tolerance = _tolerance(engine.resolved.dtype, *allowed)
        return await verify_artifact(content, engine, params=params, tolerance=tolerance)


def _capturing(config: EngineConfig) -> EngineConfig:
    """The artifact has routes, so the replay needs some to compare."""
    return config.model_copy(update={"capture": config.capture.model_copy(update={"routed_experts": True})})


def _tolerance(dtype: str, rollout_dtype: str | None, max_deviation: float | None) -> Tolerance:
    """That of the coarser of both dtypes, unless the caller says how far apart is too far."""
    from infer.artifacts.judgement import Tolerance  # noqa: PLC0415  numpy

    tolerance = Tolerance.of(dtype, rollout_dtype or dtype)
    if max_deviation is None:
        return tolerance
    return dataclasses.replace(tolerance, near=max_deviation, relative=0.0, mean=max_deviation)


def _plain(value: Any) -> Any:
    """JSON has no infinity: an impossible token's log-probability is written as a string."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _show(session: Session, report: VerifyReport) -> None:
    table = Table("choice", "prompt", "output", *KINDS, "verdict", box=None, pad_edge=False)
    for choice in report.choices:
        table.add_row(
            str(choice.choice_index),
            str(choice.prompt_tokens),
            str(choice.output_tokens),
            *(_counts(getattr(choice, kind)) for kind in KINDS),
            choice.verdict,
        )
    session.table(table)
    for choice in report.choices:
        for kind in KINDS:
            judged: Judgement | None = getattr(choice, kind)
            place = judged and (judged.first_wrong or judged.first)
            if judged is not None and place:
                session.write(f"choice {choice.choice_index}, {kind}: {_told(kind, judged, place)}\n")
    session.write(f"{report.verdict}\n")


def _counts(judged: Judgement | None) -> str:
    if judged is None:
        return "-"
    parts = [f"{judged.equal} equal"]
    parts += [f"{count} {word}" for count, word in ((judged.near, "near"), (judged.wrong, "wrong")) if count]
    return ", ".join(parts)


def _told(kind: str, judged: Judgement, place: Difference) -> str:
    """The first place that is wrong, or else that is not equal."""
    verdict = "wrong" if judged.first_wrong is not None else "difference" if judged.verdict == "wrong" else "near tie"
    where = f"position {place.position} (token {place.token_id})"
    if kind == "routes":
        return f"first {verdict} at {where}, layer {place.layer}: recorded experts {place.recorded}, here {place.ours}"
    if kind == "tokens":
        return f"first {verdict} at {where}: here {place.ours}, more likely by {place.deviation:.4g}"
    return (
        f"first {verdict} at {where}: recorded {place.recorded:.6f}, here {place.ours:.6f}; "
        f"deviation {judged.mean_deviation:.4g} on average, {judged.max_deviation:.4g} at most"
    )
