"""How clients ask for constrained output: OpenAI's `response_format`, vLLM's `structured_outputs`, SGLang's and Ollama's fields.

Pure; each becomes `SamplingParams.structured_output`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from infer.errors import InvalidRequestError, shown
from infer.plugins.tokenizer import SupportsTokenBytes, Tokenizer
from infer.structured import StructuredOutput

if TYPE_CHECKING:
    from starlette.responses import Response

    from infer.api.routing import Call

_VLLM = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
    "disable_any_whitespace": "compact",
    "disable_additional_properties": "forbid_additional_properties",
    "whitespace_pattern": "whitespace_pattern",
}
"""vLLM's field -> that of `StructuredOutput`."""
_SGLANG = {"json_schema": "json_schema", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}
SGLANG_FIELDS = tuple(_SGLANG)


def asked(response_format: Any, structured_outputs: Any) -> dict[str, Any] | None:
    """What a body with these two fields asks for; None: any text. Raises `InvalidRequestError` naming the field."""
    one = None if response_format is None else of_response_format(response_format)
    other = None if structured_outputs is None else of_vllm(structured_outputs)
    if one is not None and other is not None:
        raise InvalidRequestError(
            "response_format and structured_outputs both say what the output must be; give one of them",
            parameter="structured_outputs",
            value=None,
        )
    return one or other


def ask(values: dict[str, Any], wanted: dict[str, Any] | None) -> None:
    """Put it among the sampling values, if there is any."""
    if wanted is not None:
        values["structured_output"] = wanted


def to_vllm(output: StructuredOutput) -> dict[str, Any]:
    """The same in vLLM's words; JSON as objects."""
    theirs = {ours: name for name, ours in _VLLM.items()}
    told = {theirs[name]: getattr(output, name) for name in output.model_fields_set if getattr(output, name)}
    return {name: json.loads(value) if name in ("json", "structural_tag") else value for name, value in told.items()}


def end_ids(tokenizer: Tokenizer, stop_reason: int | str | None) -> dict[int, int | None]:
    """Ids that end an answer and are no part of its text. A grammar's end is none: its last token belongs to the text."""
    special = tokenizer.special_token_ids if isinstance(tokenizer, SupportsTokenBytes) else ()
    ends: dict[int, int | None] = dict.fromkeys((*tokenizer.eos_token_ids, *special))
    return ends | {stop_reason: stop_reason} if isinstance(stop_reason, int) else ends


def of_response_format(value: Any) -> dict[str, Any] | None:
    """`{"type": "text" | "json_object" | "json_schema" | "structural_tag", ...}`. A schema is kept with `strict` or without."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        _only(value, "response_format", ("type",))
        return {"json_object": True}
    if kind == "json_schema":
        _only(value, "response_format", ("type", "json_schema"))
        named = value.get("json_schema")
        if not isinstance(named, Mapping):
            raise _wrong("response_format.json_schema", named, "an object with name and schema")
        _only(named, "response_format.json_schema", ("name", "schema", "strict", "description"))
        schema = named.get("schema")
        if not isinstance(schema, dict | bool):
            raise _wrong("response_format.json_schema.schema", schema, "a JSON schema")
        return {"json_schema": schema}
    if kind == "structural_tag":
        return {"structural_tag": dict(value)}
    raise _wrong(
        "response_format", value, 'an object whose type is "text", "json_object", "json_schema" or "structural_tag"'
    )


def of_vllm(value: Any) -> dict[str, Any] | None:
    """vLLM's `structured_outputs`. Nulls and false count as absent."""
    if not isinstance(value, Mapping):
        raise _wrong("structured_outputs", value, "an object")
    _only(value, "structured_outputs", tuple(_VLLM))
    return {_VLLM[name]: given for name, given in value.items() if given is not None and given is not False} or None


def of_sglang(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """SGLang's sampling parameters."""
    return {_SGLANG[name]: data[name] for name in _SGLANG if data.get(name) is not None} or None


def of_ollama(value: Any) -> dict[str, Any] | None:
    """Ollama's `format`: "json" or a schema."""
    if value in (None, ""):
        return None
    if value == "json":
        return {"json_object": True}
    if isinstance(value, dict):
        return {"json_schema": value}
    raise _wrong("format", value, '"json" or a JSON schema')


def client_name(parameter: str, data: Mapping[str, Any]) -> str:
    """The field that the client wrote for one of ours."""
    if parameter == "thinking_budget":
        return "thinking_token_budget"
    if parameter == "structured_output":
        if data.get("structured_outputs") is not None:
            return "structured_outputs"
        return "tools" if data.get("tools") and data.get("response_format") is None else "response_format"
    return parameter


Handler = Callable[["Call"], Awaitable["Response | None"]]


def named(handler: Handler) -> Handler:
    """The handler, whose refusals name the client's field."""

    @functools.wraps(handler)
    async def call_it(call: Call) -> Response | None:
        try:
            return await handler(call)
        except InvalidRequestError as error:
            error.parameter = client_name(error.parameter, call.data)
            raise

    return call_it


def _only(value: Mapping[str, Any], where: str, known: tuple[str, ...]) -> None:
    odd = next((name for name in value if name not in known), None)
    if odd is not None:
        raise InvalidRequestError(
            f"{where} has no field {shown(odd)}; it takes {', '.join(known)}",
            parameter=where.partition(".")[0],
            value=odd,
        )


def _wrong(where: str, value: object, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where}={shown(value)} is not {what}", parameter=where.partition(".")[0], value=None)
