"""`infer steplog replay|show|explain FILE`: make the scheduling decisions of a step log again, read or explain them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import typer

from infer.cli.session import Session
from infer.errors import ConfigError, StepLogError

File = Annotated[str, typer.Argument(metavar="FILE", help="A step log, or the one before it (FILE.1).")]

SchedulerClass = Annotated[
    str | None,
    typer.Option(
        "--scheduler", metavar="MODULE:CLASS", help="Scheduler to replay with, where the log names one of your own."
    ),
]


def build_steplog() -> typer.Typer:
    app = typer.Typer(name="steplog", no_args_is_help=True, help="Replay and read step logs.")
    for command in (replay, show, explain):
        app.command(command.__name__)(command)
    return app


def replay(
    ctx: typer.Context,
    file: File,
    scheduler: SchedulerClass = None,
) -> None:
    """Make every decision again, without a model; exit code 1 where one comes out differently."""
    session: Session = ctx.obj
    from infer.engine.step_log.replay import replay as run  # noqa: PLC0415  only these commands need the scheduler

    report = run(file, _scheduler(file, scheduler))
    for difference in report.differences:
        raise StepLogError(f"{file}: behind {report.steps - 1} equal steps, at {difference}")
    lost = " (records in front of this file are lost)" if report.lost else ""
    session.write(
        f"{report.steps} steps, {report.requests} requests, {report.preemptions} preemptions, {report.evictions} evicted "
        f"blocks: every decision came out the same{lost}\n"
    )


def show(
    ctx: typer.Context,
    file: File,
    request: Annotated[str | None, typer.Option(metavar="ID", help="Only what concerns this request.")] = None,
) -> None:
    """Print the records, one JSON object a line; hashes in hex."""
    session: Session = ctx.obj
    for record in _of(request, file):
        session.write(json.dumps(msgspec.to_builtins(record, builtin_types=(bytes,)), default=_hex) + "\n")


def explain(
    ctx: typer.Context,
    file: File,
    request: Annotated[str, typer.Argument(metavar="REQUEST", help="Id of a request.")],
    scheduler: SchedulerClass = None,
) -> None:
    """Say why a request waited, was preempted, or where its prompt left what was cached, as of its end or the log's."""
    session: Session = ctx.obj
    from infer.engine.explanation import explain as explained  # noqa: PLC0415
    from infer.engine.step_log.replay import replayed  # noqa: PLC0415

    said = None
    for run in replayed(file, _scheduler(file, scheduler)):
        if run.scheduler.histories.of(request):
            said = explained(run.scheduler, request)
            if all(choice.status == "finished" for choice in said.choices):
                break
    if said is None:
        raise StepLogError(f"{file} holds no request {request!r}")
    session.write(f"{said}\n")


def _scheduler(file: str, named: str | None) -> Any:
    """The class to replay with. Code is not imported because a file says so."""
    from infer.engine.startup import scheduler_class  # noqa: PLC0415
    from infer.engine.step_log.replay import read_records  # noqa: PLC0415

    header: Any = next(read_records(file))
    own = header.scheduler.scheduler_class
    if own is not None and named is None:
        raise ConfigError(
            f"the scheduler of {file} was {own!r}, which is not part of infer: give --scheduler {own} if you trust it"
        )
    return scheduler_class(named)


def _of(request_id: str | None, file: str) -> Iterator[Any]:
    """Records that hold a key of the request, or all; states of the whole scheduler are left out."""
    from infer.engine.step_log import records  # noqa: PLC0415
    from infer.engine.step_log.replay import read_records  # noqa: PLC0415

    keys: set[int] = set()
    rows: dict[int, list[int]] = {}
    for record in read_records(file):
        if isinstance(record, records.Snapshot):
            continue
        if request_id is None:
            yield record
            continue
        match record:
            case records.Added(choices):
                mine = {choice.key for choice in choices if choice.request_id == request_id}
                keys |= mine
                concerned = bool(mine)
            case records.Ended(key):
                concerned = key in keys
            case records.Planned(step_id):
                if step_id is not None:
                    rows[step_id] = record.keys
                held = {*record.keys, *record.preempted, *(one.key for one in record.admissions)}
                concerned = bool(keys & held)
            case records.Applied(step_id) | records.Failed(step_id):
                concerned = bool(keys & set(rows.pop(step_id, ())))
            case _:
                concerned = True
        if concerned:
            yield record


def _hex(value: object) -> str:
    if isinstance(value, bytes):
        return value.hex()
    raise TypeError(f"{type(value).__name__} has no JSON form")
