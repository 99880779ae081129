"""Input items of a response: checked, put in the form in which they are kept, and told as chat messages.

Pure; knows OpenAI's shapes of items, not how a model reads a conversation.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from infer.errors import InvalidRequestError, shown

Item = dict[str, Any]
MAX_ITEMS = 16_384
"""Of one request: each is at least some tokens, and no context holds more."""
STATUSES = ("in_progress", "completed", "incomplete")
"""What clients send back of an item; a conversation reads the same with each."""
ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a part -> where its text is."""
_PART_EXTRAS = ("annotations", "logprobs", "parsed")
"""What parts of earlier answers carry and no model is shown."""
_FIELDS = {
    "message": ("role", "content", "phase"),
    "function_call": ("call_id", "name", "arguments", "parsed_arguments"),
    "function_call_output": ("call_id", "output", "name"),
    "reasoning": ("content", "summary", "encrypted_content"),
}
_PREFIX = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def read_items(given: str | Sequence[Mapping[str, Any]], notices: list[str]) -> list[Item]:
    """As they are kept: each with its type, an id, a status, and texts as parts. Raises `InvalidRequestError`."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not given:
        raise _bad("input is empty: send text, or at least one item")
    if len(given) > MAX_ITEMS:
        raise _bad(f"input has {len(given)} items, more than {MAX_ITEMS}")
    read: list[Item] = []
    seen: set[str] = set()
    for index, item in enumerate(given):
        read.append(_item(item, f"input[{index}]", notices))
        own = read[-1]["id"]
        if own in seen:  # pages of items go on behind an id
            raise _bad(f"input[{index}].id={shown(own)} is there twice")
        seen.add(own)
    return read


def _item(item: Mapping[str, Any], where: str, notices: list[str]) -> Item:
    kind = item.get("type", "message" if "role" in item else None)
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise _bad(f"{where}.type={shown(kind)} is not supported; known are {', '.join(_FIELDS)}")
    odd = _odd(item, ("type", "id", "status", *_FIELDS[kind]))
    if odd is not None:
        raise _bad(f"{where} has no field {shown(odd)}; a {kind} has {', '.join(_FIELDS[kind])}")
    if item.get("status") not in (None, *STATUSES):
        raise _bad(f"{where}.status={shown(item['status'])} is not one of {', '.join(STATUSES)}")
    own = item.get("id")
    if own is not None and not isinstance(own, str):
        raise _bad(f"{where}.id={shown(own)} is not text")
    read = {"id": own or f"{_PREFIX[kind]}_{uuid.uuid4().hex}", "type": kind, "status": "completed"}
    return read | _READERS[kind](item, where, notices)


def _message(item: Mapping[str, Any], where: str, notices: list[str]) -> Item:
    role = item.get("role")
    if role not in ROLES:
        raise _bad(f"{where}.role={shown(role)} is not one of {', '.join(ROLES)}")
    if item.get("phase") is not None:
        notices.append("input: phase is not shown to the model")
    kind = "output_text" if role == "assistant" else "input_text"
    return {"role": role, "content": _parts(item.get("content"), f"{where}.content", kind)}


def _parts(content: Any, where: str, kind: str) -> list[Item]:
    """Text, or parts of text, as parts of that kind."""
    if isinstance(content, str):
        content = [{"type": kind, "text": content}]
    if not isinstance(content, list):
        raise _bad(f"{where}={shown(content)} is neither text nor a list of parts")
    read = []
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        given = part.get("type") if isinstance(part, Mapping) else part
        if not isinstance(part, Mapping) or not isinstance(given, str) or given not in _TEXT_PARTS:
            raise _bad(f"{place} is of type {shown(given)}; infer takes text only: {', '.join(_TEXT_PARTS)}")
        name = _TEXT_PARTS[given]
        odd = _odd(part, ("type", name, *_PART_EXTRAS))
        if odd is not None:
            raise _bad(f"{place} has no field {shown(odd)}")
        made: Item = {"type": kind, "text": _text(part.get(name), f"{place}.{name}")}
        read.append(made | ({"annotations": []} if kind == "output_text" else {}))
    return read


def _call(item: Mapping[str, Any], where: str, notices: list[str]) -> Item:
    call_id, name = _named(item, "call_id", where), _named(item, "name", where)
    return {"call_id": call_id, "name": name, "arguments": _text(item.get("arguments"), f"{where}.arguments")}


def _result(item: Mapping[str, Any], where: str, notices: list[str]) -> Item:
    output = item.get("output")
    read = output if isinstance(output, str) else _parts(output, f"{where}.output", "input_text")
    return {"call_id": _named(item, "call_id", where), "output": read}


def _reasoning(item: Mapping[str, Any], where: str, notices: list[str]) -> Item:
    if item.get("encrypted_content") is not None:
        raise _bad(f"{where}.encrypted_content cannot be read here; send the reasoning as content")
    content = _listed(item.get("content"), f"{where}.content", "reasoning_text")
    summary = _listed(item.get("summary"), f"{where}.summary", "summary_text")
    if summary and not content:
        notices.append("input: a summary of reasoning is not shown to the model")
    return {"content": content, "summary": summary}


def _listed(parts: Any, where: str, kind: str) -> list[Item]:
    if parts is None:
        return []
    if not isinstance(parts, list):
        raise _bad(f"{where}={shown(parts)} is not a list of parts")
    for index, part in enumerate(parts):
        if not isinstance(part, Mapping) or part.get("type") != kind:
            raise _bad(f"{where}[{index}]={shown(part)} is not a part of type {kind!r}")
        odd = _odd(part, ("type", "text"))
        if odd is not None:
            raise _bad(f"{where}[{index}] has no field {shown(odd)}")
    return [
        {"type": kind, "text": _text(part.get("text"), f"{where}[{index}].text")} for index, part in enumerate(parts)
    ]


_READERS: Mapping[str, Callable[[Mapping[str, Any], str, list[str]], Item]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _result,
    "reasoning": _reasoning,
}


def _odd(given: Mapping[str, Any], known: Sequence[str]) -> str | None:
    """A field that asks for something nobody knows; null asks for nothing."""
    return next((name for name, value in given.items() if value is not None and name not in known), None)


def _named(item: Mapping[str, Any], field: str, where: str) -> str:
    value = item.get(field)
    if not isinstance(value, str) or not value:
        raise _bad(f"{where}.{field}={shown(value)} is not a name")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _bad(f"{where}={shown(value)} is not text")
    return value


def _bad(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, parameter="input")


# -- the conversation --------------------------------------------------------------------------------------------------


def chat_messages(items: Sequence[Item], instructions: str | None) -> list[dict[str, Any]]:
    """The same conversation as chat has it. Raises `InvalidRequestError` for a result of a call that nobody made, and
    where nothing is left to show."""
    told: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    names: dict[str, str] = {}
    turn = _Turn()
    for item in items:
        kind = item["type"]
        if kind == "reasoning":
            turn.add_reasoning(item, told)
        elif kind == "function_call":
            names[item["call_id"]] = item["name"]
            turn.add_call(item)
        elif kind == "message" and item["role"] == "assistant":
            turn.add_text(_joined(item["content"]), told)
        else:
            turn.end(told)
            if kind == "message":
                told.append({"role": item["role"], "content": _joined(item["content"])})
                continue
            call_id, output = item["call_id"], item["output"]
            if call_id not in names:
                raise _bad(f"no function_call has call_id={shown(call_id)}, of which there is a function_call_output")
            text = output if isinstance(output, str) else _joined(output)
            told.append({"role": "tool", "tool_call_id": call_id, "name": names[call_id], "content": text})
    turn.end(told)
    if not told:
        raise _bad("input says nothing that a model could read: send a message")
    return told


def _joined(parts: Sequence[Item]) -> str:
    return "\n".join(part["text"] for part in parts)


class _Turn:
    """The items of one answer, which are one message in chat: reasoning, then text, then calls."""

    def __init__(self) -> None:
        self._message: dict[str, Any] = {}

    def add_reasoning(self, item: Item, told: list[dict[str, Any]]) -> None:
        text = "".join(part["text"] for part in item["content"])
        if "content" in self._message or "tool_calls" in self._message:
            self.end(told)
        if text:
            text = self._message.get("reasoning_content", "") + text
            self._message |= {"reasoning": text, "reasoning_content": text}

    def add_text(self, text: str, told: list[dict[str, Any]]) -> None:
        if "content" in self._message and "tool_calls" not in self._message:
            self.end(told)  # two answers in a row
        self._message["content"] = self._message.get("content", "") + text

    def add_call(self, item: Item) -> None:
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        self._message.setdefault("tool_calls", []).append(call)

    def end(self, told: list[dict[str, Any]]) -> None:
        if self._message:
            told.append({"role": "assistant", "content": self._message.pop("content", ""), **self._message})
            self._message = {}
