"""The features whose combinations are tried, and which of these are refused."""

from __future__ import annotations

from combinations.checkpoints import GGUF_TYPES
from combinations.declared import Refusal, Space
from combinations.engine_features import ENGINE
from combinations.request_features import REQUEST

_NO_ROUTERS = {"model": ("dense", "window")}
_ROUTES = ("v1 routes", "v2 routes")
_RETURNED = ("routes", "from 5", "keys")
_GRAMMARS = tuple(value.name for value in REQUEST[7].values[1:])
_GGUF = tuple(f"gguf-{name}" for name in GGUF_TYPES)
_BEAM = {"choices": ("beam",)}
_FORCED_PROCESSED = {
    "logprobs": ("processed",),
    "forced": ("ids",),
    "artifact": ("v1", "v1 routes", "v2", "v2 delta"),
}
"""Refused beside what may leave a forced token without a probability."""

REFUSALS: tuple[Refusal, ...] = (
    _NO_ROUTERS | {"capture": ("routes", "all")},
    {"model": ("latent",), "weights": _GGUF},
    {"platform": ("reference",), "numerics": ("invariant",)},
    {"platform": ("cpu",), "kv dtype": ("float16",)},
    {"compute": ("float16",), "platform": ("cpu",)},
    {"prefix cache": ("off",), "policy": ("longest_prefix",)},
    {"prefix cache": ("off",), "capture": ("routes", "hidden", "plugin", "both", "all")},
    {"prefix cache": ("off",), "kv connector": ("directory",)},
    {"kv connector": ("directory",), "step log": ("written",)},
    {"capture": ("off", "hidden", "plugin", "both"), "artifact": _ROUTES},
    {"capture": ("off", "hidden", "plugin", "both"), "rows": _RETURNED},
    {"capture": ("off", "routes", "plugin"), "artifact": ("v2 hidden",)},
    {"capture": ("off", "routes", "hidden"), "artifact": ("v2 plugin",)},
    {"row store": ("memory", "shared"), "rows": ("keys",)},
    {"tokenizer": ("skipped",), "prompt": ("text", "chat", "tools")},
    {"tokenizer": ("skipped",), "grammar": _GRAMMARS},
    {"tokenizer": ("skipped",), "thinking": ("budget",)},
    {"tokenizer": ("skipped",), "bans": ("words",)},
    {"tokenizer": ("skipped",), "ends": ("string",)},
    {"reasoning": ("none",), "thinking": ("budget",)},
    _BEAM | {"call": ("stream",)},
    _BEAM | {"sampling": ("seeded", "penalties")},
    _BEAM | {"logprobs": ("processed", "logits", "ids")},
    _BEAM | {"prompt logprobs": ("1",)},
    _BEAM | {"kept set": ("returned",)},
    _BEAM | {"grammar": _GRAMMARS},
    _BEAM | {"thinking": ("budget",)},
    _BEAM | {"processors": ("plugin", "function")},
    _BEAM | {"ends": ("min", "string")},
    _BEAM | {"repetition": ("detected",)},
    _BEAM | {"forced": ("ids",)},
    _BEAM | {"artifact": tuple(value.name for value in REQUEST[14].values[1:])},
    _BEAM | {"rows": _RETURNED},
    {"choices": ("2",), "forced": ("ids",)},
    {"logprobs": ("logits", "ids"), "artifact": ("v1", "v1 routes", "v2", "v2 prompt rows", "v2 delta")},
    _FORCED_PROCESSED | {"sampling": ("seeded",)},
    _FORCED_PROCESSED | {"thinking": ("budget",)},
    _FORCED_PROCESSED | {"processors": ("plugin", "function")},
    _FORCED_PROCESSED | {"bans": ("allowed", "words")},
    _FORCED_PROCESSED | {"ends": ("min",)},
)
"""Tested one by one: each must be refused by an error of ours that names both."""

DEAR: tuple[Refusal, ...] = ({"platform": ("reference",), "threads": ("2",)},)
"""Tried as seldom as can be: on a busy machine torch waits a time slice for its second thread at every operation."""

SPACE = Space((*ENGINE, *REQUEST), REFUSALS)
