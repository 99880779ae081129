"""`python -m infer` and the installed command `infer`."""

from __future__ import annotations

import sys

from infer.cli import app
from infer.config.env import let_idle_threads_sleep


def main() -> None:
    let_idle_threads_sleep()
    sys.exit(app.main())


if __name__ == "__main__":
    main()
