"""Which rows of a finished choice are named by keys: those that the store has, and no others."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from infer.artifacts import rebuild_rows
from infer.config.capture import CaptureProfile, ResolvedCapture, object_key
from infer.engine.keyed_rows import as_keys, check_captured_as
from infer.engine.worker.directory_store import DirectoryStore, directory_store
from infer.errors import InvalidRequestError
from infer.types import CapturedRows, SamplingParams

PROFILE = CaptureProfile(
    name="moe_routes", dtype="uint8", row_shape=(1,), layer_ids=(0,), num_experts=200, model_identity="m"
)
RUN = b"r" * 16
HASHES = [bytes([i]) * 32 for i in range(5)]


def resolved(store_dir: Path) -> ResolvedCapture:
    return ResolvedCapture(
        profiles=(PROFILE,),
        block_size=4,
        num_objects={"moe_routes": 8},
        max_step_tokens=8,
        queue_size=2,
        store_dir=str(store_dir),
        run=RUN,
    )


def captured(start: int, count: int, versions: tuple[tuple[int, int], ...] | None = None) -> CapturedRows:
    """The row of position i holds i."""
    return CapturedRows(
        field="moe_routes",
        start=start,
        count=count,
        data=memoryview(bytes(range(start, start + count))),
        dtype="uint8",
        row_shape=(1,),
        layer_ids=(0,),
        num_experts=200,
        status=bytes(count),
        versions=versions if versions is not None else ((count, 0),),
    )


def key(block: int, version: int = 0) -> bytes:
    return object_key(RUN + PROFILE.digest, version, HASHES[block])


@pytest.fixture
def store(tmp_path: Path) -> Any:
    made = directory_store(tmp_path / PROFILE.digest.hex(), 4, 8)
    yield made
    made.close()


def fill(store: DirectoryStore, *blocks: int, version: int = 0) -> None:
    store.put({key(block, version): bytes(range(4 * block, 4 * block + 4)) for block in blocks})


@pytest.mark.parametrize(
    ("start", "count", "num_keys", "rest"),
    [
        (0, 18, 4, [16, 17]),
        (0, 16, 4, []),
        (0, 3, 0, [0, 1, 2]),
        (6, 10, 3, []),
        (6, 11, 3, [16]),
        (7, 1, 1, []),
        (13, 2, 0, [13, 14]),
        (5, 0, 0, []),
    ],
)
def test_whole_blocks_have_keys_and_the_tail_is_inline(
    store: DirectoryStore, tmp_path: Path, start: int, count: int, num_keys: int, rest: list[int]
) -> None:
    fill(store, 0, 1, 2, 3)
    rows = captured(start, count)
    found = as_keys(rows, PROFILE, resolved(tmp_path), HASHES)
    assert found.keys == tuple(key(start // 4 + i) for i in range(num_keys))
    assert list(found.data) == rest
    assert found.digest == hashlib.sha256(rows.data).digest()
    assert (found.block_size, found.model_identity, found.status, found.versions) == (
        4,
        "m",
        rows.status,
        rows.versions,
    )
    assert rebuild_rows(found, tmp_path).data == rows.data


@pytest.mark.row(
    "X-AUX-KEYS", "a block that the store does not have, or has otherwise, is returned as rows, with what follows"
)
def test_what_the_store_does_not_have_is_inline(store: DirectoryStore, tmp_path: Path) -> None:
    fill(store, 0, 2, 3)
    found = as_keys(captured(0, 17), PROFILE, resolved(tmp_path), HASHES)
    assert found.keys == (key(0),) and list(found.data) == list(range(4, 17))
    store.put({key(1): bytes([4, 5, 6, 9])})  # of another request: an equal block computed in another batch
    found = as_keys(captured(0, 17), PROFILE, resolved(tmp_path), HASHES)
    assert found.keys == (key(0),) and rebuild_rows(found, tmp_path).data == bytes(range(17))
    assert as_keys(captured(0, 17), PROFILE, resolved(tmp_path / "no"), HASHES).keys == ()
    assert as_keys(captured(0, 17), PROFILE, resolved(tmp_path), HASHES[:1]).keys == (key(0),)
    assert as_keys(captured(0, 17), PROFILE, resolved(tmp_path), []).keys == ()


def test_keys_carry_the_version_of_their_rows(store: DirectoryStore, tmp_path: Path) -> None:
    """A block under two versions is nowhere, under neither key."""
    fill(store, 0, 1)
    fill(store, 2, 3, version=7)
    found = as_keys(captured(0, 18, ((8, 0), (10, 7))), PROFILE, resolved(tmp_path), HASHES)
    assert found.keys == (key(0), key(1), key(2, 7), key(3, 7)) and list(found.data) == [16, 17]
    found = as_keys(captured(2, 16, ((7, 0), (9, 7))), PROFILE, resolved(tmp_path), HASHES)
    assert found.keys[:2] == (key(0), key(1)) and rebuild_rows(found, tmp_path).data == bytes(range(2, 18))
    found = as_keys(captured(0, 18, ((12, 0), (6, 7))), PROFILE, resolved(tmp_path), HASHES)
    assert found.keys == (key(0), key(1)), "block 2 was computed under version 0 here"


def test_rows_are_the_default_and_keys_need_a_store(tmp_path: Path) -> None:
    check_captured_as(SamplingParams(), None)
    wanted = SamplingParams(captured_as="keys", return_routed_experts=True)
    check_captured_as(wanted, resolved(tmp_path))
    for capture in (None, ResolvedCapture(**{**fields_of(resolved(tmp_path)), "store_dir": None})):
        with pytest.raises(InvalidRequestError, match=r"capture\.store_dir"):
            check_captured_as(wanted, capture)
    with pytest.raises(InvalidRequestError, match="return_routed_experts"):
        check_captured_as(SamplingParams(captured_as="keys"), resolved(tmp_path))


def fields_of(value: ResolvedCapture) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__struct_fields__}
