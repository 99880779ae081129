"""Planted bugs: the kit of storage targets names the promise that a wrong one breaks."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import anyio.lowlevel
import pytest

from infer.errors import StorageError, StorageNotFoundError
from infer.plugins import StorageTargetSpec
from infer.testing.kits import storage_target
from infer.testing.storage_faults import disk
from planted_bugs import PlantBug, failures, plant_bug, registry

__all__ = ["plant_bug", "registry"]


class MemoryTarget:
    """A correct target; the bugs override one method each."""

    objects: dict[str, bytes] = {}  # noqa: RUF012 - one store, as a bucket is

    def __init__(self, uri: str, options: dict[str, Any]) -> None:
        self.uri = uri

    async def put(self, data: bytes, *, if_absent: bool) -> None:
        if if_absent and self.uri in self.objects:
            raise StorageError(f"{self.uri} exists")
        self.objects[self.uri] = data

    async def get(self, start: int = 0, end: int | None = None) -> bytes:
        if self.uri not in self.objects:
            raise StorageNotFoundError(self.uri)
        return self.objects[self.uri][start:end]

    async def exists(self) -> bool:
        return self.uri in self.objects

    async def list(self) -> list[str]:
        return [*self.objects]

    async def delete(self) -> None:
        self.objects.pop(self.uri, None)

    async def aclose(self) -> None:
        return None


class Overwrites(MemoryTarget):
    async def put(self, data: bytes, *, if_absent: bool) -> None:
        self.objects[self.uri] = data


class ChecksThenWrites(MemoryTarget):
    async def put(self, data: bytes, *, if_absent: bool) -> None:
        if if_absent and self.uri in self.objects:
            raise StorageError(f"{self.uri} exists")
        await anyio.lowlevel.checkpoint()
        self.objects[self.uri] = data


class EndsTooLate(MemoryTarget):
    async def get(self, start: int = 0, end: int | None = None) -> bytes:
        return await super().get(start, None if end is None else end + 1)


class ForgetsErrors(MemoryTarget):
    async def get(self, start: int = 0, end: int | None = None) -> bytes:
        return self.objects.get(self.uri, b"")[start:end]


class ClosesOnce(MemoryTarget):
    closed = False

    async def aclose(self) -> None:
        if self.closed:
            raise RuntimeError("already closed")
        self.closed = True


class ShowsHalf(MemoryTarget):
    """Writes in pieces under the final name."""

    async def put(self, data: bytes, *, if_absent: bool) -> None:
        await super().put(data[: len(data) // 2], if_absent=if_absent)
        await anyio.lowlevel.checkpoint()
        self.objects[self.uri] = data


class LosesTheOld(MemoryTarget):
    """Deletes before it writes."""

    async def put(self, data: bytes, *, if_absent: bool) -> None:
        if not if_absent and self.objects.pop(self.uri, None) is not None:
            await anyio.lowlevel.checkpoint()
        await super().put(data, if_absent=if_absent)


class InvitesARetry(MemoryTarget):
    async def put(self, data: bytes, *, if_absent: bool) -> None:
        if if_absent and self.uri in self.objects:
            raise StorageError(f"{self.uri} exists", retryable=True)
        await super().put(data, if_absent=if_absent)


class ChangesItsOptions(MemoryTarget):
    def __init__(self, uri: str, options: dict[str, Any]) -> None:
        super().__init__(uri, options)
        options.setdefault("retries", 3)


class NeverOverwrites(MemoryTarget):
    async def put(self, data: bytes, *, if_absent: bool) -> None:
        await super().put(data, if_absent=True)


class ForgetsToDelete(MemoryTarget):
    async def delete(self) -> None:
        return None


class DeletesItsNeighbours(MemoryTarget):
    """As a prefix is deleted where an object is meant."""

    async def delete(self) -> None:
        for name in [name for name in self.objects if name.startswith(self.uri[:-2])]:
            del self.objects[name]


@pytest.mark.row("X-PLUGIN-KIT", "the kit fails six planted plugin bugs")
@pytest.mark.parametrize(
    ("bug", "broken"),
    [
        (MemoryTarget, set()),
        (Overwrites, {"keeps_existing", "one_winner", "state_machine"}),
        (ChecksThenWrites, {"one_winner", "state_machine"}),
        (EndsTooLate, {"reads_back", "state_machine"}),
        (ForgetsErrors, {"missing", "state_machine"}),
        (ClosesOnce, {"closes_twice"}),
        (ShowsHalf, {"cancelled_anywhere", "state_machine"}),
        (LosesTheOld, {"state_machine"}),
        (InvitesARetry, {"keeps_existing"}),
        (ChangesItsOptions, {"leaves_its_options_alone"}),
        (NeverOverwrites, {"put", "state_machine"}),
        (ForgetsToDelete, {"deletes", "state_machine"}),
        (DeletesItsNeighbours, {"state_machine"}),
    ],
)
def test_the_kit_names_the_broken_promise(
    plant_bug: PlantBug, tmp_path: Path, bug: type[MemoryTarget], broken: set[str]
) -> None:
    bug.objects = {}
    failed = failures(storage_target.checks(spec(plant_bug(bug)), tmp_path))
    assert failed >= broken
    assert bool(failed) == bool(broken)


def spec(factory: str, uri: str = "planted:{tmp}/") -> StorageTargetSpec:
    example = {"uri": uri, "options": {"root": "x"}}
    return StorageTargetSpec(name="bug", api=1, factory=factory, schemes=("planted",), example=example)


class DiskTarget:
    """A correct target on disk; the bugs override how it writes."""

    def __init__(self, uri: str, options: dict[str, Any]) -> None:
        self.path = Path(uri.removeprefix("planted:"))

    def write(self, data: bytes, if_absent: bool) -> None:
        hidden = self.path.with_name(f".{uuid.uuid4().hex}")
        try:
            hidden.write_bytes(data)
            if if_absent:
                self.path.hardlink_to(hidden)
            else:
                hidden.replace(self.path)
        finally:
            hidden.unlink(missing_ok=True)

    async def put(self, data: bytes, *, if_absent: bool) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.write(data, if_absent)
        except OSError as error:
            raise StorageError(str(error), retryable=not isinstance(error, FileExistsError)) from error

    async def get(self, start: int = 0, end: int | None = None) -> bytes:
        try:
            return self.path.read_bytes()[start:end]
        except FileNotFoundError:
            raise StorageNotFoundError(str(self.path)) from None

    async def exists(self) -> bool:
        return self.path.exists()

    async def list(self) -> list[str]:
        return [str(path) for path in self.path.parent.iterdir()]

    async def delete(self) -> None:
        self.path.unlink()

    async def aclose(self) -> None:
        return None


class WritesInPlace(DiskTarget):
    def write(self, data: bytes, if_absent: bool) -> None:
        with self.path.open("xb" if if_absent else "wb") as file:
            file.write(data)


class LetsErrorsOut(DiskTarget):
    async def put(self, data: bytes, *, if_absent: bool) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.write(data, if_absent)
        except FileExistsError as error:
            raise StorageError(str(error)) from error


class IgnoresTheDisk(DiskTarget):
    def write(self, data: bytes, if_absent: bool) -> None:
        try:
            super().write(data, if_absent)
        except FileExistsError:
            raise
        except OSError:
            return


class BlocksItsOwnRetry(DiskTarget):
    """Its hidden file has a fixed name, must not be there, and stays behind."""

    def write(self, data: bytes, if_absent: bool) -> None:
        if if_absent and self.path.exists():
            raise FileExistsError(str(self.path))
        hidden = self.path.with_name(f".{self.path.name}")
        with hidden.open("xb") as file:
            file.write(data)
        hidden.replace(self.path)


class RemovesTheOld(DiskTarget):
    def write(self, data: bytes, if_absent: bool) -> None:
        if not if_absent:
            self.path.unlink(missing_ok=True)
        super().write(data, if_absent)


@pytest.mark.parametrize(
    ("bug", "broken"),
    [
        (DiskTarget, set()),
        (WritesInPlace, {"state_machine"}),
        (LetsErrorsOut, {"state_machine"}),
        (IgnoresTheDisk, {"state_machine"}),
        (BlocksItsOwnRetry, {"state_machine"}),
        (RemovesTheOld, {"state_machine"}),
    ],
)
def test_only_a_store_that_fails_shows_some_bugs(
    plant_bug: PlantBug, tmp_path: Path, bug: type[DiskTarget], broken: set[str]
) -> None:
    assert failures(storage_target.checks(spec(plant_bug(bug)), tmp_path / "whole")) <= {"one_winner"}
    assert failures(storage_target.checks(spec(plant_bug(bug)), tmp_path / "faulty", disk)) - {"one_winner"} == broken


def test_a_failure_tells_the_operations_that_led_to_it(plant_bug: PlantBug, tmp_path: Path) -> None:
    EndsTooLate.objects = {}
    [check, _] = [
        check
        for check in storage_target.checks(spec(plant_bug(EndsTooLate)), tmp_path)
        if check.name.startswith("state_machine")
    ]
    with pytest.raises(AssertionError, match=r"bytes \d+ to \d+ of [abcd]. are .*; after .*range [abcd].$"):
        check.run()
