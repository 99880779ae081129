"""`infer kernels build --out DIR`: native kernels for machines without a compiler (`platform.kernels`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from infer.cli.options import with_options
from infer.cli.progress import ProgressDisplay
from infer.cli.session import Session
from infer.config.engine import EngineConfig
from infer.errors import ConfigError
from infer.plugins.manager import build_registry


def build_kernels() -> typer.Typer:
    app = typer.Typer(name="kernels", no_args_is_help=True, help="Native kernels, built beforehand.")
    app.callback()(_group)  # keeps `build` a command of its own
    app.command("build")(build)
    return app


def _group() -> None:
    """Native kernels, built beforehand."""


@with_options(sections=("plugins",))
def build(
    session: Session,
    *,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the libraries go.")],
    level: Annotated[
        list[str] | None, typer.Option("--level", help="One instruction set; again for more. Left out: all.")
    ] = None,
    platform: Annotated[str, typer.Option("--platform", help="Platform plugin whose kernels to build.")] = "cpu",
    config: EngineConfig,
) -> None:
    """Build libraries into a directory, for machines that have no compiler."""
    registry = build_registry(config.plugins)
    spec = registry.get("platform", platform)
    if spec.prebuild is None:
        raise ConfigError(f"platform {platform!r} has no kernels that can be built beforehand")
    with ProgressDisplay(session) as progress:
        files: list[Path] = registry.create("platform", platform, out, tuple(level or ()), progress, field="prebuild")
    for file in files:
        session.write(f"{file}\n")
