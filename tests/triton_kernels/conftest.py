"""Tests of the Triton kernels under Triton's interpreter. Collected only in a process that asked for it before Triton was
imported; `integration/test_triton_kernels.py` starts one per file."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
if os.environ.get("TRITON_INTERPRET") == "1":
    from hypothesis import Phase, settings

    from triton_interpreter import mend

    _UNSHRUNK = (Phase.explicit, Phase.generate)  # a smaller counterexample takes minutes here
    settings.register_profile("interpreted", settings.get_profile("ci"), max_examples=12, phases=_UNSHRUNK)
    settings.register_profile("interpreted-heavy", settings.get_profile("ci"), max_examples=150, phases=_UNSHRUNK)
    settings.load_profile(os.environ.get("INFER_INTERPRETED_PROFILE", "interpreted"))

    mend()
