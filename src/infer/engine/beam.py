"""Beam search as a loop around the public engine: each step asks for one more token behind every beam.

Runs in the request's task. Part of the facade; owns the beams. What beams share is computed once: the prefix cache has it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from infer.engine.admission import check_name, deadline_at
from infer.engine.many import at_most
from infer.errors import InvalidRequestError
from infer.text.detokenizer import Detokenizer
from infer.types import Choice, Completion, FinishReason, Prompt, RequestTimings, SamplingParams, TokenLogprob, Usage

if TYPE_CHECKING:
    from infer.engine.admission import Admission, Admitted
    from infer.engine.engine import Engine

_PASSED = ("logit_bias", "allowed_token_ids", "bad_words", "repetition_penalty")
"""What shapes the probabilities of each step; all of it looks at whole sequences, not at where the prompt ends."""


@dataclass(frozen=True, slots=True)
class Beam:
    """An answer so far."""

    entries: tuple[TokenLogprob, ...] = ()
    logprob: float = 0.0
    """Of all its tokens together."""
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_scored: int = 0
    """Tokens that count for its length."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(entry.token_id for entry in self.entries)


class BeamState:
    """The search without the engine. Deterministic: equal values keep the order of their beams, then of their tokens."""

    def __init__(
        self,
        *,
        prompt_len: int,
        width: int,
        length_penalty: float,
        max_tokens: int,
        stop_ids: dict[int, int | None],
    ) -> None:
        self.live = [Beam()]
        """Best first; all of one length."""
        self._ended: list[Beam] = []
        self._prompt_len = prompt_len
        self._width = width
        self._penalty = length_penalty
        self._max_tokens = max_tokens
        self._stop_ids = stop_ids

    @property
    def num_candidates(self) -> int:
        """Tokens to look at behind each beam: enough that `width` of them go on."""
        return self._width + len(self._stop_ids)

    def score(self, beam: Beam) -> float:
        return self._scored(beam.logprob, beam.num_scored)

    def advance(self, candidates: Sequence[Sequence[TokenLogprob]]) -> None:
        """Per live beam its likeliest next tokens, best first. Of all together the `width` likeliest that go on become the
        live beams; those that end with a stop id count when they are among the `width` likeliest."""
        grown = [
            (beam.logprob + entry.logprob, beam, entry)
            for beam, entries in zip(self.live, candidates, strict=True)
            for entry in entries
        ]
        grown.sort(key=lambda one: -one[0])
        live: list[Beam] = []
        for place, (logprob, beam, entry) in enumerate(grown):
            length = len(beam.entries) + 1
            entries = (*beam.entries, entry)
            if entry.token_id not in self._stop_ids:
                if len(live) < self._width:
                    live.append(Beam(entries, logprob, num_scored=length))
            elif place < self._width:
                reason = self._stop_ids[entry.token_id]
                self._ended.append(Beam(entries, logprob, "stop", reason, length - 1))
        self.live = live
        self._keep_best()
        if live and len(live[0].entries) >= self._max_tokens:
            self.end("length")

    def end(self, reason: FinishReason) -> None:
        """All live beams end as they are."""
        self._ended += [Beam(beam.entries, beam.logprob, reason, None, beam.num_scored) for beam in self.live]
        self.live = []
        self._keep_best()

    @property
    def is_over(self) -> bool:
        """No live beam is left, or none can still become one of the best."""
        if not self.live:
            return True
        if len(self._ended) < self._width:
            return False
        best = self.live[0]  # it can only lose: log-probabilities are at most 0
        reachable = (len(best.entries), self._max_tokens)
        return self.score(self._ended[-1]) >= max(self._scored(best.logprob, length) for length in reachable)

    def best(self, count: int) -> list[Beam]:
        """Of the ended ones, best first."""
        return self._ended[:count]

    def _keep_best(self) -> None:
        self._ended.sort(key=lambda beam: -self.score(beam))
        del self._ended[self._width :]

    def _scored(self, logprob: float, num_output: int) -> float:
        return logprob / math.pow(self._prompt_len + num_output, self._penalty)


