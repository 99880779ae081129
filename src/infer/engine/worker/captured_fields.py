"""Which artifact fields are captured from a model: asked for in the settings, made by plugins, refused with a reason.

Runs on the worker thread while a model is planned and again when it is built; owns nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from infer.config.capture import CaptureProfile, CaptureSection, artifact_name
from infer.config.model import ModelConfig, RoutedLayer
from infer.errors import ConfigError, PluginContractError
from infer.plugins.artifact_field import ArtifactField, ArtifactFieldSpec, TapFacts, profile_problem
from infer.plugins.model import CausalLM, SupportsHiddenTaps, SupportsRouteTaps
from infer.plugins.registry import Registry

TAPS = ("router", "hidden", "logits")


@dataclass(frozen=True, slots=True)
class CapturedField:
    """A field of this model."""

    profile: CaptureProfile
    tap: str
    field: ArtifactField


def captured_fields(
    registry: Registry, section: CaptureSection, model: CausalLM, config: ModelConfig, dtype: str
) -> tuple[TapFacts, tuple[CapturedField, ...]]:
    """What the settings turn on. Raises `ConfigError` for what this model cannot give completely."""
    facts = tap_facts(section, model, config, dtype)
    found = []
    called: dict[str, str] = {}
    for name in section.names():
        setting = section.setting(name)
        spec = registry.get("artifact_field", name)
        _check_spec(spec, setting)
        if spec.tap == "router":
            _check_routers(model, setting)
        field: ArtifactField = registry.create("artifact_field", name, facts)
        profile = field.profile()
        distribution = registry.origin("artifact_field", name).distribution
        problem = profile_problem(spec, profile, distribution)
        if problem:
            raise PluginContractError(f"artifact_field {name!r}: {problem}", plugin=name)
        in_artifacts = artifact_name(name, distribution)
        other = called.setdefault(in_artifacts, name)
        if other != name:  # rows of one would be lost without a word
            raise ConfigError(
                f"{setting}: artifacts have one name, {in_artifacts!r}, for the fields {other!r} and "
                f"{name!r}; leave one of them out",
                fields=(setting,),
            )
        found.append(CapturedField(profile, spec.tap, field))
    return facts, tuple(found)


def tap_facts(section: CaptureSection, model: CausalLM, config: ModelConfig, dtype: str) -> TapFacts:
    routed: tuple[RoutedLayer, ...] = model.routed_layers() if isinstance(model, SupportsRouteTaps) else ()
    num_layers, hidden_size = model.hidden_shape() if isinstance(model, SupportsHiddenTaps) else (0, 0)
    return TapFacts(
        model_identity=config.identity,
        dtype=dtype,
        num_layers=num_layers,
        hidden_size=hidden_size,
        routed_layers=routed,
        hidden_layers=tuple(sorted(set(section.hidden_layers))),
        vocab_size=config.vocab_size,
    )


def _check_routers(model: CausalLM, setting: str) -> None:
    """Every layer that routes must be bound, or a row would have silent holes."""
    if not isinstance(model, SupportsRouteTaps):
        raise ConfigError(
            f"{setting}: this model plugin does not let its routers be read; leave it off, or use a plugin that does",
            fields=(setting,),
        )
    unbound = model.unbound_layers()
    if unbound:
        raise ConfigError(
            f"{setting}: layers {', '.join(map(str, unbound))} may route tokens by a router that cannot be read, so that "
            "rows would be incomplete; leave it off, or use a model plugin whose routers can be read",
            fields=(setting,),
        )


def _check_spec(spec: ArtifactFieldSpec, setting: str) -> None:
    problem = None
    if spec.tap not in TAPS:
        problem = f"reads the tap {spec.tap!r}, which is reserved and not there yet"
    elif spec.coordinate not in ("executed_token", "predicted_token"):
        problem = f"has rows per {spec.coordinate}; only rows of executed and of predicted tokens are captured"
    elif spec.coordinate == "predicted_token" and spec.tap != "logits":
        problem = f"has rows per predicted_token of the tap {spec.tap!r}; only the tap 'logits' tells what is predicted"
    elif spec.reuse != "prefix_block":
        problem = "cannot be kept with the prefix cache, so that a prompt that reuses KV blocks would lack rows"
    if problem is not None:
        raise ConfigError(f"{setting}: the artifact field {spec.name} {problem}; leave it out", fields=(setting,))
