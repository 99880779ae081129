"""`infer bench serve`: what clients of any OpenAI server wait for, as a table, as JSON with every time, and as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import anyio
import typer
from rich.table import Table

from infer.cli.load_client import LoadClient, LoadError
from infer.cli.measure_serve import ServeBench, ServeReport, ServeWorkload
from infer.cli.options import with_options
from infer.cli.serve_plot import draw
from infer.cli.session import Session
from infer.errors import ConfigError

DEFAULT_CONCURRENCY = 8


@with_options(sections=())
def serve(
    session: Session,
    *,
    base_url: Annotated[str, typer.Option("--base-url", help="Where the server is.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option("--model", help="Name to ask for; the first that the server lists if absent.")
    ] = None,
    endpoint: Annotated[
        str, typer.Option("--endpoint", metavar="completions|chat", help="Which route is asked.")
    ] = "completions",
    prompts: Annotated[
        str | None,
        typer.Option(
            "--prompts",
            metavar="ids|text",
            help="Random token ids (completions only, the default there) or random words.",
            show_default=False,
        ),
    ] = None,
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=1, help="Requests in all.")] = 64,
    input_len: Annotated[
        int, typer.Option("--input-len", min=1, help="Prompt length: tokens, or words of text.")
    ] = 128,
    output_len: Annotated[int, typer.Option("--output-len", min=1, help="Output tokens asked for.")] = 64,
    concurrency: Annotated[
        int | None,
        typer.Option("--concurrency", min=1, help=f"Requests at once; {DEFAULT_CONCURRENCY} if no rate is given."),
    ] = None,
    request_rate: Annotated[
        float | None,
        typer.Option("--request-rate", min=1e-3, help="Requests per second, at random (Poisson) intervals."),
    ] = None,
    vocab_size: Annotated[int, typer.Option("--vocab-size", min=2, help="Random token ids are below this.")] = 10_000,
    seed: Annotated[int, typer.Option("--seed", help="The same seed asks the same at the same times.")] = 0,
    api_key: Annotated[
        str | None, typer.Option("--api-key", help="Others on this machine can read it; prefer --api-key-file.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", help="File whose first line is the key.")
    ] = None,
    extra_body: Annotated[
        str | None, typer.Option("--extra-body", metavar="JSON", help="Further fields of each request.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write all figures to this file.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Also draw them to this file, as SVG.")] = None,
) -> None:
    """Time to first token, time between tokens and throughput of a running server, ours or another's."""
    chosen = prompts or ("ids" if endpoint == "completions" else "text")
    workload = ServeWorkload(
        base_url=base_url,
        model=model,
        endpoint=_one_of("--endpoint", endpoint, ("completions", "chat")),
        prompts=_one_of("--prompts", chosen, ("ids", "text")),
        num_prompts=num_prompts,
        input_len=input_len,
        output_len=output_len,
        concurrency=concurrency if concurrency or request_rate else DEFAULT_CONCURRENCY,
        request_rate=request_rate,
        vocab_size=vocab_size,
        seed=seed,
        extra_body=_extra(extra_body),
    )
    if workload.endpoint == "chat" and workload.prompts == "ids":
        raise ConfigError("--prompts ids needs --endpoint completions: a chat takes no token ids")
    report = anyio.run(_measure, session, workload, stated_key(api_key, api_key_file))
    session.table(_table(report))
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_json(), indent=1) + "\n", "utf-8")
        session.note(f"figures written to {json_file}")
    if plot_file is not None:
        plot_file.write_text(draw(report), "utf-8")
        session.note(f"picture written to {plot_file}")
    failures = [request.error for request in report.requests if request.error is not None]
    if failures:
        raise LoadError(f"{len(failures)} of {len(report.requests)} requests failed; the first: {failures[0]}")


async def _measure(session: Session, workload: ServeWorkload, key: str | None) -> ServeReport:
    mode = f"{workload.request_rate:g} per second" if workload.request_rate else f"{workload.concurrency} at once"
    session.note(
        f"{workload.num_prompts} requests of {workload.input_len} in, {workload.output_len} out, {mode}, "
        f"to {workload.base_url} ..."
    )
    async with LoadClient(workload.base_url, key) as client:
        report = await ServeBench(workload, client).run()
    if report.left_out:
        session.note(f"left out, since the server refuses it: {', '.join(report.left_out)}")
    return report


def _table(report: ServeReport) -> Table:
    summary = report.summary
    table = Table("what", "mean", "p50", "p90", "p99", "max", box=None, pad_edge=False)
    for name, title, digits in (
        ("ttft_s", "time to first token, ms", 1),
        ("itl_s", "time between tokens, ms", 2),
        ("tpot_s", "time per output token, ms", 2),
        ("e2e_s", "whole request, ms", 1),
    ):
        figures = summary[name]
        cells = ("mean", "p50", "p90", "p99", "max")
        table.add_row(title, *(f"{figures[cell] * 1e3:.{digits}f}" if figures else "-" for cell in cells))
    for title, value in (
        ("output tokens/s", f"{summary['output_tokens_per_s']:.1f}"),
        ("all tokens/s", f"{summary['total_tokens_per_s']:.1f}"),
        ("requests/s", f"{summary['requests_per_s']:.2f}"),
        ("tokens in, out", f"{summary['prompt_tokens']}, {summary['output_tokens']}"),
        ("completed, failed", f"{summary['completed']}, {summary['failed']}"),
        ("most at once", str(summary["most_at_once"])),
        ("seconds, of which client CPU", f"{summary['seconds']:.2f}, {report.client_cpu_s:.2f}"),
    ):
        table.add_row(title, value)
    return table


def _one_of(flag: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ConfigError(f"{flag} {value!r} is none of {', '.join(known)}")
    return value


def _extra(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ConfigError(f"--extra-body {text!r} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--extra-body {text!r} is no JSON object")
    return value


def stated_key(stated: str | None, file: Path | None) -> str | None:
    if stated is not None or file is None:
        return stated
    try:
        return file.read_text("utf-8").split()[0]
    except (OSError, UnicodeDecodeError, IndexError) as error:
        raise ConfigError(f"--api-key-file {str(file)!r} holds no key: {error}") from None
