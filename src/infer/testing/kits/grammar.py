"""Conformance of a grammar backend: what the mask allows, where an output may end, what is refused, and that states are apart.

Runs on the calling thread and a small pool; owns nothing. An adapter of another grammar library is checked by the same promises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from infer.errors import GrammarError
from infer.plugins.grammar import Grammar, GrammarBackend, GrammarSource, GrammarSpec, Matcher, Vocabulary
from infer.plugins.platform import Probe
from infer.testing.kits import Check, expect, load

_PIECES = ("{}", '{"', '":', '"}', "true", "ab", "abc", "bb", "re", "green", "12", " ", "\n", "é", "日", "aa", "cbb")
EOS, OTHER_EOS, SPECIAL, NOTHING = 256, 257, 258, 259


def vocabulary() -> Vocabulary:
    """Bytes, two ends of sequence, a special token, an id without a token, and pieces that cross boundaries."""
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [b"</s>", b"<|end|>", b"<tool>", b"", *(piece.encode() for piece in _PIECES)]
    return Vocabulary(
        tokens=tokens,
        special_ids=frozenset({EOS, OTHER_EOS, SPECIAL}),
        eos_token_ids=(EOS, OTHER_EOS),
        encode=lambda text: list(text.encode()),
    )


def checks(spec: GrammarSpec) -> Iterator[Check]:
    """The spec's example says what it accepts, rejects and refuses."""
    words = vocabulary()

    def run(body: Callable[[GrammarBackend, Vocabulary, GrammarSource, str], None]) -> None:
        backend: GrammarBackend = load(spec)(words)
        for kind, text, document in spec.example["accepts"]:
            body(backend, words, GrammarSource(kind=kind, text=text), document)

    yield Check("probe_says_whether_it_is_here", lambda: _probe(spec))
    yield Check("example_covers_its_kinds", lambda: _covers(spec))
    for body in (
        _accepts,
        _mask_is_written_whole,
        _mask_is_brute_force,
        _long_tokens,
        _ends,
        _special_tokens,
        _states_are_apart,
        _threads,
    ):
        yield Check(body.__name__.strip("_"), partial(run, body))
    yield Check("rejects", lambda: _rejects(spec, load(spec)(words), words))
    yield Check("refuses_by_name", lambda: _refuses(spec, load(spec)(words)))


def _probe(spec: GrammarSpec) -> None:
    probe = load(spec, "probe")()
    expect(isinstance(probe, Probe) and probe.available, f"probe() is {probe!r}; the backend is being checked here")


def _covers(spec: GrammarSpec) -> None:
    shown = {kind for kind, _, _ in spec.example["accepts"]}
    expect(shown <= set(spec.kinds), f"the example has {sorted(shown - set(spec.kinds))}, which kinds does not")
    expect(spec.kinds and shown, "a backend has kinds, and an example of some")


def _accepts(backend: GrammarBackend, words: Vocabulary, source: GrammarSource, document: str) -> None:
    matcher = _walk(backend.compile(source), words, document.encode())
    expect(matcher is not None, f"{document!r} does not get through {source.text[:80]!r}")
    expect(matcher is not None and matcher.can_end, f"the output may not end behind {document!r}")


