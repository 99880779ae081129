"""Routes in the encodings that trainers decode today, one module per client. Each keeps the router's order of experts.

Pure functions over a decoded choice; optional packages are imported when they are used.
"""

from __future__ import annotations

from infer.artifacts.exporters.nemo_rl import to_nemo_nrlre1
from infer.artifacts.exporters.padding import PaddedRoutes, pad_rows
from infer.artifacts.exporters.prime_rl import to_prime_rl
from infer.artifacts.exporters.sglang import to_miles, to_sglang_int32
from infer.artifacts.exporters.skyrl import to_skyrl
from infer.artifacts.exporters.tensors import to_torch
from infer.artifacts.exporters.verl import to_verl
from infer.artifacts.exporters.vllm import to_vllm_npy

__all__ = [
    "PaddedRoutes",
    "pad_rows",
    "to_miles",
    "to_nemo_nrlre1",
    "to_prime_rl",
    "to_sglang_int32",
    "to_skyrl",
    "to_torch",
    "to_verl",
    "to_vllm_npy",
]
