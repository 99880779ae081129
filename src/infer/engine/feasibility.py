"""Whether a request's sampling settings leave a token to sample at all: what no logits can satisfy is refused at admission.

Runs in the request's task; pure. What depends on the logits is left to the step, and fails that request alone.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass

from infer.engine.step import SamplingSpec
from infer.errors import InvalidRequestError
from infer.types import SamplingParams

MAX_TAILS = 256
MAX_POSITIONS = 1024
"""Beyond these the search gives up, and the step decides."""
SMALLEST_SCALE = 1e-30
"""Logits of up to 3e8, divided by less than this, are infinite in float32."""
GREEDY_BELOW = 1e-5
"""The sampler does not divide by temperatures below this."""


@dataclass(frozen=True, slots=True)
class _Bans:
    """What bad words and min_tokens forbid."""

    never: frozenset[int]
    """Bad words of one token."""
    endings: dict[int, list[tuple[int, ...]]]
    """Last id of a longer bad word -> the ids before it."""
    masked: frozenset[int]
    """Not before `min_tokens` outputs."""
    width: int
    """Ids of the tail that decide."""

    def completes(self, tail: Sequence[int], token_id: int) -> bool:
        return any(tuple(tail[-len(start) :]) == start for start in self.endings.get(token_id, ()))


def check_feasible(
    spec: SamplingSpec, prompt_ids: Sequence[int], stop_ids: Container[int], max_tokens: int, vocab_size: int
) -> None:
    """Raises `InvalidRequestError` naming the parameters when every way to go on ends without a token to sample."""
    _check_scale(spec)
    bans = _bans(spec)
    touched = {*bans.never, *bans.masked, *bans.endings}
    allowed: Collection[int] | None = spec.allowed_token_ids
    if allowed is None:
        if sum(token_id < vocab_size for token_id in touched) < vocab_size:
            return  # there is a token that nothing ever forbids
        allowed = range(vocab_size)
    elif any(token_id not in touched for token_id in allowed):
        return
    forced = spec.forced_token_ids
    if any(token_id in stop_ids for token_id in forced):
        return
    free = [token_id for token_id in dict.fromkeys(allowed) if token_id not in bans.never]
    tails = {_cut((*prompt_ids[max(0, len(prompt_ids) - bans.width) :], *forced), bans.width)}
    seen: set[tuple[int, ...]] = set()
    for position in range(len(forced), min(max_tokens, len(forced) + MAX_POSITIONS)):
        waits = position < spec.min_tokens
        open_ids = [token_id for token_id in free if token_id not in bans.masked] if waits else free
        following = _following(tails, open_ids, bans, stop_ids)
        if following is None:
            return
        if not following:
            raise _impossible(spec, bans, position, waits)
        if not waits:
            if following <= seen:
                return  # it can go round for ever
            seen |= following
        tails = following


def what_may_exclude_forced(params: SamplingParams) -> str | None:
    """The setting after which a forced token may have no probability left: its processed log-probability is then -inf. (One that
    does not fit its grammar fails the request anyway.)"""
    if params.forced_token_ids is None:
        return None
    random = params.temperature >= GREEDY_BELOW
    excluding = {
        "top_k": random and params.top_k > 0,
        "top_p": random and params.top_p < 1,
        "min_p": random and params.min_p > 0,
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": bool(params.bad_words),
        "min_tokens": params.min_tokens > 0,
        "logits_processors": bool(params.logits_processors),
        "thinking_budget": params.thinking_budget is not None,
    }
    return next((name for name, excludes in excluding.items() if excludes), None)


def _following(
    tails: Iterable[tuple[int, ...]], open_ids: Sequence[int], bans: _Bans, stop_ids: Container[int]
) -> set[tuple[int, ...]] | None:
    """The tails after one more token; None when there are plainly ways to go on."""
    found: set[tuple[int, ...]] = set()
    for tail in tails:
        for token_id in open_ids:
            if bans.completes(tail, token_id):
                continue
            if token_id in stop_ids or not bans.width:
                return None
            found.add(_cut((*tail, token_id), bans.width))
            if len(found) > MAX_TAILS:
                return None
    return found


def _bans(spec: SamplingSpec) -> _Bans:
    endings: dict[int, list[tuple[int, ...]]] = {}
    for word in spec.bad_words:
        if len(word) > 1:
            endings.setdefault(word[-1], []).append(tuple(word[:-1]))
    return _Bans(
        never=frozenset(word[0] for word in spec.bad_words if len(word) == 1),
        endings=endings,
        masked=frozenset(spec.min_tokens_masked_ids) if spec.min_tokens else frozenset(),
        width=max((len(start) for starts in endings.values() for start in starts), default=0),
    )


def _cut(tail: tuple[int, ...], width: int) -> tuple[int, ...]:
    return tail[-width:] if width else ()


def _check_scale(spec: SamplingSpec) -> None:
    temperature = spec.temperature if spec.temperature >= GREEDY_BELOW else 1.0
    if spec.repetition_penalty * temperature < SMALLEST_SCALE:
        raise InvalidRequestError(
            f"repetition_penalty={spec.repetition_penalty!r} and temperature={spec.temperature!r}: logits divided by both "
            "are infinite; raise repetition_penalty",
            parameter="repetition_penalty",
            value=spec.repetition_penalty,
        )


def _impossible(spec: SamplingSpec, bans: _Bans, position: int, waits: bool) -> InvalidRequestError:
    reasons = {}
    if spec.allowed_token_ids is not None:
        reasons["allowed_token_ids"] = "allowed_token_ids allows nothing else"
    if bans.never or bans.endings:
        reasons["bad_words"] = "bad_words forbids what is left"
    if waits and bans.masked:
        reasons["min_tokens"] = f"min_tokens={spec.min_tokens} keeps end-of-sequence and stop ids back"
    return InvalidRequestError(
        f"no token can be sampled for output token {position}, whatever the model says: {', '.join(reasons.values())}; "
        f"relax {' or '.join(reasons)}",
        parameter=next(iter(reasons)),
    )
