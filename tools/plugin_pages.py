"""Puts the templates of `infer.templates` into the pages of docs/plugins, one a kind, so that each has one source.
Runs by hand (`make docs`); a test calls `render` and compares. Owns the marked blocks of those pages, not their words."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from infer.cli.plugin_new import template
from infer.plugins.registry import KINDS, Kind

PAGES = Path(__file__).resolve().parent.parent / "docs" / "plugins"
_BLOCK = re.compile(r"(?<=^```python\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)


def page(kind: Kind) -> Path:
    return PAGES / f"{kind}.md"


def render(kind: Kind) -> str:
    """The page with the template as it is now. It has one Python block."""
    text, count = _BLOCK.subn(lambda _: template(kind), page(kind).read_text("utf-8"))
    if count != 1:
        raise ValueError(f"{page(kind)} has {count} Python blocks, and the template belongs into one")
    return text


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when a page is not what would be written")
    check = parser.parse_args(arguments).check
    stale = [kind for kind in KINDS if render(kind) != page(kind).read_text("utf-8")]
    for kind in stale:
        if check:
            print(f"{page(kind)} has another example than the template; run `make docs` and commit it")
        else:
            page(kind).write_text(render(kind), "utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
