"""What a request for an artifact may say, and that its secrets stay where they belong."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from infer.artifacts.request import ArtifactRequest, ManagedTarget, PresignedTarget, find_request, parse_request, redact
from infer.errors import ArtifactRefusedError

PRESIGNED: dict[str, Any] = {
    "format": "generation_artifact_v1",
    "contents": ["moe_routes", "selected_logprobs"],
    "codec": "zstd",
    "delivery": {
        "mode": "object_store",
        "target": {
            "kind": "presigned_http_put",
            "url": "https://bucket.example/k%2Fx?sig=SECRET&a=1&a=2",
            "expires_at": "2027-01-01T12:00:00Z",
            "max_bytes": 67_108_864,
            "required_headers": {"content-type": "application/octet-stream", "if-none-match": "*", "x-key": "SECRET"},
            "object_id": "opaque-1",
        },
    },
}
MANAGED: dict[str, Any] = PRESIGNED | {
    "delivery": {"mode": "object_store", "target": {"kind": "managed_fsspec", "profile": "runs", "object_key": "a/b"}}
}


def changed(base: dict[str, Any], path: str, value: Any = None, *, drop: bool = False) -> dict[str, Any]:
    made = copy.deepcopy(base)
    node = made
    *parents, last = path.split(".")
    for part in parents:
        node = node[part]
    if drop:
        del node[last]
    else:
        node[last] = value
    return made


def test_both_targets() -> None:
    """T71, T72."""
    presigned = parse_request(PRESIGNED)
    assert isinstance(presigned.target, PresignedTarget)
    assert presigned.target.url.reveal() == PRESIGNED["delivery"]["target"]["url"]
    assert presigned.to_json() == PRESIGNED
    managed = parse_request(MANAGED)
    assert managed == ArtifactRequest(target=ManagedTarget("runs", "a/b"), contents=("moe_routes", "selected_logprobs"))
    assert managed.to_json() == MANAGED


def test_names_of_formats_and_contents_are_opaque_here() -> None:
    """T72: only the capture layer knows names."""
    made = parse_request(MANAGED | {"format": " external_artifact_v2 ", "contents": ["opaque_component"]})
    assert (made.format, made.contents) == ("external_artifact_v2", ("opaque_component",))
    assert parse_request(MANAGED | {"contents": []}).contents == ()
    assert parse_request(changed(MANAGED, "codec", drop=True)).codec == "zstd"


TARGET = "delivery.target"
REFUSED = {
    "not an object": "artifact",
    "null": None,
    "no format": changed(PRESIGNED, "format", drop=True),
    "blank format": changed(PRESIGNED, "format", "  "),
    "a number as format": changed(PRESIGNED, "format", 1),
    "no contents": changed(PRESIGNED, "contents", drop=True),
    "contents as text": changed(PRESIGNED, "contents", "moe_routes"),
    "contents with a number": changed(PRESIGNED, "contents", [1]),
    "a blank entry": changed(PRESIGNED, "contents", [""]),
    "duplicates": changed(PRESIGNED, "contents", ["moe_routes", "moe_routes"]),
    "codec none": changed(PRESIGNED, "codec", "none"),
    "codec null": changed(PRESIGNED, "codec", None),
    "no delivery": changed(PRESIGNED, "delivery", drop=True),
    "another mode": changed(PRESIGNED, "delivery.mode", "inline"),
    "an unknown key": changed(PRESIGNED, "SECRET", 1),
    "an unknown key of the delivery": changed(PRESIGNED, "delivery.more", 1),
    "an unknown key of the target": changed(PRESIGNED, f"{TARGET}.more", 1),
    "another kind": changed(PRESIGNED, f"{TARGET}.kind", "ftp"),
    "a list as kind": changed(PRESIGNED, f"{TARGET}.kind", ["managed_fsspec"]),
    "no url": changed(PRESIGNED, f"{TARGET}.url", drop=True),
    "empty url": changed(PRESIGNED, f"{TARGET}.url", ""),
    "no expiry": changed(PRESIGNED, f"{TARGET}.expires_at", drop=True),
    "max_bytes 0": changed(PRESIGNED, f"{TARGET}.max_bytes", 0),
    "max_bytes as text": changed(PRESIGNED, f"{TARGET}.max_bytes", "5"),
    "max_bytes true": changed(PRESIGNED, f"{TARGET}.max_bytes", True),
    "max_bytes beyond u64": changed(PRESIGNED, f"{TARGET}.max_bytes", 2**64),
    "headers as list": changed(PRESIGNED, f"{TARGET}.required_headers", []),
    "a number as header": changed(PRESIGNED, f"{TARGET}.required_headers", {"a": 1}),
    "no object id": changed(PRESIGNED, f"{TARGET}.object_id", " "),
    "no profile": changed(MANAGED, f"{TARGET}.profile", drop=True),
    "a number as profile": changed(MANAGED, f"{TARGET}.profile", 1),
    "no key": changed(MANAGED, f"{TARGET}.object_key", ""),
    "a url for a managed target": changed(MANAGED, f"{TARGET}.url", "https://SECRET"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """Section 2.2; T72."""
    with pytest.raises(ArtifactRefusedError) as caught:
        parse_request(REFUSED[name])
    assert caught.value.code == "artifact_invalid_request"
    assert "SECRET" not in str(caught.value)


def test_either_spelling_but_not_both() -> None:
    """T111."""
    assert find_request({}) is None
    assert find_request({"nvext": {"extra_fields": []}, "generation_artifact": None}) is None
    native = find_request({"generation_artifact": MANAGED})
    nested = find_request({"nvext": {"generation_artifact": MANAGED}})
    assert native is not None and nested is not None
    assert (native[1], nested[1]) == ("native", "nvext") and native[0] == nested[0]
    for body in (
        {"generation_artifact": MANAGED, "nvext": {"generation_artifact": MANAGED}},
        {"generation_artifact": MANAGED, "generation_artifact_strict": "yes"},
        {"generation_artifact": "a string"},
    ):
        with pytest.raises(ArtifactRefusedError):
            find_request(body)
    strict = find_request({"generation_artifact": MANAGED, "generation_artifact_strict": True})
    assert strict is not None and strict[0].strict


def test_secrets_show_nowhere() -> None:
    """T71, section 2.5."""
    request = parse_request(PRESIGNED)
    for text in (repr(request), str(request), f"{request.target}"):
        assert "SECRET" not in text and "2027-01-01" not in text
        assert "opaque-1" in text and "x-key" in text and "67108864" in text
    body = {"messages": [{"nvext": {"generation_artifact": PRESIGNED}}], "generation_artifact": PRESIGNED}
    shown = redact(body)
    assert "SECRET" not in json.dumps(shown)
    assert shown["generation_artifact"]["delivery"]["target"]["required_headers"]["x-key"] == "[REDACTED]"
    assert shown["generation_artifact"]["delivery"]["target"]["object_id"] == "opaque-1"
    assert "SECRET" in json.dumps(body), "the original is untouched"
    assert redact({"generation_artifact": MANAGED}) == {"generation_artifact": MANAGED}


@pytest.mark.parametrize(
    "odd", [1, "text", None, [], {"generation_artifact": "x"}, {"generation_artifact": {"delivery": 3}}]
)
def test_redaction_takes_anything(odd: Any) -> None:
    assert redact(odd) == odd


def test_the_description_says_that_token_ids_are_always_written() -> None:
    """BR-25."""
    words = " ".join(str(ArtifactRequest.__doc__).split())
    assert "Prompt and completion token ids are always written" in words
