"""The only user of `os.environ`. Called by the command line and `EngineConfig.from_env()`, never at import.

Engine settings are `INFER_SECTION__FIELD`; the names in `_OWN` are about the process, not the engine.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infer.errors import ConfigError

PREFIX = "INFER_"
_OWN = ("INFER_CACHE_DIR", "INFER_OFFLINE", "INFER_LOG_LEVEL", "INFER_LOG_JSON", "INFER_DEBUG", "INFER_CONFIG")
_SHORT = {"INFER_MODEL": ("model", "ref"), "INFER_PLATFORM": ("platform", "name")}
"""Settings with a shorter name."""
_REFERENCE_PREFIX = "DYN_GENERATION_ARTIFACT_"
"""Settings of NVIDIA Dynamo's generation artifacts: same names behind another prefix."""
logger = logging.getLogger("infer.config")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What the environment says."""

    settings: dict[str, Any]
    """Nested engine settings, as text: `EngineConfig(**settings)` parses and checks them."""
    names: dict[str, str]
    """Dotted setting -> the variable it came from, for messages."""
    cache_dir: Path
    offline: bool
    hub_token: str | None
    log_level: str | None
    log_json: bool
    debug: bool
    config_file: Path | None


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Read it now. `environ` defaults to the process's. An empty `INFER_*` value counts as absent."""
    environ = os.environ if environ is None else environ
    settings: dict[str, Any] = {}
    names: dict[str, str] = {}
    for variable in sorted(environ):
        if variable.startswith(_REFERENCE_PREFIX):
            ours = f"{PREFIX}ARTIFACTS__{variable.removeprefix(_REFERENCE_PREFIX)}"
            logger.warning("%s is a variable of another engine and has no effect here; set %s", variable, ours)
        if not variable.startswith(PREFIX) or variable in _OWN or not environ[variable]:
            continue
        path = _SHORT.get(variable) or variable.removeprefix(PREFIX).lower().split("__")
        if len(path) == 1:
            _refuse_misspelling(variable)  # a name of another kind, such as a test's own, is nobody's error
            continue
        if not all(path):
            raise ConfigError(f"{variable}: write INFER_SECTION__FIELD, as in INFER_SCHEDULER__MAX_NUM_SEQS")
        node = settings
        for part in path[:-1]:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ConfigError(f"{variable} contradicts {PREFIX}{part.upper()}; unset one of them")
        setting, value = ".".join(path), _value(variable, environ[variable])
        if node.setdefault(path[-1], value) != value:
            other = next(name for known, name in names.items() if f"{known}.".startswith(f"{setting}."))
            raise ConfigError(f"{variable} contradicts {other}: both set {setting}; unset one of them")
        names[setting] = variable
    config_file = environ.get("INFER_CONFIG")
    return Environment(
        settings=settings,
        names=names,
        cache_dir=cache_directory(environ),
        offline=_flag(environ, "INFER_OFFLINE") or _flag(environ, "HF_HUB_OFFLINE"),
        hub_token=environ.get("HF_TOKEN") or environ.get("HUGGING_FACE_HUB_TOKEN") or None,
        log_level=environ.get("INFER_LOG_LEVEL") or None,
        log_json=_flag(environ, "INFER_LOG_JSON"),
        debug=_flag(environ, "INFER_DEBUG"),
        config_file=Path(config_file) if config_file else None,
    )


def cache_directory(environ: Mapping[str, str] | None = None) -> Path:
    """`INFER_CACHE_DIR`, else the platform's cache directory with `infer` below it."""
    environ = os.environ if environ is None else environ
    stated = environ.get("INFER_CACHE_DIR")
    if stated:
        return Path(stated).expanduser().absolute()
    if sys.platform == "darwin":
        return Path("~/Library/Caches/infer").expanduser()
    base = environ.get("XDG_CACHE_HOME")
    # The XDG specification: a relative path there is to be ignored.
    root = Path(base) if base and Path(base).is_absolute() else Path("~/.cache").expanduser()
    return root / "infer"


def let_idle_threads_sleep() -> None:
    """For a process that is ours (the command `infer`), before torch is loaded: OpenMP threads that wait give up their core.

    By default they spin. With another busy process on the machine, or our own event loop, that stops the threads that
    have work: measured on 2 busy cores, a step took over 20 times as long. A library must not decide this for its
    application; the environment wins.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _refuse_misspelling(variable: str) -> None:
    near = difflib.get_close_matches(variable, (*_OWN, *_SHORT), n=1, cutoff=0.85)
    if near:
        raise ConfigError(f"unknown environment variable {variable}; did you mean {near[0]}?")


def _value(variable: str, text: str) -> Any:
    if text[0] not in "[{":
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{variable}={text!r} looks like JSON and is not: {error}") from None


def _flag(environ: Mapping[str, str], variable: str) -> bool:
    text = environ.get(variable, "").strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ConfigError(f"{variable}={text!r}: write 1 or 0")
