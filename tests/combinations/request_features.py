"""What a request can ask for: how each value is asked for. How it is seen to be at work is in `request_checks`."""

from __future__ import annotations

from typing import Any

from combinations.declared import Feature, Value
from integration.engine_support import VOCAB

MAX_TOKENS = 12
FIELD = "infer-entropy.token_entropy"
"""A field of a plugin, as artifacts call it."""
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
CALL = '{"<tool_call>{"name": "look", "arguments": {}}</tool_call>'
FORCED = (93, 4)
"""Of {" in the alphabet of bytes: every grammar begins with it."""
STOP_IDS = tuple(range(110, 259, 2))
"""Bytes that no grammar needs."""
MERGED = 259
"""Ids from here on are tokens of several bytes; those before can write everything."""
CHOICES = ('{"yes, sir', '{"no, sir')
TAG = '{"all done'
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}


def bytes_alone(prompt_ids: Any, output_ids: Any, logits: Any) -> Any:
    """A function as a logits processor."""
    logits[MERGED:] = float("-inf")


def _request(name: str, values: tuple[Value, ...], *named: str, shown: str) -> Feature:
    return Feature(name=name, scope="request", values=values, named=named or (name,), shown=shown)


def _params(name: str, /, **params: Any) -> Value:
    return Value(name=name, asks={"params": params})


def _artifact(name: str, *contents: str, version: int = 2, named: tuple[str, ...] = ()) -> Value:
    asked = {"contents": contents, "format": f"generation_artifact_v{version}"}
    return Value(name=name, asks={"artifact": asked}, named=named)


