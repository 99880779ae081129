"""Planted bugs: each kit must name the promise that a wrong implementation breaks."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio.lowlevel
import msgspec
import pytest
import torch

from infer.config.engine import PluginsSection
from infer.errors import GrammarError, StorageError, StorageNotFoundError
from infer.plugins import Registry, ResolvedModel, StorageTargetSpec, TokenizerSpec, build_registry
from infer.plugins.grammar import GrammarSource
from infer.plugins.platform import Probe
from infer.testing.kits import Check, grammar, model, model_source, platform, quant_method, storage_target, tokenizer

Plant = Callable[..., str]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """`plant(factory)` makes it importable and returns its "module:attr"."""

    def put(made: Any, name: str = "make") -> str:
        module = sys.modules.get("planted_bugs") or ModuleType("planted_bugs")
        setattr(module, name, made)
        monkeypatch.setitem(sys.modules, "planted_bugs", module)
        return f"planted_bugs:{name}"

    return put


@pytest.fixture(scope="module")
def registry() -> Registry:
    return build_registry(PluginsSection(allow=()))


def failures(checks: Iterable[Check]) -> set[str]:
    """Names of the checks that fail, without the variant in brackets."""
    failed = set()
    for check in checks:
        try:
            check.run()
        except Exception:
            failed.add(check.name.partition("[")[0])
    return failed


# -- storage targets -----------------------------------------------------------------------------------------------


class MemoryTarget:
    """A correct target; the bugs override one method each."""

    objects: dict[str, bytes] = {}  # noqa: RUF012 - one store, as a bucket is

    def __init__(self, uri: str, options: dict[str, Any]) -> None:
        self.uri = uri

    async def put(self, data: bytes, *, if_absent: bool) -> None:
        if if_absent and self.uri in self.objects:
            raise StorageError(f"{self.uri} exists")
        self.objects[self.uri] = data

    async def get(self, start: int = 0, end: int | None = None) -> bytes:
        if self.uri not in self.objects:
            raise StorageNotFoundError(self.uri)
        return self.objects[self.uri][start:end]

    async def exists(self) -> bool:
        return self.uri in self.objects

    async def list(self) -> list[str]:
        return [*self.objects]

    async def delete(self) -> None:
        self.objects.pop(self.uri, None)

    async def aclose(self) -> None:
        return None


class Overwrites(MemoryTarget):
    async def put(self, data: bytes, *, if_absent: bool) -> None:
        self.objects[self.uri] = data


class ChecksThenWrites(MemoryTarget):
    async def put(self, data: bytes, *, if_absent: bool) -> None:
        if if_absent and self.uri in self.objects:
            raise StorageError(f"{self.uri} exists")
        await anyio.lowlevel.checkpoint()
        self.objects[self.uri] = data


class EndsTooLate(MemoryTarget):
    async def get(self, start: int = 0, end: int | None = None) -> bytes:
        return await super().get(start, None if end is None else end + 1)


class ForgetsErrors(MemoryTarget):
    async def get(self, start: int = 0, end: int | None = None) -> bytes:
        return self.objects.get(self.uri, b"")[start:end]


class ClosesOnce(MemoryTarget):
    closed = False

    async def aclose(self) -> None:
        if self.closed:
            raise RuntimeError("already closed")
        self.closed = True


@pytest.mark.parametrize(
    ("bug", "broken"),
    [
        (MemoryTarget, set()),
        (Overwrites, {"keeps_existing", "one_winner"}),
        (ChecksThenWrites, {"one_winner"}),
        (EndsTooLate, {"reads_back"}),
        (ForgetsErrors, {"missing"}),
        (ClosesOnce, {"closes_twice"}),
    ],
)
def test_storage_target(plant: Plant, tmp_path: Path, bug: type[MemoryTarget], broken: set[str]) -> None:
    bug.objects = {}
    example = {"uri": "planted:{tmp}/", "options": {}}
    spec = StorageTargetSpec(name="bug", api=1, factory=plant(bug), schemes=("planted",), example=example)
    assert failures(storage_target.checks(spec, tmp_path)) == broken


# -- tokenizers ----------------------------------------------------------------------------------------------------


class Stream:
    def __init__(self, tokenizer: ByteTokenizer, prompt: Sequence[int]) -> None:
        self.tokenizer, self.ids, self.said = tokenizer, list(prompt), tokenizer.decode(prompt)

    def step(self, token_id: int) -> str:
        self.ids.append(token_id)
        text = self.tokenizer.decode(self.ids)
        if text.endswith("\ufffd"):
            return ""
        new, self.said = text[len(self.said) :], text
        return new

    def finish(self) -> str:
        return self.tokenizer.decode(self.ids)[len(self.said) :]


class ByteTokenizer:
    """Ids are bytes; 256 is BOS."""

    vocab_size = 257
    bos_token_id = 256
    eos_token_ids: tuple[int, ...] = ()
    chat_template = None

    def __init__(self, path: Path) -> None:
        self.path = path

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [256] * add_special_tokens + list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text = bytes(token_id for token_id in token_ids if token_id < 256).decode(errors="replace")
        return text if skip_special_tokens else "<s>" * (256 in token_ids) + text

    def decode_stream(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True) -> Any:
        return Stream(self, prompt_ids)

    def special_tokens(self) -> dict[str, str]:
        return {"bos_token": "<s>"}


class TwoBos(ByteTokenizer):
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [256, 256] * add_special_tokens + list(text.encode())


class Strips(ByteTokenizer):
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens).strip()


class OneIdAtATime(ByteTokenizer):
    def decode_stream(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True) -> Any:
        stream = Stream(self, prompt_ids)
        stream.step = lambda token_id: self.decode([token_id])  # type: ignore[method-assign]
        stream.finish = lambda: ""  # type: ignore[method-assign]
        return stream


class RepeatsThePrompt(ByteTokenizer):
    def decode_stream(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True) -> Any:
        stream = Stream(self, prompt_ids)
        stream.said = ""
        return stream


class SmallVocabulary(ByteTokenizer):
    vocab_size = 100


@pytest.mark.parametrize(
    ("bug", "broken"),
    [
        (ByteTokenizer, set()),
        (TwoBos, {"special_tokens_once"}),
        (Strips, {"round_trip", "special_tokens_once"}),
        (OneIdAtATime, {"stream", "stream_after_prompt"}),
        (RepeatsThePrompt, {"stream_after_prompt"}),
        (SmallVocabulary, {"round_trip"}),
    ],
)
def test_tokenizer(plant: Plant, tmp_path: Path, bug: type[ByteTokenizer], broken: set[str]) -> None:
    probe = plant(lambda path: path == tmp_path, "probe")
    spec = TokenizerSpec(name="bug", api=1, factory=plant(bug), probe=probe, example={})
    assert failures(tokenizer.checks(spec, tmp_path)) == broken


def test_tokenizer_probe_that_says_yes_to_everything(plant: Plant, tmp_path: Path) -> None:
    probe = plant(lambda path: True, "probe")
    spec = TokenizerSpec(name="bug", api=1, factory=plant(ByteTokenizer), probe=probe, example={})
    assert failures(tokenizer.checks(spec, tmp_path)) == {"finds_its_own_files"}


# -- model sources -------------------------------------------------------------------------------------------------


def test_model_source(plant: Plant, registry: Registry, tmp_path: Path) -> None:
    class Greedy:
        def __init__(self, cache_dir: Path, offline: bool, token: str | None) -> None:
            self.cache_dir = cache_dir

        def matches(self, reference: str) -> bool:
            return True

        def resolve(self, reference: str, progress: Any) -> ResolvedModel:
            progress(model_source.Progress("download", 5, 3))
            return ResolvedModel(path=self.cache_dir / "nothing", reference=reference, identity=str(id(object())))

    spec = dataclasses.replace(registry.get("model_source", "pypi"), factory=plant(Greedy))
    assert failures(model_source.checks(spec, tmp_path, reference="pypi:x")) == {
        "leaves_other_schemes_alone",
        "names_what_it_cannot_find",
        "resolves_to_what_exists",
        "resolves_again_offline",
    }


# -- the data plane ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "bug", "broken"),
    [
        ("apply", lambda original, storage, x, bias, ops: original(storage, x, None, ops), {"product_with_bias"}),
        ("apply", lambda original, storage, x, bias, ops: original(storage, x, bias, ops).float(), {"shape"}),
        ("dequantize", lambda original, storage: original(storage) * 1.01, {"product", "product_with_bias"}),
        (
            "create",
            lambda original, n, i, dtype, device: original(n, i, dtype, torch.device("cpu")),
            {"creates_nothing_on_meta"},
        ),
    ],
)
def test_quant_method(plant: Plant, registry: Registry, method: str, bug: Any, broken: set[str]) -> None:
    def make(section: Any) -> Any:
        made = registry.create("quant_method", "unquantized", section)
        original = getattr(made, method)
        setattr(made, method, lambda *arguments: bug(original, *arguments))
        return made

    spec = dataclasses.replace(registry.get("quant_method", "unquantized"), factory=plant(make))
    ops = registry.create("platform", "reference", threads=1).ops
    assert failures(quant_method.checks(spec, ops)) == broken


@pytest.mark.parametrize(
    ("bug", "broken"),
    [
        (lambda blocks, rows: blocks.float(), "blocks"),
        (lambda blocks, rows: blocks.roll(1, 1), "blocks"),
        (lambda blocks, rows: blocks ^ (rows.shape[0] > 1), "rows_stand_alone"),
    ],
)
def test_load_time_method(plant: Plant, registry: Registry, bug: Any, broken: str) -> None:
    def make(section: Any) -> Any:
        made = registry.create("quant_method", "int8", section)
        original = made.encode
        made.encode = lambda rows, block_type: bug(original(rows, block_type), rows)
        return made

    ops = registry.create("platform", "reference", threads=1).ops
    spec = dataclasses.replace(registry.get("quant_method", "int8"), factory=plant(make))
    assert broken in failures(quant_method.checks(spec, ops))
    spec = dataclasses.replace(registry.get("quant_method", "int8"), matches=plant(lambda section: section is None))
    assert failures(quant_method.checks(spec, ops)) == {"matches_no_checkpoint"}


@pytest.mark.parametrize(
    ("op", "bug", "broken"),
    [
        (
            "attention",
            lambda o, q, k, v, meta, scale, window, cap, *rest: o(
                q, k, v, meta, scale, window and window + 1, cap, *rest
            ),
            "attention",
        ),
        (
            "attention",
            lambda o, q, k, v, meta, scale, window, cap, *rest: o(q, k, v, meta, scale, window, None, *rest),
            "attention",
        ),
        ("attention", lambda o, q, k, v, *rules_and_scales: o(q, k, v, *rules_and_scales[:4]), "fp8_cache"),
        ("write_kv", lambda o, k, v, kc, vc, slots, *scales: o(k, v, kc, vc, slots), "fp8_cache"),
        ("rms_norm", lambda o, x, weight, eps: o(x, weight, 0.0), "rms_norm"),
        ("rotary", lambda o, q, k, cos, sin: o(q, k, cos, -sin), "rotary"),
        ("silu_and_mul", lambda o, x: o(x.roll(x.shape[-1] // 2, -1)), "gated"),
        (
            "write_kv",
            lambda o, k, v, kc, vc, slots, *scales: (
                o(k, v, kc, vc, slots, *scales) if scales else o(v, k, kc, vc, slots)
            ),
            "write_kv",
        ),
        ("linear", lambda o, x, weight, bias: o(x, weight, None), "linear"),
        ("gather_rows", lambda o, x, rows: o(x, rows.sort().values), "gather"),
        ("embedding", lambda o, ids, weight: o(ids.clamp(max=9), weight), "embedding"),
    ],
)
def test_platform_op(plant: Plant, registry: Registry, op: str, bug: Any, broken: str) -> None:
    def make(threads: int | None) -> Any:
        made = registry.create("platform", "reference", threads)
        original = getattr(made.ops, op)
        made.ops = dataclasses.replace(made.ops, **{op: lambda *arguments: bug(original, *arguments)})
        return made

    spec = dataclasses.replace(registry.get("platform", "reference"), factory=plant(make))
    assert failures(platform.checks(spec)) == {broken}


class _Replays:
    """A graph that gives again what the work gave when it was recorded."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def replay(self) -> Any:
        return self.result


