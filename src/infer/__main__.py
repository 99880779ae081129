"""`python -m infer` and the installed command `infer`."""

from __future__ import annotations

import sys

from infer.cli import app


def main() -> None:
    sys.exit(app.main())


if __name__ == "__main__":
    main()
