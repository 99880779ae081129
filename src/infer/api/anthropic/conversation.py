"""From Anthropic's messages, tools and choices to those that the chat template and the rest of the API know.

Pure. Refusals say where: `messages[0].content[1].text`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from infer.api.anthropic.schemas import (
    BLOCKS,
    TOOL,
    TOOL_CHOICE,
    ConversationBody,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from infer.api.fields import Body, BodyModel
from infer.api.tool_requests import ToolRequest, read_tools
from infer.errors import InvalidRequestError, shown

Message = dict[str, Any]
Policy = Literal["refuse", "notice"]
_BLOCKS_OF = {
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "tool_result": ("text",),
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


@contextmanager
def at(where: str) -> Iterator[None]:
    """Refusals name the place."""
    try:
        yield
    except InvalidRequestError as error:
        name = f"{where}.{error.parameter}" if error.parameter else where
        raise InvalidRequestError(f"{where}: {error}", parameter=name, value=error.value) from None


@dataclass(frozen=True, slots=True)
class ConversationReader:
    """One request's. `unknown`: what becomes of fields that nobody knows; `notices` are told to the client."""

    unknown: Policy
    notices: list[str] = field(default_factory=list)

    def messages(self, body: ConversationBody) -> list[Message]:
        """The conversation as chat messages in the OpenAI shape, turns of one role joined. Raises `InvalidRequestError`."""
        told: list[Message] = []
        if body.system:
            told.append({"role": "system", "content": _content(self._blocks(body.system, "system", "system"))})
        turns: list[tuple[str, list[BodyModel]]] = []
        for index, message in enumerate(body.messages):
            where = f"messages[{index}]"
            role, blocks = self._turn(message, where)
            if turns and turns[-1][0] == role:
                turns[-1][1].extend(blocks)
            else:
                turns.append((role, blocks))
        for role, blocks in turns:
            if role == "assistant":
                told.append(_assistant_message(blocks))
            elif role == "user":
                told += self._user_messages(blocks)
            else:
                told.append({"role": "system", "content": _content(blocks)})
        if told[-1]["role"] == "assistant" and not told[-1]["content"]:
            raise _bad("messages", "end with the assistant's, without text to go on with; send results of its calls")
        return told

    def _turn(self, message: Mapping[str, Any], where: str) -> tuple[str, list[BodyModel]]:
        odd = next((name for name in message if name not in ("role", "content")), None)
        if odd is not None:
            raise _bad(f"{where}.{odd[:100]}", "is not a field of a message; it has role and content")
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            raise _bad(f"{where}.role", f'={shown(role)} is not "user", "assistant" or "system"')
        blocks = self._blocks(message.get("content"), role, f"{where}.content")
        if not blocks:
            raise _bad(f"{where}.content", "is empty")
        return role, blocks

    def _blocks(self, content: Any, holder: str, where: str) -> list[BodyModel]:
        """Of text, or of a list of blocks of the types that `holder` may have."""
        if isinstance(content, str):
            return [TextBlock(type="text", text=content)]
        if not isinstance(content, list):
            raise _bad(where, f"={shown(content)} is neither text nor a list of content blocks")
        blocks = []
        for index, block in enumerate(content):
            place = f"{where}[{index}]"
            kind = block.get("type") if isinstance(block, Mapping) else None
            if not isinstance(kind, str):
                raise _bad(place, f"={shown(block)} is not a content block with a type")
            if kind not in BLOCKS:
                raise _bad(place, f": blocks of type {shown(kind)} are not supported: infer takes text only")
            if kind not in _BLOCKS_OF[holder]:
                known = ", ".join(_BLOCKS_OF[holder])
                raise _bad(place, f": {kind} has no place in {holder} content, which takes {known}")
            blocks.append(self.parsed(BLOCKS[kind], block, place))
        return blocks

    def parsed(self, body: Body, data: Mapping[str, Any], where: str) -> Any:
        """A part of the request that has fields of its own."""
        notices: list[str] = []
        with at(where):
            found, _ = body.parse(data, unknown=self.unknown, notices=notices)
        self.notices.extend(f"{where}.{notice}" for notice in notices)
        if isinstance(found, RedactedThinkingBlock):
            self.notices.append(f"{where}: redacted_thinking cannot be read here and is left out")
        return found

    def _user_messages(self, blocks: Sequence[BodyModel]) -> list[Message]:
        """Results of tools are messages of their own, in the order of the blocks."""
        told: list[Message] = []
        texts: list[BodyModel] = []
        for block in blocks:
            if not isinstance(block, ToolResultBlock):
                texts.append(block)
                continue
            if texts:
                told.append({"role": "user", "content": _content(texts)})
                texts = []
            told.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": self._result(block)})
        if texts:
            told.append({"role": "user", "content": _content(texts)})
        return told

    def _result(self, block: ToolResultBlock) -> str:
        blocks = self._blocks(block.content or "", "tool_result", f"tool_result {block.tool_use_id[:100]!r}.content")
        text = "\n".join(part.text for part in blocks if isinstance(part, TextBlock))
        return f"Error: {text}" if block.is_error else text

    def tools(self, body: ConversationBody) -> ToolRequest:
        """Tools and choice. Raises `InvalidRequestError`."""
        listed = [self._tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ())]
        choice, parallel = None, None
        if body.tool_choice is not None:
            stated: ToolChoice = self.parsed(TOOL_CHOICE, body.tool_choice, "tool_choice")
            choice = _choice(stated)
            parallel = False if stated.disable_parallel_tool_use else None
        try:
            return read_tools(listed or None, choice, parallel)
        except InvalidRequestError as error:
            message = str(error).replace(".function.", ".").replace(".parameters", ".input_schema")
            raise InvalidRequestError(message, parameter=error.parameter, value=error.value) from None

    def _tool(self, tool: Mapping[str, Any], where: str) -> dict[str, Any]:
        kind = tool.get("type")
        if kind not in (None, "custom"):
            raise _bad(f"{where}.type", f"={shown(kind)} is not supported: only tools with an input_schema are")
        stated: Tool = self.parsed(TOOL, tool, where)
        function: dict[str, Any] = {"name": stated.name, "parameters": stated.input_schema}
        if stated.description is not None:
            function["description"] = stated.description
        if stated.strict is not None:
            function["strict"] = stated.strict
        return {"type": "function", "function": function}


def _choice(stated: ToolChoice) -> str | dict[str, Any]:
    """In OpenAI's words."""
    if stated.type == "tool":
        if not stated.name:
            raise _bad("tool_choice.name", 'is missing: with type "tool" it says which')
        return {"type": "function", "function": {"name": stated.name}}
    if stated.name is not None:
        raise _bad("tool_choice.name", f'={shown(stated.name)} belongs to type "tool"')
    return _CHOICES[stated.type]


def _assistant_message(blocks: Sequence[BodyModel]) -> Message:
    thought = [block.thinking for block in blocks if isinstance(block, ThinkingBlock) and block.thinking]
    message: Message = {"role": "assistant", "content": _content(blocks)}
    if thought:
        message["reasoning_content"] = "\n".join(thought)
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": json.dumps(block.input)}}
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    return message | {"tool_calls": calls} if calls else message


def _content(blocks: Sequence[BodyModel]) -> str | list[dict[str, Any]]:
    """One text as it is, several as parts: the template joins them as it likes."""
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    return "".join(texts) if len(texts) < 2 else [{"type": "text", "text": text} for text in texts]


def _bad(where: str, problem: str) -> InvalidRequestError:
    space = "" if problem[0] in "=:" else " "
    return InvalidRequestError(f"{where}{space}{problem}", parameter=where)
