"""Typed reading of config.json keys for the models' config views; every refusal names the key and the value.

Used on the worker thread while a model is planned; pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from infer.errors import ModelError, UnsupportedModelError
from infer.layers.rotary import RopeFacts, yarn_mscale

if TYPE_CHECKING:
    from infer.config.model import ModelConfig

MISSING: Any = object()


MAX_COUNTED = 2**16
MAX_SIZE = 2**31 - 1
"""Bounds on counts (layers, heads, experts) and sizes: a damaged file must be refused, not tried."""


class Facts:
    """A checkpoint's config.json. A key without a default must be there; null counts as absent where a default exists."""

    def __init__(self, config: ModelConfig) -> None:
        self.raw = config.raw
        self.architecture = config.architecture
        self.max_position = config.max_position

    def integer(self, key: str, default: int = MISSING, *, minimum: int = 1) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self._wrong(key, value, f"must be an integer of at least {minimum}")
        limit = MAX_COUNTED if key.startswith(("num_", "n_")) else MAX_SIZE
        if value > limit:
            raise self._wrong(key, value, f"must be an integer of at most {limit}")
        return value

    def even(self, key: str, default: int = MISSING) -> int:
        value = self.integer(key, default)
        if value % 2:
            raise self._wrong(key, value, "must be even")
        return value

    def number(self, key: str, default: float = MISSING) -> float:
        value = self._value(key, default)
        return self._positive(key, value)

    def optional_number(self, key: str) -> float | None:
        return None if self.raw.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "must be true or false")
        return value

    def must_be(self, key: str, *supported: object) -> None:
        """Refuse any other value; an absent key passes."""
        value = self.raw.get(key)
        if value is not None and value not in supported:
            names = " or ".join(repr(item) for item in supported)
            raise UnsupportedModelError(f"{self.architecture}: {key}={value!r} is not supported, only {names}")

    def heads(self, *, kv_default: int | None = None, size_default: int | None = None) -> tuple[int, int, int]:
        """-> (num_heads, num_kv_heads, head_size); the defaults are transformers' for the architecture. Without them
        the KV heads are as many as the query heads, and the head size is hidden_size / num_attention_heads."""
        num_heads = self.integer("num_attention_heads")
        num_kv_heads = self.integer("num_key_value_heads", num_heads if kv_default is None else kv_default)
        if num_heads % num_kv_heads:
            raise self._wrong("num_key_value_heads", num_kv_heads, f"must divide num_attention_heads={num_heads}")
        hidden = self.integer("hidden_size")
        if self.raw.get("head_dim") is None and size_default is None and hidden % num_heads:
            raise self._wrong("hidden_size", hidden, f"must be a multiple of num_attention_heads={num_heads}")
        return num_heads, num_kv_heads, self.even("head_dim", size_default or hidden // num_heads)

    def windows(self, num_layers: int, window: int | None, default: list[bool]) -> list[int | None]:
        """Window of each layer. `layer_types` in the config decides; `default` says which layers slide without it."""
        kinds = self.raw.get("layer_types")
        slides = default
        if kinds is not None:
            names = ("full_attention", "sliding_attention")
            if not isinstance(kinds, list) or len(kinds) != num_layers:
                raise self._wrong("layer_types", kinds, f"must list {num_layers} layers")
            unknown = [kind for kind in kinds if kind not in names]
            if unknown:
                raise UnsupportedModelError(f"{self.architecture}: layer_types holds {unknown[0]!r}; known are {names}")
            slides = [kind == "sliding_attention" for kind in kinds]
        if any(slides) and window is None:
            raise self._wrong("sliding_window", None, "must be set: layer_types has sliding layers")
        return [window if slide else None for slide in slides]

    def rope(
        self, section: Mapping[str, Any] | None = None, *, theta_key: str = "rope_theta", theta: float
    ) -> RopeFacts:
        """Rotary facts from `section`, or from `rope_parameters` or the older `rope_scaling` of the config.

        The base frequency is the section's `rope_theta`, else the config's `theta_key`, else `theta`.
        """
        if section is None:
            section = self.raw.get("rope_scaling") or self.raw.get("rope_parameters") or {}
        if not isinstance(section, Mapping):
            raise self._wrong("rope_scaling", section, "must be an object")
        kind: Literal["default", "linear", "dynamic", "llama3", "yarn"]
        match section.get("rope_type", section.get("type")):
            case None | "default":
                kind = "default"
            case "linear":
                kind = "linear"
            case "dynamic" if section.get("alpha") is None:  # with alpha (Hunyuan) it is another base at every length
                kind = "dynamic"
            case "llama3":
                kind = "llama3"
            case "yarn":
                kind = "yarn"
            case other:
                known = "default, linear, dynamic (without alpha), llama3, yarn"
                raise UnsupportedModelError(
                    f"{self.architecture}: rope_type {other!r} is not supported; known: {known}"
                )
        base = section.get("rope_theta")
        partial = section.get("partial_rotary_factor", self.raw.get("partial_rotary_factor"))
        rope = RopeFacts(
            theta=self.number(theta_key, theta) if base is None else self._positive("rope_theta", base),
            kind=kind,
            partial=1.0 if partial is None else self._positive("partial_rotary_factor", partial),
        )
        return rope if kind == "default" else self._scaled(rope, section)

    def _scaled(self, rope: RopeFacts, section: Mapping[str, Any]) -> RopeFacts:
        """The facts beyond the base frequency. Keys, defaults and precedence are transformers'."""

        def positive(name: str, default: float | None = None) -> float:
            value = section.get(name)
            return self._positive(f"rope_scaling.{name}", default if value is None else value)

        outer = self.raw.get("original_max_position_embeddings")  # of old configs; it wins
        original = positive("original_max_position_embeddings", self.max_position) if outer is None else outer
        original = self._positive("original_max_position_embeddings", original)
        factor = positive("factor", self.max_position / original if rope.kind == "yarn" else None)
        all_dims = section.get("mscale_all_dim")
        rope = replace(
            rope,
            factor=factor,
            original_max_position=int(original),
            mscale_all_dim=self._positive("rope_scaling.mscale_all_dim", all_dims) if all_dims else 0.0,
        )
        if rope.kind == "llama3":
            low, high = positive("low_freq_factor"), positive("high_freq_factor")
            return replace(rope, low_freq_factor=low, high_freq_factor=high)
        if rope.kind != "yarn":
            return rope
        if rope.theta <= 1:
            raise self._wrong("rope_theta", rope.theta, "must be more than 1 with rope_type 'yarn'")
        sharper = yarn_mscale(factor)
        if section.get("mscale") and rope.mscale_all_dim:
            sharper = yarn_mscale(factor, positive("mscale")) / yarn_mscale(factor, rope.mscale_all_dim)
        truncate = section.get("truncate", True)
        if not isinstance(truncate, bool):
            raise self._wrong("rope_scaling.truncate", truncate, "must be true or false")
        return replace(
            rope,
            beta_fast=self._positive("rope_scaling.beta_fast", section.get("beta_fast") or 32.0),
            beta_slow=self._positive("rope_scaling.beta_slow", section.get("beta_slow") or 1.0),
            truncate=truncate,
            attention_factor=sharper if section.get("attention_factor") is None else positive("attention_factor"),
        )

    def _value(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        if value is not None:
            return value
        if default is MISSING:
            raise ModelError(f"{self.architecture}: config.json has no {key!r}")
        return default

    def _positive(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self._wrong(key, value, "must be a positive number")
        return float(value)

    def _wrong(self, key: str, value: object, rule: str) -> ModelError:
        return ModelError(f"{self.architecture}: {key}={value!r} in config.json {rule}")
