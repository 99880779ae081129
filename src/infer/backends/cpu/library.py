"""The compiled kernels as Python functions. Called on the worker thread; owns the thread pool inside the library.

Pointers go across as integers: every caller has checked shapes, dtypes and strides before.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_float, c_int, c_int64, c_void_p
from pathlib import Path

SPINS = 20_000
"""Turns of a waiting thread before it sleeps: some 50 microseconds, the gap between two operations of a step."""


class AttentionArgs(ctypes.Structure):
    """As in csrc/api.h."""

    _fields_ = [
        *[(name, c_void_p) for name in ("q", "k_cache", "v_cache", "out", "query_starts", "seq_lens", "block_table")],
        *[
            (name, c_int64)
            for name in (
                "rows",
                "table_width",
                "block_size",
                "heads",
                "kv_heads",
                "head_size",
                "value_size",
                "q_stride",
            )
        ],
        ("scale", c_float),
        ("softcap", c_float),
        ("window", c_int64),
        ("cache_dtype", c_int64),
        ("out_scale", c_float),
    ]


_FUNCTIONS: dict[str, tuple[type | None, list[type]]] = {
    "infer_pool_create": (c_void_p, [c_int, c_int]),
    "infer_pool_destroy": (None, [c_void_p]),
    "infer_linear": (None, [c_void_p, c_int, c_int, c_int, *[c_void_p] * 4, c_int64, c_int64, c_int64]),
    "infer_pack_blocks": (None, [c_void_p, c_int, c_void_p, c_void_p, c_int64, c_int64]),
    "infer_pack_words": (None, [*[c_void_p] * 3, c_int64, c_int64]),
    "infer_encode_blocks": (c_int64, [c_void_p, c_int, c_int, c_void_p, c_int64, c_void_p]),
    "infer_block_rows": (None, [c_int, c_int, *[c_void_p] * 3, c_int64, c_int64]),
    "infer_block_work": (c_int64, [c_void_p, c_int64, c_int64]),
    "infer_block_linear": (None, [c_void_p, c_int, c_int, c_int, *[c_void_p] * 5, c_int64, c_int64, c_int64]),
    "infer_rms_norm": (None, [c_void_p, c_int, c_int, *[c_void_p] * 5, c_int64, c_int64, c_float]),
    "infer_gate": (None, [c_void_p, c_int, c_int, c_void_p, c_void_p, c_int64, c_int64]),
    "infer_rotary": (None, [c_void_p, c_int, *[c_void_p] * 4, *[c_int64] * 5]),
    "infer_unary": (None, [c_int, c_int, c_void_p, c_void_p, c_int64]),
    "infer_angles": (None, [c_void_p, c_void_p, c_float, c_void_p, c_void_p, c_int64, c_int64]),
    "infer_write_kv": (None, [c_int, c_int, *[c_void_p] * 5, *[c_int64] * 5, c_float, c_float]),
    "infer_attention": (None, [c_void_p, c_int, ctypes.POINTER(AttentionArgs)]),
    "infer_moe_work": (c_int64, [c_void_p, c_int, c_int, c_int, *[c_int64] * 4]),
    "infer_moe": (
        None,
        [c_void_p, c_int, *[c_void_p] * 4, c_int, c_void_p, c_int, c_void_p, c_void_p, *[c_int64] * 5],
    ),
    "infer_route": (
        None,
        [c_void_p, c_int, *[c_void_p] * 5, *[c_int64] * 5, c_int, c_int, c_int64, c_int64, c_int, c_float],
    ),
    "infer_widen": (None, [c_void_p, c_void_p, c_int64]),
    "infer_add_shared": (None, [c_int, *[c_void_p] * 4, c_int64, c_int64]),
    "infer_best": (None, [*[c_void_p] * 4, c_int64, c_int64]),
    "infer_draw_work": (c_int64, [c_void_p, c_int, c_int64]),
    "infer_draw": (None, [*[c_void_p] * 11, c_int64, c_int64]),
    "infer_scale": (None, [c_int, c_void_p, c_void_p, c_int64, c_float]),
    "infer_copy_rows": (None, [c_void_p, c_void_p, *[c_int64] * 3]),
    "infer_place_rows": (None, [c_void_p, c_void_p, *[c_int64] * 3]),
    "infer_gather_rows": (None, [*[c_void_p] * 3, *[c_int64] * 2]),
    "infer_packed_rows": (None, [c_int, *[c_void_p] * 3, *[c_int64] * 2]),
    "infer_tape_create": (c_void_p, []),
    "infer_tape_destroy": (None, [c_void_p]),
    "infer_tape_add": (c_int, [c_void_p, c_char_p, c_void_p, c_int64]),
    "infer_tape_run": (None, [c_void_p]),
}


class Library:
    """A loaded library with its own threads. `call.infer_linear(pool, ...)` and so on; see csrc/api.h."""

    def __init__(self, path: Path, threads: int) -> None:
        self.call = ctypes.CDLL(str(path))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(self.call, name)
            function.restype, function.argtypes = result, arguments
        self.pool: int | None = self.call.infer_pool_create(threads, SPINS)

    @staticmethod
    def arguments(name: str) -> list[type]:
        """The C types of a function's arguments."""
        return _FUNCTIONS[name][1]

    @staticmethod
    def writes(name: str) -> bool:
        """Whether a function is called for what it writes; the others only answer."""
        return _FUNCTIONS[name][0] is None

    def close(self) -> None:
        """End the threads. A second call does nothing."""
        if self.pool is not None:
            self.call.infer_pool_destroy(self.pool)
            self.pool = None
