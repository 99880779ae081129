"""A conversation with tools for a chat template that knows none: tools, calls and results as words.

Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from infer.plugins.parser import CallSyntax

Message = dict[str, Any]
_CALLS = "tool_calls"


def told_in_words(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], syntax: CallSyntax
) -> list[Message]:
    """Tools go to the end of the system message; results of tools become the user's, those that follow each other one."""
    told: list[Message] = []
    after_result = False
    for message in messages:
        is_result = message.get("role") == "tool"
        if is_result:
            text = f"<tool_response>\n{_text(message.get('content'))}\n</tool_response>"
            if after_result:
                told[-1]["content"] += f"\n{text}"
            else:
                told.append({"role": "user", "content": text})
        elif message.get(_CALLS):
            rest = {key: value for key, value in message.items() if key != _CALLS}
            told.append({**rest, "content": _text(message.get("content")) + _written(message[_CALLS], syntax)})
        else:
            told.append(dict(message))
        after_result = is_result
    if not tools:
        return told
    words = _introduction(tools, syntax)
    if told and told[0].get("role") == "system":
        told[0]["content"] = f"{_text(told[0].get('content'))}\n\n{words}"
    else:
        told.insert(0, {"role": "system", "content": words})
    return told


def _introduction(tools: Sequence[Mapping[str, Any]], syntax: CallSyntax) -> str:
    listed = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    form = syntax.section_begin + _call(syntax, "NAME", "{ARGUMENTS}") + syntax.section_end
    return (
        f"You can call these functions, one JSON object a line:\n<tools>\n{listed}\n</tools>\n"
        f"To call one, write nothing but this, with the arguments as JSON:\n{form}"
    )


def _written(calls: Any, syntax: CallSyntax) -> str:
    """Calls of the history as the model should have written them."""
    written = []
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            arguments = function.get("arguments") or "{}"
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            written.append(_call(syntax, str(function.get("name")), arguments))
    return syntax.section_begin + syntax.separator.join(written) + syntax.section_end if written else ""


def _call(syntax: CallSyntax, name: str, arguments: str) -> str:
    return f"{syntax.before_name}{name}{syntax.before_arguments}{arguments}{syntax.end}"


def _text(content: Any) -> str:
    """Text, or text parts; what is neither is for the template to refuse."""
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)
