"""Tests of the Triton kernels under Triton's interpreter. Collected only in a process that asked for it before Triton was
imported; `integration/test_triton_kernels.py` starts one per file."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
if os.environ.get("TRITON_INTERPRET") == "1":
    from typing import Any

    from hypothesis import Phase, settings
    from triton.runtime import interpreter

    _UNSHRUNK = (Phase.explicit, Phase.generate)  # a smaller counterexample takes minutes here
    settings.register_profile("interpreted", settings.get_profile("ci"), max_examples=12, phases=_UNSHRUNK)
    settings.register_profile("interpreted-heavy", settings.get_profile("ci"), max_examples=150, phases=_UNSHRUNK)
    settings.load_profile(os.environ.get("INFER_INTERPRETED_PROFILE", "interpreted"))

    _patch = interpreter._patch_lang_tensor

    def _with_index(tensor: Any, scope: Any) -> None:
        """Triton 3.6 makes loop bounds with `int(array of one element)`, which NumPy 2.4 refuses."""
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _with_index
