"""The server is part of the control plane: it comes without torch."""

from __future__ import annotations

import subprocess
import sys


def test_the_api_imports_no_torch() -> None:
    code = "import sys, infer.api, infer.cli.serve; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