class BeamSearches:
    """Runs beam searches on an engine. One per engine."""

    def __init__(self, engine: Engine, admission: Admission, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._admission = admission
        self._clock = clock
        self._names = itertools.count()
        self._running: dict[str, int] = {}
        """Name -> sequences it has in the engine at most."""
        self._aborted: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._running)

    def abort(self, request_id: str) -> bool:
        """End a search with what it has; False if there is none of that name."""
        width = self._running.get(request_id)
        if width is None:
            return False
        self._aborted.add(request_id)
        for name in _part_names(request_id, width):
            self._engine.abort(name)
        return True

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None,
        tools: Sequence[dict[str, Any]] | None,
        deadline: float | None,
        priority: int,
        cache_salt: str | None,
        **refused: object,
    ) -> Completion:
        """Arguments as for `Engine.generate`. Choices come best first."""
        for argument, value in refused.items():
            if value is not None:
                raise InvalidRequestError(
                    f"{argument} is not available with beam search", parameter=argument, value=None
                )
        arrived_at = self._clock()
        late_at = deadline_at(deadline, arrived_at)
        admitted = await self._admission.admit(prompt, params, tools)
        name = self._name(request_id)
        if params.beam is None:
            raise InvalidRequestError("this is no beam search: params.beam is None", parameter="beam")
        state = BeamState(
            prompt_len=len(admitted.prompt_ids),
            width=params.beam.width,
            length_penalty=params.beam.length_penalty,
            max_tokens=admitted.max_tokens,
            stop_ids=admitted.stop_ids,
        )
        step = _step_params(admitted, min(state.num_candidates, self._engine.model_config.vocab_size))
        parts: list[Completion] = []
        options = {"priority": priority, "cache_salt": cache_salt}
        self._running[name] = params.beam.width
        try:
            while not state.is_over:
                if name in self._aborted:
                    state.end("abort")
                elif late_at is not None and self._clock() >= late_at:
                    state.end("deadline")
                else:
                    left = None if late_at is None else late_at - self._clock()
                    await self._step(state, admitted, step, name, parts, {**options, "deadline": left})
        finally:
            del self._running[name]
            self._aborted.discard(name)
        return self._completion(state, admitted, name, parts, arrived_at)

    async def _step(
        self,
        state: BeamState,
        admitted: Admitted,
        params: SamplingParams,
        name: str,
        parts: list[Completion],
        options: dict[str, Any],
    ) -> None:
        """One token behind every live beam, all at once. The first failure ends the others."""
        names = list(_part_names(name, len(state.live)))
        done = await at_most(
            len(names),
            lambda i: self._engine.generate(
                [*admitted.prompt_ids, *state.live[i].token_ids], params, request_id=names[i], **options
            ),
            len(names),
        )
        if not parts:
            parts += done
        cut = next((one.finish_reason for one in done if one.finish_reason in ("abort", "deadline")), None)
        if cut is not None:
            state.end(cut)
        else:
            state.advance([_candidates(one) for one in done])

    def _completion(
        self, state: BeamState, admitted: Admitted, name: str, parts: Sequence[Completion], arrived_at: float
    ) -> Completion:
        beams = state.best(admitted.params.n)
        return Completion(
            request_id=name,
            prompt_token_ids=admitted.prompt_ids,
            choices=tuple(self._choice(i, beam, state.score(beam), admitted) for i, beam in enumerate(beams)),
            usage=Usage(
                prompt_tokens=len(admitted.prompt_ids),
                output_tokens=sum(len(beam.entries) for beam in beams),
                cached_tokens=parts[0].usage.cached_tokens if parts else 0,
            ),
            sampling=admitted.params,
            sampling_defaults=admitted.defaults,
            timings=_timings(parts, self._clock() - arrived_at),
        )

    def _choice(self, index: int, beam: Beam, score: float, admitted: Admitted) -> Choice:
        params, token_ids = admitted.params, beam.token_ids
        shown = token_ids[:-1] if beam.finish_reason == "stop" and not params.include_stop else token_ids
        detokenizer = Detokenizer(self._engine.tokenizer, admitted.prompt_ids, params.skip_special_tokens)
        text = "".join([*(detokenizer.feed(token_id) for token_id in shown), detokenizer.finish()])
        top = params.logprobs
        return Choice(
            index=index,
            text=text,
            token_ids=token_ids,
            finish_reason=beam.finish_reason or "length",
            stop_reason=beam.stop_reason,
            logprobs=None if top is None else tuple(_cut(entry, top) for entry in beam.entries),
            seed=params.seed or 0,
            beam_score=score,
            parsed=None if admitted.answers is None else admitted.answers.read(text, shown, f"beam-{index}"),
        )

    def _name(self, request_id: str | None) -> str:
        taken: Collection[str] = {*self._engine.request_ids, *self._running}
        if request_id is not None:
            return check_name(request_id, taken)
        return next(name for number in self._names if (name := f"beam-{number}") not in taken)


def refuse_beam(params: object) -> None:
    """Where answers are read while they grow."""
    if isinstance(params, SamplingParams) and params.beam is not None:
        raise InvalidRequestError(
            "beam search cannot be streamed: which beams are best is known at the end; use generate",
            parameter="beam",
            value=None,
        )


def _part_names(name: str, count: int) -> Iterator[str]:
    return (f"{name}/{index}" for index in range(count))


def _step_params(admitted: Admitted, num_candidates: int) -> SamplingParams:
    """One token, with the log-probabilities that are left after the request's own shaping."""
    shaping = {field: getattr(admitted.params, field) for field in _PASSED}
    return SamplingParams(
        **shaping,
        max_tokens=1,
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        seed=0,
        ignore_eos=True,
        logprobs=num_candidates,
        logprobs_mode="processed",
    )


def _candidates(done: Completion) -> list[TokenLogprob]:
    """The likeliest next tokens as entries of their own, each with all of them as alternatives."""
    if not done.logprobs:
        return []
    top = done.logprobs[0].top
    return [TokenLogprob(token, value, 1 + sum(other > value for _, other in top), top) for token, value in top]


def _cut(entry: TokenLogprob, num_top: int) -> TokenLogprob:
    return TokenLogprob(entry.token_id, entry.logprob, entry.rank, entry.top[:num_top])


def _timings(parts: Sequence[Completion], total: float) -> RequestTimings:
    first = parts[0].timings if parts else None
    if first is None or first.first_token is None:
        return RequestTimings(queued=total, first_token=None, total=total)
    return RequestTimings(
        queued=first.queued,
        first_token=first.first_token,
        total=total,
        prefill=first.prefill,
        decode=total - first.first_token,
    )
