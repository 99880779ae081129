"""A request's tools as a grammar: the model must call, may only call in the schemas, or may call or answer in a form.

Pure; builds structural tags (see `SamplingParams.structured_output`) in a parser's own way of writing calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infer.plugins.parser import CallSyntax, ParserSpec

Tag = dict[str, Any]
Tools = Mapping[str, Any]
"""Function name -> JSON schema of its arguments."""


def syntax_of(spec: ParserSpec, template: str) -> CallSyntax | None:
    """How a grammar writes calls for this parser and this chat template; None: it cannot."""
    return next((syntax for syntax in spec.call_syntaxes if syntax.fingerprint in template), None)


def must_call(syntax: CallSyntax, tools: Tools, *, several: bool) -> Tag:
    """Calls and nothing else."""
    return _whole(_calls(syntax, tools, several))


def may_call(syntax: CallSyntax, tools: Tools, *, several: bool) -> Tag:
    """Free text in which every call fits its schema. The syntax must have a trigger."""
    if syntax.section_begin:
        tags = [_tag(syntax.section_begin, _separated(syntax, tools, several), syntax.section_end)]
    else:
        tags = _tags(syntax, tools)
    return _whole(
        {
            "type": "triggered_tags",
            "triggers": [syntax.trigger],
            "tags": tags,
            "stop_after_first": not several or bool(syntax.section_begin),
            "excludes": list(syntax.excludes),
        }
    )


def call_or_form(syntax: CallSyntax, tools: Tools, *, several: bool, form: Mapping[str, Any] | bool) -> Tag:
    """Calls and nothing else, or JSON of the schema `form`. The syntax must have a trigger: JSON is not told from JSON."""
    answer = {"type": "json_schema", "json_schema": form}
    return _whole({"type": "or", "elements": [_calls(syntax, tools, several), answer]})


def _whole(part: Tag) -> Tag:
    return {"type": "structural_tag", "format": part}


def _calls(syntax: CallSyntax, tools: Tools, several: bool) -> Tag:
    calls = _separated(syntax, tools, several)
    around = [{"type": "const_string", "value": text} for text in (syntax.section_begin, syntax.section_end)]
    return {"type": "sequence", "elements": [around[0], calls, around[1]]} if syntax.section_begin else calls


def _separated(syntax: CallSyntax, tools: Tools, several: bool) -> Tag:
    return {
        "type": "tags_with_separator",
        "tags": _tags(syntax, tools),
        "separator": syntax.separator,
        "at_least_one": True,
        "stop_after_first": not several,
    }


def _tags(syntax: CallSyntax, tools: Tools) -> list[Tag]:
    return [
        _tag(
            f"{syntax.before_name}{name}{syntax.before_arguments}",
            {"type": "json_schema", "json_schema": schema},
            syntax.end,
        )
        for name, schema in tools.items()
    ]


def _tag(begin: str, content: Tag, end: str) -> Tag:
    return {"type": "tag", "begin": begin, "content": content, "end": end}
