"""Builds docs/cli.md from the commands themselves: every command, argument and flag with its help.
Runs by hand (`make docs`); a test calls `render` and compares. Owns docs/cli.md."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main
from generated_page import write_or_check

from infer.cli.app import build_app
from infer.cli.options import COMMON, SAMPLING
from infer.config.flags import flags

VALUES = {int: "INTEGER", float: "NUMBER", Path: "FILE"}
PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
INTRODUCTION = """\
# Command line

Built by `make docs` from the commands in `src/infer/cli`; never edited by hand. `infer COMMAND --help` shows the same.

Every command takes the [common flags](#common-flags); those that compute text take the [sampling flags](#sampling-flags); and
those that use an engine or a server take its [settings as flags](#settings-as-flags). An error is one line on stderr, and the
exit code is 1; a wrong flag exits with 2, Ctrl-C with 130.
"""


def render() -> str:
    """The whole page."""
    root: Any = typer.main.get_command(build_app())
    page = [INTRODUCTION]
    shared: dict[str, Any] = {}
    for path, command in commands(root, "infer"):
        page += [f"## {path}", "", " ".join((command.help or "").split()), ""]
        own, words = [], []
        for parameter in command.params:
            if parameter.name in SAMPLING or parameter.name in COMMON:
                shared[parameter.name] = parameter
            elif parameter.param_type_name == "argument":
                words.append(value_name(parameter))
            elif "__" not in parameter.name:
                own.append(row(parameter))
        page += [f"`{' '.join([path, *words])} [FLAGS]`", ""]
        if own:
            page += ["| flag | meaning |", "| --- | --- |", *own, ""]
        page += [taken(command), ""]
    for title, names in (("Common flags", COMMON), ("Sampling flags", SAMPLING)):
        page += [f"## {title}", "", "| flag | meaning |", "| --- | --- |"]
        page += [*(row(shared[name]) for name in names), ""]
    page += ["## Settings as flags", "", "Every [setting](configuration.md), and the names that vLLM gives some.", ""]
    page += ["| flag | setting |", "| --- | --- |"]
    page += [
        f"| {', '.join(f'`{name}`' for name in (*flag.names, *flag.off_names))} | `{flag.setting}` |"
        for flag in flags()
    ]
    return "\n".join(page) + "\n"


def commands(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every command with the words that call it, groups after their own commands."""
    yield path, group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, f"{path} {name}")


def taken(command: Any) -> str:
    """Which of the shared flags it takes."""
    names = {parameter.name for parameter in command.params}
    sections = list(dict.fromkeys(name.partition("__")[0] for name in names if "__" in name))
    said = ["common"] * (COMMON[0] in names) + ["sampling"] * (SAMPLING[0] in names)
    if sections:
        said.append(f"settings of {', '.join(f'`{section}`' for section in sorted(sections))}")
    return f"Also: {'; '.join(said)}." if said else ""


def row(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    value = "" if option.is_flag else f" `{value_name(option)}`"
    text = " ".join((option.help or "").split()).replace("|", "\\|")
    return f"| {names}{value} | {text} |"


def value_name(parameter: Any) -> Any:
    """What stands for a value."""
    return parameter.metavar or VALUES.get(parameter.type_descriptor.annotation, "TEXT")


def main(arguments: list[str] | None = None) -> int:
    return write_or_check(PAGE, render(), "the commands say", __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
