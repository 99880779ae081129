"""`infer bench latency|throughput` (and `serve`, see `bench_serve`): how fast a model runs here, as a table and as JSON."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

import anyio
import typer
from rich.table import Table

from infer.cli.bench_serve import serve
from infer.cli.measure import Report, Workload, measure
from infer.cli.options import with_model, with_options
from infer.cli.progress import ProgressDisplay
from infer.cli.session import Session
from infer.config.engine import EngineConfig

Model = Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Model reference; the default model if absent.")]
InputLen = Annotated[int, typer.Option("--input-len", min=1, help="Prompt tokens of a decode run.")]
OutputLen = Annotated[int, typer.Option("--output-len", min=2, help="Output tokens of a decode run.")]
PrefillLen = Annotated[int, typer.Option("--prefill-len", min=1, help="Prompt tokens of the prefill run.")]
Repeat = Annotated[int, typer.Option("--repeat", min=1, help="Counted rounds; the table shows medians.")]
Json = Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")]


@with_options()
def latency(
    session: Session,
    *,
    model: Model = None,
    input_len: InputLen = 128,
    output_len: OutputLen = 64,
    prefill_len: PrefillLen = 512,
    repeat: Repeat = 3,
    json_file: Json = None,
    config: EngineConfig,
) -> None:
    """One request at a time: prefill rate, time to first token, time between tokens."""
    workload = Workload(input_len=input_len, output_len=output_len, repeat=repeat, prefill_len=prefill_len)
    _run(session, with_model(config, model), [1], workload, json_file)


@with_options()
def throughput(
    session: Session,
    *,
    model: Model = None,
    concurrency: Annotated[
        list[int] | None, typer.Option("--concurrency", min=1, help="Requests at once; may be given several times.")
    ] = None,
    input_len: InputLen = 128,
    output_len: OutputLen = 64,
    prefill_len: PrefillLen = 512,
    repeat: Repeat = 3,
    json_file: Json = None,
    config: EngineConfig,
) -> None:
    """Many requests at once: tokens per second at 1, 8 and 32 (or what --concurrency says)."""
    workload = Workload(input_len=input_len, output_len=output_len, repeat=repeat, prefill_len=prefill_len)
    _run(session, with_model(config, model), concurrency or [1, 8, 32], workload, json_file)


def _run(
    session: Session, config: EngineConfig, concurrencies: list[int], workload: Workload, json_file: Path | None
) -> None:
    report = anyio.run(_measure, session, config, concurrencies, workload)
    session.table(_table(report))
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_json(), indent=1) + "\n", "utf-8")
        session.note(f"figures written to {json_file}")


async def _measure(session: Session, config: EngineConfig, concurrencies: list[int], workload: Workload) -> Report:
    async with AsyncExitStack() as stack:
        with ProgressDisplay(session) as report:
            engine = await stack.enter_async_context(session.make_engine(config, report))
        session.note(
            f"measuring {workload.repeat} times {workload.input_len} tokens in, {workload.output_len} out, "
            f"at {', '.join(map(str, concurrencies))} at once ..."
        )
        return await measure(engine, concurrencies, workload)


def _table(report: Report) -> Table:
    """Medians, with the lowest and highest of the rounds in brackets."""
    table = Table("what", "at once", "median", "lowest", "highest", box=None, pad_edge=False)

    def row(what: str, concurrency: str, figures: dict[str, float], scale: float = 1.0, digits: int = 1) -> None:
        cells = (f"{figures[name] * scale:.{digits}f}" for name in ("median", "min", "max"))
        table.add_row(what, concurrency, *cells)

    row(f"prefill of {report.workload.prefill_len}, tokens/s", "1", report.prefill_rate)
    for concurrency, figures in report.concurrency.items():
        row("decode, tokens/s", str(concurrency), figures["decode_tokens_per_s"])
        row("output with prefill, tokens/s", str(concurrency), figures["output_tokens_per_s"])
        row("time to first token, ms", str(concurrency), figures["ttft_s"], 1e3)
        row("time between tokens, ms", str(concurrency), figures["itl_s"], 1e3, 2)
    table.add_row("peak memory (RSS), MiB", "", f"{report.peak_rss / 2**20:.0f}", "", "")
    return table


def build_bench() -> typer.Typer:
    app = typer.Typer(name="bench", no_args_is_help=True, help="Measure speed on this machine.")
    for command in (latency, throughput, serve):
        app.command(command.__name__)(command)
    return app
