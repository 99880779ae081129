"""dtypes of the wire as numpy has them, and what the values of well-known fields must satisfy, chunk by chunk. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.artifacts.record import MISSING
from infer.artifacts.v1.semantics import malformed
from infer.artifacts.v2.header import Field

DTYPES: Mapping[str, np.dtype[Any]] = {
    name: np.dtype("<u2" if name == "bf16" else f"<{name[0]}{int(name[1:]) // 8}")
    for name in ("u8", "u16", "u32", "u64", "i8", "i16", "i32", "i64", "f16", "bf16", "f32", "f64")
}
_FINITE = ("selected_logprobs", "topk_logprobs", "prompt_logprobs", "entropy", "kept_logmass")
_NOT_NEGATIVE = ("token_ids", "kept_set")


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Of an array of a plugin's field. Raises `ArtifactError` for a type that the format does not have."""
    name = f"{dtype.kind}{dtype.itemsize * 8}"
    if name not in DTYPES:
        raise malformed(f"an array of dtype {dtype} cannot be stored; one of {', '.join(DTYPES)} can")
    return name


def narrow(values: NDArray[Any], dtype: str, where: str) -> NDArray[Any]:
    """A contiguous copy or view in the wire's type. Raises `ArtifactError` when a value does not fit."""
    wanted = DTYPES[dtype]
    if values.dtype != wanted and values.size:
        if values.dtype.kind in "iu":
            low, high = int(values.min()), int(values.max())
            bounds = np.iinfo(wanted)
            if low < bounds.min or high > bounds.max:
                raise malformed(f"{where} holds {low if low < bounds.min else high}, outside {dtype}")
        elif wanted.kind == "f":
            largest = float(np.finfo(wanted).max)
            if not bool((np.abs(values) <= largest).all()):
                raise malformed(f"{where} holds a number that is not a finite {dtype}")
    return np.ascontiguousarray(values, dtype=wanted)


@dataclass(slots=True)
class EntryCheck:
    """Values of one entry of the field table, its chunks given in the order in which they are stored."""

    field: Field
    previous: int = 0
    """Last offset seen."""
    status: NDArray[Any] | None = None

    def chunk(self, array: str, values: NDArray[Any], box: tuple[int, int, int, int]) -> None:
        """Raises `ArtifactError`."""
        name = self.field.name
        if array == "offsets":
            self._offsets(values, box[0])
        elif array == "status":
            if values.size and int(values.max()) > MISSING:
                raise malformed(f"{name} has row status {int(values.max())}; 0 to {MISSING} exist")
            self.status = values if self.status is None else np.concatenate([self.status, values])
        else:
            self._missing(array, values, box)
            self._known(array, values, box)

    def _offsets(self, values: NDArray[Any], first: int) -> None:
        if not first and int(values[0]):
            raise malformed(f"{self.field.name}: offsets begin at {int(values[0])}, not 0")
        steps = np.diff(values, prepend=self.previous)
        if int(steps.min()) < 0:
            raise malformed(f"{self.field.name}: offsets decrease")
        self.previous = int(values[-1])
        end = self.field.arrays["values"].shape[0]
        if first + len(values) == self.field.num_rows + 1 and self.previous != end:
            raise malformed(f"{self.field.name}: offsets end at {self.previous} of {end} values")

    def _missing(self, array: str, values: NDArray[Any], box: tuple[int, int, int, int]) -> None:
        if self.status is None or "offsets" in self.field.arrays:
            return
        gone = values[self.status[box[0] : box[1]] == MISSING]
        if gone.size and gone.tobytes().strip(b"\0"):
            raise malformed(f"{self.field.name}.{array} has a missing row that is not zero")

    def _known(self, array: str, values: NDArray[Any], box: tuple[int, int, int, int]) -> None:
        name = self.field.name
        if not values.size:
            return
        if name in _FINITE:
            if values.dtype.kind == "f" and not bool(np.isfinite(values).all()):
                raise malformed(f"{name} holds a number that is not finite")
            if array == "token_ids":
                self._within(array, values, 0, None)
        elif name in _NOT_NEGATIVE:
            self._within(array, values, 0, None)
        elif name == "sampled_mask":
            self._within(array, values, 0, 1)
        elif name == "indexer_topk":
            self._within(array, values, -1, None)
        elif name == "weight_spans":
            versions: Any = self.field.attributes["versions"]
            self._within(array, values, 0, len(versions) - 1)
        elif name == "moe_routes":
            self._routes(values, box)

    def _within(self, array: str, values: NDArray[Any], low: int, high: int | None) -> None:
        least, largest = int(values.min()), int(values.max())
        if least < low or (high is not None and largest > high):
            raise malformed(f"{self.field.name}.{array} holds {least if least < low else largest}")

    def _routes(self, values: NDArray[Any], box: tuple[int, int, int, int]) -> None:
        counts: Any = self.field.attributes["expert_counts"]
        layers: Any = self.field.attributes["layer_ids"]
        if int(values.min()) < 0:
            raise malformed(f"moe_routes holds expert {int(values.min())}")
        largest = values.max(axis=(0, 2)).tolist()
        for layer, count, seen in zip(layers[box[2] : box[3]], counts[box[2] : box[3]], largest, strict=True):
            if seen >= count:
                raise malformed(f"expert id {seen} of layer {layer} is not below its {count} experts")
