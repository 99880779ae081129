"""Part: every operation of both tables against its definition in float64, in bf16 (the public kit of platforms)."""

from __future__ import annotations

from collections.abc import Iterator

from gpu.checks import Check, Facts
from gpu.place import Place
from gpu.tables import TablePlatform, cuda_tables, offer
from infer.backends.reference.platform import OPS
from infer.testing.kits import Check as KitCheck
from infer.testing.kits import platform as kit


def checks(place: Place) -> Iterator[Check]:
    """A dry run takes the reference's operations: Triton's interpreter runs the kernels in the tests of their own."""
    tables = {"plain": OPS, "invariant": OPS} if place.dry_run else cuda_tables(place)
    for name, ops in tables.items():
        platform = TablePlatform(place, f"cuda-{name}", ops, ("bfloat16",))
        for check in kit.checks(offer(platform)):
            yield Check(f"{name} {check.name}", lambda check=check: run(place, check))  # type: ignore[misc]


def run(place: Place, check: KitCheck) -> Facts | None:
    check.run()
    place.synchronize()  # an error of a kernel is told here and not by the next check
    return None