def _records_the_result(platform: Any, work: Any) -> Any:
    result = work()
    return result, _Replays(result)


def _overlooks_torch(platform: Any, work: Any) -> Any:
    """Records the platform's own calls and takes them for all there is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infer.backends.cpu.tape._looks_at", lambda args, out: True)
        return type(platform).record(platform, work)


@pytest.mark.parametrize("bug", [_records_the_result, _overlooks_torch])
def test_platform_graphs(plant: Plant, registry: Registry, bug: Any) -> None:
    def make(threads: int | None) -> Any:
        made = registry.create("platform", "cpu", threads)
        made.record = lambda work: bug(made, work)
        return made

    spec = dataclasses.replace(registry.get("platform", "cpu"), factory=plant(make))
    assert failures(platform.checks(spec)) == {"graphs"}


@pytest.mark.parametrize(
    "bug",
    [
        lambda o, x, rows, t, k, p, m, u: o(x, rows, t, k + 1, p, m, u),
        lambda o, x, rows, t, k, p, m, u: o(x, rows, t, k, p.clamp_min(1.0), m, u),
        lambda o, x, rows, t, k, p, m, u: o(x, rows, t, k, p, m * 0, u),
        lambda o, x, rows, t, k, p, m, u: o(x, rows, t.clamp(0.5, 2), k, p, m, u),
        lambda o, x, rows, t, k, p, m, u: o(x, rows * 0, t, k, p, m, u),
        lambda o, x, rows, t, k, p, m, u: o(x, rows, t, k, p, m, 1 - u),
        lambda o, x, rows, t, k, p, m, u: o(x.nan_to_num_(neginf=-1.0), rows, t, k, p, m, u),
    ],
    ids=["top_k", "top_p", "min_p", "temperature", "rows", "number", "in place"],
)
def test_platform_draw(plant: Plant, registry: Registry, bug: Any) -> None:
    def make(threads: int | None) -> Any:
        made = registry.create("platform", "cpu", threads)
        original = made.ops.draw
        made.ops = dataclasses.replace(made.ops, draw=lambda *arguments: bug(original, *arguments))
        return made

    spec = dataclasses.replace(registry.get("platform", "cpu"), factory=plant(make))
    assert failures(platform.checks(spec)) == {"draw"}


def test_platform_that_leaks_its_thread_count(plant: Plant, registry: Registry) -> None:
    def make(threads: int | None) -> Any:
        made = registry.create("platform", "reference", threads)
        original = made.step_context

        @contextmanager
        def leaking() -> Any:
            with original():
                yield
            torch.set_num_threads(torch.get_num_threads() + 1)  # not when the step fails: not restored, then

        @contextmanager
        def context() -> Any:
            torch.set_num_threads(3)
            with leaking():
                yield

        made.step_context = context
        return made

    spec = dataclasses.replace(registry.get("platform", "reference"), factory=plant(make))
    before = torch.get_num_threads()
    try:
        assert failures(platform.checks(spec)) == {"step_context_restores_what_it_changes"}
    finally:
        torch.set_num_threads(before)


def _relative_positions(made: Any) -> None:
    forward = made.forward

    def wrong(batch: Any) -> Any:
        batch.positions = batch.positions - batch.positions.min()
        return forward(batch)

    made.forward = wrong


def _sees_neighbours(made: Any) -> None:
    forward = made.forward
    made.forward = lambda batch: forward(batch) + 0.1 * forward(batch).mean(0)


def _forgets_a_layer(made: Any) -> None:
    layout = made.kv_layout()
    made.kv_layout = lambda: msgspec.structs.replace(layout, layers=layout.layers[:1])


def _forgets_a_weight(made: Any) -> None:
    del made.weight_table().targets["model.norm.weight"]


def _half_logits(made: Any) -> None:
    logits = made.logits
    made.logits = lambda hidden, rows: logits(hidden, rows).half()


@pytest.mark.parametrize(
    ("bug", "broken"),
    [
        (_relative_positions, {"chunks"}),
        (_sees_neighbours, {"chunks", "batch"}),
        (_half_logits, {"chunks"}),
        (_forgets_a_layer, {"kv_layout", "chunks", "batch"}),
        (_forgets_a_weight, {"weights", "chunks", "batch"}),
    ],
)
def test_model(plant: Plant, registry: Registry, bug: Callable[[Any], None], broken: set[str]) -> None:
    factory = registry.load("model", "llama")

    def make(config: Any, context: Any) -> Any:
        made = factory(config, context)
        bug(made)
        return made

    spec = dataclasses.replace(registry.get("model", "llama"), factory=plant(make))
    ops = registry.create("platform", "reference", threads=1).ops
    plain = registry.create("quant_method", "unquantized", None)
    assert failures(model.checks(spec, ops, plain)) == broken


def test_model_that_raises_what_python_raises(plant: Plant, registry: Registry) -> None:
    def view(config: Any) -> Any:
        return int(config.raw["hidden_size"]) // config.raw["num_attention_heads"] // config.raw["num_hidden_layers"]

    spec = dataclasses.replace(registry.get("model", "llama"), config_view=plant(view, "view"))
    ops = registry.create("platform", "reference", threads=1).ops
    plain = registry.create("quant_method", "unquantized", None)
    assert failures(model.checks(spec, ops, plain)) == {"typed_errors_for_bad_facts"}


def test_model_whose_gguf_lacks_a_tensor(registry: Registry) -> None:
    spec = registry.get("model", "llama")
    assert spec.gguf is not None
    tensors = {name: hf for name, hf in spec.gguf.tensors.items() if name != "output_norm.weight"}
    broken = dataclasses.replace(spec, gguf=dataclasses.replace(spec.gguf, tensors=tensors))
    ops = registry.create("platform", "reference", threads=1).ops
    plain = registry.create("quant_method", "unquantized", None)
    assert failures(model.checks(broken, ops, plain)) == {"gguf_names_every_weight"}


# -- grammars ------------------------------------------------------------------------------------------------------


class BuggyMatcher:
    """llguidance's matcher with one thing wrong."""

    def __init__(self, real: Any, bug: str) -> None:
        self.real, self.bug = real, bug

    def accept(self, token_id: int) -> str | None:
        found: str | None = self.real.accept(token_id)
        return found

    def fill(self, mask: bytearray) -> None:
        before = bytes(mask)
        self.real.fill(mask)
        if self.bug == "adds to the mask":
            mask[:] = bytes(new | old for new, old in zip(mask, before, strict=True))
        elif self.bug == "allows special tokens":
            mask[grammar.SPECIAL >> 3] |= 1 << (grammar.SPECIAL & 7)
        elif self.bug == "ends anywhere":
            mask[grammar.EOS >> 3] |= 1 << (grammar.EOS & 7)
        elif self.bug == "forgets an end":
            mask[grammar.OTHER_EOS >> 3] &= ~(1 << (grammar.OTHER_EOS & 7)) & 0xFF
        elif self.bug == "one spelling":
            mask[grammar.NOTHING >> 3 :] = bytes(len(mask) - (grammar.NOTHING >> 3))

    @property
    def can_end(self) -> bool:
        return bool(self.real.can_end)

    @property
    def is_complete(self) -> bool:
        return False if self.bug == "is never complete" else bool(self.real.is_complete)


