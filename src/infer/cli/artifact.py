"""`infer artifact inspect|verify|plot|export FILE`: look into an artifact, check it, draw it, hand it to a trainer."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from infer.cli.session import Session
from infer.config.units import format_bytes
from infer.errors import ConfigError

if TYPE_CHECKING:
    from infer.artifacts import ArtifactReader

FORMATS = ("vllm", "prime-rl", "skyrl", "sglang", "miles", "nemo-rl", "verl", "json")
File = Annotated[str, typer.Argument(metavar="FILE", help="A path or any fsspec URL (s3://..., memory://...).")]
ChoiceIndex = Annotated[int | None, typer.Option("--choice", help="Index of the choice; left out: the first.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", metavar="PATH", help="Write here instead of to stdout.")]


def build_artifact() -> typer.Typer:
    app = typer.Typer(name="artifact", no_args_is_help=True, help="Look into, check, draw and export artifacts.")
    for command in (inspect, verify, plot, export):
        app.command(command.__name__)(command)
    return app


def inspect(
    ctx: typer.Context,
    file: File,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Show what an artifact holds; only its beginning is read."""
    session, reader = _open(ctx, file)
    if as_json:
        shown = {"file": file, "codec": reader.codec, "actual_bytes": reader.actual_bytes}
        session.write(json.dumps(shown | {"choices": [dataclasses.asdict(c) for c in reader.choices]}, indent=1) + "\n")
        return
    session.write(f"generation_artifact_v1, {reader.codec}, {format_bytes(reader.actual_bytes)}\n")
    table = Table("choice", "prompt", "tokens", "contents", "routes", "layers", "experts", box=None, pad_edge=False)
    for choice in reader.choices:
        shape = "" if choice.routes_shape is None else " x ".join(map(str, choice.routes_shape))
        routes = f"{shape} {choice.routes_dtype} from {choice.route_start}" if shape else ""
        table.add_row(
            str(choice.choice_index),
            str(choice.prompt_token_count),
            str(choice.num_tokens),
            ", ".join(choice.contents) or "token ids only",
            routes,
            _ranges(choice.router_ids),
            ", ".join(map(str, sorted(set(choice.expert_counts)))),
        )
    session.table(table)


def verify(
    ctx: typer.Context,
    file: File,
    sha256: Annotated[str | None, typer.Option("--sha256", help="The receipt's digest.")] = None,
    receipt: Annotated[Path | None, typer.Option("--receipt", help="File with the receipt as JSON.")] = None,
) -> None:
    """Read and check all of an artifact, against a receipt where one is given. The exit code is 1 if it does not hold."""
    session, reader = _open(ctx, file)
    size = None
    if receipt is not None:
        sha256, size = _receipt(receipt, sha256)
    found = reader.verify(sha256=sha256, actual_bytes=size)
    session.write(f"sha256 {found.sha256}\nbody_sha256 {found.body_sha256}\nactual_bytes {found.actual_bytes}\n")
    if sha256 is None:
        session.note("well formed; without the receipt's digest a changed value cannot be noticed")


def plot(ctx: typer.Context, file: File, choice: ChoiceIndex = None, output: Output = None) -> None:
    """Draw expert load per layer and experts per token and layer, as SVG."""
    from infer.cli.route_plot import draw_routes  # noqa: PLC0415  numpy

    session, reader = _open(ctx, file)
    _emit(session, output, draw_routes(reader.routes(choice)))


