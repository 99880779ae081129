"""`infer artifact inspect|verify|plot|export FILE`: look into an artifact, check it, draw it, hand it to a trainer."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.table import Table

from infer.cli.session import Session
from infer.config.units import format_bytes
from infer.errors import ConfigError

if TYPE_CHECKING:
    from infer.artifacts import ArtifactReader

FORMATS = ("vllm", "prime-rl", "skyrl", "sglang", "miles", "nemo-rl", "verl", "json")
File = Annotated[str, typer.Argument(metavar="FILE", help="A path or any fsspec URL (s3://..., memory://...).")]
ChoiceIndex = Annotated[
    int | None, typer.Option("--choice", help="Index of the choice; needed where there are several.")
]
Parents = Annotated[
    list[str] | None,
    typer.Option(
        "--parent", metavar="FILE", help="Artifact that a delta continues; again for the parent's own parent."
    ),
]
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
        session.write(json.dumps(_described(file, reader), indent=1) + "\n")
        return
    session.write(f"{reader.format}, {reader.codec}, {format_bytes(reader.actual_bytes)}\n")
    if reader.parent is not None:
        first = reader.parent.token_count
        session.write(f"continues {reader.parent.sha256.hex()}, whose {first} tokens are not repeated\n")
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
    if reader.provenance is not None:
        session.table(_field_table(reader))
        for name, value in _leaves(_builtins(reader.provenance)):
            session.write(f"{name}: {value}\n")


def _field_table(reader: ArtifactReader) -> Table:
    table = Table("field", "choices", "scope", "from", "values", "raw", "stored", box=None, pad_edge=False)
    for one in reader.fields():
        table.add_row(
            one.name if one.known else f"{one.name} (unknown here)",
            _ranges(one.choices),
            one.scope,
            str(one.row_start),
            f"{' x '.join(map(str, one.shape))} {one.dtype}",
            format_bytes(one.raw_bytes),
            format_bytes(one.stored_bytes),
        )
    return table


def _described(file: str, reader: ArtifactReader) -> dict[str, Any]:
    """What is known without reading on, as JSON values."""
    shown: dict[str, Any] = {
        "file": file,
        "format": reader.format,
        "codec": reader.codec,
        "actual_bytes": reader.actual_bytes,
        "choices": [dataclasses.asdict(choice) for choice in reader.choices],
        "fields": [dataclasses.asdict(one) for one in reader.fields()],
    }
    if reader.provenance is not None:
        shown["provenance"] = _builtins(reader.provenance)
    if reader.parent is not None:
        shown["parent"] = _builtins(reader.parent)
    return shown


def _builtins(value: Any) -> dict[str, Any]:
    """A part of a header; digests in hex."""
    made: dict[str, Any] = msgspec.to_builtins(value, builtin_types=(bytes,))
    return {name: item.hex() if isinstance(item, bytes) else item for name, item in made.items()}


def _leaves(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


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
        session.note(
            "every digest inside holds; only a receipt says that this is the object that was delivered"
            if reader.format == "generation_artifact_v2"
            else "well formed; without the receipt's digest a changed value cannot be noticed"
        )


def plot(
    ctx: typer.Context, file: File, choice: ChoiceIndex = None, parent: Parents = None, output: Output = None
) -> None:
    """Draw expert load per layer and experts per token and layer: PNG if the output is called so, else SVG."""
    from infer.cli.route_plot import draw_routes, draw_routes_png  # noqa: PLC0415  numpy

    if output is not None and output.suffix.lower() not in (".png", ".svg"):
        raise ConfigError(f"--output {output}: a picture ends in .png or .svg")
    session, reader = _open(ctx, file, parent)
    routes = reader.routes(_index(reader, choice))
    if output is not None and output.suffix.lower() == ".png":
        output.write_bytes(draw_routes_png(routes))
    else:
        _emit(session, output, draw_routes(routes))


def export(
    ctx: typer.Context,
    file: File,
    to: Annotated[str, typer.Option("--to", metavar="|".join(FORMATS), help="Whose encoding.")],
    choice: ChoiceIndex = None,
    num_hidden_layers: Annotated[
        int | None, typer.Option("--num-hidden-layers", help="Fill up to all layers; left out: MoE layers only.")
    ] = None,
    parent: Parents = None,
    output: Output = None,
) -> None:
    """Write the routes in the encoding that a trainer decodes, or everything as JSON."""
    session, reader = _open(ctx, file, parent)
    if to not in FORMATS:
        raise ConfigError(f"--to {to}: there is no such encoding; one of {', '.join(FORMATS)}")
    index = _index(reader, choice)
    found = next(one for one in reader.artifact().choices if one.choice_index == index)
    if to == "json":
        _emit(session, output, json.dumps(_plain(found) | _other_fields(reader, index)) + "\n")
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


def _index(reader: ArtifactReader, choice: int | None) -> int:
    """Of the choice that is meant. Raises `ConfigError`."""
    known = [one.choice_index for one in reader.choices]
    if choice is None and len(known) > 1:
        raise ConfigError(f"there are choices {known[:64]}: say which one with --choice, such as --choice {known[0]}")
    if choice is not None and choice not in known:
        raise ConfigError(f"--choice {choice}: there is no such choice; there are {known[:64]}")
    return known[0] if choice is None else choice


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


def _other_fields(reader: ArtifactReader, index: int) -> dict[str, Any]:
    """What only the open format holds: `fields`, by name."""
    names = {one.name for one in reader.fields() if index in one.choices}
    made = {}
    for name in sorted(names - {"token_ids", "moe_routes", "selected_logprobs"}):
        rows = reader.field(name, index)
        arrays = {"values": rows.values, "offsets": rows.offsets, "status": rows.status, **rows.extra}
        made[name] = {
            "row_start": rows.row_start,
            "attributes": dict(rows.attributes),
            **{key: array.tolist() for key, array in arrays.items() if array is not None},
        }
    return {"fields": made} if made else {}


def _open(ctx: typer.Context, file: str, parents: list[str] | None = None) -> tuple[Session, ArtifactReader]:
    session: Session = ctx.obj
    return session, open_with_parents(file, parents)


def open_with_parents(file: str, parents: list[str] | None) -> ArtifactReader:
    """An artifact, and those that it continues: its own parent first."""
    from infer.artifacts import open_artifact  # noqa: PLC0415  numpy

    parent: ArtifactReader | None = None
    for name in reversed(parents or []):  # the eldest first
        parent = open_artifact(name, parent=parent)
    return open_artifact(file, parent=parent)


def _receipt(path: Path, sha256: str | None) -> tuple[str, int | None]:
    """Digest and size that a receipt states; a whole response around it is fine."""
    try:
        receipt = json.loads(path.read_text("utf-8"))
        for key in ("nvext", "generation_artifact"):
            receipt = receipt.get(key, receipt)
        digest, size = receipt.get("sha256"), receipt.get("actual_bytes")
    except AttributeError:
        raise ConfigError(
            f"--receipt {path} is no JSON object; it is the response of the server, its generation_artifact, or "
            "receipt.to_json() of a program"
        ) from None
    except (OSError, ValueError) as error:
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
