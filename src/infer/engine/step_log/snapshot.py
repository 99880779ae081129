"""The state of a scheduler as plain data and back: everything that a decision depends on, and no word of the requests.

Used in the loop task when a log file begins, and by `replay`. Pure but for the scheduler that `restore` fills.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from enum import Enum
from typing import Any

import msgspec

from infer.config.capture import CaptureProfile
from infer.engine.aux import coordinator, index
from infer.engine.aux import rows as aux_rows
from infer.engine.kv_cache.block_pool import BlockPool, KVEvent
from infer.engine.kv_cache.manager import RequestBlocks
from infer.engine.request import Request, Status
from infer.engine.scheduler.budget import ScheduledStep
from infer.engine.scheduler.scheduler import Scheduler
from infer.engine.step import AuxBegin, SamplingSpec, StepPlan
from infer.errors import EngineError

Digest = Callable[[bytes], bytes]

_CLASSES: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        Request,
        RequestBlocks,
        ScheduledStep,
        StepPlan,
        SamplingSpec,
        BlockPool,
        AuxBegin,
        CaptureProfile,
        aux_rows.RequestRows,
        aux_rows._Segment,
        index.RetainedObject,
        coordinator._Capture,
    )
}
_NOT_TOLD: dict[tuple[str, str], Any] = {
    ("Request", "cache_salt"): None,
    ("Request", "stop_ids"): {},
    ("Request", "outbox"): None,
    ("Request", "repetition"): None,
    ("Request", "error"): None,
    ("Request", "history"): None,
    ("Request", "stop_reason"): None,
    ("StepPlan", "admissions"): [],
    ("StepPlan", "new_blocks"): [],
    ("StepPlan", "aux"): None,
    ("_Segment", "buffers"): {},
}
"""Attributes whose values decide nothing any more, or are the requests' own: written as these."""

_NO_STATE = {
    "scheduler": {
        "config",
        "kv",
        "aux",
        "stats",
        "metrics",
        "histories",
        "waiting",
        "log",
        "preempted",
        "retired",
        "_match",
        "_clock",
    },
    "kv": {"block_size", "prefix_caching", "groups", "watermarks", "stats", "lineage", "_root", "_has_windows"},
    "aux": {"stats", "retained", "_kv", "_block_size"},
    "retained": {"_capacities", "_is_cached"},
}
"""What the parts of a scheduler are made with, or only count."""


class NoReader:
    """Stands for the outbox of a request that nobody reads."""

    def put(self, *args: Any) -> None:
        pass


def bare_sampling(spec: SamplingSpec) -> SamplingSpec:
    """Of the sampling parameters what scheduling looks at."""
    return SamplingSpec(
        seed=0,
        min_tokens=spec.min_tokens,
        prompt_logprobs=None if spec.prompt_logprobs is None else 0,
        forced_token_ids=(0,) * len(spec.forced_token_ids),
    )


def take(scheduler: Scheduler, keys: dict[Request, int], digest: Digest) -> msgspec.Raw:
    """The state between two calls, as msgpack. `keys` are the log's names of the requests. Raises `EngineError` naming the
    class when a scheduler of the user's keeps something that has no plain form."""
    writer = _Writer(digest)
    state = {name: writer.attributes(part, _NO_STATE[name]) for name, part in _parts(scheduler).items()}
    state["waiting"] = writer.value(list(scheduler.waiting))
    state["keys"] = writer.value([[request, key] for request, key in keys.items()])
    return msgspec.Raw(msgspec.msgpack.encode(state))


def restore(scheduler: Scheduler, state: msgspec.Raw) -> dict[int, Request]:
    """Fill a new scheduler of the same configuration; returns the requests by the log's names."""
    written = msgspec.msgpack.decode(state, strict=False)
    reader = _Reader()
    for name, part in _parts(scheduler).items():
        for attribute, value in written[name].items():
            setattr(part, attribute, reader.value(value))
    scheduler.waiting._requests = reader.value(written["waiting"])
    return {key: request for request, key in reader.value(written["keys"])}


