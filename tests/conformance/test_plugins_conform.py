"""Every spec that the registry holds, and those of the example plugin, against the kit of its kind."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest

from infer.config.engine import PluginsSection
from infer.connectors import directory
from infer.plugins import Ops, QuantMethod, Registry, build_registry
from infer.plugins.registry import KINDS, Kind
from infer.testing.kits import (
    Check,
    artifact_field,
    grammar,
    kv_connector,
    logits_processor,
    model,
    model_source,
    platform,
    quant_method,
    stat_logger,
    storage_target,
    tokenizer,
)
from infer.testing.storage_faults import disk
from infer.testing.tiny_models import make_checkpoint
from put_server import put_server

HELLO = Path(__file__).parents[2] / "examples" / "plugins" / "hello"
WITHOUT_A_KIT: set[Kind] = set()


def names(kind: Kind) -> list[str]:
    return [spec.name for spec in build_registry(PluginsSection(allow=())).specs(kind)]


def installed_grammars() -> list[str]:
    """The built-in one, and those whose optional package is there."""
    registry = build_registry(PluginsSection(allow=()))
    return [name for name in names("grammar") if registry.create("grammar", name, field="probe").available]


def run(checks: Iterable[Check]) -> None:
    failed, count = [], 0
    for check in checks:
        count += 1
        try:
            check.run()
        except Exception as error:
            failed.append(f"{check.name}: {type(error).__name__}: {error}")
    assert failed == []
    assert count > 0


@pytest.fixture(scope="module")
def registry() -> Registry:
    return build_registry(PluginsSection(allow=()))


@pytest.fixture(scope="module")
def ops(registry: Registry) -> Ops:
    """The oracle's table."""
    made: Ops = registry.create("platform", "reference", threads=1).ops
    return made


@pytest.fixture(scope="module")
def plain(registry: Registry) -> QuantMethod:
    made: QuantMethod = registry.create("quant_method", "unquantized", None)
    return made


def test_no_built_in_is_left_out(registry: Registry) -> None:
    assert [entry for entry in registry.entries() if entry.state != "chosen"] == []
    for kind in ("platform", "model", "quant_method", "tokenizer", "model_source"):
        assert names(kind), kind


def test_every_kind_with_built_ins_has_a_kit(registry: Registry) -> None:
    assert {kind for kind in KINDS if registry.specs(kind)}.isdisjoint(WITHOUT_A_KIT)


