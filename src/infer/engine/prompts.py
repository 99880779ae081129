"""From a prompt (text, ids or chat messages) to token ids, as admission does it and as the server shows it.

Runs in the request's task. Part of the facade; holds the tokenizer and the chat template of one loaded model.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anyio

from infer.errors import InvalidRequestError, shown
from infer.text.token_ids_only import NoTokenizer, needs_tokenizer
from infer.types import Prompt

if TYPE_CHECKING:
    from infer.plugins.tokenizer import Tokenizer
    from infer.text.chat_template import ChatTemplate

_LONG_TEXT = 20_000
"""Characters from which tokenizing is worth a thread."""


class PromptEncoder:
    """`engine.prompts`: what a request's prompt becomes, without running it."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template

    @property
    def template_source(self) -> str:
        """The chat template's text, of all templates if there are several; "" when there is none."""
        return self._template.source if self._template is not None else ""

    async def encode(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_special_tokens: bool = True,
        **template_options: Any,
    ) -> list[int]:
        """Token ids of a prompt. `template_options` are those of `render`, for chat messages."""
        chat = is_chat(prompt)
        check_tools(tools, chat)
        if isinstance(prompt, str):
            return await self.encode_text(prompt, add_special_tokens=add_special_tokens)
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
            raise InvalidRequestError(
                f"prompt is {type(prompt).__name__}; give text, a list of token ids or a list of chat messages",
                parameter="prompt",
                value=prompt,
            )
        if chat:
            text = self.render(prompt, tools=tools, **template_options)
            # The template writes BOS and every other special token itself.
            return await self.encode_text(text, add_special_tokens=False)
        for index, token_id in enumerate(prompt):
            if type(token_id) is not int:
                raise InvalidRequestError(
                    f"prompt[{index}]={shown(token_id)} is not a token id", parameter="prompt", value=token_id
                )
        return list(prompt)  # type: ignore[arg-type]

    def render(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The chat template's text. None: a chat that ends with the assistant's turn is continued, any other answered.

        variables: further values for the template, such as `enable_thinking` or `documents`.
        """
        if self._template is None:
            if isinstance(self._tokenizer, NoTokenizer):
                raise needs_tokenizer("a chat", "messages")
            raise InvalidRequestError(
                "the model has no chat template: give raw text, or set model.chat_template", parameter="messages"
            )
        if continue_final_message is None:
            last = messages[-1] if messages else None
            ends_open = isinstance(last, Mapping) and last.get("role") == "assistant"
            continue_final_message = ends_open and not add_generation_prompt
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        if add_generation_prompt and continue_final_message:
            raise InvalidRequestError(
                "continue_final_message=True needs add_generation_prompt=False: one opens a new turn, the other goes on "
                "with the last",
                parameter="continue_final_message",
                value=True,
            )
        taken = {"messages", "tools", "add_generation_prompt", "continue_final_message"} & set(variables or {})
        if taken:
            raise InvalidRequestError(
                f"{sorted(taken)[0]} is not a template variable of the caller's; give it as a field of its own",
                parameter="chat_template_kwargs",
                value=sorted(taken),
            )
        odd = [name for name in variables or () if not isinstance(name, str)]
        if odd:
            raise InvalidRequestError(
                f"{shown(odd[0])} is not the name of a template variable",
                parameter="chat_template_kwargs",
                value=odd[0],
            )
        return self._template.render(
            list(messages),
            tools=list(tools) if tools else None,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **(variables or {}),
        )

    async def encode_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"the prompt is not valid Unicode: {error.reason}", parameter="prompt") from None
        if len(text) < _LONG_TEXT:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await anyio.to_thread.run_sync(
            lambda: self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        )


def is_chat(prompt: Any) -> bool:
    """Whether a prompt is chat messages, as far as its first item shows."""
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], dict)


def prompt_length(prompt: Sequence[Any]) -> int:
    """Items of a prompt; more than any context where it cannot be said."""
    try:
        return len(prompt)
    except OverflowError:  # range(10**30)
        return sys.maxsize


def check_tools(tools: object, chat: bool) -> None:
    """Raises `InvalidRequestError` for what is no list of tools, or is none of a chat."""
    if tools is None:
        return
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidRequestError(f"tools={shown(tools)} is not a list of tool objects", parameter="tools", value=tools)
    if tools and not chat:
        raise InvalidRequestError("tools need chat messages, not a raw prompt", parameter="tools")
