"""Storage targets against a model: any sequence of writes, reads and deletions leaves what a dictionary would hold."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import anyio
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from infer.errors import StorageError, StorageNotFoundError
from infer.storage.fsspec_target import FsspecTarget, create

KEYS = st.sampled_from(["a", "b", "a.b", "dir/a", "dir/b", "dir/deep/a", "other/a"])
DATA = st.binary(max_size=200)


class StorageMachine(RuleBasedStateMachine):
    """Every step uses a target of its own, as deliveries do."""

    @initialize(kind=st.sampled_from(["file", "memory"]), backend=st.sampled_from(["asyncio", "trio"]))
    def start(self, kind: str, backend: str) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.root = f"{kind}://{self.directory}"
        self.backend = backend
        self.model: dict[str, bytes] = {}

    def run_step(self, key: str, step: Any) -> Any:
        target = create(f"{self.root}/{key}", {"root": self.root})

        async def main(target: FsspecTarget) -> Any:
            try:
                return await step(target)
            finally:
                await target.aclose()

        return anyio.run(main, target, backend=self.backend)

    @rule(key=KEYS, data=DATA)
    def put(self, key: str, data: bytes) -> None:
        try:
            self.run_step(key, lambda target: target.put(data, if_absent=True))
        except StorageError as error:
            assert error.code == "artifact_conflict" and key in self.model
        else:
            assert key not in self.model
            self.model[key] = data

    @rule(key=KEYS, data=DATA)
    def replace(self, key: str, data: bytes) -> None:
        self.run_step(key, lambda target: target.put(data, if_absent=False))
        self.model[key] = data

    @rule(key=KEYS, start=st.integers(0, 250), length=st.integers(0, 250))
    def read(self, key: str, start: int, length: int) -> None:
        try:
            found = self.run_step(key, lambda target: target.get(start, start + length))
        except StorageNotFoundError:
            assert key not in self.model
        else:
            assert found == self.model[key][start : start + length]

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        try:
            self.run_step(key, lambda target: target.delete())
        except StorageNotFoundError:
            assert key not in self.model
        else:
            del self.model[key]

    @invariant()
    def nothing_half_written_is_left(self) -> None:
        if self.root.startswith("file"):
            files = {str(path.relative_to(self.directory)) for path in self.directory.rglob("*") if path.is_file()}
            assert files == set(self.model)

    def teardown(self) -> None:
        if hasattr(self, "root"):
            for key in list(self.model):
                self.run_step(key, lambda target: target.delete())
            shutil.rmtree(self.directory, ignore_errors=True)


TestStorageMachine = StorageMachine.TestCase
TestStorageMachine.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)
