"""Writes docs/combinations.md from a run of all combinations (`tests/combinations`), which takes a minute. By hand, when features
or refusals changed; a test makes the same run and compares."""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any

from generated_page import write_or_check

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "combinations.md"


def found_page() -> str:
    sys.path.insert(0, str(ROOT / "tests"))
    campaigns: Any = importlib.import_module("combinations.campaign")
    features: Any = importlib.import_module("combinations.features")
    with tempfile.TemporaryDirectory() as directory:
        campaign = campaigns.Campaign(Path(directory))
        wrong = [campaign.run_case(number, case) for number, case in enumerate(campaigns.all_cases())]
        wrong += [campaign.run_refusal(group) for group in features.SPACE.refused]
    if told := [one for one in wrong if one is not None]:
        sys.exit("\n".join(told))
    page: str = campaigns.page(campaign.found)
    return page


def main(arguments: list[str] | None = None) -> int:
    return write_or_check(PAGE, found_page(), "the combinations do", __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
