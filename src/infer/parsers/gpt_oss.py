"""gpt-oss: harmony messages with channels for reasoning, preambles, calls and the final answer."""

from __future__ import annotations

from typing import Any

from infer.plugins import ParserSpec, hookimpl
from infer.plugins.parser import API_VERSION
from infer.plugins.parsing import SAMPLE_TOOLS, ChannelParser, Channels, Reasoning, called, cut, said, thought
from infer.plugins.parsing.dialect import reasoning_fields

CHANNELS = Channels(
    start="<|start|>",
    channel="<|channel|>",
    message="<|message|>",
    constrain="<|constrain|>",
    ends=("<|end|>", "<|return|>", "<|call|>"),
    reasoning_channels=("analysis",),
    function_prefix="functions.",
    reasoning=Reasoning(
        start=("<|channel|>analysis<|message|>",),
        end=("<|channel|>final<|message|>",),
        close="<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
)
CALL = (
    "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json"
    '<|message|>{"city": "Oslo"}<|call|>'
)
TRANSCRIPTS: list[dict[str, Any]] = [
    {
        "text": "<|channel|>analysis<|message|>Sum it.<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>",
        "events": [*thought("Sum it."), *said("4")],
    },
    {
        "text": "<|channel|>analysis<|message|>Look.<|end|>" + CALL,
        "events": [*thought("Look."), *called("get_weather", '{"city": "Oslo"}')],
        "tools": SAMPLE_TOOLS,
    },
    {  # the recipient before the channel; a preamble; no type
        "text": "<|channel|>commentary<|message|>I check.<|end|><|start|>"
        "assistant to=functions.get_time<|channel|>commentary "
        "json<|message|>{}<|call|>" + CALL,
        "events": [*said("I check."), *called("get_time", "{}"), *called("get_weather", '{"city": "Oslo"}', 1)],
    },
    {
        "text": " to=functions.get_time<|channel|>commentary<|message|>{}<|call|>",
        "prompt": "<|start|>user<|message|>Hi<|end|><|start|>assistant",
        "events": called("get_time", "{}"),
    },
    {  # without the end of the analysis
        "text": "<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>4",
        "events": [*thought("Hm."), *said("4")],
    },
    {  # a built-in tool of the model, called in its reasoning
        "text": "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
        "events": thought("print(1)"),
    },
    {"text": "4 < 5 <|", "events": said("4 < 5 <|")},
    {"text": "to=be or not, <|channel|>final<|message|>4", "events": said("to=be or not, 4")},
    {"text": "Sum", "prompt": "<|start|>assistant<|channel|>final<|message|>", "events": said("Sum")},
    {"text": "<|channel|>analysis<|message|>cut o", "events": thought("cut o")},
    {"text": "<|channel|>anal", "events": []},
    {
        "text": '<|channel|>commentary to=functions.f<|message|>{"a": "cut',
        "events": cut("f", '{"a": "cut'),
    },
    {
        "text": "<|channel|>commentary to=functions.f<|message|>no json<|call|>",
        "events": said("<|channel|>commentary to=functions.f<|message|>no json"),
    },
]


def create(tools: list[dict[str, Any]] | None) -> ChannelParser:
    return ChannelParser(CHANNELS, tools)


@hookimpl
def infer_parsers() -> list[ParserSpec]:
    return [
        ParserSpec(
            name="gpt_oss",
            api=API_VERSION,
            factory=f"{__name__}:create",
            fingerprints=("<|channel|>analysis",),
            **reasoning_fields(CHANNELS.reasoning),
            example={"transcripts": TRANSCRIPTS},
        )
    ]
