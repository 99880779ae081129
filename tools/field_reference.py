"""Builds docs/fields.md from the tables that the server checks requests by, so that the list cannot drift from the code.
Runs by hand (`make docs`); a test calls `render` and compares. Owns docs/fields.md."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from infer.api import generate, ollama_schemas, render_schemas, sglang_schemas, utility
from infer.api.anthropic import schemas as anthropic_schemas
from infer.api.fields import Body
from infer.api.openai import batches, schemas
from infer.api.openai.responses.schemas import RESPONSES
from infer.api.reply_fields import REPLY_FIELDS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "fields.md"

BODIES: tuple[Body, ...] = (
    schemas.CHAT,
    schemas.COMPLETION,
    RESPONSES,
    batches.BATCH,
    generate.GENERATE,
    generate.SAMPLING,
    sglang_schemas.GENERATE,
    sglang_schemas.SAMPLING,
    render_schemas.DERENDER,
    utility.TOKENIZE,
    utility.DETOKENIZE,
    anthropic_schemas.MESSAGES,
    anthropic_schemas.COUNT_TOKENS,
    *anthropic_schemas.BLOCKS.values(),
    anthropic_schemas.TOOL,
    anthropic_schemas.TOOL_CHOICE,
    anthropic_schemas.THINKING,
    anthropic_schemas.OUTPUT_CONFIG,
    ollama_schemas.CHAT,
    ollama_schemas.GENERATE,
    ollama_schemas.OPTIONS,
    ollama_schemas.SHOW,
    utility.RESET,
    utility.ABORT,
)
"""Every body, in the order of the page."""

INTRODUCTION = """\
# Fields of requests and replies

Built by `make docs` from the tables that the server checks requests by; never edited by hand. `/openapi.json` of a running
server says the same to programs.

A request field is *honoured*, accepted with a *notice* in the header `x-infer-notice`, or *refused* with 400 naming it. What is
not listed is refused, too, unless the operator sets `api.unknown_fields` to `notice`. JSON null counts as absent, and values of
refused fields that ask for nothing pass.
"""


def render_page() -> str:
    """The whole page."""
    page = [INTRODUCTION, "## Requests", ""]
    for body in BODIES:
        page += _body(body)
    page += [
        "## Replies",
        "",
        "Replies have the fields of the API that the route is made after, and these. The `openai` clients keep them: in Python",
        "`reply.choices[0].seed`.",
        "",
    ]
    for route, fields in REPLY_FIELDS.items():
        page += [f"### {route}", "", "| field | where | asked by | meaning |", "| --- | --- | --- | --- |"]
        for field in fields:
            asked = f"`{field.asked_by}`" if field.asked_by else ""
            page.append(f"| `{field.name}` | {', '.join(field.places)} | {asked} | {_cell(field.note)} |")
        page.append("")
    return "\n".join(page)


def _body(body: Body) -> Iterator[str]:
    yield from (f"### {body.name}", "", "| field | treatment | meaning, or why not |", "| --- | --- | --- |")
    for rule in body.rules():
        yield f"| `{rule.name}` | {rule.treatment} | {_cell(rule.note)} |"
    yield ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the page is not current")
    page = render_page()
    if not parser.parse_args().check:
        PAGE.write_text(page, "utf-8")
    elif not PAGE.exists() or PAGE.read_text("utf-8") != page:
        sys.exit(f"{PAGE.name} is not current; run `make docs`")


if __name__ == "__main__":
    main()
