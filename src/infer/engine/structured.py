"""Constrained output before it runs: the backend, compiling in a thread within bounds, and the cache of what was compiled.

Called in request tasks; the worker takes matchers from the cache. One per engine; no tensors.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import anyio
import anyio.to_thread

from infer.config.structured_output import StructuredOutputSection
from infer.errors import ConfigError, GrammarError, InferError, QueueFullError, shown
from infer.plugins.grammar import Grammar, GrammarBackend, GrammarSource, GrammarSpec, Matcher, Vocabulary
from infer.plugins.registry import Registry
from infer.plugins.tokenizer import SupportsTokenBytes

if TYPE_CHECKING:
    from infer.config.model import ModelConfig
    from infer.plugins.tokenizer import Tokenizer
    from infer.structured import StructuredOutput

MAX_COMPILING = 4
"""Grammars compiled at a time, and abandoned ones that still are, each."""
SOURCES_KEPT = 8
"""Times max_source_bytes that the cached sources may have together."""


class _Kept:
    """A compiled grammar in the cache. Held by the cache, and by each running request that uses it."""

    __slots__ = ("__weakref__", "grammar")

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar


class GrammarStore:
    """Compiled grammars of one engine. `admit` is called in request tasks, `matcher` on any thread."""

    def __init__(
        self, registry: Registry, section: StructuredOutputSection, make_vocabulary: Callable[[], Vocabulary]
    ) -> None:
        """Raises `ConfigError` when the named backend cannot be had."""
        self._registry = registry
        self._section = section
        self._make_vocabulary = make_vocabulary
        self._spec = choose_backend(registry, section.backend)
        self._lock = threading.RLock()
        self._vocabulary: Vocabulary | None = None
        self._backend: GrammarBackend | None = None
        self._kept: OrderedDict[GrammarSource, _Kept] = OrderedDict()
        self._alive: WeakValueDictionary[GrammarSource, _Kept] = WeakValueDictionary()
        self._num_abandoned = 0
        self._slots: anyio.CapacityLimiter | None = None

    @property
    def skip_forced_tokens(self) -> bool:
        return self._section.skip_forced_tokens

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokens as grammars see them, made when first asked for. Raises `GrammarError` when there are none."""
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            return self._vocabulary

    async def admit(self, source: GrammarSource) -> object:
        """Compile, or find compiled; the worker finds it as long as the returned object is held.

        Raises `GrammarError` naming what is wrong, `QueueFullError` while too many have run into the time limit.
        """
        size = len(source.text.encode("utf-8", "surrogatepass"))
        if size > self._section.max_source_bytes:
            raise GrammarError(
                f"{source.kind} has {size} bytes, more than structured_output.max_source_bytes="
                f"{self._section.max_source_bytes}",
                value=size,
            )
        kept = self._find(source)
        if kept is not None:
            return kept
        if self._slots is None:
            self._slots = anyio.CapacityLimiter(MAX_COMPILING)
        async with self._slots:
            return await self._compile_within(source)

    def matcher(self, source: GrammarSource) -> Matcher:
        """A fresh matcher; compiles at once what is not in the cache. Raises `GrammarError`."""
        return (self._find(source) or self._compile(source)).grammar.start()

    async def _compile_within(self, source: GrammarSource) -> _Kept:
        """A thread cannot be stopped: it is left behind at the limit, and what it makes is thrown away."""
        if self._num_abandoned >= MAX_COMPILING:
            raise QueueFullError(
                f"{self._num_abandoned} grammars are still being compiled past their time limit; retry later",
                retry_after=self._section.compile_timeout,
            )
        state = _Compiling()

        def run() -> _Kept:
            try:
                return self._compile(source)
            finally:
                with self._lock:
                    state.done = True
                    self._num_abandoned -= state.abandoned

        try:
            with anyio.fail_after(self._section.compile_timeout):
                return await anyio.to_thread.run_sync(run, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))
        except TimeoutError:
            raise GrammarError(
                f"{source.kind} takes longer to compile than structured_output.compile_timeout="
                f"{self._section.compile_timeout:g} seconds; make it smaller"
            ) from None
        finally:
            with self._lock:
                if not state.done:
                    state.abandoned = True
                    self._num_abandoned += 1

    def _compile(self, source: GrammarSource) -> _Kept:
        kept = self._find(source)
        if kept is not None:
            return kept
        backend = self._open()
        if source.kind not in self._spec.kinds:
            raise GrammarError(
                f"{source.kind} is not supported by the grammar backend {self._spec.name!r}, which takes "
                f"{', '.join(self._spec.kinds)}; see structured_output.backend"
            )
        try:
            kept = _Kept(backend.compile(source))
        except InferError:
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise GrammarError(
                f"{source.kind} cannot be used: the grammar backend {self._spec.name!r} failed with "
                f"{type(error).__name__}: {error}"
            ) from error
        self._keep(source, kept)
        return kept

    def _open(self) -> GrammarBackend:
        with self._lock:
            if self._backend is None:
                self._backend = self._registry.create("grammar", self._spec.name, self.vocabulary)
            return self._backend

    def _find(self, source: GrammarSource) -> _Kept | None:
        with self._lock:
            kept = self._alive.get(source)
            if kept is not None and source in self._kept:
                self._kept.move_to_end(source)
            return kept

    def _keep(self, source: GrammarSource, kept: _Kept) -> None:
        section = self._section
        with self._lock:
            self._alive[source] = self._kept[source] = kept
            while len(self._kept) > section.cache_size or (
                len(self._kept) > 1
                and sum(len(known.text) for known in self._kept) > SOURCES_KEPT * section.max_source_bytes
            ):
                self._kept.popitem(last=False)


