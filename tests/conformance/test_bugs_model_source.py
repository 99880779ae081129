"""Planted bugs: the kit of model sources names the promise that a wrong one breaks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infer.errors import ModelError
from infer.plugins import ModelSourceSpec, Progress, ProgressCallback, ResolvedModel
from infer.testing.kits import model_source
from planted_bugs import PlantBug, failures, plant_bug

__all__ = ["plant_bug"]


class Good:
    """ "shelf:x" is a directory of a shelf beside the cache; it is copied into the cache."""

    def __init__(self, cache_dir: Path, offline: bool, token: str | None) -> None:
        self.cache_dir, self.offline = cache_dir, offline
        self.shelf = cache_dir.parent / "shelf"

    def matches(self, reference: str) -> bool:
        return reference.startswith("shelf:")

    def resolve(self, reference: str, progress: ProgressCallback) -> ResolvedModel:
        name = reference.partition(":")[2]
        kept = self.cache_dir / name
        if not kept.is_dir():
            found = self.shelf / name
            if self.offline or not found.is_dir():
                raise ModelError(f"{name!r} is not on the shelf; it has {[path.name for path in self.shelf.glob('*')]}")
            self.fetch(found, kept, progress)
        return ResolvedModel(path=kept, reference=reference, identity=self.identity(kept))

    def fetch(self, found: Path, kept: Path, progress: ProgressCallback) -> None:
        progress(Progress("download", 0, 2))
        kept.mkdir(parents=True)
        (kept / "config.json").write_text((found / "config.json").read_text())
        progress(Progress("download", 2, 2))

    def identity(self, kept: Path) -> str:
        return f"text:{(kept / 'config.json').read_text()}"


class AnswersForEverything(Good):
    def matches(self, reference: str) -> bool:
        return True


class ForgetsItsScheme(Good):
    def matches(self, reference: str) -> bool:
        return (self.shelf / reference.partition(":")[2]).is_dir()


class SaysNeither(Good):
    def matches(self, reference: str) -> Any:
        return reference.startswith("shelf:") or None


class RaisesWhatPythonRaises(Good):
    def resolve(self, reference: str, progress: ProgressCallback) -> ResolvedModel:
        if not (self.shelf / reference.partition(":")[2]).is_dir():
            raise FileNotFoundError(reference)
        return super().resolve(reference, progress)


class NamesNothing(Good):
    def resolve(self, reference: str, progress: ProgressCallback) -> ResolvedModel:
        try:
            return super().resolve(reference, progress)
        except ModelError:
            raise ModelError("the model cannot be found") from None


class NamesWhatIsNotThere(Good):
    def fetch(self, found: Path, kept: Path, progress: ProgressCallback) -> None:
        return None

    def identity(self, kept: Path) -> str:
        return "x"


class CountsBeyondTheEnd(Good):
    def fetch(self, found: Path, kept: Path, progress: ProgressCallback) -> None:
        super().fetch(found, kept, progress)
        progress(Progress("download", 3, 2))


class AnotherIdentityEachTime(Good):
    calls = 0

    def identity(self, kept: Path) -> str:
        AnotherIdentityEachTime.calls += 1
        return str(self.calls)


class NoIdentity(Good):
    def identity(self, kept: Path) -> str:
        return ""


class NeedsTheNetworkAgain(Good):
    def resolve(self, reference: str, progress: ProgressCallback) -> ResolvedModel:
        if self.offline:
            raise ModelError(f"{reference} needs the network")
        return super().resolve(reference, progress)


class NeitherDirectoryNorFile(Good):
    def resolve(self, reference: str, progress: ProgressCallback) -> ResolvedModel:
        made = super().resolve(reference, progress)
        return ResolvedModel(path=made.path / "config.json", reference=reference, identity=made.identity)


@pytest.mark.row("X-PLUGIN-KIT", "the kit fails six planted plugin bugs")
@pytest.mark.parametrize(
    ("bug", "broken"),
    [
        (Good, set()),
        (AnswersForEverything, {"leaves_other_schemes_alone"}),
        (ForgetsItsScheme, {"answers_for_its_schemes"}),
        (SaysNeither, {"leaves_other_schemes_alone"}),
        (RaisesWhatPythonRaises, {"names_what_it_cannot_find"}),
        (NamesNothing, {"names_what_it_cannot_find"}),
        (NamesWhatIsNotThere, {"resolves_to_what_exists", "resolves_again_offline"}),
        (CountsBeyondTheEnd, {"resolves_to_what_exists"}),
        (AnotherIdentityEachTime, {"resolves_again_offline"}),
        (NoIdentity, {"resolves_to_what_exists"}),
        (NeedsTheNetworkAgain, {"resolves_again_offline"}),
        (NeitherDirectoryNorFile, {"resolves_to_what_exists"}),
    ],
)
def test_the_kit_names_the_broken_promise(
    plant_bug: PlantBug, tmp_path: Path, bug: type[Good], broken: set[str]
) -> None:
    book = tmp_path / "shelf" / "book"
    book.mkdir(parents=True)
    (book / "config.json").write_text("{}")
    spec = ModelSourceSpec(name="bug", api=1, factory=plant_bug(bug), schemes=("shelf",), example={})
    assert failures(model_source.checks(spec, tmp_path / "cache", reference="shelf:book")) == broken
