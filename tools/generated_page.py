"""The command line of the tools that write one page of docs/: write it, or with --check say whether it is current."""

from __future__ import annotations

import argparse
from pathlib import Path


def write_or_check(page: Path, text: str, source: str, about: str | None, arguments: list[str] | None) -> int:
    """The exit code. `source` is what the page is made of, `about` the tool's own words for --help."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--check", action="store_true", help="fail when the page is not what would be written")
    if not parser.parse_args(arguments).check:
        page.write_text(text, "utf-8")
        return 0
    if not page.is_file() or page.read_text("utf-8") != text:
        print(f"docs/{page.name} is not what {source}; run `make docs` and commit it")
        return 1
    return 0
