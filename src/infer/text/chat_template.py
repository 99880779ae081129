"""Chat messages to the model's prompt text, by the checkpoint's own Jinja template and as transformers renders it.

Runs in the request's task, synchronously; owns the compiled templates. Untrusted: see `text.sandbox`.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from infer.errors import InvalidRequestError, ModelError
from infer.plugins.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jinja2 import Template

Message = dict[str, Any]

DEFAULT, TOOL_USE = "default", "tool_use"
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
END_MARK = "\ue000continue\ue001 "
"""Marks the end of the final message while it renders. The space at its end shows whether the template trims."""


class ChatTemplate:
    """`source` is one template, or several by name: "tool_use" serves requests with tools, "default" all others."""

    def __init__(self, source: str | Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        sources = {DEFAULT: source} if isinstance(source, str) else dict(source)
        self.source = "\n".join(sources.values())
        """All of them, to be searched for what they know."""
        self._special_tokens = dict(special_tokens)
        self._templates = {name: _compile(name, text) for name, text in sources.items()}

    def render(
        self,
        /,  # `extra` may hold a `self`
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **extra: Any,
    ) -> str:
        """The prompt text. `extra` reaches the template (as `enable_thinking` or `documents`) over the special tokens.

        `continue_final_message` leaves the last message open, for the model to go on, and adds no generation prompt.
        Content in text parts goes to the template as it is, or joined by newlines if the template prints the list;
        tool-call arguments in JSON text are parsed, unless the template wants the text.
        """
        template = self._choose(tools)
        try:
            chat = _checked_messages(messages)
            variables = {**self._special_tokens, **_plain(extra, "chat_template_kwargs")}
            variables["tools"] = None if tools is None else _plain(list(tools), "tools")
        except RecursionError:
            raise InvalidRequestError("the messages are nested too deeply", parameter="messages") from None
        variables["documents"] = variables.get("documents")
        variables["add_generation_prompt"] = add_generation_prompt and not continue_final_message
        ending = _mark_end(chat) if continue_final_message else None
        text = _render_first_fit(template, _forms(chat), variables)
        return text if ending is None else _cut_at_end(text, ending)

    def _choose(self, tools: Sequence[Mapping[str, Any]] | None) -> Template:
        name = TOOL_USE if tools is not None and TOOL_USE in self._templates else DEFAULT
        if name not in self._templates:
            raise InvalidRequestError(
                f"the model has chat templates named {sorted(self._templates)} but no default: send a rendered prompt",
                parameter="messages",
            )
        return self._templates[name]


def encode_chat(tokenizer: Tokenizer, rendered: str) -> list[int]:
    """Ids of a rendered chat. The template wrote every special token, BOS included, so the tokenizer adds none."""
    return tokenizer.encode(rendered, add_special_tokens=False)


def _compile(name: str, source: str) -> Template:
    from infer.text.sandbox import compile_template  # noqa: PLC0415 - jinja2 loads with the first template

    try:
        return compile_template(source)
    except ValueError as error:
        raise ModelError(f"the model's chat template {name!r} is broken: {error}") from error


def _render_first_fit(template: Template, forms: list[list[Message]], variables: dict[str, Any]) -> str:
    """The first form of the messages that the template takes without an error or printing a list."""
    first_error: InvalidRequestError | None = None
    for form in forms:
        try:
            text = _render(template, {"messages": form, **variables})
        except InvalidRequestError as error:
            first_error = first_error or error
            continue
        lists = [message["content"] for message in form if isinstance(message.get("content"), list)]
        if form is forms[-1] or not any(str(parts) in text for parts in lists):
            return text
    raise first_error or AssertionError("no form of the messages")


def _render(template: Template, variables: dict[str, Any]) -> str:
    from infer.text.sandbox import MAX_SECONDS, check_size, check_time, time_limit  # noqa: PLC0415

    parts: list[str] = []
    size = 0
    try:
        with time_limit(MAX_SECONDS):
            for part in template.generate(variables):
                size += len(part)
                check_size(size)
                check_time()
                parts.append(part)
    except Exception as error:  # a template can raise whatever its expressions raise
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
        where = f" (line {lines[-1]} of the template)" if lines else ""
        reason = str(error) or type(error).__name__
        raise InvalidRequestError(
            f"the model's chat template refuses these messages: {reason}{where}", parameter="messages"
        ) from error
    return "".join(parts)


def _checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """A copy in plain types, without keys that are None (templates would print them), reasoning under all its names."""
    if isinstance(messages, str | Mapping) or not messages:
        raise InvalidRequestError(
            "messages must be a list of at least one message", parameter="messages", value=messages
        )
    chat: list[Message] = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise _bad_message(index, f"is a {type(message).__name__}, not an object", message)
        plain = {key: value for key, value in _plain(message, "messages").items() if value is not None}
        if not isinstance(plain.get("role"), str) or not plain["role"]:
            raise _bad_message(index, "has no role", plain.get("role"))
        _check_content(index, plain.get("content"))
        reasoning = next((plain[name] for name in REASONING_FIELDS if name in plain), None)
        if reasoning is not None:
            plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
        chat.append(plain)
    return chat


def _check_content(index: int, content: Any) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise _bad_message(index, f"has content of type {type(content).__name__}; send text or text parts", content)
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise _bad_message(index, f"has a content part {kind!r}; only parts of type 'text' are supported", kind)


def _bad_message(index: int, problem: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(f"messages[{index}] {problem}", parameter="messages", value=value)


def _plain(value: Any, parameter: str) -> Any:
    """A copy in exact JSON types: templates must not meet objects with methods of their own."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key, parameter): _plain(item, parameter) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, parameter) for item in value]
    raise InvalidRequestError(
        f"{parameter} holds a {type(value).__name__}; send JSON values only", parameter=parameter, value=value
    )


def _forms(chat: list[Message]) -> list[list[Message]]:
    """The same messages in the forms that templates expect, most expressive first."""
    parsed = [_parse_arguments(message) for message in chat]
    forms = [parsed] if parsed == chat else [parsed, chat]
    if any(isinstance(message.get("content"), list) for message in chat):
        forms += [[_join_parts(message) for message in form] for form in forms]
    return forms


def _join_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": "\n".join(part["text"] for part in content)} if isinstance(content, list) else message


def _parse_arguments(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_parse_call(call) for call in calls]}


def _parse_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _mark_end(chat: list[Message]) -> str:
    """Append the mark to the final message (its last text part) and return what it marks the end of."""
    message = chat[-1]
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + END_MARK
        return content
    if isinstance(content, list) and content:
        text: str = content[-1]["text"]
        content[-1]["text"] = text + END_MARK
        return text
    raise InvalidRequestError(
        "continue_final_message: the final message has no text to continue", parameter="continue_final_message"
    )


def _cut_at_end(text: str, ending: str) -> str:
    at = text.rfind(END_MARK.strip())
    if at < 0 or ending.strip() not in text:
        raise InvalidRequestError(
            "continue_final_message: the model's chat template does not show the end of the final message",
            parameter="continue_final_message",
        )
    return text[:at] if text.startswith(END_MARK, at) else text[:at].rstrip()
