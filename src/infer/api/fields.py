"""The fields of a request body: honoured, accepted with a notice, or refused by name; unknown ones are refused.

Pure. A `Body` is both the check and the source of the documented list.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from infer.errors import InvalidRequestError
from infer.types import SamplingParams

SECRET_FIELDS = frozenset({"nvext", "generation_artifact"})
"""Their values may hold an upload grant: messages never quote them."""
Treatment = Literal["honoured", "notice", "refused"]


class BodyModel(BaseModel):
    """Base of the honoured fields. JSON null counts as absent."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRule:
    """One documented field."""

    name: str
    treatment: Treatment
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsupported:
    """A known field that is not honoured. `harmless` values ask for nothing and pass in silence, as null does."""

    note: str
    refused: bool = True
    harmless: Callable[[Any], bool] = lambda value: value in (False, [], {}, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """What one route's JSON object may hold."""

    name: str
    model: type[BodyModel]
    sampling: Mapping[str, str] = field(default_factory=dict)
    """JSON name -> name in SamplingParams; checked there."""
    unsupported: Mapping[str, Unsupported] = field(default_factory=dict)

    def rules(self) -> Iterator[FieldRule]:
        """Every known field with what becomes of it."""
        for name, info in self.model.model_fields.items():
            yield FieldRule(name=name, treatment="honoured", note=_one_line(info.description))
        for name, parameter in self.sampling.items():
            docs = SamplingParams.model_fields[parameter].description
            note = _one_line(docs) if docs else f"SamplingParams.{parameter}"
            yield FieldRule(name=name, treatment="honoured", note=note)
        for name, rule in self.unsupported.items():
            yield FieldRule(name=name, treatment="refused" if rule.refused else "notice", note=rule.note)

    def parse(
        self, data: Mapping[str, Any], *, unknown: Literal["refuse", "notice"], notices: list[str]
    ) -> tuple[Any, dict[str, Any]]:
        """(the honoured fields as `model`, sampling values by SamplingParams name). Appends to `notices`."""
        own: dict[str, Any] = {}
        sampling: dict[str, Any] = {}
        for name, value in data.items():
            if value is None:
                if name not in self.known():
                    self._unknown(name, unknown, notices)
            elif name in self.model.model_fields:
                own[name] = value
            elif name in self.sampling:
                sampling[self.sampling[name]] = value
            elif name in self.unsupported:
                self._unsupported(name, value, notices)
            else:
                self._unknown(name, unknown, notices)
        try:
            return self.model.model_validate(own), sampling
        except ValidationError as error:
            raise invalid_field(error) from None

    def known(self) -> set[str]:
        return {*self.model.model_fields, *self.sampling, *self.unsupported}

    def _unsupported(self, name: str, value: Any, notices: list[str]) -> None:
        rule = self.unsupported[name]
        if rule.harmless(value):
            return
        if rule.refused:
            raise InvalidRequestError(f"{name} is not supported: {rule.note}", parameter=name, value=value)
        notices.append(f"{name}: {rule.note}")

    def _unknown(self, name: str, policy: str, notices: list[str]) -> None:
        if policy == "notice":
            notices.append(f"{name}: unknown, ignored")
            return
        near = difflib.get_close_matches(name, sorted(self.known()), n=1, cutoff=0.7)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InvalidRequestError(f"unknown field {name[:100]!r}{hint}", parameter=name[:100], value=data_kind(name))


def data_kind(value: object) -> str:
    return type(value).__name__


def invalid_field(error: ValidationError) -> InvalidRequestError:
    """The first complaint, naming the field and the value."""
    errors = error.errors(include_url=False)
    first = errors[0]
    parts = [str(part) for part in first["loc"]]
    # A union says which member it tried ("list[str]", "function-before[...]"): not a part of the path.
    path = ".".join(part for part in parts if re.fullmatch(r"\w+", part) and part not in ("str", "int"))
    top = parts[0] if parts else ""
    if first["type"] == "extra_forbidden":
        return InvalidRequestError(f"unknown field {path!r}", parameter=path)
    same = [item["msg"] for item in errors if item["loc"] and str(item["loc"][0]) == top]
    message = ", or: ".join(dict.fromkeys(text.removeprefix("Value error, ") for text in same[:4]))
    if top in SECRET_FIELDS:
        return InvalidRequestError(f"{path}: {message}", parameter=top)
    shown = repr(first.get("input"))
    shown = shown if len(shown) < 200 else shown[:200] + "..."
    if first["type"] == "missing":
        return InvalidRequestError(f"{path} is missing", parameter=path)
    if not top:
        return InvalidRequestError(message, parameter=message.split(" ")[0])
    return InvalidRequestError(f"{path}={shown}: {message}", parameter=top, value=first.get("input"))


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())
