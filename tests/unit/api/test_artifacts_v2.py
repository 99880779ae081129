"""`generation_artifact_v2` over HTTP: both spellings on each route, receipts with digests, deltas, refusals by name, schema."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from infer.api.artifacts import NativeArtifactFields, Nvext
from infer.artifacts import ArtifactReader, open_artifact
from unit.api.test_artifacts import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    ROUTES,
    SGLANG,
    asking,
    body,
    chunks,
    managed,
    place,
    post,
    refused,
    served,
)

pytestmark = pytest.mark.anyio
V2 = "generation_artifact_v2"
CONTENTS = ("kept_logmass", "kept_set", "sampled_mask", "selected_logprobs", "topk_logprobs", "weight_spans")
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _empty_memory() -> Any:
    yield
    for name in [name for name in MemoryFileSystem.store if name.startswith("/api/")]:
        del MemoryFileSystem.store[name]


def wanted(*contents: str, **more: Any) -> dict[str, Any]:
    return managed(*contents, key=f"runs/v2-{next(_numbers)}") | {"format": V2, **more}


def opened(receipt: dict[str, Any], **options: Any) -> ArtifactReader:
    """The object that a receipt names, verified."""
    assert receipt["state"] == "ready", receipt
    reader = open_artifact(f"memory://api/{receipt['object_id'].partition(':')[2]}", **options)
    assert reader.verify(sha256=receipt["sha256"]).body_sha256 == receipt["body_sha256"]
    return reader


class TestReceipts:
    @pytest.mark.row("X-ARTIFACT-V2", "over HTTP, and the receipt has a digest of each field")
    @pytest.mark.parametrize("spelling", ["nvext", "native"])
    @pytest.mark.parametrize("route", ROUTES)
    async def test_in_the_reply(self, route: str, spelling: str) -> None:
        """Nothing of what was computed for the artifact is in the reply."""
        async with served() as (client, _):
            plain = await post(client, route, body(route, return_token_ids=True))
            reply = await post(client, route, asking(route, spelling, wanted(*CONTENTS), return_token_ids=True))
        receipt = place(route, spelling)(reply)
        reader = opened(receipt)
        ids = reply.get("prompt_token_ids") or reply["choices"][0]["prompt_token_ids"]
        assert reader.tokens().tolist() == [*ids, *reply["choices"][0]["token_ids"]]
        assert (receipt["format"], receipt["contents"]) == (V2, sorted(CONTENTS))
        assert set(receipt["field_sha256"]) == {*CONTENTS, "token_ids"}
        assert receipt["actual_bytes"] > receipt["header_bytes"] > 0 and receipt["raw_bytes"] > 0
        assert len(receipt["header_sha256"]) == 64 and receipt["logprobs_mode"] == "raw"
        told = {key: value for key, value in reply["choices"][0].items() if key not in plain["choices"][0]}
        assert told == {} and reply["choices"][0].get("logprobs") == plain["choices"][0].get("logprobs")

    @pytest.mark.parametrize("route", ROUTES)
    async def test_in_the_chunk_with_the_finish_reason(self, route: str) -> None:
        async with served() as (client, _):
            found = await chunks(client, route, asking(route, "native", wanted(*CONTENTS)))
        [chunk] = [chunk for chunk in found if "generation_artifact" in chunk]
        assert opened(chunk["generation_artifact"]).field("kept_set").num_rows == 6
        assert "kept" not in json.dumps([piece["choices"] for piece in found])

    async def test_sglang(self) -> None:
        async with served() as (client, _):
            reply = await post(client, SGLANG, body(SGLANG, generation_artifact=wanted("topk_logprobs")))
        receipt = reply["meta_info"].get("generation_artifact") or reply["generation_artifact"]
        assert opened(receipt).field("topk_logprobs").values.shape == (6, 20)

    async def test_public_logprobs_are_as_many_as_asked_for(self) -> None:
        """Three for the caller are three in the artifact, too."""
        async with served() as (client, _):
            asked = asking(COMPLETIONS, "native", wanted("topk_logprobs", "kept_set"), logprobs=3)
            reply = await post(client, COMPLETIONS, asked)
        assert opened(reply["generation_artifact"]).field("topk_logprobs").values.shape == (6, 3)
        assert all(len(top) <= 4 for top in reply["choices"][0]["logprobs"]["top_logprobs"])


class TestDeltas:
    @pytest.mark.row("X-ARTIFACT-V2", "a child stores only rows that its parent lacks, over HTTP")
    async def test_a_second_turn(self) -> None:
        async with served() as (client, _):
            first = await post(client, GENERATE, body(GENERATE, generation_artifact=wanted("weight_spans")))
            held = first["generation_artifact"]
            ids = [*b"hi", *first["choices"][0]["token_ids"]]
            parent = {"sha256": held["sha256"], "header_sha256": held["header_sha256"], "token_count": len(ids)}
            asked = wanted("weight_spans", parent=parent)
            reply = await post(
                client, GENERATE, body(GENERATE, generation_artifact=asked) | {"token_ids": [*ids, *b"more"]}
            )
        sequence = [*ids, *b"more", *reply["choices"][0]["token_ids"]]
        alone = opened(reply["generation_artifact"])
        assert alone.field("token_ids").values.tolist() == sequence[len(ids) :]
        whole = opened(reply["generation_artifact"], parent=opened(held))
        assert whole.tokens().tolist() == sequence
        assert [(span.start, span.end) for span in whole.weight_spans()] == [(0, len(sequence))]


class TestRefusals:
    @pytest.mark.row("X-ARTIFACT-V2", "a field that the engine cannot fill is refused by name, with status 400")
    @pytest.mark.parametrize(
        ("artifact", "words"),
        [
            (wanted("entropy"), "does not record entropy"),
            (wanted("moe_routes"), "moe_routes needs capture.routed_experts"),
            (wanted("hidden_states"), "hidden_states needs capture.hidden_layers"),
            (wanted("a.b"), "capture.fields"),
            (wanted(parent={"sha256": "x"}), "parent lacks header_sha256, token_count"),
            (wanted(parent={"sha256": "x", "header_sha256": "y", "token_count": 1}), "parent.sha256"),
            (wanted(parent={"sha256": "x", "header_sha256": "y", "token_count": 1, "a": 1}), "unknown key"),
            (wanted() | {"format": "generation_artifact_v3"}, "generation_artifact_v2"),
            (wanted() | {"format": "generation_artifact_v1", "parent": None, "contents": ["kept_set"]}, "kept_set"),
        ],
        ids=["entropy", "routes", "hidden", "plugin", "parent", "digest", "key", "format", "v1"],
    )
    async def test_with_status_400(self, artifact: dict[str, Any], words: str) -> None:
        async with served() as (client, _):
            for route in (CHAT, GENERATE):
                error = await refused(client, route, asking(route, "native", artifact))
                assert words in error["message"], error
                assert error["code"] in ("artifact_unsupported", "artifact_invalid_request")


def test_the_schema_has_the_parent() -> None:
    for fields in (Nvext, NativeArtifactFields):
        schema = fields.model_json_schema()["properties"]["generation_artifact"]
        assert set(schema["properties"]["parent"]["required"]) == {"sha256", "header_sha256", "token_count"}
        assert "generation_artifact_v2" in schema["description"]


async def test_server_info_says_what_holds() -> None:
    async with served(settings={"admin": True}) as (client, server):
        told = (await client.get("/server_info")).json()
        assert told["resolved"]["numerics"] == server.engine.resolved.numerics in ("fast", "invariant")
        assert told["artifacts"]["v2_max_decoded_bytes"] == 2**28
        assert told["artifacts"]["v2_max_managed_bytes"] == 2**29
