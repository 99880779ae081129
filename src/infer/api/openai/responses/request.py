"""A Responses request as the chat request that it amounts to: plans, sampling and prompts are made by chat's own code.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from infer.api.openai.responses.schemas import ResponsesBody
from infer.api.openai.schemas import ChatBody
from infer.errors import InvalidRequestError, shown

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
_TOOL_FIELDS = ("type", "name", "description", "parameters", "strict")
_FORMAT_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_OUR_NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "reasoning_effort": "reasoning",
    "response_format": "text",
    "thinking_budget": "thinking_token_budget",
}
"""Chat's name, or the engine's, of what this route calls otherwise."""


@contextmanager
def client_names(body: ResponsesBody) -> Iterator[None]:
    """Refusals name the fields of this route."""
    try:
        yield
    except InvalidRequestError as error:
        name = error.parameter
        if name == "structured_output":
            error.parameter = "tools" if body.tools and text_format(body)["type"] == "text" else "text"
        elif name == "tools":
            raise InvalidRequestError(
                str(error).replace("].function.", "]."), parameter=name, value=error.value
            ) from None
        else:
            error.parameter = _OUR_NAMES.get(name, name)
        raise


def chat_body(body: ResponsesBody, messages: Sequence[Mapping[str, Any]]) -> ChatBody:
    """The chat request. Raises `InvalidRequestError` in the words of this route."""
    tools = _chat_tools(body.tools)
    choice, allowed = _choice(body.tool_choice)
    if allowed is not None:
        names = [tool["function"].get("name") for tool in tools]
        for name in allowed:
            if name not in names:
                raise _bad(
                    "tool_choice", f"tool_choice allows {shown(name)}, and tools has {', '.join(map(str, names))}"
                )
        tools = [tool for tool in tools if tool["function"].get("name") in allowed]
    logprobs = wants_logprobs(body)
    return ChatBody(
        messages=[dict(message) for message in messages],
        model=body.model,
        stream=body.stream,
        tools=tools or None,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_chat_format(text_format(body)),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        logprobs=logprobs,
        top_logprobs=body.top_logprobs if logprobs else None,
        chat_template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=True,
        continue_final_message=False,
        priority=body.priority,
        cache_salt=body.cache_salt,
        deadline=body.deadline,
    )


def notices(body: ResponsesBody) -> Iterator[str]:
    """What is accepted and not done. Raises `InvalidRequestError` for what is refused."""
    for name in body.include or ():
        if name == ENCRYPTED:
            yield "include: nothing is encrypted; reasoning comes as content, which can be sent back"
        elif name != LOGPROBS:
            raise _bad("include", f"include={shown(name)} is not supported; known are {LOGPROBS}, {ENCRYPTED}")
    reasoning, text = body.reasoning, body.text
    if reasoning is not None and (reasoning.summary or reasoning.generate_summary):
        yield "reasoning.summary: none is made; the reasoning itself comes as content"
    if text is not None and text.verbosity not in (None, "medium"):
        yield "text.verbosity: has no effect here"
    if body.stream_options is not None:
        if not body.stream:
            raise _bad("stream_options", "stream_options need stream=true")
        if body.stream_options.include_obfuscation:
            yield "stream_options.include_obfuscation: events are not padded"


def wants_logprobs(body: ResponsesBody) -> bool:
    return LOGPROBS in (body.include or ()) or bool(body.top_logprobs)


def text_format(body: ResponsesBody) -> dict[str, Any]:
    return {"type": "text"} if body.text is None or body.text.format is None else body.text.format


def told_back(body: ResponsesBody) -> dict[str, Any]:
    """What the response object repeats of the request."""
    reasoning, text = body.reasoning, body.text
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "text": {"format": text_format(body), "verbosity": "medium" if text is None else text.verbosity or "medium"},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [{**tool, "strict": tool.get("strict") is True} for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled",
    }


def _chat_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Names and schemas are checked by chat."""
    found = []
    for index, tool in enumerate(tools or ()):
        if tool.get("type") != "function":
            raise _bad("tools", f'tools[{index}] has type {shown(tool.get("type"))}; only "function" is known')
        odd = next((name for name, value in tool.items() if name not in _TOOL_FIELDS and value), None)
        if odd is not None:
            raise _bad("tools", f"tools[{index}].{odd[:100]} is not supported; known are {', '.join(_TOOL_FIELDS)}")
        function = {name: tool[name] for name in _TOOL_FIELDS[1:] if tool.get(name) is not None}
        found.append({"type": "function", "function": function})
    return found


def _choice(value: str | dict[str, Any] | None) -> tuple[str | dict[str, Any] | None, list[str] | None]:
    """(tool_choice of chat, names of the tools that are shown; None: all)."""
    if value is None or value in ("none", "auto", "required"):
        return value, None
    if isinstance(value, dict):
        kind, name, mode, tools = (value.get(key) for key in ("type", "name", "mode", "tools"))
        if kind == "function" and isinstance(name, str) and set(value) <= {"type", "name"}:
            return {"type": "function", "function": {"name": name}}, None
        known = set(value) <= {"type", "mode", "tools"}
        if known and kind == "allowed_tools" and mode in ("auto", "required") and isinstance(tools, list) and tools:
            return mode, [_allowed(tool, index) for index, tool in enumerate(tools)]
    raise _bad(
        "tool_choice",
        f'tool_choice={shown(value)} is not "none", "auto", "required", {{"type": "function", "name": ...}} or {{"type": '
        '"allowed_tools", "mode": "auto" or "required", "tools": [...]}',
    )


def _allowed(tool: Any, index: int) -> str:
    name = None
    if isinstance(tool, Mapping) and tool.get("type") == "function" and set(tool) <= {"type", "name"}:
        name = tool.get("name")
    if not isinstance(name, str):
        raise _bad(
            "tool_choice", f'tool_choice.tools[{index}]={shown(tool)} is not {{"type": "function", "name": ...}}'
        )
    return name


def _chat_format(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """`response_format` of chat."""
    kind = given.get("type")
    known = {
        "text": {"type"},
        "json_object": {"type"},
        "json_schema": {"type", "name", "schema", "strict", "description"},
    }
    if not isinstance(kind, str) or kind not in known:
        raise _bad("text", f"text.format.type={shown(kind)} is not one of {', '.join(known)}")
    odd = next((name for name, value in given.items() if name not in known[kind] and value is not None), None)
    if odd is not None:
        raise _bad("text", f"text.format has no field {shown(odd)}; {kind} has {', '.join(sorted(known[kind]))}")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    name, schema = given.get("name"), given.get("schema")
    if not isinstance(name, str) or not _FORMAT_NAME.fullmatch(name):
        raise _bad("text", f"text.format.name={shown(name)} is not 1 to 64 letters, digits, underscores, dashes")
    if not isinstance(schema, dict):
        raise _bad("text", f"text.format.schema={shown(schema)} is not a JSON schema")
    if not isinstance(given.get("strict"), bool | None):
        raise _bad("text", f"text.format.strict={shown(given['strict'])} is not true or false")
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}


def _bad(parameter: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(message, parameter=parameter)
