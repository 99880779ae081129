"""Writes the table of the schema campaign into docs/structured_output.md. Run by `make docs`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "structured_output.md"
BEGIN, END = "<!-- campaign -->\n", "<!-- /campaign -->\n"


def replaced(page: str, table: str) -> str:
    """The page with another table between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table}{END}{after}"


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    schema_campaign: Any = importlib.import_module("schema_campaign")
    from infer.grammars.llguidance import LLGuidanceBackend  # noqa: PLC0415

    rows = schema_campaign.run(LLGuidanceBackend(schema_campaign.VOCABULARY))
    wrong = [complaint for row in rows.values() for complaint in row.wrong]
    if wrong:
        sys.exit("\n".join(wrong))
    PAGE.write_text(replaced(PAGE.read_text("utf-8"), schema_campaign.table(rows)), "utf-8")


if __name__ == "__main__":
    main()
