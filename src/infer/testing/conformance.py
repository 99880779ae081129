"""Every kit by kind: what a plugin declares, and the checks of each of its specs, for pytest and for any other runner.

On the calling thread; each spec is checked in a directory of its own. Owns nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pluggy

from infer.config.engine import PluginsSection
from infer.plugins import hookspecs
from infer.plugins.contracts import CONTRACTS
from infer.plugins.manager import build_registry, contract_problem, deprecation
from infer.plugins.registry import KINDS, Kind, Spec
from infer.testing.kits import (
    Check,
    artifact_field,
    expect,
    grammar,
    kv_connector,
    load,
    logits_processor,
    model,
    model_source,
    parser,
    platform,
    quant_method,
    stat_logger,
    storage_target,
    tokenizer,
)


def declared(plugin: Any) -> list[tuple[Kind, Spec]]:
    """What the hooks of a module (or any object) return, by kind. Raises what pluggy raises for a hook that does not exist."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(plugin)
    manager.check_pending()
    found: list[tuple[Kind, Spec]] = []
    for kind in KINDS:
        for specs in getattr(manager.hook, CONTRACTS[kind].hook)():
            found += [(kind, spec) for spec in specs]
    return found


def checks(kind: Kind, spec: Spec, directory: Path, *, network: bool = False) -> Iterator[Check]:
    """The declaration, then the kit of its kind with what the spec's example brings; `directory` is scratch space.

    network: the reference in a model source's example may be fetched. What a kit needs and an example cannot bring (a server to
    store to) is given by calling the kit itself.
    """
    yield Check("declaration", partial(_declaration, kind, spec))
    try:
        yield from _kit(kind, spec, directory, network)
    except Exception as error:  # the kit's generator makes the plugin's object first
        yield Check("can_be_made", partial(_raise, error))


def _kit(kind: Kind, spec: Any, directory: Path, network: bool) -> Iterator[Check]:
    simple: dict[Kind, Callable[[Any], Iterator[Check]]] = {
        "platform": platform.checks,
        "artifact_field": artifact_field.checks,
        "parser": parser.checks,
        "grammar": grammar.checks,
        "logits_processor": logits_processor.checks,
        "stat_logger": stat_logger.checks,
    }
    if kind in simple:
        yield from simple[kind](spec)
    elif kind in ("model", "quant_method"):
        builtin = build_registry(PluginsSection(allow=()))
        ops = builtin.create("platform", "reference", threads=1).ops
        if kind == "model":
            yield from model.checks(spec, ops, builtin.create("quant_method", "unquantized", None))
        else:
            yield from quant_method.checks(spec, ops)
    elif kind == "storage_target":
        yield from storage_target.checks(spec, directory)
    elif kind == "kv_connector":
        yield from kv_connector.checks(spec, directory)
    elif kind == "tokenizer":
        yield from tokenizer.checks(spec, tokenizer.example_files(spec, directory))
    elif kind == "endpoint":
        from infer.testing.kits import endpoint  # noqa: PLC0415 - needs the server's packages

        yield from endpoint.checks(spec)
    elif kind == "model_source":
        reference = spec.example.get("reference") if network else None
        yield from model_source.checks(spec, directory, reference=reference)
    else:
        yield Check("has_a_kit", partial(expect, False, f"there is no kit for the kind {kind!r} yet"))


def _declaration(kind: Kind, spec: Any) -> None:
    """Of the right type, of the current version, with names that can be imported."""
    contract = CONTRACTS[kind]
    expect(type(spec) is contract.spec_type, f"{contract.hook} returns {contract.spec_type.__name__}, not {spec!r:.80}")
    problem = contract_problem(kind, spec) or deprecation(kind, spec)
    expect(not problem, problem)
    for field in ("factory", "worker_factory", "config_view", "probe", "matches", "reader"):
        if getattr(spec, field, None) is not None:
            expect(callable(load(spec, field)), f"{field} {getattr(spec, field)!r} cannot be called")


def _raise(error: Exception) -> None:
    raise error


class PluginTests:
    """A test class for pytest: one test for each check of each spec.

    ::

        class TestMine(PluginTests):
            plugin = my_plugin          # the module that the entry point names
    """

    plugin: ClassVar[Any]
    network: ClassVar[bool] = False

    def prepare(self, kind: Kind, spec: Any) -> Any:
        """The spec to check; override it to fill what only the test run knows into its example, such as a port."""
        return spec

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Called by pytest when it collects."""
        nowhere = Path(tempfile.gettempdir()) / "infer-conformance"  # only names are asked for, nothing is written
        cases, names = [], []
        for kind, spec in declared(self.plugin):
            for check in checks(kind, self.prepare(kind, spec), nowhere, network=self.network):
                cases.append((kind, spec.name, check.name))
                names.append(f"{kind}-{spec.name}-{check.name}")
        metafunc.parametrize(("kind", "name", "check"), cases, ids=names)

    def test_conforms(self, kind: Kind, name: str, check: str, tmp_path: Path) -> None:
        """One promise of one spec."""
        spec = next(spec for found, spec in declared(self.plugin) if (found, spec.name) == (kind, name))
        made = checks(kind, self.prepare(kind, spec), tmp_path, network=self.network)
        next(each for each in made if each.name == check).run()
