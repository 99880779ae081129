"""Triton's interpreter on the NumPy of today. Imported by processes that asked for it before Triton was imported."""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


def mend() -> None:
    """Triton 3.6 makes loop bounds with `int(array of one element)`, which NumPy 2.4 refuses."""
    patch = interpreter._patch_lang_tensor

    def with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = with_index
