"""Conformance of a model source: answers for its own references, resolves to what exists, fails with typed errors.

Blocking, on the calling thread, without network except for the reference that the caller gives; owns nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from infer.errors import ModelError
from infer.plugins.model_source import ModelSource, ModelSourceSpec, Progress
from infer.testing.kits import Check, expect, load

Open = Callable[[], ModelSource]


def checks(
    spec: ModelSourceSpec, cache_dir: Path, *, reference: str | None = None, unknown: str | None = None
) -> Iterator[Check]:
    """`reference` is resolved (None: nothing is). `unknown` must fail offline; None: the example's, or made up."""

    def open_source(offline: bool = True) -> ModelSource:
        source: ModelSource = load(spec)(cache_dir, offline, None)
        return source

    own = next((f"{scheme}:no-such-model/at-all" for scheme in spec.schemes if scheme not in ("", "*")), None)
    missing = unknown or spec.example.get("unknown") or own
    yield Check("leaves_other_schemes_alone", partial(_foreign, open_source))
    if own is not None:
        yield Check("answers_for_its_schemes", partial(_own, open_source, spec.schemes))
    if missing is not None:
        yield Check("names_what_it_cannot_find", partial(_missing, open_source, missing))
    if reference is not None:
        yield Check("resolves_to_what_exists", partial(_resolves, partial(open_source, False), reference))
        yield Check("resolves_again_offline", partial(_again, open_source, partial(open_source, False), reference))


def _foreign(open_source: Open) -> None:
    expect(open_source().matches("no-such-scheme-here:x") is False, "matches() is not False for a stranger's scheme")


def _own(open_source: Open, schemes: tuple[str, ...]) -> None:
    for scheme in schemes:
        if scheme not in ("", "*"):
            expect(open_source().matches(f"{scheme}:x/y") is True, f"matches() is not True for {scheme!r}")


def _missing(open_source: Open, reference: str) -> None:
    try:
        open_source().resolve(reference, lambda report: None)
    except ModelError as error:
        named = reference.partition(":")[2] or reference
        expect(named in str(error), f"the error does not name {named!r}: {error}")
    else:
        raise AssertionError(f"resolve({reference!r}) offline did not raise ModelError")


def _resolves(open_source: Open, reference: str) -> None:
    reports: list[Progress] = []
    source = open_source()
    expect(source.matches(reference) is True, f"matches({reference!r}) is not True")
    model = source.resolve(reference, reports.append)
    expect(model.path.exists(), f"{model.path} does not exist")
    expect(model.path.is_dir() or model.path.suffix == ".gguf", f"{model.path} is neither a directory nor a .gguf file")
    expect(model.identity, "the identity is empty")
    for report in reports:
        expect(report.total is None or 0 <= report.done <= report.total, f"progress {report.done} of {report.total}")


def _again(open_source: Open, open_online: Open, reference: str) -> None:
    """What was fetched once is there without network, with the same identity."""
    first = open_online().resolve(reference, lambda report: None)
    second = open_source().resolve(reference, lambda report: None)
    expect(second.identity == first.identity, f"identity changed from {first.identity} to {second.identity}")
    expect(second.path.exists(), f"{second.path} does not exist")
