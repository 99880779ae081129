"""Reads `generation_artifact_v2` in ranges: the header first, then the chunks that are asked for and no others.

Synchronous, for trainers and tools; owns nothing but the header.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.artifacts.byte_source import ByteSource
from infer.artifacts.generation import ArtifactChoice, GenerationArtifact, RoutedExperts, SelectedLogprobs
from infer.artifacts.reading import (
    ArtifactReader,
    ChoiceSummary,
    FieldSummary,
    Verified,
    chosen_layers,
    row_range,
    sound,
)
from infer.artifacts.record import MISSING, ChoiceRecord, FieldRows, GenerationRecord
from infer.artifacts.v1.semantics import check_logprobs, check_routes, check_tokens
from infer.artifacts.v2 import header as wire
from infer.artifacts.v2.decoder import read_header, read_prelude
from infer.artifacts.v2.fields import RULES
from infer.artifacts.v2.limits import DEFAULT_LIMITS, FORMAT, PRELUDE_BYTES, Limits
from infer.artifacts.v2.rows import columns_of, joined, read_rows
from infer.artifacts.v2.verification import verify_object
from infer.errors import ArtifactCorruptError, ArtifactError, ArtifactFieldMissingError


class V2Reader(ArtifactReader):
    """Of an object in the open format. A delta needs `parent` for what it does not store itself."""

    format = FORMAT

    def __init__(
        self, source: ByteSource, *, limits: Limits = DEFAULT_LIMITS, parent: ArtifactReader | None = None
    ) -> None:
        self._source = source
        size = source.size
        self._prelude = read_prelude(source.read(0, min(size, PRELUDE_BYTES)), size, limits)
        head = source.read(PRELUDE_BYTES, self._prelude.payload_start)
        self.header = read_header(head, self._prelude, size, limits)
        self.actual_bytes = size
        self.provenance = self.header.provenance
        self.parent = self.header.parent
        self.header_sha256 = self._prelude.header_sha256.hex()
        self._parent = self._checked_parent(parent)
        arrays = [array for field in self.header.fields for array in field.arrays.values()]
        self.codec = "zstd" if any(array.codec == "zstd" for array in arrays) else "none"
        self._entries: dict[tuple[str, int], list[wire.Field]] = {}
        for field in self.header.fields:
            for index in field.choices:
                self._entries.setdefault((field.name, index), []).append(field)
        self._choices = {choice.choice_index: choice for choice in self.header.choices}
        self.choices = tuple(self._summary(choice) for choice in self.header.choices)

    def fields(self) -> tuple[FieldSummary, ...]:
        found = []
        for field in self.header.fields:
            values, arrays = field.arrays["values"], field.arrays.values()
            found.append(
                FieldSummary(
                    name=field.name,
                    choices=field.choices,
                    scope=field.scope,
                    row_start=field.row_start,
                    num_rows=field.num_rows,
                    dtype=values.dtype,
                    shape=values.shape,
                    raw_bytes=sum(array.raw_bytes for array in arrays),
                    stored_bytes=sum(array.stored_bytes or 0 for array in arrays),
                    known=field.name in RULES,
                )
            )
        return tuple(found)

    def field(
        self,
        name: str,
        choice: int | None = None,
        *,
        tokens: slice | None = None,
        layers: int | Iterable[int] | None = None,
    ) -> FieldRows:
        """Arrays are read-only. Rows of a delta that its parent holds are included when the parent was given; without it
        the rows begin where the delta begins."""
        entries = self._found(name, self._chosen(choice))
        first, wanted = entries[0], chosen_layers(layers)
        columns = None if wanted is None else columns_of(first, wanted)
        if first.scope == "request":
            if tokens is not None:
                raise ArtifactFieldMissingError(f"{name} is of the request and has no rows of tokens")
            return read_rows(self._source, entries, [(0, first.num_rows)], columns, 0)
        prefix_end = first.row_start if self._prefixed(name) else 0
        start = self._parent_start(name) if prefix_end else first.row_start
        low, high = row_range(tokens, start, entries[-1].row_end - start)
        low, high = low + start, high + start
        inner = [
            (max(low, entry.row_start) - entry.row_start, min(high, entry.row_end) - entry.row_start)
            for entry in entries
        ]
        own = read_rows(self._source, entries, inner, columns, max(low, first.row_start))
        if low >= prefix_end:
            return own
        return joined(self._prefix(name, low, min(high, prefix_end), wanted), own)

    def tokens(self, choice: int | None = None) -> NDArray[np.int64]:
        index = self._chosen(choice)
        rows = self.field("token_ids", index)
        if rows.row_start:
            raise ArtifactFieldMissingError(
                f"tokens 0 to {rows.row_start - 1} are in the parent, the artifact with SHA-256 "
                f"{self.parent.sha256.hex() if self.parent else ''}: open it and give it as parent="
            )
        prompt = self._choices[index].prompt_token_count
        sound(lambda: check_tokens(rows.values, prompt))
        return rows.values

    def routes(
        self, choice: int | None = None, *, layers: int | Iterable[int] | None = None, tokens: slice | None = None
    ) -> RoutedExperts:
        """Only the chunks of these layers and tokens are fetched. Rows that are missing are never handed out as routes:
        `field("moe_routes")` gives them with their status."""
        rows = self.field("moe_routes", choice, tokens=tokens, layers=layers)
        if not rows.complete:
            gone = int((np.asarray(rows.status) == MISSING).sum())
            raise ArtifactFieldMissingError(f"{gone} rows of moe_routes are missing; field('moe_routes') says which")
        ids, start = rows.values, rows.row_start
        routers, counts = (_integers(rows, name) for name in ("layer_ids", "expert_counts"))
        if ids.shape[1]:
            sound(lambda: check_routes(ids, start, routers, counts, start + len(ids) + 1))
        return RoutedExperts(start, ids, routers, counts)

    def logprobs(self, choice: int | None = None) -> SelectedLogprobs:
        index = self._chosen(choice)
        rows = self.field("selected_logprobs", index)
        if not rows.complete:
            raise ArtifactFieldMissingError("selected_logprobs has missing rows; field('selected_logprobs') says which")
        found = self._choices[index]
        sound(lambda: check_logprobs(rows.values, rows.row_start, found.prompt_token_count, found.token_count))
        return SelectedLogprobs(rows.row_start, rows.values)

    def artifact(self) -> GenerationArtifact:
        return GenerationArtifact(choices=tuple(self._artifact_choice(choice) for choice in self.header.choices))

    def record(self) -> GenerationRecord:
        """Everything, as the writer takes it; a delta stays a delta."""
        choices = []
        for choice in self.header.choices:
            index = choice.choice_index
            names = [name for name, owner in self._entries if owner == index]
            rows = {name: self._own(name, index) for name in names}
            tokens = rows.pop("token_ids")
            spans = self.weight_spans(index) if rows.pop("weight_spans", None) is not None else ()
            ids = np.concatenate(
                [np.zeros(tokens.row_start, np.int64), tokens.values]
            )  # what the parent holds is not kept
            choices.append(
                ChoiceRecord(
                    choice_index=index,
                    prompt_token_ids=ids[: choice.prompt_token_count],
                    output_token_ids=ids[choice.prompt_token_count :],
                    fields=rows,
                    weight_spans=spans,
                    finish_reason=choice.finish_reason,
                    stop_reason=choice.stop_reason,
                    seed=choice.seed,
                )
            )
        return GenerationRecord(choices=choices, provenance=self.header.provenance, parent=self.parent)

    def verify(self, *, sha256: str | None = None, actual_bytes: int | None = None) -> Verified:
        """One pass over the object in bounded memory: digests, padding, and the values of all fields that are known."""
        if actual_bytes is not None and self.actual_bytes != actual_bytes:
            raise ArtifactCorruptError(f"the object has {self.actual_bytes} bytes; the receipt says {actual_bytes}")
        digest, body = verify_object(self._source, self.header, self._prelude)
        if sha256 is not None and digest != sha256.lower():
            raise ArtifactCorruptError(f"the object's SHA-256 is {digest}; the receipt says {sha256}")
        return Verified(self.actual_bytes, digest, body)

    def _checked_parent(self, parent: ArtifactReader | None) -> V2Reader | None:
        if parent is None:
            return None
        if self.parent is None or not isinstance(parent, V2Reader):
            raise ArtifactError("this artifact has no parent, or the one that was given has another format")
        if parent.header_sha256 != self.parent.header_sha256.hex():
            raise ArtifactError(
                f"this is not the parent: its header has SHA-256 {parent.header_sha256}, and the child names "
                f"{self.parent.header_sha256.hex()}"
            )
        if self.parent.choice_index not in parent._choices:
            raise ArtifactCorruptError(f"the parent has no choice {self.parent.choice_index}")
        return parent

    def _found(self, name: str, index: int) -> list[wire.Field]:
        entries = self._entries.get((name, index))
        if entries is None:
            known = ", ".join(sorted({known for known, owner in self._entries if owner == index}))
            raise ArtifactFieldMissingError(
                f"choice {index} of this artifact holds no {name[:64]}; it holds {known[:400]}"
            )
        return entries

    def _prefixed(self, name: str) -> bool:
        return self._parent is not None and self.parent is not None and name in self.parent.fields

    def _parent_start(self, name: str) -> int:
        if self._parent is None or self.parent is None:
            return 0
        entries = self._parent._found(name, self.parent.choice_index)
        return self._parent._parent_start(name) if self._parent._prefixed(name) else entries[0].row_start

    def _prefix(self, name: str, low: int, high: int, layers: tuple[int, ...] | None) -> FieldRows:
        if self._parent is None or self.parent is None:
            raise ArtifactFieldMissingError(f"rows {low} to {high} of {name} are in the parent")
        rows = self._parent.field(name, self.parent.choice_index, tokens=slice(low, high), layers=layers)
        if (rows.row_start, rows.row_end) != (low, high):
            raise ArtifactCorruptError(
                f"{name}: the parent has rows {rows.row_start} to {rows.row_end} of {low} to {high}"
            )
        return rows

    def _own(self, name: str, index: int) -> FieldRows:
        entries = self._found(name, index)
        whole = [(0, entry.num_rows) for entry in entries]
        return read_rows(self._source, entries, whole, None, entries[0].row_start)

    def _artifact_choice(self, choice: wire.Choice) -> ArtifactChoice:
        index = choice.choice_index
        routes = self.routes(index) if ("moe_routes", index) in self._entries else None
        logprobs = self.logprobs(index) if ("selected_logprobs", index) in self._entries else None
        return ArtifactChoice(index, choice.prompt_token_count, self.tokens(index), routes, logprobs)

    def _summary(self, choice: wire.Choice) -> ChoiceSummary:
        index = choice.choice_index
        routes = self._entries.get(("moe_routes", index))
        attributes: dict[str, Any] = routes[0].attributes if routes else {}
        shape = None
        if routes:
            shape = (sum(entry.num_rows for entry in routes), *routes[0].arrays["values"].shape[1:])
        return ChoiceSummary(
            choice_index=index,
            prompt_token_count=choice.prompt_token_count,
            num_tokens=choice.token_count,
            contents=tuple(sorted(name for name, owner in self._entries if owner == index and name != "token_ids")),
            route_start=routes[0].row_start if routes else None,
            routes_shape=shape,
            routes_dtype=routes[0].arrays["values"].dtype if routes else None,
            router_ids=attributes.get("layer_ids", ()),
            expert_counts=attributes.get("expert_counts", ()),
            finish_reason=choice.finish_reason,
            seed=choice.seed,
        )


def _integers(rows: FieldRows, name: str) -> tuple[int, ...]:
    found = rows.attributes[name]
    return tuple(int(value) for value in found) if isinstance(found, tuple) else ()