def _mask_is_written_whole(backend: GrammarBackend, words: Vocabulary, source: GrammarSource, document: str) -> None:
    """Whatever the buffer held; no bit behind the vocabulary."""
    matcher = backend.compile(source).start()
    masks = []
    for before in (0x00, 0xFF):
        mask = bytearray([before]) * words.mask_bytes
        matcher.fill(mask)
        masks.append(bytes(mask[: len(words.tokens) // 8]))
        expect(len(mask) == words.mask_bytes, f"a mask of {len(mask)} bytes instead of {words.mask_bytes}")
    expect(masks[0] == masks[1], "what the buffer held before shines through")


def _mask_is_brute_force(backend: GrammarBackend, words: Vocabulary, source: GrammarSource, document: str) -> None:
    """At every place of the document: a token is allowed exactly if its bytes are, one by one."""
    grammar, data = backend.compile(source), document.encode()
    for end in range(len(data)):
        here = _walk(grammar, words, data[:end])
        if here is None:
            raise AssertionError(f"{data[:end]!r} does not get through")
        allowed = _allowed(here, words)
        for token_id, piece in enumerate(words.tokens):
            if not piece or token_id in words.special_ids:
                continue
            fits = len(piece) == 1 or _walk(grammar, words, data[:end] + piece) is not None
            if len(piece) > 1:
                expect(
                    (token_id in allowed) is fits,
                    f"behind {data[:end]!r} the mask {'allows' if token_id in allowed else 'forbids'} {piece!r}, byte by "
                    f"byte it {'fits' if fits else 'does not'}",
                )
            elif token_id in allowed:
                again = _walk(grammar, words, data[:end])
                expect(again is not None and again.accept(token_id) is None, f"{piece!r} is allowed and not accepted")


def _long_tokens(backend: GrammarBackend, words: Vocabulary, source: GrammarSource, document: str) -> None:
    """A token of several bytes leads where its bytes lead one by one."""
    grammar, data = backend.compile(source), document.encode()
    for end in range(len(data)):
        here = _walk(grammar, words, data[:end])
        for token_id in sorted(_allowed(here, words) - words.special_ids) if here is not None else ():
            piece = words.tokens[token_id]
            at_once, bytewise = _walk(grammar, words, data[:end]), _walk(grammar, words, data[:end] + piece)
            if len(piece) < 2 or at_once is None or bytewise is None:
                continue
            refusal = at_once.accept(token_id)
            expect(refusal is None, f"behind {data[:end]!r} {piece!r} is allowed and not accepted: {refusal}")
            same = _allowed(at_once, words) == _allowed(bytewise, words) and at_once.can_end == bytewise.can_end
            expect(same, f"behind {data[:end]!r} {piece!r} as one token leads elsewhere than byte by byte")


def _ends(backend: GrammarBackend, words: Vocabulary, source: GrammarSource, document: str) -> None:
    """End-of-sequence bits follow `can_end`; complete means that nothing else is allowed."""
    grammar, data = backend.compile(source), document.encode()
    for end in range(len(data) + 1):
        matcher = _walk(grammar, words, data[:end])
        if matcher is None:
            raise AssertionError(f"{data[:end]!r} does not get through")
        allowed = _allowed(matcher, words)
        ends = set(words.eos_token_ids)
        expect(
            (allowed & ends) == (ends if matcher.can_end else set()),
            f"behind {data[:end]!r} can_end={matcher.can_end}, and the mask has {allowed & ends} of {ends}",
        )
        expect(
            matcher.is_complete is (matcher.can_end and not allowed - ends),
            f"behind {data[:end]!r} is_complete={matcher.is_complete} and {len(allowed - ends)} tokens may follow",
        )


def _special_tokens(backend: GrammarBackend, words: Vocabulary, source: GrammarSource, document: str) -> None:
    """None is ordinary text, nor is an id without a token."""
    grammar, data = backend.compile(source), document.encode()
    for end in range(len(data) + 1):
        matcher = _walk(grammar, words, data[:end])
        odd = _allowed(matcher, words) & {SPECIAL, NOTHING} if matcher is not None else set()
        expect(not odd, f"behind {data[:end]!r} the mask allows {odd}, which no text is")


def _states_are_apart(backend: GrammarBackend, words: Vocabulary, source: GrammarSource, document: str) -> None:
    grammar, data = backend.compile(source), document.encode()
    fresh = _allowed(grammar.start(), words)
    first, second = grammar.start(), grammar.start()
    expect(first.accept(data[0]) is None, f"{data[:1]!r} is not accepted")
    expect(_allowed(second, words) == fresh, "one output's tokens change what another may write")
    expect(_allowed(grammar.start(), words) == fresh, "a used grammar no longer starts at its start")
    expect(_allowed(backend.compile(source).start(), words) == fresh, "compiling again gives another grammar")


def _threads(backend: GrammarBackend, words: Vocabulary, source: GrammarSource, document: str) -> None:
    def once(_: int) -> bool:
        matcher = _walk(backend.compile(source), words, document.encode())
        return matcher is not None and matcher.can_end

    with ThreadPoolExecutor(4) as pool:
        expect(all(pool.map(once, range(16))), "threads get in each other's way")


def _rejects(spec: GrammarSpec, backend: GrammarBackend, words: Vocabulary) -> None:
    expect(spec.example["rejects"], "the example rejects nothing")
    for kind, text, document in spec.example["rejects"]:
        matcher = _walk(backend.compile(GrammarSource(kind=kind, text=text)), words, document.encode())
        expect(matcher is None or not matcher.can_end, f"{document!r} gets through {text[:80]!r}")


def _refuses(spec: GrammarSpec, backend: GrammarBackend) -> None:
    expect(spec.example["refused"], "the example refuses nothing")
    for kind, text, word in spec.example["refused"]:
        try:
            backend.compile(GrammarSource(kind=kind, text=text))
        except GrammarError as error:
            expect(word in str(error), f"the refusal of {text[:80]!r} does not name {word!r}: {error}")
        else:
            raise AssertionError(f"{text[:80]!r} is accepted, though {word!r} has no effect")


def _walk(grammar: Grammar, words: Vocabulary, data: bytes) -> Matcher | None:
    """The matcher behind these bytes, each allowed and accepted; else None."""
    matcher = grammar.start()
    for byte in data:
        if byte not in _allowed(matcher, words) or matcher.accept(byte) is not None:
            return None
    return matcher


def _allowed(matcher: Matcher, words: Vocabulary) -> set[int]:
    mask = bytearray(words.mask_bytes)
    matcher.fill(mask)
    return {i for i in range(len(words.tokens)) if mask[i >> 3] >> (i & 7) & 1}