GRAMMAR_BUGS = [
    ("none", set()),
    ("adds to the mask", {"mask_is_written_whole"}),
    ("allows special tokens", {"ends", "special_tokens"}),
    ("ends anywhere", {"ends"}),
    ("forgets an end", {"ends"}),
    ("one spelling", {"mask_is_brute_force", "ends"}),
    ("is never complete", {"ends"}),
    ("shares its state", {"mask_is_brute_force", "ends", "states_are_apart"}),
    ("lets warnings pass", {"refuses_by_name"}),
    ("names nothing", {"refuses_by_name"}),
]


@pytest.mark.parametrize(("bug", "broken"), GRAMMAR_BUGS, ids=[bug for bug, _ in GRAMMAR_BUGS])
def test_grammar(plant: Plant, registry: Registry, bug: str, broken: set[str]) -> None:
    factory = registry.load("grammar", "llguidance")

    class Buggy:
        def __init__(self, vocabulary: Any) -> None:
            self.real = factory(vocabulary)

        def compile(self, source: Any) -> Any:
            try:
                compiled = self.real.compile(source)
            except GrammarError as error:
                if bug == "lets warnings pass" and "not" in source.text:
                    return self.real.compile(GrammarSource(kind="json_schema", text="true"))
                raise GrammarError("no" if bug == "names nothing" else str(error)) from None
            shared = BuggyMatcher(compiled.start(), bug)

            class Made:
                def start(self) -> Any:
                    return shared if bug == "shares its state" else BuggyMatcher(compiled.start(), bug)

            return Made()

    spec = dataclasses.replace(registry.get("grammar", "llguidance"), factory=plant(Buggy))
    assert failures(grammar.checks(spec)) == broken


def test_a_grammar_probe_that_says_no(plant: Plant, registry: Registry) -> None:
    spec = dataclasses.replace(
        registry.get("grammar", "llguidance"), probe=plant(lambda: Probe(False, "not here"), "no")
    )
    assert failures(grammar.checks(spec)) == {"probe_says_whether_it_is_here"}
