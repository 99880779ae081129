"""Two plugins of other distributions, put where engines find them: the artifact field of `examples/plugins/infer-entropy`, and a
logits processor. Owns the directory they lie in, and the place in `sys.path`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ENTROPY = Path(__file__).parents[2] / "examples" / "plugins" / "infer-entropy" / "infer_entropy.py"
PROCESSOR = '''
from infer.plugins import LogitsProcessorSpec, hookimpl


class Below:
    """{"limit": n}: no token of that id or a higher one."""

    def __init__(self, vocab_size):
        pass

    def check(self, params):
        if type(params.get("limit")) is not int:
            raise ValueError("limit is no integer")

    def apply(self, logits, rows):
        for i, row in enumerate(rows):
            logits[i, row.params["limit"] :] = float("-inf")


@hookimpl
def infer_logits_processors():
    return [LogitsProcessorSpec(name="below", api=1, factory=f"{__name__}:Below", example={"params": {"limit": 3}})]
'''


@contextmanager
def plugins(directory: Path) -> Iterator[None]:
    """Engines that start within find both."""
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copy(ENTROPY, directory)
    (directory / "combined_processor.py").write_text(PROCESSOR, "utf-8")
    for name, module in (("infer-entropy", "infer_entropy"), ("combined-processor", "combined_processor")):
        info = directory / f"{module}-1.0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[infer]\nleaf = {module}\n")
    sys.path.insert(0, str(directory))
    try:
        yield
    finally:
        sys.path.remove(str(directory))
        for module in ("infer_entropy", "combined_processor"):
            sys.modules.pop(module, None)
