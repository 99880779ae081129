"""`/openapi.json`: the server describes itself, from the same route and field tables that it runs by.

Made once at start; pure.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response

from infer.api.fields import Body
from infer.api.routing import ApiRoute, Call
from infer.types import SamplingParams

_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
DESCRIPTION = "/openapi.json"
_REF = "#/components/schemas/{model}"


def with_description(routes: Sequence[ApiRoute], *, unknown_fields: str, needs_key: bool) -> list[ApiRoute]:
    """The routes, and the one that describes them all, itself included."""
    document: dict[str, Any] = {}

    async def describe(call: Call) -> Response:
        return call.json(document)

    own = ApiRoute(method="GET", path=DESCRIPTION, handler=describe, public=True, summary="This document")
    everything = [*routes, own]
    document |= openapi_document(everything, unknown_fields=unknown_fields, needs_key=needs_key)
    return everything


def openapi_document(
    routes: Sequence[ApiRoute], *, unknown_fields: str = "refuse", needs_key: bool = False
) -> dict[str, Any]:
    """OpenAPI 3.1 of these routes."""
    schemas: dict[str, Any] = {"Error": _ERROR}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = re.sub(r"\{(\w+):\w+\}", r"{\1}", route.path)
        operation = _operation(route, path)
        if route.body is not None:
            name = _schema_name(route.body)
            schemas[name] = body_schema(route.body, schemas, closed=unknown_fields == "refuse")
            operation["requestBody"] = _content(_REF.format(model=name), required=not route.optional_body)
        elif route.method == "POST":
            operation["requestBody"] = {
                "content": {"application/json": {"schema": {"type": "object"}}},
                "required": not route.optional_body,
            }
        if needs_key and not route.public:
            operation["security"] = [{"key": []}]
        paths.setdefault(path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "infer",
            "version": importlib.metadata.version("infer-engine"),
            "description": "OpenAI's API of one model, and further routes.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def body_schema(body: Body, schemas: dict[str, Any], *, closed: bool = True) -> dict[str, Any]:
    """JSON schema of one body: what is honoured or accepted. Refused fields are listed with their reasons beside it."""
    own = body.model.model_json_schema(ref_template=_REF)
    schemas |= own.pop("$defs", {})
    sampling = SamplingParams.model_json_schema(ref_template=_REF)
    schemas |= sampling.pop("$defs", {})
    properties: dict[str, Any] = {name: _or_null(schema) for name, schema in own.get("properties", {}).items()}
    refused: dict[str, str] = {}
    for rule in body.rules():
        if rule.name in body.sampling:
            schema = {k: v for k, v in sampling["properties"][body.sampling[rule.name]].items() if k != "default"}
            if body.sampling[rule.name] == "stop":  # one string will do
                schema = {"anyOf": [{"type": "string"}, schema]}
            properties[rule.name] = _or_null({**schema, "description": rule.note})
        elif rule.treatment == "notice":
            properties[rule.name] = {"description": f"Accepted with a notice: {rule.note}."}
        elif rule.treatment == "refused":
            refused[rule.name] = rule.note
            if closed:  # a value that asks for nothing passes, null always does
                properties[rule.name] = {"type": "null", "description": f"Not supported: {rule.note}."}
    required = own.get("required", [])
    for name in required:
        properties[name] = own["properties"][name]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": not closed,
        "x-refused-fields": refused,
    }


def _operation(route: ApiRoute, path: str) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{route.method.lower()}{re.sub(r'[^a-zA-Z0-9]+', '_', path)}",
        "responses": {
            "200": {"description": "Done"},
            "default": {"description": "Refused or failed", **_content(_REF.format(model="Error"))},
        },
    }
    names = re.findall(r"\{(\w+)\}", path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ]
    return operation


def _content(ref: str, **more: Any) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": {"$ref": ref}}}, **more}


def _or_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    """JSON null counts as absent everywhere."""
    schema = dict(schema)
    about: dict[str, Any] = {key: schema.pop(key) for key in ("description", "title", "default") if key in schema}
    choices = schema["anyOf"] if set(schema) == {"anyOf"} else [schema]
    if {"type": "null"} not in choices:
        choices = [*choices, {"type": "null"}]
    return {"anyOf": choices, **about}


def _schema_name(body: Body) -> str:
    return re.sub(r"[^a-zA-Z0-9]+", "_", body.name).strip("_")