def export(
    ctx: typer.Context,
    file: File,
    to: Annotated[str, typer.Option("--to", metavar="|".join(FORMATS), help="Whose encoding.")],
    choice: ChoiceIndex = None,
    num_hidden_layers: Annotated[
        int | None, typer.Option("--num-hidden-layers", help="Fill up to all layers; left out: MoE layers only.")
    ] = None,
    output: Output = None,
) -> None:
    """Write the routes in the encoding that a trainer decodes, or everything as JSON."""
    session, reader = _open(ctx, file)
    if to not in FORMATS:
        raise ConfigError(f"--to {to}: there is no such encoding; one of {', '.join(FORMATS)}")
    content = reader.artifact()
    index = reader.choices[0].choice_index if choice is None else choice
    found = next((one for one in content.choices if one.choice_index == index), None)
    if found is None:
        raise ConfigError(
            f"--choice {index}: there is no such choice; there are {[c.choice_index for c in reader.choices]}"
        )
    if to == "json":
        _emit(session, output, json.dumps(_plain(found)) + "\n")
        return
    if to == "verl" and output is None:
        raise ConfigError("verl reads NumPy arrays: name a file with --output NAME.npz")
    made = _exporters()[to](found, num_hidden_layers=num_hidden_layers)
    if to == "verl":
        import numpy as np  # noqa: PLC0415

        with Path(str(output)).open("wb") as sink:
            np.savez(sink, routed_experts=made.routed_experts, replay_mask=made.replay_mask)
        return
    if to in ("vllm", "skyrl"):
        made = dataclasses.asdict(made)
    text = made if isinstance(made, str) else json.dumps(made)
    _emit(session, output, text + "\n")


def _exporters() -> dict[str, Callable[..., Any]]:
    from infer.artifacts import exporters  # noqa: PLC0415  numpy

    return {
        "vllm": exporters.to_vllm_npy,
        "prime-rl": exporters.to_prime_rl,
        "skyrl": exporters.to_skyrl,
        "sglang": exporters.to_sglang_int32,
        "miles": exporters.to_miles,
        "nemo-rl": exporters.to_nemo_nrlre1,
        "verl": exporters.to_verl,
    }


def _plain(choice: Any) -> dict[str, Any]:
    """A choice as JSON values; for looking at, not for large ones."""
    routes, logprobs = choice.moe_routes, choice.selected_logprobs
    made = {
        "choice_index": choice.choice_index,
        "prompt_token_count": choice.prompt_token_count,
        "sequence_token_ids": choice.sequence_token_ids.tolist(),
    }
    if routes is not None:
        made["moe_routes"] = {
            "token_start": routes.token_start,
            "expert_ids": routes.expert_ids.tolist(),
            "router_ids": list(routes.router_ids),
            "expert_counts": list(routes.expert_counts),
        }
    if logprobs is not None:
        made["selected_logprobs"] = {"token_start": logprobs.token_start, "logprobs": logprobs.logprobs.tolist()}
    return made


def _open(ctx: typer.Context, file: str) -> tuple[Session, ArtifactReader]:
    from infer.artifacts import open_artifact  # noqa: PLC0415  numpy

    session: Session = ctx.obj
    return session, open_artifact(file)


def _receipt(path: Path, sha256: str | None) -> tuple[str, int | None]:
    """Digest and size that a receipt states; a whole response around it is fine."""
    try:
        receipt = json.loads(path.read_text("utf-8"))
        for key in ("nvext", "generation_artifact"):
            receipt = receipt.get(key, receipt)
        digest, size = receipt.get("sha256"), receipt.get("actual_bytes")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"--receipt {path} cannot be read: {error}") from None
    if not isinstance(digest, str) or (sha256 is not None and sha256 != digest):
        raise ConfigError(f"--receipt {path} states no sha256, or another than --sha256")
    return digest, size if isinstance(size, int) else None


def _emit(session: Session, output: Path | None, text: str) -> None:
    if output is None:
        session.write(text)
    else:
        output.write_text(text, "utf-8")


def _ranges(numbers: tuple[int, ...]) -> str:
    """(1, 2, 3, 7) -> "1-3, 7"."""
    shown: list[str] = []
    start = previous = None
    for number in (*numbers, None):
        if previous is not None and number == previous + 1:
            previous = number
            continue
        if start is not None:
            shown.append(str(start) if start == previous else f"{start}-{previous}")
        start = previous = number
    return ", ".join(shown)
