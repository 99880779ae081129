"""Schemathesis reads the server's own OpenAPI document and calls every route it names with what the document allows and
with what it forbids: never a 5xx, and what is forbidden is refused. Runs in the test's thread, the server in its own."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import Failure
from schemathesis.generation import GenerationMode

from infer import Engine, EngineConfig
from infer.testing.fake_engine import fake_engine, scripted
from integration.live_server import LiveServer, live_server

EXAMPLES = 60
"""Per route and kind. Schemathesis draws each body anew; the whole stays under a minute or two."""


def answering(config: EngineConfig) -> Engine:
    return fake_engine(scripted("Ja."), config)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    # A drawn request may ask for a million tokens: the deadline ends it.
    with live_server(answering, api={"request_deadline": 0.3, "sse_keep_alive": 0.1, "admin": True}) as running:
        yield running


@pytest.fixture(scope="module")
def document(server: LiveServer) -> dict[str, object]:
    reply = httpx2.get(server.url + "/openapi.json")
    assert reply.status_code == 200
    found: dict[str, object] = reply.json()
    return found


def test_the_document_names_every_route_and_field(server: LiveServer, document: dict[str, object]) -> None:
    paths = json.loads(json.dumps(document["paths"]))
    for path in ("/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/responses", "/health", "/openapi.json"):
        assert path in paths
    chat = document["components"]["schemas"]["v1_chat_completions"]  # type: ignore[index]
    assert chat["required"] == ["messages"]
    assert chat["additionalProperties"] is False
    assert chat["properties"]["temperature"]["anyOf"][0]["maximum"] == 100
    assert "functions" in chat["x-refused-fields"]
    for path, operations in paths.items():
        assert path.startswith("/")
        for operation in operations.values():
            assert operation["summary"], f"{path} says what it is for"


@pytest.mark.heavy
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["allowed", "forbidden"])
def test_no_request_breaks_the_server(server: LiveServer, document: dict[str, object], mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_dict(document)
    schema.config.generation.update(modes=[mode])
    called = []
    for result in schema.get_all_operations():
        operation = result.ok()
        if mode is GenerationMode.NEGATIVE and "requestBody" not in operation.definition.raw:
            continue  # nothing to get wrong
        called.append(operation.path)
        call_operation(server, operation, mode)
        server.wait_for(lambda now: now.running == 0 and now.waiting == 0)
    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses"} <= set(called)
    assert httpx2.get(server.url + "/health").status_code == 200


def call_operation(server: LiveServer, operation: schemathesis.schemas.APIOperation, mode: GenerationMode) -> None:
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
        database=None,
        derandomize=True,
    )
    @given(st.data())
    def call(data: st.DataObject) -> None:
        case = data.draw(operation.as_strategy(generation_mode=mode))
        response = case.call(base_url=server.url, timeout=20)
        try:
            case.validate_response(response, checks=[not_a_server_error])
        except Failure as failure:
            pytest.fail(f"{operation.label}: {failure}\n{case.as_curl_command()}")
        if response.status_code >= 400:
            told = response.json()["error"]
            told = told if operation.path.startswith("/api/") else told["message"]
            assert told and isinstance(told, str), "every refusal has OpenAI's body, or Ollama's"
        needed = operation.definition.raw.get("requestBody", {}).get("required", True)
        if mode is GenerationMode.NEGATIVE and (needed or response.request.body):
            assert 400 <= response.status_code < 500, f"forbidden but accepted: {case.as_curl_command()}"

    call()
