"""Llama 4 and 3.2 in its Python form: a list of calls in Python syntax as the whole answer."""

from __future__ import annotations

from typing import Any

from infer.plugins import ParserSpec, hookimpl
from infer.plugins.parser import API_VERSION
from infer.plugins.parsing import SAMPLE_TOOLS, Dialect, PythonCalls, TableParser, called, cut, said

DIALECT = Dialect(
    calls=(
        PythonCalls(openers=("<|python_start|>",), closers=("<|python_end|>",), listed=False),
        PythonCalls(openers=("[",), bare=True, only_first=True),
    ),
    dropped=("<|eom|>", "<|eot|>", "<|eot_id|>"),
)
TRANSCRIPTS: list[dict[str, Any]] = [
    {"text": "How can I help [you](x) today?", "events": said("How can I help [you](x) today?")},
    {
        "text": "[get_weather(city='San Francisco', metric='celsius')]",
        "events": called("get_weather", '{"city": "San Francisco", "metric": "celsius"}'),
    },
    {
        "text": "[register(name='John Doe', age=37, at={'city': 'X', \"n\": -1.5}, role=None, "
        "ok=True, all=['a', ('b',)]),"
        " get_time(), f(a={}, b=[])]<|eot|>",
        "events": [
            *called(
                "register",
                '{"name": "John Doe", "age": 37, "at": {"city": "X", "n": -1.5}, "role": null, '
                '"ok": true, "all": ["a", ["b"]]}',
            ),
            *called("get_time", "{}", 1),
            *called("f", '{"a": {}, "b": []}', 2),
        ],
    },
    {
        "text": "[f(a='Martha\\'s Vineyard', b='\\\"cool\\\" \\x41\\u00e9\\d\\n')]",
        "events": called("f", '{"a": "Martha\'s Vineyard", "b": "\\"cool\\" A\\u00e9\\\\d\\n"}'),
    },
    {"text": "<|python_start|>[get_time()]<|python_end|>", "events": called("get_time", "{}")},
    {"text": "<|python_start|>get_time(zone='UTC')<|python_end|>", "events": called("get_time", '{"zone": "UTC"}')},
    {"text": "[unknown(a=1)]", "events": said("[unknown(a=1)]"), "tools": SAMPLE_TOOLS},
    {"text": "See [get_time()] there", "events": said("See [get_time()] there")},
    {"text": "[f(1, 2)]", "events": said("[f(1, 2)]")},
    {"text": "[f(x=b'z')]", "events": said("[f(x=b'z')]")},
    {  # one broken call takes none along
        "text": "[f(x=b'z'), get_time(), g(a=1e999, b=2), h(c='x')]",
        "events": [
            *said("[f(x=b'z')"),
            *called("get_time", "{}"),
            *said(", g(a=1e999, b=2)"),
            *called("h", '{"c": "x"}', 1),
        ],
    },
    {"text": "[1, 2, f(a=1)], g(b=2)", "events": said("[1, 2, f(a=1)], g(b=2)")},
    {"text": "[f(x=1e999)]", "events": said("[f(x=1e999)]")},
    {"text": "[f(a='x 'y')]", "events": [*cut("f", '{"a": "x "'), *said("y')]")]},
    {"text": "[f(a='cut", "events": cut("f", '{"a": "cut')},
]


def create(tools: list[dict[str, Any]] | None) -> TableParser:
    return TableParser(DIALECT, tools)


@hookimpl
def infer_parsers() -> list[ParserSpec]:
    return [
        ParserSpec(
            name="llama4_pythonic",
            api=API_VERSION,
            factory=f"{__name__}:create",
            fingerprints=("<|python_start|>",),
            **DIALECT.spec_fields(),
            example={"transcripts": TRANSCRIPTS},
        )
    ]
