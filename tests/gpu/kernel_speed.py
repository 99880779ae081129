"""Part: bandwidth and operations per second of each kernel, against what torch's own copy and cuBLAS reach on this card."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from gpu.checks import Check, Facts
from gpu.figures import figure
from gpu.kernel_cases import Case, cases
from gpu.place import Place


def checks(place: Place) -> Iterator[Check]:
    for case in cases():
        yield Check(case.name, lambda case=case: measured(place, case))  # type: ignore[misc]


def measured(place: Place, case: Case) -> Facts:
    with torch.inference_mode():
        torch.manual_seed(0)
        made = case.make(place)
        seconds = place.clock.seconds(made.run)
        place.synchronize()
    facts: dict[str, Any] = {
        "judged": not place.dry_run,
        "seconds_per_call": seconds,
        "bytes": made.num_bytes,
        "operations": made.operations,
    }
    if case.bound == "matmul":
        value, ceiling = made.operations / seconds / 1e12, place.ceilings.matmul / 1e12
        return figure(value, "TFLOP/s", ceiling=ceiling, target=case.target, **facts)
    value, ceiling = made.num_bytes / seconds / 1e9, place.ceilings.copy_bandwidth / 1e9
    return figure(value, "GB/s", ceiling=ceiling, target=case.target, **facts)
