"""`infer batch INPUT OUTPUT`: requests from a file in OpenAI's batch format, answered by the server's own routes.

Stopped and started again, it goes on behind what the output file has.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import anyio
import msgspec
import typer

from infer.cli.options import with_model, with_options
from infer.cli.progress import ProgressDisplay
from infer.cli.session import Session
from infer.config.engine import EngineConfig
from infer.errors import ConfigError

if TYPE_CHECKING:
    from infer.api.openai.batch_lines import Line


@with_options(sections=tuple(EngineConfig.model_fields))
def batch(
    session: Session,
    *,
    source: Annotated[Path, typer.Argument(metavar="INPUT", help="JSON lines: custom_id, method, url, body.")],
    target: Annotated[Path, typer.Argument(metavar="OUTPUT", help="A line for each; added to when it exists.")],
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Left out: the small default model.")] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Lines at a time (twice --scheduler.max-num-seqs).")
    ] = None,
    config: EngineConfig,
) -> None:
    """Answer a file of requests in OpenAI's batch format. Run it again to go on after an interruption."""
    if not source.is_file():
        raise ConfigError(f"{source} is no file: INPUT holds one JSON request per line")
    if target.exists() and target.samefile(source):
        raise ConfigError(f"{target} is the input itself; name another file for the output")
    _check_installed()
    done = _answered(target)
    _check_belongs(source, target, done)
    left = sum(1 for line in _lines(source) if line.number not in done)
    if done:
        session.note(f"{target}: {len(done)} lines are answered, {left} are left")
    if left:
        config = with_model(config, model)
        answered, failed = anyio.run(_run, session, config, source, target, done, concurrency)
        session.note(f"{answered} lines answered, {failed} of them with an error")


def _check_installed() -> None:
    if importlib.util.find_spec("starlette") is None:
        raise ConfigError("`infer batch` needs starlette; install the extra: pip install 'infer-engine[server]'")


async def _run(
    session: Session,
    config: EngineConfig,
    source: Path,
    target: Path,
    done: dict[int, str | None],
    concurrency: int | None,
) -> tuple[int, int]:
    """(lines answered, of them with an error)."""
    from infer.api.app import build_context  # noqa: PLC0415 - only this command needs the server's routes
    from infer.api.openai.batch_lines import BatchLines, answer_all  # noqa: PLC0415

    count = failed = 0
    async with AsyncExitStack() as stack:
        with ProgressDisplay(session) as report:
            engine = await stack.enter_async_context(session.make_engine(config, report))
        lines = BatchLines(build_context(engine, config.api))
        for custom_id in done.values():
            lines.seen(custom_id)
        output = stack.enter_context(target.open("ab"))

        def write(row: dict[str, Any]) -> None:
            nonlocal count, failed
            output.write(msgspec.json.encode(row) + b"\n")
            output.flush()
            count += 1
            failed += row["error"] is not None

        waiting = (line for line in _lines(source) if line.number not in done)
        await answer_all(waiting, lines.answer, write, concurrency or 2 * engine.resolved.scheduler.max_num_seqs)
    return count, failed


def _lines(path: Path) -> Iterator[Line]:
    """Lines that are not blank, numbered as an editor does."""
    from infer.api.openai.batch_lines import Line  # noqa: PLC0415

    with path.open("rb") as file:
        for number, data in enumerate(file, start=1):
            if data.strip():
                yield Line(number, data)


def _answered(target: Path) -> dict[int, str | None]:
    """Line number -> custom_id, of the rows that the output has. A row that was cut off is taken out of the file."""
    found: dict[int, str | None] = {}
    if not target.exists():
        return found
    with target.open("r+b") as file:
        whole = 0
        for data in file:
            if not data.endswith(b"\n"):
                break
            found |= _row_of(target, data)
            whole += len(data)
        _cut(file, whole)
    return found


def _row_of(target: Path, data: bytes) -> dict[int, str | None]:
    try:
        row = msgspec.json.decode(data)
        prefix, _, number = row["id"].rpartition("_")
        if prefix != "batch_req" or not number.isdecimal():
            raise ValueError
        return {int(number): row["custom_id"]}
    except (msgspec.MsgspecError, ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"{target} holds a line that `infer batch` did not write: {data[:80]!r}; name another file for the output"
        ) from None


def _cut(file: BinaryIO, length: int) -> None:
    file.seek(0, 2)
    if file.tell() > length:
        file.truncate(length)


def _check_belongs(source: Path, target: Path, done: dict[int, str | None]) -> None:
    """Answers of another file would be taken for those of this one."""
    left = dict(done)
    for line in _lines(source):
        if line.number not in left:
            continue
        stated = left.pop(line.number)
        try:
            asked = msgspec.json.decode(line.data)
        except (msgspec.MsgspecError, RecursionError):
            asked = None
        custom_id = asked.get("custom_id") if isinstance(asked, dict) else None
        if stated != (custom_id if isinstance(custom_id, str) else None):
            raise ConfigError(
                f"{target} answers line {line.number} as {stated!r}, and {source} has {custom_id!r:.100} there: the output is of "
                "another input; name another file for it"
            )
    if left:
        raise ConfigError(
            f"{target} answers line {min(left)}, which {source} does not have: the output is of another input; name another "
            "file for it"
        )