class FileFaults:
    """What can happen to a directory of blocks."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._root = Path(options["path"])

    @contextmanager
    def outage(self) -> Iterator[None]:
        """Neither files nor directories can be opened: a file is in their place."""
        away = self._root.with_name("away")
        self._root.rename(away)
        self._root.write_bytes(b"")
        try:
            yield
        finally:
            self._root.unlink()
            away.rename(self._root)

    @contextmanager
    def delay(self) -> Iterator[None]:
        """Files wait for nobody, so the store itself is held back."""
        go_on = threading.Event()
        store, patched = directory.DirectoryStore, pytest.MonkeyPatch()
        for name in ("contains", "get", "put"):
            patched.setattr(store, name, partialmethod(_held_back, getattr(store, name), go_on))
        try:
            yield
        finally:
            go_on.set()
            patched.undo()

    def lose(self) -> None:
        for path in sorted(self._root.rglob("*.kv"))[::2]:
            path.unlink()

    def damage(self) -> None:
        for number, path in enumerate(self._root.rglob("*.kv")):
            data = path.read_bytes()
            path.write_bytes(data[:-1] if number % 2 else data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])


def _held_back(store: Any, call: Any, go_on: threading.Event, *args: Any) -> Any:
    assert go_on.wait(60)
    return call(store, *args)


@pytest.mark.parametrize("name", names("kv_connector"))
def test_kv_connector(registry: Registry, name: str, tmp_path: Path) -> None:
    run(kv_connector.checks(registry.get("kv_connector", name), tmp_path, FileFaults))


@pytest.mark.parametrize("name", names("logits_processor"))
def test_logits_processor(registry: Registry, name: str) -> None:
    run(logits_processor.checks(registry.get("logits_processor", name)))


@pytest.mark.parametrize("name", names("stat_logger"))
def test_stat_logger(registry: Registry, name: str) -> None:
    run(stat_logger.checks(registry.get("stat_logger", name)))


@pytest.mark.parametrize("name", names("platform"))
def test_platform(registry: Registry, name: str) -> None:
    run(platform.checks(registry.get("platform", name)))


@pytest.mark.parametrize("name", names("quant_method"))
def test_quant_method(registry: Registry, name: str, ops: Ops) -> None:
    run(quant_method.checks(registry.get("quant_method", name), ops))


@pytest.mark.row("X-PLUGIN-KIT", "the built-in models pass it")
@pytest.mark.parametrize("name", names("model"))
def test_model(registry: Registry, name: str, ops: Ops, plain: QuantMethod) -> None:
    run(model.checks(registry.get("model", name), ops, plain))


@pytest.mark.parametrize("name", names("artifact_field"))
def test_artifact_field(registry: Registry, name: str) -> None:
    run(artifact_field.checks(registry.get("artifact_field", name)))


@pytest.mark.parametrize("name", names("model_source"))
def test_model_source(registry: Registry, name: str, tmp_path: Path) -> None:
    reference = unknown = None
    if name == "local":
        example = registry.specs("model")[0].example
        reference, unknown = str(make_checkpoint(example, tmp_path / "tiny")), str(tmp_path / "absent")
    checks = model_source.checks(
        registry.get("model_source", name), tmp_path / "cache", reference=reference, unknown=unknown
    )
    run(checks)


@pytest.mark.parametrize("uri", ["file://{tmp}/", "memory://conformance{tmp}/"])
def test_managed_storage_target(registry: Registry, tmp_path: Path, uri: str) -> None:
    spec = registry.get("storage_target", "managed_fsspec")
    faults = disk if uri.startswith("file:") else None
    run(storage_target.checks(dataclasses.replace(spec, example=spec.example | {"uri": uri}), tmp_path, faults))


def test_presigned_storage_target(registry: Registry, tmp_path: Path) -> None:
    spec = registry.get("storage_target", "presigned_http_put")
    with put_server() as server:
        example = json.loads(json.dumps(spec.example).replace("{port}", str(server.port)))
        # Every check works in a directory of its own; here that is a path of the URL.
        example["uri"] += "{tmp}/"
        run(storage_target.checks(dataclasses.replace(spec, example=example), Path("scratch")))


def test_every_storage_target_is_checked_above() -> None:
    assert set(names("storage_target")) == {"managed_fsspec", "presigned_http_put"}


def test_hf_tokenizer(registry: Registry, tmp_path: Path) -> None:
    """A byte-level tokenizer with a BOS, trained here, as a directory."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=["<s>", "</s>"], vocab_size=400, initial_alphabet=alphabet)
    backend.train_from_iterator(tokenizer.TEXTS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    directory = tmp_path / "model"
    directory.mkdir()
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    run(tokenizer.checks(registry.get("tokenizer", "hf"), directory))


@pytest.mark.model
def test_gguf_tokenizer(registry: Registry, smollm2_gguf: Path) -> None:
    run(tokenizer.checks(registry.get("tokenizer", "gguf"), smollm2_gguf))


def test_every_tokenizer_is_checked_above() -> None:
    assert set(names("tokenizer")) == {"gguf", "hf"}


def test_example_plugin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(HELLO))
    import infer_hello

    (target,) = infer_hello.infer_storage_targets()
    run(storage_target.checks(target, tmp_path))
    (source,) = infer_hello.infer_model_sources()
    run(model_source.checks(source, tmp_path / "cache"))


def test_the_example_alias_stands_for_the_default_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Offline with an empty cache the built-in source refuses, and names the model that the alias stands for."""
    monkeypatch.syspath_prepend(str(HELLO))
    import infer_hello

    from infer.config.engine import DEFAULT_MODEL
    from infer.errors import ModelError

    source = infer_hello.AliasSource(tmp_path, True, None)
    with pytest.raises(ModelError) as caught:
        source.resolve("hello:default", lambda report: None)
    assert DEFAULT_MODEL.removeprefix("pypi:") in str(caught.value)


@pytest.mark.row("TOOLS-GUIDANCE-OUTLINES", "the same suite passes with each installed one")
@pytest.mark.parametrize("name", installed_grammars())
def test_grammar(registry: Registry, name: str) -> None:
    run(grammar.checks(registry.get("grammar", name)))
