"""What a header must say to make sense, asked by the writer and the reader alike. Pure, no numpy; raises `ArtifactError`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from infer.artifacts.v1.semantics import malformed
from infer.artifacts.v2.fields import ALWAYS, ARRAY_NAME, REQUIRED_EXTRA, RULES, FieldRule, route_dtype
from infer.artifacts.v2.header import SCOPES, Array, Choice, Field, Header
from infer.artifacts.v2.limits import ITEM_BYTES, MAX_ARRAYS, MAX_EXTENT_BYTES, MAX_RANK
from infer.config.capture import FIELD_NAME


def check_facts(header: Header) -> None:
    """Choices, field table and parent fit together, and every well-known field has exactly the rows it must have."""
    check_choices(header.choices)
    _check_parent(header)
    by_index = {choice.choice_index: choice for choice in header.choices}
    parts: dict[tuple[str, int], list[Field]] = {}
    previous: tuple[str, int, tuple[int, ...]] | None = None
    for field in header.fields:
        key = (field.name, SCOPES.index(field.scope), field.choices)
        if previous is not None and key <= previous:
            raise malformed(f"field {field.name} is listed twice or out of order")
        previous = key
        check_entry(field)
        for index in field.choices:
            if index not in by_index:
                raise malformed(f"field {field.name} is of choice {index}, which does not exist")
            parts.setdefault((field.name, index), []).append(field)
    for (name, index), entries in parts.items():
        _check_parts(name, by_index[index], entries, header)
    for index in by_index:
        for name in (ALWAYS, *(() if header.parent is None else header.parent.fields)):
            if (name, index) not in parts:
                raise malformed(f"choice {index} has no {name}")


def check_choices(choices: Sequence[Choice]) -> None:
    if not choices:
        raise malformed("an artifact needs at least one choice")
    for before, after in itertools.pairwise(choices):
        if after.choice_index <= before.choice_index:
            raise malformed(f"choice_index {after.choice_index} follows {before.choice_index}; it must increase")
    for choice in choices:
        if choice.prompt_token_count > choice.token_count:
            raise malformed(f"choice {choice.choice_index} has a prompt longer than its {choice.token_count} tokens")


def check_entry(field: Field) -> None:
    """Names, arrays and attributes of one entry."""
    if not FIELD_NAME.fullmatch(field.name):
        raise malformed(f"{field.name[:64]!r} is no field name: a well-known one, or distribution.name")
    if not field.choices or any(after <= before for before, after in itertools.pairwise(field.choices)):
        raise malformed(f"field {field.name}: choices must increase and not be empty")
    if "values" not in field.arrays or len(field.arrays) > MAX_ARRAYS:
        raise malformed(f"field {field.name} has no array 'values', or more than {MAX_ARRAYS} arrays")
    for name, array in field.arrays.items():
        _check_array(field.name, name, array)
    _check_axes(field)
    rule = RULES.get(field.name)
    if rule is not None:
        _check_rule(field, rule)


def executed_ends(choice: Choice) -> tuple[int, ...]:
    """Where the rows of fed tokens end: the last sampled token was never fed. With nothing sampled, the last prompt token
    may have been fed (a prefill) or may be due to be fed."""
    last = choice.token_count - 1
    return (last,) if choice.token_count > choice.prompt_token_count else (last, last + 1)


def _check_array(field: str, name: str, array: Array) -> None:
    if not ARRAY_NAME.fullmatch(name):
        raise malformed(f"field {field}: {name[:64]!r} is no array name")
    if array.dtype not in ITEM_BYTES:
        raise malformed(f"array {field}.{name} has dtype {array.dtype[:20]!r}; one of {', '.join(ITEM_BYTES)}")
    if not 1 <= len(array.shape) <= MAX_RANK:
        raise malformed(f"array {field}.{name} has rank {len(array.shape)}; 1 to {MAX_RANK} are allowed")
    size = extents = ITEM_BYTES[array.dtype]
    for extent in array.shape:
        size *= extent
        extents *= max(extent, 1)
        if extents > MAX_EXTENT_BYTES:
            raise malformed(f"array {field}.{name} is larger than {MAX_EXTENT_BYTES} bytes")
    if array.raw_bytes != size:
        raise malformed(f"array {field}.{name} of shape {array.shape[:4]} has {size} bytes, not {array.raw_bytes}")


def _check_axes(field: Field) -> None:
    """First axes and special arrays agree."""
    offsets, status = field.arrays.get("offsets"), field.arrays.get("status")
    if offsets is not None and (offsets.dtype != "i64" or len(offsets.shape) != 1 or offsets.shape[0] < 1):
        raise malformed(f"field {field.name}: offsets must be i64 of one axis, one more than there are rows")
    if status is not None and (status.dtype != "u8" or status.shape != (field.num_rows,)):
        raise malformed(f"field {field.name}: status must be u8, one for each of the {field.num_rows} rows")
    if field.scope == "request":
        if field.row_start or offsets is not None or status is not None or field.executed:
            raise malformed(f"field {field.name} is of the request: it has neither rows nor a start")
        return
    length = field.arrays["values"].shape[0]
    for name, array in field.arrays.items():
        if name not in ("offsets", "status") and array.shape[0] != length:
            raise malformed(f"array {field.name}.{name} has {array.shape[0]} entries beside {length} values")


def _check_rule(field: Field, rule: FieldRule) -> None:
    name, values = field.name, field.arrays["values"]
    scopes = {"both": SCOPES[:2], "prompt": SCOPES[:1], "output": SCOPES[1:2]}[rule.part]
    if field.scope not in scopes or field.executed != rule.executed:
        raise malformed(f"field {name} cannot have scope {field.scope} with executed={field.executed}")
    if values.dtype not in rule.dtypes or len(values.shape) != rule.rank:
        raise malformed(
            f"{name} has dtype {values.dtype} and rank {len(values.shape)}, not {rule.dtypes} and {rule.rank}"
        )
    known = {"values", "status", *rule.extra, *(("offsets",) if rule.ragged else ())}
    required = {*(("offsets",) if rule.ragged else ()), *((REQUIRED_EXTRA[name],) if name in REQUIRED_EXTRA else ())}
    if set(field.arrays) - known or required - set(field.arrays):
        raise malformed(f"field {name} has the arrays {', '.join(sorted(field.arrays))[:200]}")
    for extra, dtype in rule.extra.items():
        found = field.arrays.get(extra)
        if found is not None and (found.dtype, found.shape) != (dtype, values.shape):
            raise malformed(f"array {name}.{extra} must be {dtype} of shape {values.shape}")
    if set(field.attributes) != set(rule.attributes):
        raise malformed(f"field {name} needs the attributes {', '.join(rule.attributes) or 'none'}")
    if name == "weight_spans":
        _check_different(field, "versions", str)
        return
    if "layer_ids" in rule.attributes:
        layers = _check_different(field, "layer_ids", int)
        if len(layers) != values.shape[1] or min(layers) < 0 or values.shape[2] < 1:
            raise malformed(f"field {name} has {len(layers)} layer_ids for the shape {values.shape}")
    if "expert_counts" in rule.attributes:
        counts = _items(field, "expert_counts", int)
        if len(counts) != values.shape[1] or min(counts) < 1 or values.dtype != route_dtype(max(counts)):
            raise malformed(f"field {name}: expert_counts must be positive, one a layer, and {values.dtype} their type")


def _items(field: Field, name: str, kind: type) -> tuple[Any, ...]:
    value = field.attributes[name]
    if not isinstance(value, tuple) or not value or any(type(item) is not kind for item in value):
        raise malformed(f"field {field.name}: {name} must be a list of {kind.__name__}")
    return value


def _check_different(field: Field, name: str, kind: type) -> tuple[Any, ...]:
    value = _items(field, name, kind)
    if len(set(value)) != len(value):
        raise malformed(f"field {field.name}: {name} holds one entry twice")
    return value


def _check_parts(name: str, choice: Choice, entries: Sequence[Field], header: Header) -> None:
    """The entries of one field of one choice follow each other and end where they must."""
    first, last = entries[0], entries[-1]
    if first.scope in ("step", "request"):
        if len(entries) > 1:
            raise malformed(f"field {name} of choice {choice.choice_index} has two entries")
        return
    if len(entries) > 2 or (len(entries) == 2 and not (first.num_rows and last.num_rows)):
        raise malformed(f"field {name} of choice {choice.choice_index} has an entry too many")
    prompt = choice.prompt_token_count
    stop = executed_ends(choice)[-1] if first.executed else choice.token_count
    for entry in entries:
        in_prompt = entry.scope == "prompt_token"
        sound = entry.row_end <= min(prompt, stop) if in_prompt else prompt <= entry.row_start <= entry.row_end <= stop
        if in_prompt and entry.row_start == prompt and not (name in RULES and RULES[name].part == "prompt"):
            sound = False  # without rows, and after the prompt: said in one way only
        if not sound:
            raise malformed(
                f"field {name} of choice {choice.choice_index} has rows {entry.row_start} to {entry.row_end} of scope "
                f"{entry.scope}; the sequence has {prompt} + {choice.token_count - prompt} tokens"
            )
    if len(entries) == 2:
        _check_continued(first, last)
    if name in RULES:
        _check_covered(name, RULES[name], choice, first, last)
    _check_start(name, choice, first, header)


def _check_continued(first: Field, last: Field) -> None:
    same = ("executed", "attributes")
    if first.row_end != last.row_start or any(getattr(first, key) != getattr(last, key) for key in same):
        raise malformed(f"field {first.name}: the second entry does not continue the first")
    if set(first.arrays) - {"status"} != set(last.arrays) - {"status"}:
        raise malformed(f"field {first.name}: the second entry has other arrays than the first")
    for name, array in first.arrays.items():
        other = last.arrays.get(name)
        if other is not None and (array.dtype, array.shape[1:]) != (other.dtype, other.shape[1:]):
            raise malformed(f"field {first.name}: the second entry has another type or shape than the first")


def _check_covered(name: str, rule: FieldRule, choice: Choice, first: Field, last: Field) -> None:
    prompt, total = choice.prompt_token_count, choice.token_count
    ends = executed_ends(choice) if rule.executed else (prompt if rule.part == "prompt" else total,)
    if last.row_end not in ends:
        raise malformed(
            f"{name} of choice {choice.choice_index} ends at token {last.row_end}; {prompt} + {total - prompt} tokens need "
            f"{' or '.join(map(str, ends))}"
        )
    if rule.part == "output" and first.row_start != prompt:
        raise malformed(
            f"{name} of choice {choice.choice_index} begins at {first.row_start}, not after the {prompt} tokens"
        )
    if rule.part == "prompt" and first.row_start < 1:
        raise malformed(f"{name} begins at token 0, which nothing predicts")


def _check_start(name: str, choice: Choice, first: Field, header: Header) -> None:
    parent = header.parent
    if parent is not None and name in parent.fields:
        needed = parent.token_count - (1 if first.executed else 0)
        if first.row_start != needed:
            raise malformed(f"{name} begins at {first.row_start}; the parent's rows end at {needed}")
    elif name in RULES and RULES[name].part == "both" and not RULES[name].executed and first.row_start:
        raise malformed(
            f"{name} of choice {choice.choice_index} begins at {first.row_start}, and no parent has the rest"
        )


def _check_parent(header: Header) -> None:
    parent = header.parent
    if parent is None:
        return
    if any(after <= before for before, after in itertools.pairwise(parent.fields)) or parent.choice_index < 0:
        raise malformed("the parent's fields must be sorted, each once")
    if len(parent.sha256) != 32 or len(parent.header_sha256) != 32:
        raise malformed("the parent's digests must be SHA-256")
    if any(not 1 <= parent.token_count <= choice.prompt_token_count for choice in header.choices):
        raise malformed(f"the parent's {parent.token_count} tokens must be the beginning of every prompt")
