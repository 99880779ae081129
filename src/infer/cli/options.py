"""Options that commands share: every setting as a flag, sampling, logging. Turns them into typed values before a command runs.

Flags are derived from `infer.config.flags`, so that a new setting needs no line here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from infer.cli.logs import LEVELS, logging_to
from infer.cli.session import Session
from infer.config.engine import EngineConfig
from infer.config.files import load_config
from infer.config.flags import Flag, flags, nest
from infer.errors import ConfigError
from infer.types import SamplingParams

_SAMPLING: tuple[tuple[str, Any, str], ...] = (
    ("max_tokens", int, "At most this many output tokens (up to the context length)."),
    ("min_tokens", int, "At least this many."),
    ("temperature", float, "0 always takes the likeliest token."),
    ("top_p", float, "Keep the likeliest tokens that together have this probability."),
    ("top_k", int, "Keep this many likeliest tokens; 0 keeps all."),
    ("min_p", float, "Drop tokens less likely than this share of the likeliest."),
    ("repetition_penalty", float, "Above 1 discourages tokens of the prompt and the answer."),
    ("frequency_penalty", float, "Discourages tokens by how often the answer has them."),
    ("presence_penalty", float, "Discourages tokens that the answer has."),
    ("seed", int, "The same seed gives the same answer; drawn, and shown at the end, when absent."),
    ("stop", list[str], "End the answer before this text; may be given several times."),
    ("ignore_eos", bool, "Go on after the model's end token."),
)
_METAVARS: dict[Any, str] = {int: "INTEGER", float: "NUMBER", list[str]: "TEXT"}
SAMPLING = tuple(name for name, _, _ in _SAMPLING)
COMMON = ("config_file", "debug", "log_level", "log_json", "quiet")


def with_options(
    *, sections: tuple[str, ...] | None = None, sampling: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the shared options. `sections` None: all settings but the server's.

    The command's first parameter is the `Session`; where it names them, `config` is the merged `EngineConfig`, `model`
    the positional model reference (checked against --model.ref) and `params` the `SamplingParams` that were given.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        offered = [
            flag for flag in flags() if (flag.section != "api" if sections is None else flag.section in sections)
        ]
        visible = [p for p in own if p.name not in ("config", "params")]

        def wrapper(ctx: typer.Context, **values: Any) -> None:
            session: Session = ctx.obj
            common = {name: values.pop(name) for name in COMMON}
            _apply(session, common)
            with logging_to(session):
                chosen = {flag.setting: values.pop(_parameter(flag)) for flag in offered}
                if sampling:
                    given = {name: values.pop(name) for name, _, _ in _SAMPLING}
                    values["params"] = _sampling_params(given)
                if any(p.name == "config" for p in own):
                    values["config"] = _config(session, chosen, common["config_file"], offered)
                command(session, **values)

        parameters = [inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
        parameters += [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in visible]
        parameters += _sampling_parameters() if sampling else []
        parameters += [_flag_parameter(flag) for flag in offered]
        parameters += _common_parameters()
        wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorate


def with_model(config: EngineConfig, model: str | None) -> EngineConfig:
    """The configuration with a positional model reference put in."""
    if model is None:
        return config
    if "ref" in config.model.model_fields_set and config.model.ref != model:
        raise ConfigError(
            f"two models: {model!r} and model.ref={config.model.ref!r}; name one of them", fields=("model.ref",)
        )
    return config.model_copy(update={"model": config.model.model_copy(update={"ref": model})})


def _apply(session: Session, common: dict[str, Any]) -> None:
    session.debug = session.debug or common["debug"]
    session.log_level = common["log_level"] or session.log_level
    session.log_json = session.log_json or common["log_json"]
    session.quiet = session.quiet or common["quiet"]


def _config(session: Session, chosen: dict[str, Any], file: Path | None, offered: list[Flag]) -> EngineConfig:
    names = {flag.setting: flag.names[0] for flag in offered}
    return load_config(nest(chosen), file or session.environment.config_file, session.environment, names)


def _sampling_params(given: dict[str, Any]) -> SamplingParams:
    # Only what was typed: the checkpoint's own defaults apply to the rest.
    return SamplingParams(**{name: value for name, value in given.items() if value not in (None, [])})


def _option(name: str, kind: Any, *names: str, **info: Any) -> inspect.Parameter:
    annotation = Annotated[kind | None, typer.Option(*names, show_default=False, **info)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _parameter(flag: Flag) -> str:
    return flag.setting.replace(".", "__")


def _flag_parameter(flag: Flag) -> inspect.Parameter:
    if flag.off_names:
        names = [f"{on}/{off}" for on, off in zip(flag.names, flag.off_names, strict=True)]
        return _option(_parameter(flag), bool, *names, help=flag.help)
    return _option(_parameter(flag), str, *flag.names, help=flag.help, metavar=flag.values)


def _sampling_parameters() -> list[inspect.Parameter]:
    made = []
    for name, kind, text in _SAMPLING:
        flag = "--" + name.replace("_", "-")
        if kind is bool:
            flag = f"{flag}/--no-{name.replace('_', '-')}"
        made.append(_option(name, kind, flag, help=text, metavar=_METAVARS.get(kind)))
    return made


def _common_parameters() -> list[inspect.Parameter]:
    kind = inspect.Parameter.KEYWORD_ONLY
    switches = (
        ("debug", "--debug", "Show the traceback with an error."),
        ("log_json", "--log-json", "Logs as one JSON object per line."),
        ("quiet", "--quiet", "No progress, notes or statistics on stderr."),
    )
    made = [
        inspect.Parameter(
            "config_file",
            kind,
            default=None,
            annotation=Annotated[
                Path | None,
                typer.Option(
                    "--config", metavar="FILE", help="Settings from a YAML, TOML or JSON file.", show_default=False
                ),
            ],
        ),
        _option("log_level", str, "--log-level", metavar="LEVEL", help=f"One of {', '.join(LEVELS)}."),
    ]
    for name, flag, text in switches:
        option = typer.Option(flag, help=text, show_default=False)
        made.append(inspect.Parameter(name, kind, default=False, annotation=Annotated[bool, option]))
    return made