def _parts(scheduler: Scheduler) -> dict[str, Any]:
    parts: dict[str, Any] = {"scheduler": scheduler, "kv": scheduler.kv}
    if scheduler.aux is not None:
        parts |= {"aux": scheduler.aux, "retained": scheduler.aux.retained}
    return parts


def _names(value: Any) -> list[str]:
    """Attributes of an object, with slots or without."""
    if isinstance(value, msgspec.Struct):
        return list(value.__struct_fields__)
    slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
    return slots or list(vars(value))


class _Writer:
    """Objects are written once and then meant by their number. Bytes are hashes of content: they are keyed anew."""

    def __init__(self, digest: Digest) -> None:
        self._digest = digest
        self._numbers: dict[int, int] = {}

    def attributes(self, part: Any, skipped: set[str]) -> dict[str, Any]:
        return {name: self.value(getattr(part, name)) for name in _names(part) if name not in skipped}

    def value(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, bytes):
            return {"hash": self._digest(value)}
        if isinstance(value, bytearray):
            return {"zeros": len(value)}
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, KVEvent):
            return {"event": [value.kind, self.value(list(value.hashes))]}
        if isinstance(value, tuple | deque):
            return {type(value).__name__: [self.value(item) for item in value]}
        if isinstance(value, array):
            return {"array": value.typecode, "items": value.tolist()}
        if isinstance(value, dict):
            return {type(value).__name__: [[self.value(key), self.value(item)] for key, item in value.items()]}
        if isinstance(value, Enum):
            return {"status": value.value}
        return self._object(value)

    def _object(self, value: Any) -> Any:
        name = type(value).__name__
        if _CLASSES.get(name) is not type(value):
            raise EngineError(f"the step log cannot write the state of a scheduler that holds a {name}")
        number = self._numbers.get(id(value))
        if number is not None:
            return {"object": number}
        number = self._numbers[id(value)] = len(self._numbers)
        if isinstance(value, SamplingSpec):
            value = bare_sampling(value)
        written: dict[str, Any] = {}
        for attribute in _names(value):
            if isinstance(value, Request) and attribute == "token_ids":
                written[attribute] = len(value.token_ids)
            elif isinstance(value, Request) and attribute == "drafts":  # token ids are nobody's business
                written[attribute] = [0] * len(value.drafts)
            elif (name, attribute) in _NOT_TOLD:
                written[attribute] = self.value(_NOT_TOLD[name, attribute])
            else:
                written[attribute] = self.value(getattr(value, attribute))
        return {"object": number, "class": name, "with": written}


class _Reader:
    def __init__(self) -> None:
        self._objects: dict[int, Any] = {}

    def value(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "object" in value:
            return self._object(value)
        (kind, content), *more = value.items()
        if more:
            return array(content, value["items"])
        match kind:
            case "hash":
                return content
            case "zeros":
                return bytearray(content)
            case "event":
                return KVEvent(content[0], tuple(self.value(content[1])))
            case "tuple":
                return tuple(self.value(content))
            case "deque":
                return deque(self.value(content))
            case "status":
                return Status(content)
            case "OrderedDict":
                return OrderedDict(self.value(content))
            case _:
                return dict(self.value(content))

    def _object(self, value: dict[str, Any]) -> Any:
        number = value["object"]
        if "class" not in value:
            return self._objects[number]
        cls = _CLASSES[value["class"]]
        if issubclass(cls, msgspec.Struct):  # plain data, which holds nothing that could lead back to it
            self._objects[number] = cls(**{name: self.value(item) for name, item in value["with"].items()})
            return self._objects[number]
        made = self._objects[number] = cls.__new__(cls)
        for name, item in value["with"].items():
            content = self.value(item)
            if cls is Request and name == "token_ids":
                content = [0] * content
            elif cls is Request and name == "outbox":
                content = NoReader()
            object.__setattr__(made, name, content)
        return made
