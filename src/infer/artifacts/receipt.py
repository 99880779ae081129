"""What the response carries instead of the artifact: where it is, how to verify it, or which failure it met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from infer.artifacts.request import ArtifactParent
from infer.errors import ArtifactError

SENTENCES = {
    "artifact_invalid_request": "the generation artifact request is invalid",
    "artifact_unsupported": "this engine cannot capture what the generation artifact request asks for",
    "artifact_target_rejected": "the generation artifact target is not allowed",
    "artifact_limit_exceeded": "the generation artifact may exceed a size limit",
    "artifact_target_expires_too_soon": "the upload grant expires before the generation artifact can be delivered",
    "artifact_capacity_exhausted": "there is no room for another generation artifact now",
    "artifact_capture_failed": "the generation artifact could not be captured completely",
    "artifact_too_large": "the generation artifact exceeds a size limit",
    "artifact_target_expired": "the upload grant expired before the generation artifact was delivered",
    "artifact_address_refused": "the generation artifact target resolves to an address that is not allowed",
    "artifact_conflict": "an object exists already at the generation artifact target",
    "artifact_upload_rejected": "the generation artifact target did not accept the upload",
    "artifact_upload_timeout": "the generation artifact upload did not finish in time",
    "artifact_queue_timeout": "the generation artifact found no free delivery slot in time",
    "artifact_cancelled": "the request was aborted before the generation artifact was delivered",
    "artifact_outcome_unknown": "the generation artifact may or may not have been stored",
    "artifact_receipt_missing": "the request finished without a generation artifact receipt",
    "artifact_delivery_failed": "generation artifact delivery failed",
}
"""Code -> its one fixed sentence."""
_OPTIONAL = (
    *("actual_bytes", "sha256", "object_id", "body_sha256", "token_start", "logprobs_mode"),
    *("header_sha256", "header_bytes", "raw_bytes"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactReceipt:
    """`state` "ready": the object of `actual_bytes` bytes with digest `sha256` is stored as `object_id`.

    `state` "failed": `error_code` says why. Size, digest and id are given then too when an object was encoded, so that an
    orphan can be found. `body_sha256` is that of the decoded body and does not depend on the compression library.
    """

    format: str
    contents: tuple[str, ...]
    state: Literal["ready", "failed"]
    error_code: str | None = None
    actual_bytes: int | None = None
    sha256: str | None = None
    object_id: str | None = None
    body_sha256: str | None = None
    completion_token_count: int | tuple[int, ...] | None = None
    """Per choice when there are several."""
    token_start: int | None = None
    """First token that has a route row."""
    logprobs_mode: str | None = None
    header_sha256: str | None = None
    """This and the following: of generation_artifact_v2."""
    header_bytes: int | None = None
    raw_bytes: int | None = None
    """Of all fields before compression."""
    field_sha256: tuple[tuple[str, str], ...] = ()
    """(field, digest over the digests of its arrays in the order of the table)."""

    @property
    def error(self) -> str | None:
        """The fixed sentence of `error_code`."""
        return None if self.error_code is None else SENTENCES[self.error_code]

    def to_json(self) -> dict[str, Any]:
        """The keys of a response; what is not known is absent."""
        made: dict[str, Any] = {"format": self.format, "contents": list(self.contents), "state": self.state}
        if self.state == "failed":
            made |= {"error_code": self.error_code, "error": self.error}
        for name in _OPTIONAL:
            value = getattr(self, name)
            if value is not None:
                made[name] = value
        count = self.completion_token_count
        if count is not None:
            made["completion_token_count"] = count if isinstance(count, int) else list(count)
        if self.field_sha256:
            made["field_sha256"] = dict(self.field_sha256)
        return made

    def as_parent(
        self, token_count: int, *, choice_index: int = 0, fields: tuple[str, ...] | None = None
    ) -> ArtifactParent:
        """For the next turn, whose prompt begins with `token_count` tokens of this artifact. Raises `ArtifactError` unless
        this is a delivered artifact in the open format."""
        if self.state != "ready" or self.sha256 is None or self.header_sha256 is None:
            reason = f"a {self.state} receipt of {self.format} cannot be a parent"
            raise ArtifactError(reason, code=self.error_code or "artifact_unsupported")
        return ArtifactParent(
            sha256=self.sha256,
            header_sha256=self.header_sha256,
            token_count=token_count,
            choice_index=choice_index,
            fields=fields,
        )

    def raise_if_failed(self) -> None:
        """For strict requests. Raises `ArtifactError` with the receipt's code."""
        if self.error_code is not None:
            raise ArtifactError(SENTENCES[self.error_code], code=self.error_code)


def missing_receipt(format: str, contents: Sequence[str]) -> ArtifactReceipt:
    """Made by the API when a request finishes and no receipt arrived; contents stay as they were asked for."""
    return ArtifactReceipt(
        format=format, contents=tuple(contents), state="failed", error_code="artifact_receipt_missing"
    )