class _Compiling:
    """One call of a compiler, seen from both sides of its thread."""

    def __init__(self) -> None:
        self.done = False
        self.abandoned = False


def choose_backend(registry: Registry, name: str) -> GrammarSpec:
    """The named backend, or for "auto" the available one of highest priority. Raises `ConfigError` or `PluginError`."""
    if name != "auto":
        spec = registry.get("grammar", name)
        probe = registry.probe("grammar", name, named=True)
        if not probe.available:
            raise ConfigError(
                f"structured_output.backend={name}: not available here ({probe.reason})",
                fields=("structured_output.backend",),
            )
        return spec
    reasons = []
    for spec in sorted(registry.specs("grammar"), key=lambda spec: -spec.priority):
        probe = registry.probe("grammar", spec.name)
        if probe.available:
            return spec
        reasons.append(f"{spec.name}: {probe.reason}")
    raise ConfigError(
        f"no grammar backend is available here; {'; '.join(reasons) or 'none is installed'}",
        fields=("structured_output.backend",),
    )


def grammar_source(asked: StructuredOutput) -> GrammarSource:
    """What a request asks for, as backends take it. Raises `GrammarError` for text that is no JSON."""
    if asked.json_object or asked.json_schema is not None:
        schema = '{"type":"object"}' if asked.json_schema is None else _checked_json("json_schema", asked.json_schema)
        return GrammarSource(
            kind="json_schema",
            text=schema,
            compact=asked.compact,
            whitespace_pattern=asked.whitespace_pattern,
            forbid_additional_properties=asked.forbid_additional_properties,
        )
    if asked.structural_tag is not None:
        return GrammarSource(kind="structural_tag", text=_checked_json("structural_tag", asked.structural_tag))
    if asked.choice is not None:
        return GrammarSource(kind="choice", text=json.dumps(asked.choice))
    if asked.regex is not None:
        return GrammarSource(kind="regex", text=asked.regex)
    return GrammarSource(kind="grammar", text=asked.grammar or "")


def _checked_json(kind: str, text: str) -> str:
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"{kind}={shown(text)} is not JSON: {error}", value=text[:200]) from None
    return text


def vocabulary_of(tokenizer: Tokenizer, model: ModelConfig) -> Vocabulary:
    """The tokens of a loaded model. Raises `GrammarError` when the tokenizer cannot give their bytes."""
    if not isinstance(tokenizer, SupportsTokenBytes):
        raise GrammarError(
            "structured output needs a tokenizer that knows the bytes of its tokens; none such is loaded"
        )
    tokens = []
    for token_id in range(model.vocab_size):
        piece = tokenizer.token_bytes(token_id)
        if piece is None:
            raise GrammarError(
                "structured output needs tokens that are bytes; this model's tokenizer joins them in its way"
            )
        tokens.append(piece)
    ends = [i for i in dict.fromkeys((*model.eos_token_ids, *tokenizer.eos_token_ids)) if i < model.vocab_size]
    if not ends:
        raise GrammarError("structured output needs an end-of-sequence token, and the model has none")
    special = frozenset(i for i in (*tokenizer.special_token_ids, *ends) if i < model.vocab_size)
    return Vocabulary(
        tokens=tokens,
        special_ids=special,
        eos_token_ids=tuple(ends),
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )
