"""The reader's end of a request: fetches ids from the outbox and makes text of them, delta by delta.

Runs in the request's task. Part of the facade; owns the detokenizer and stop matcher of each choice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from infer.engine.delivery import taken_rows
from infer.engine.metrics import request_timings
from infer.engine.outputs import ChoiceUpdate, Outbox
from infer.engine.request import Request
from infer.errors import EngineError
from infer.text.detokenizer import Detokenizer
from infer.text.stop import StopMatch, StopMatcher, StopStrings
from infer.types import CapturedRows, Choice, Completion, Delta, FinishReason, TokenLogprob, Usage

if TYPE_CHECKING:
    from infer.engine.admission import Admitted
    from infer.engine.delivery import Delivery
    from infer.engine.step import PositionLogprobs
    from infer.plugins.tokenizer import Tokenizer


class ChoiceText:
    """One choice being read: its ids, text and log-probabilities, all cut at the same token."""

    def __init__(self, index: int, admitted: Admitted, tokenizer: Tokenizer, stops: StopStrings) -> None:
        params = admitted.params
        self.index = index
        self.seed = admitted.specs[index].seed
        self.token_ids: list[int] = []
        self.text = ""
        self.logprobs: list[TokenLogprob] | None = [] if params.wants_logprobs else None
        self._num_top = params.logprobs or 0
        self._has_kept_sets = params.return_kept_set
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._include_stop = params.include_stop
        self._stop_ids = admitted.stop_ids
        self._answers = admitted.answers
        self._detokenizer = Detokenizer(tokenizer, admitted.prompt_ids, params.skip_special_tokens)
        forced = len(params.forced_token_ids or ())
        self._stop = StopMatcher(stops, params.include_stop, min_tokens=max(params.min_tokens, forced - 1))

    def read(self, update: ChoiceUpdate) -> Delta | None:
        """Take an update in; None when it changes nothing for the reader."""
        if self.finish_reason is not None:
            return None  # a stop string ended it; what the engine still delivers is surplus
        pieces: list[str] = []
        kept = 0
        for token_id in update.token_ids:
            kept += 1
            self.token_ids.append(token_id)
            is_last = kept == len(update.token_ids)
            is_stop_token = is_last and update.finish_reason == "stop" and token_id in self._stop_ids
            if is_stop_token and not self._include_stop:
                break  # its text is not part of the answer
            self._take(self._stop.feed(self._detokenizer.feed(token_id)), pieces)
            if self.finish_reason is not None:
                break
        if self.finish_reason is None and update.finish_reason is not None:
            self._take(self._stop.finish(self._detokenizer.finish()), pieces)
            if self.finish_reason is None:
                self.finish_reason, self.stop_reason = update.finish_reason, update.stop_reason
        text = "".join(pieces)
        self.text += text
        logprobs = self._read_logprobs(update.logprobs[:kept])
        return Delta(
            choice_index=self.index,
            text=text,
            token_ids=tuple(update.token_ids[:kept]),
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _take(self, emitted: tuple[str, StopMatch | None], pieces: list[str]) -> None:
        """Keep what the stop strings let through; a match ends the choice."""
        text, match = emitted
        pieces.append(text)
        if match is not None:
            self.finish_reason, self.stop_reason = "stop", match.stop

    def _read_logprobs(self, entries: list[PositionLogprobs]) -> tuple[TokenLogprob, ...] | None:
        if self.logprobs is None:
            return None
        public = public_logprobs(entries, self._num_top, kept_sets=self._has_kept_sets)
        self.logprobs += public
        return public

    def choice(self, request_id: str = "") -> Choice:
        if self.finish_reason is None:
            raise EngineError(f"choice {self.index} has not ended")
        parsed = None
        if self._answers is not None:
            hidden = self.finish_reason == "stop" and self.token_ids[-1] in self._stop_ids and not self._include_stop
            stop = self.stop_reason if isinstance(self.stop_reason, str) else None
            shown = self.token_ids[:-1] if hidden and stop is None else self.token_ids
            parsed = self._answers.read(self.text, shown, f"{request_id}-{self.index}", cut_at=stop)
        return Choice(
            index=self.index,
            text=self.text,
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
            seed=self.seed,
            parsed=parsed,
        )


def public_logprobs(
    entries: list[PositionLogprobs], num_top: int | None = None, *, kept_sets: bool = True
) -> tuple[TokenLogprob, ...]:
    """As the caller asked for them: an artifact may have had more computed. `num_top` None: all alternatives."""
    return tuple(
        TokenLogprob(
            entry.token_id,
            entry.logprob,
            entry.rank,
            entry.top[:num_top],
            entry.candidates,
            entry.kept_ids if kept_sets else None,
            entry.kept_logmass if kept_sets else None,
        )
        for entry in entries
    )


class Stream:
    """One request while it runs: `async with engine.stream(...) as stream: async for delta in stream: ...`.

    After the loop `stream.result` is what `generate` returns. Leaving the block early aborts the request. With an artifact
    the loop ends when its receipt is there; the last delta comes before it is delivered.
    """

    def __init__(
        self,
        submit: Callable[[Stream], Awaitable[None]],
        end: Callable[[Request, FinishReason, int | str | None], None],
        forget: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._submit = submit
        self._end = end
        self._forget = forget
        self._clock = clock
        self._entered = False
        self._requests: list[Request] = []
        self._choices: list[ChoiceText] = []
        self._deltas: deque[Delta] = deque()
        self._prompt_logprobs: list[PositionLogprobs] = []
        self._result: Completion | None = None
        self._failed = False
        self._delivery: Delivery | None = None
        self._ended: dict[int, Choice] = {}
        self._rows: dict[int, dict[str, CapturedRows]] = {}

    def attach(
        self,
        requests: list[Request],
        admitted: Admitted,
        tokenizer: Tokenizer,
        outbox: Outbox,
        delivery: Delivery | None = None,
    ) -> None:
        """Called by the engine once the request is queued."""
        self._delivery = delivery
        self._requests = requests
        self._admitted = admitted
        self._outbox = outbox
        stops = StopStrings(admitted.params.stop)  # compiled once, shared by the choices
        self._choices = [ChoiceText(index, admitted, tokenizer, stops) for index in range(len(requests))]

    @property
    def request_id(self) -> str:
        self._check_entered()
        return self._requests[0].request_id

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        self._check_entered()
        return self._admitted.prompt_ids

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        """One entry per prompt token (the first is None), complete from the first delta on; None if not asked for."""
        self._check_entered()
        if self._admitted.params.prompt_logprobs is None:
            return None
        return (None, *public_logprobs([*self._prompt_logprobs, *self._outbox.prompt_logprobs_left()]))

    @property
    def seeds(self) -> tuple[int, ...]:
        """In force, one for each choice."""
        self._check_entered()
        return tuple(choice.seed for choice in self._choices)

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """The fields that came from the checkpoint's generation_config.json, with their values."""
        self._check_entered()
        return self._admitted.defaults

    @property
    def prefilled(self) -> tuple[int, int]:
        """(prompt tokens computed or being computed, all prompt tokens)."""
        self._check_entered()
        first = self._requests[0]
        return min(first.num_computed, first.prompt_len) if not first.num_output else first.prompt_len, first.prompt_len

    @property
    def has_result(self) -> bool:
        return self._result is not None

    @property
    def result(self) -> Completion:
        """The completion; raises `EngineError` while the stream has not been read to its end."""
        self._check_entered()
        if self._result is None:
            raise EngineError("the stream has no result yet: read it to its end first")
        return self._result

    def choice(self, index: int) -> Choice:
        """A choice whose last delta is there; the others may still run."""
        if index not in self._ended:
            raise EngineError(f"choice {index} has not ended")
        return self._ended[index]

    def _check_entered(self) -> None:
        if not self._requests:
            raise EngineError("the stream was not entered: use it as `async with engine.stream(...) as stream`")

    async def __aenter__(self) -> Self:
        if self._entered:
            raise EngineError("a stream can be entered once; ask the engine for another one")
        self._entered = True
        await self._submit(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for request in self._requests:
            if request.finish_reason is None:
                self._end(request, "abort", None)
            if request.rows is not None:
                request.rows.release()
        self._rows.clear()
        if self._delivery is not None:
            self._delivery.release()
        if self._requests:
            self._forget(self.request_id)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        self._check_entered()
        while not self._deltas:
            if self._result is not None or self._failed:
                raise StopAsyncIteration
            if self._has_ended:
                await self._deliver()
            else:
                await self._fetch()
        return self._deltas.popleft()

    async def _fetch(self) -> None:
        for update in await self._outbox.take():
            if update.error is not None:
                self._failed = True
                if self._delivery is not None:
                    self._delivery.release("artifact_capture_failed")
                raise _own_copy(update.error)
            choice = self._choices[update.choice_index]
            if update.prompt_logprobs:
                self._take_prompt_logprobs(update.prompt_logprobs)
            delta = choice.read(update)
            if delta is None:
                continue
            if self._delivery is not None:
                kept = len(delta.token_ids)
                self._delivery.record(choice.index, delta.token_ids, update.logprobs[:kept])
            if delta.finish_reason is not None and update.finish_reason is None:
                self._end(self._requests[choice.index], "stop", delta.stop_reason)
            if delta.finish_reason is not None:
                await self._end_choice(choice)
            self._deltas.append(delta)
        if self._has_ended and (self._delivery is None or not self._delivery.has_artifact):
            self._result = self._complete()

    def _take_prompt_logprobs(self, entries: list[PositionLogprobs]) -> None:
        if self._delivery is not None:
            self._delivery.record_prompt_logprobs(entries)
        if self._admitted.params.prompt_logprobs is not None:
            self._prompt_logprobs += entries

    async def _end_choice(self, choice: ChoiceText) -> None:
        """Tokens, log-probabilities and rows are cut at the same token; what the engine still computes is surplus."""
        request = self._requests[choice.index]
        rows = self._rows[choice.index] = taken_rows(request, len(choice.token_ids))
        captured: Mapping[str, CapturedRows] = rows if self._admitted.params.return_routed_experts else {}
        if self._delivery is not None:
            captured = await self._delivery.returned_rows(request, captured)
        self._ended[choice.index] = replace(
            choice.choice(request.request_id),
            captured=captured,
            weight_versions=request.weight_versions(len(choice.token_ids)),
        )

    @property
    def _has_ended(self) -> bool:
        return all(choice.finish_reason is not None for choice in self._choices)

    async def _deliver(self) -> None:
        """Every delta was handed out, the last included: nobody waits for storage but who waits for the receipt."""
        if self._delivery is None:
            raise EngineError("a request without a delivery has nothing to wait for")
        done = self._complete()
        receipt = await self._delivery.finish(done.choices, [self._rows[choice.index] for choice in done.choices])
        self._result = replace(done, artifact=receipt)
        if self._delivery.is_strict:
            receipt.raise_if_failed()

    def _complete(self) -> Completion:
        admitted, first = self._admitted, self._requests[0]
        prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        if admitted.params.prompt_logprobs is not None:
            prompt_logprobs = (None, *public_logprobs(self._prompt_logprobs))
        return Completion(
            request_id=first.request_id,
            prompt_token_ids=admitted.prompt_ids,
            choices=tuple(self._ended[choice.index] for choice in self._choices),
            usage=Usage(
                prompt_tokens=len(admitted.prompt_ids),
                output_tokens=sum(len(choice.token_ids) for choice in self._choices),
                cached_tokens=first.num_cached_tokens or 0,
            ),
            sampling=admitted.params,
            sampling_defaults=admitted.defaults,
            prompt_logprobs=prompt_logprobs,
            timings=request_timings(self._requests, self._clock()),
        )


def _own_copy(error: Exception) -> Exception:
    """One error may end many requests: each raises its own, with the shared one's cause."""
    copy = type(error).__new__(type(error))
    copy.__dict__.update(error.__dict__)
    copy.args = error.args
    copy.__cause__ = error.__cause__ or error
    return copy
