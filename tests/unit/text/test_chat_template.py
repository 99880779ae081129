"""Chat templates: text equal to transformers' for published templates, bad input and hostile templates refused."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from infer.errors import InferError, InvalidRequestError, ModelError
from infer.text import sandbox
from infer.text.chat_template import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'Weather in a "city" <é>',
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "City"},
                    "unit": {"type": "string", "enum": ["c", "f"]},
                },
                "required": ["city"],
            },
        },
    }
]
USER = {"role": "user", "content": 'Hi <é> "q" 😀'}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call_1abcd", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    ],
}
ANSWER = {"role": "tool", "tool_call_id": "call_1abcd", "name": "get_weather", "content": '{"t": 3}'}
CHATS: dict[str, dict[str, Any]] = {
    "one": {"messages": [USER]},
    "no generation prompt": {"messages": [USER], "add_generation_prompt": False},
    "system and turns": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            USER,
            {"role": "assistant", "content": "Hello!", "tool_calls": None},
            {"role": "user", "content": "More "},
        ]
    },
    "tools": {"messages": [USER], "tools": TOOLS},
    "tool call": {"messages": [USER, CALL, ANSWER, USER], "tools": TOOLS},
    "continued": {
        "messages": [USER, {"role": "assistant", "content": "The answer is "}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "documents": {"messages": [USER], "documents": [{"title": "A", "text": "Document text"}]},
    "no thinking": {
        "messages": [USER, {"role": "assistant", "content": "x", "reasoning_content": "hmm"}, USER],
        "enable_thinking": False,
    },
    "own variables": {"messages": [USER], "bos_token": "<own>", "enable_thinking": True, "custom": [1, {"a": None}]},
}


def rendered(template: str, chat: dict[str, Any]) -> str:
    chat = copy.deepcopy(chat)
    messages, tools = chat.pop("messages"), chat.pop("tools", None)
    prompt = chat.pop("add_generation_prompt", True)
    return compiled(template).render(messages, tools, prompt, **chat)


@lru_cache
def compiled(template: str) -> ChatTemplate:
    return ChatTemplate(template, SPECIAL)


def rendered_by_transformers(template: str, chat: dict[str, Any]) -> str:
    chat = {**SPECIAL, "add_generation_prompt": True, **copy.deepcopy(chat)}
    kept = [{k: v for k, v in message.items() if v is not None} for message in chat.pop("messages")]
    texts, _ = render_jinja_template([kept], chat_template=template, **chat)
    return str(texts[0])


@pytest.mark.row("SERVE-CHAT-TEMPLATE", "text equals transformers for at least 30 published templates")
@pytest.mark.parametrize("name", CHATS)
def test_text_equals_transformers(chat_templates: dict[str, str], name: str) -> None:
    accepted = 0
    for template_name, template in chat_templates.items():
        try:
            expected = rendered_by_transformers(template, CHATS[name])
        except Exception:
            with pytest.raises(InvalidRequestError):
                rendered(template, CHATS[name])
            continue
        accepted += 1
        assert rendered(template, CHATS[name]) == expected, template_name
    assert accepted >= 60


def test_text_parts_reach_templates_that_read_them_and_are_joined_for_others(chat_templates: dict[str, str]) -> None:
    parts = [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]
    chat = {"messages": [{"role": "user", "content": parts}]}
    joined = {"messages": [{"role": "user", "content": "One\nTwo"}]}
    as_parts = 0
    for name, template in chat_templates.items():
        if _try_transformers(template, joined) is None:
            continue  # needs more than one user message
        text = rendered(template, chat)
        assert "'type'" not in text, name
        try:
            expected = rendered_by_transformers(template, chat)
        except Exception:
            expected = "'type'"
        if "'type'" in expected:
            expected = rendered_by_transformers(template, joined)
        else:
            as_parts += 1
        assert text == expected, name
    assert as_parts >= 20


def test_arguments_in_json_text_render_as_the_object(chat_templates: dict[str, str]) -> None:
    text_call = copy.deepcopy(CALL)
    text_call["tool_calls"][0]["function"]["arguments"] = '{"city":"Oslo"}'  # type: ignore[index]
    by_object = {"messages": [USER, CALL, ANSWER], "tools": TOOLS}
    by_text = {"messages": [USER, text_call, ANSWER], "tools": TOOLS}
    same = 0
    for name, template in chat_templates.items():
        try:
            expected = rendered(template, by_object)
        except InferError:  # a template that only takes text gets the text
            if template_takes_text := _try_transformers(template, by_text):
                assert rendered(template, by_text) == template_takes_text, name
            continue
        same += 1
        assert rendered(template, by_text) == expected, name
    assert same >= 40


def _try_transformers(template: str, chat: dict[str, Any]) -> str | None:
    try:
        return rendered_by_transformers(template, chat)
    except Exception:
        return None


def test_arguments_stay_text_where_the_template_adds_text() -> None:
    template = "{{ messages[0].tool_calls[0].function.arguments + '!' }}"
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}
    assert rendered(template, {"messages": [call]}) == '{"a": 1}!'


def test_tool_use_template_serves_requests_with_tools() -> None:
    template = ChatTemplate({"default": "plain {{ bos_token }}", "tool_use": "with {{ tools|length }}"}, SPECIAL)
    assert template.render([USER]) == "plain <s>"
    assert template.render([USER], TOOLS) == "with 1"
    assert template.render([USER], []) == "with 0"
    only_tools = ChatTemplate({"tool_use": "x"}, SPECIAL)
    with pytest.raises(InvalidRequestError, match=r"named \['tool_use'\] but no default"):
        only_tools.render([USER])


@pytest.mark.parametrize(
    ("template", "message", "expected"),
    [
        ("{{ messages[-1].content }}</s>", "The answer is ", "The answer is "),
        ("{{ messages[-1].content.strip() }}</s>", "The answer is ", "The answer is"),
        ("{{ messages[-1].content | trim }}", "a", "a"),
        ("{{ messages[-1].content }}|{{ messages[-1].content }}!", "twice", "twice\ue000continue\ue001 |twice"),
    ],
)
def test_continue_cuts_after_the_final_message(template: str, message: str, expected: str) -> None:
    chat = {"messages": [USER, {"role": "assistant", "content": message}], "continue_final_message": True}
    assert rendered(template, chat) == expected


@pytest.mark.parametrize(
    "final", [{"role": "assistant", "tool_calls": []}, {"role": "assistant", "content": []}, {"role": "user"}]
)
def test_continue_needs_text(final: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="no text to continue") as caught:
        rendered("{{ messages[-1].content }}", {"messages": [USER, final], "continue_final_message": True})
    assert caught.value.parameter == "continue_final_message"


def test_continue_needs_a_template_that_shows_the_message() -> None:
    with pytest.raises(InvalidRequestError, match="does not show the end of the final message"):
        rendered("{{ messages[0].role }}", {"messages": [USER], "continue_final_message": True})


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "at least one message"),
        ("Hi", "at least one message"),
        ({"role": "user"}, "at least one message"),
        (["Hi"], r"messages\[0\] is a str"),
        ([USER, {"content": "x"}], r"messages\[1\] has no role"),
        ([{"role": "", "content": "x"}], r"messages\[0\] has no role"),
        ([{"role": 3, "content": "x"}], r"messages\[0\] has no role"),
        ([{"role": "user", "content": 7}], r"messages\[0\] has content of type int"),
        ([{"role": "user", "content": {"a": 1}}], r"messages\[0\] has content of type dict"),
        ([{"role": "user", "content": ["x"]}], "content part 'str'"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "content part 'image_url'"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "content part 'input_audio'"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "content part 'text'"),
        ([{"role": "user", "content": "x", "extra": object()}], "messages holds a object"),
    ],
)
def test_bad_messages_are_refused(messages: Any, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem) as caught:
        ChatTemplate("{{ messages }}", SPECIAL).render(messages)
    assert caught.value.parameter == "messages"


def test_other_arguments_are_plain_data_too() -> None:
    template = ChatTemplate("{{ x }}{{ tools }}", SPECIAL)
    with pytest.raises(InvalidRequestError) as caught:
        template.render([USER], x=object())
    assert caught.value.parameter == "chat_template_kwargs"
    with pytest.raises(InvalidRequestError) as caught:
        template.render([USER], [{"f": object()}])
    assert caught.value.parameter == "tools"


def test_the_callers_messages_are_not_touched() -> None:
    chat = copy.deepcopy(CHATS["continued"]["messages"])
    ChatTemplate("{{ messages[-1].content }}", SPECIAL).render(chat, continue_final_message=True)
    assert chat == CHATS["continued"]["messages"]


def test_a_broken_template_names_the_line() -> None:
    with pytest.raises(ModelError, match=r"'default' is broken: line 2: "):
        ChatTemplate("fine\n{% if %}", SPECIAL)
    with pytest.raises(ModelError, match="'tool_use' is broken: line 1: Encountered unknown tag 'nonsense'"):
        ChatTemplate({"default": "", "tool_use": "{% nonsense %}"}, SPECIAL)
    with pytest.raises(ModelError, match="broken"):
        ChatTemplate("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", SPECIAL)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("a\n{{ raise_exception('roles must alternate') }}", r"roles must alternate \(line 2 of the template\)"),
        ("{{ missing.attribute }}", "'missing' is undefined"),
        ("{{ messages[0].content + 1 }}", "must be str|can only concatenate"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[9].role }}", "has no element 9|no element"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% include 'other' %}", "no loader"),
    ],
)
def test_what_a_template_raises_is_a_request_error(template: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        rendered(template, {"messages": [USER]})
    assert caught.value.parameter == "messages"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ namespace(_x=1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ (''|attr('__class__')).mro() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ dict.__call__.__globals__ }}",
        "{{ '{0.__class__.__mro__[1].__subclasses__}'.format('') }}",
    ],
)
def test_there_is_no_way_out(template: str) -> None:
    try:
        text = rendered(template, {"messages": [USER]})
    except InvalidRequestError:
        return
    assert text == ""  # an unsafe attribute is undefined and prints nothing


BOMBS = [
    "{{ 'a' * 999999999 }}",
    "{{ 999999999 * 'a' }}",
    "{{ [1] * 999999999 }}",
    "{{ ('a' * 9999999) * 9999999 }}",
    "{{ 9 ** 999999999 }}",
    "{{ 9 ** 999 ** 999 }}",
    "{{ '{:{x[0]}}'.format(1, x=[999999999]) }}",
    "{{ '{a:999999999}'.format_map({'a': 1}) }}",
    "{% set ns = namespace(s='aaaa') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s='aaaa') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s=['a']) %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s=9) %}{% for i in range(99) %}{% set ns.s = ns.s * ns.s %}{% endfor %}{{ ns.s }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa{% endfor %}{% endfor %}",
    "{{ 'a'.center(999999999) }}",
    "{{ 'a'.ljust(width=999999999) }}",
    "{{ 'a'.zfill(999999999) }}",
    "{{ 'a' | center(999999999) }}",
    "{{ 'a\\nb' | indent(999999999) }}",
    "{{ '\\t'.expandtabs(999999999) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ '{:{}}'.format(1, 999999999) }}",
    "{{ '%999999999d' | format(1) }}",
    "{{ ('a' * 9999).replace('a', 'b' * 9999) }}",
    "{{ ('a' * 9999) | replace('a', 'b' * 9999) }}",
    "{{ ('a' * 9999).join(['b'] * 9999) }}",
    "{{ (['b' * 9999] * 9999) | join }}",
    "{{ [1] | tojson(indent=999999999) }}",
    "{{ [1, 2] | batch(999999999, 'x') | list }}",
    "{{ [1, 2] | slice(999999999) | list }}",
    "{{ ('a' * 9999999) ~ ('a' * 9999999) }}",
]


@pytest.mark.parametrize("template", BOMBS)
def test_size_is_bounded(template: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"elements|bits|width|indent|too long") as caught:
        rendered(template, {"messages": [USER]})
    assert caught.value.parameter == "messages"


@pytest.mark.parametrize(
    "template",
    [
        "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% set x = a + b %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in [[[]]] recursive %}{% for b in range(99999) %}{{ loop.length and '' }}{% endfor %}"
        "{% for c in range(99999) %}{% for d in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    ],
)
def test_time_is_bounded(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.2)
    with pytest.raises(InvalidRequestError, match="takes too long"):
        rendered(template, {"messages": [USER]})


def test_features_of_transformers_environment() -> None:
    assert rendered("{% generation %}{{ messages[0].role }}{% endgeneration %}", {"messages": [USER]}) == "user"
    assert rendered("{{ {'é': '<'} | tojson }}", {"messages": [USER]}) == '{"é": "<"}'
    assert rendered("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", {"messages": [USER]}) == (
        '{\n "a": 2,\n "b": 1\n}'
    )
    assert rendered("{{ strftime_now('%Y') | int > 2000 }}", {"messages": [USER]}) == "True"
    loop = "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}"
    assert rendered(loop + "{% endfor %}", {"messages": [USER]}) == "013"
    assert rendered("  {% if true %}\nx\n  {% endif %}\ny", {"messages": [USER]}) == "x\ny"
    assert rendered("{{ dict(a=1).a }}{{ dict.fromkeys('ab', 0) }}", {"messages": [USER]}) == "1{'a': 0, 'b': 0}"


def test_messages_that_hold_themselves_are_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        ChatTemplate("{{ messages }}", {}).render([{"role": "user", "content": "hi", "more": endless}])