REQUEST = (
    _request(
        "prompt",
        (
            Value(name="ids"),
            Value(name="text", named=("prompt of text",)),
            Value(name="chat", named=("chat",)),
            Value(name="tools", asks={"tools": TOOLS}, named=("tools", "chat")),
        ),
        shown="the prompt's token ids; of chats the parsed answer, of tools the call where one was forced",
    ),
    _request(
        "call",
        (Value(name="generate"), Value(name="stream", named=("streamed",))),
        shown="deltas that join to the result",
    ),
    _request(
        "sampling",
        (
            _params("greedy", temperature=0),
            _params("seeded", temperature=0.9, top_k=60, top_p=0.95, min_p=0.01, seed=7),
            _params("penalties", temperature=0, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.5),
        ),
        *("temperature", "frequency_penalty", "min_p", "top_k"),
        shown="the same tokens as in a plain engine; greedy: the best of each position",
    ),
    _request(
        "choices",
        (
            Value(name="1"),
            _params("2", n=2),
            Value(name="beam", asks={"params": {"beam": {"width": 2}}}, named=("beam",)),
        ),
        "n",
        shown="the number of choices, with beam their order",
    ),
    _request(
        "logprobs",
        (
            Value(name="none"),
            _params("raw", logprobs=2),
            _params("processed", logprobs=2, logprobs_mode="processed"),
            _params("logits", logprobs=2, logprobs_mode="raw_logits"),
            _params("ids", logprob_token_ids=(5, 6)),
        ),
        *("logprobs", "logprobs_mode", "logprob_token_ids"),
        shown="an entry for every token, equal to a plain engine's",
    ),
    _request(
        "prompt logprobs",
        (Value(name="none"), _params("1", prompt_logprobs=1)),
        "prompt_logprobs",
        shown="an entry for every token of the prompt",
    ),
    _request(
        "kept set",
        (Value(name="none"), _params("returned", return_kept_set=True)),
        "return_kept_set",
        shown="a set with the token in it for every position",
    ),
    _request(
        "grammar",
        (
            Value(name="none"),
            _params("regex", structured_output={"regex": r'\{"[a-f]{2,4}-[0-9]{2}'}),
            _params(
                "schema",
                structured_output={"json_schema": SCHEMA, "compact": True, "forbid_additional_properties": True},
            ),
            _params("choice", structured_output={"choice": CHOICES}),
            _params("call", structured_output={"choice": [CALL]}, max_tokens=64),
            _params("grammar", structured_output={"grammar": 'start: "{" /"/ ("go" | "stop")'}),
            _params(
                "tag",
                structured_output={
                    "structural_tag": {"type": "structural_tag", "format": {"type": "const_string", "value": TAG}}
                },
            ),
        ),
        *("structured_output", "grammar"),
        shown="an answer that fits, or the beginning of one",
    ),
    _request(
        "thinking",
        (Value(name="free"), _params("budget", thinking_budget=2)),
        "thinking_budget",
        shown="reasoning closed in time",
    ),
    _request(
        "processors",
        (
            Value(name="none"),
            _params("plugin", logits_processors=({"name": "below", "params": {"limit": MERGED}},)),
            _params("function", logits_processors=(bytes_alone,)),
        ),
        "logits_processors",
        shown="no token that it forbids",
    ),
    _request(
        "bans",
        (
            Value(name="none"),
            _params("bias", logit_bias=dict.fromkeys(range(MERGED, VOCAB), -100.0)),
            _params("allowed", allowed_token_ids=tuple(range(MERGED))),
            Value(name="words", asks={"params": {"bad_words": ["Z", "qu"]}}, named=("bad_words",)),
        ),
        *("logit_bias", "allowed_token_ids", "bad_words"),
        shown="no token that it forbids",
    ),
    _request(
        "ends",
        (
            _params("length", ignore_eos=True),
            _params("ids", stop_token_ids=STOP_IDS, ignore_eos=True),
            _params("min", stop_token_ids=STOP_IDS, min_tokens=5),
            Value(name="string", asks={"params": {"stop": ["e", "a", "o"], "ignore_eos": True}}, named=("stop",)),
        ),
        *("stop_token_ids", "min_tokens", "stop", "ignore_eos"),
        shown="the end where it must be, not before and not after",
    ),
    _request(
        "repetition",
        (Value(name="free"), _params("detected", repetition_detection={"max_pattern_size": 2, "min_count": 2})),
        "repetition_detection",
        shown="no repetition that went unnoticed",
    ),
    _request(
        "forced",
        (Value(name="none"), _params("ids", forced_token_ids=FORCED)),
        "forced_token_ids",
        shown="the answer's first tokens",
    ),
    _request(
        "artifact",
        (
            Value(name="none"),
            _artifact("v1", "selected_logprobs", version=1, named=("selected_logprobs", "artifact")),
            _artifact(
                "v1 routes",
                "moe_routes",
                "selected_logprobs",
                version=1,
                named=("moe_routes", "selected_logprobs", "artifact"),
            ),
            _artifact(
                "v2",
                "sampled_mask",
                "selected_logprobs",
                "token_ids",
                "topk_logprobs",
                "weight_spans",
                named=("logprobs", "artifact"),
            ),
            _artifact("v2 kept", "kept_logmass", "kept_set", "token_ids", named=("kept_set", "artifact")),
            _artifact("v2 prompt rows", "prompt_logprobs", "token_ids", named=("prompt_logprobs", "artifact")),
            _artifact("v2 routes", "moe_routes", "token_ids", named=("moe_routes", "artifact")),
            _artifact("v2 hidden", "hidden_states", "token_ids", named=("hidden_states", "artifact")),
            _artifact("v2 plugin", FIELD, "token_ids", named=(FIELD, "artifact")),
            _artifact("v2 delta", "selected_logprobs", "token_ids", named=("parent", "selected_logprobs", "artifact")),
        ),
        "artifact",
        shown="the receipt; every row against the tokens and a plain engine's rows",
    ),
    _request(
        "rows",
        (
            Value(name="none"),
            _params("routes", return_routed_experts=True),
            _params("from 5", return_routed_experts=True, routed_experts_prompt_start=5),
            _params("keys", return_routed_experts=True, captured_as="keys"),
        ),
        *("return_routed_experts", "captured_as"),
        shown="a row for every token that was fed, as in a plain engine",
    ),
    _request(
        "admission",
        (
            Value(name="plain"),
            Value(name="salted", asks={"cache_salt": "salt"}),
            Value(name="first", asks={"priority": -1}),
            Value(name="deadline", asks={"deadline": 3000.0}),
        ),
        *("cache_salt", "priority", "deadline"),
        shown="the same answer",
    ),
)
