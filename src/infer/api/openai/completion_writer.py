"""Replies and chunks of `/v1/completions`: echo, log-probabilities, the best of several choices, indexes, usage.

Pure but for decoding tokens; one per call.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infer.api.context import ApiContext
from infer.api.openai import generation
from infer.api.openai.logprobs import CompletionLogprobs, prompt_logprobs, token_writer
from infer.api.openai.schemas import CompletionBody
from infer.api.sse import EventFrame
from infer.api.timings import timing_metrics
from infer.types import Choice, Completion, Delta, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompted:
    """One prompt of the call."""

    ids: list[int]
    text: str
    """What echo shows."""


class CompletionWriter:
    def __init__(
        self,
        context: ApiContext,
        body: CompletionBody,
        model: str,
        reply_id: str,
        prompts: Sequence[Prompted],
        num_returned: int,
        asks_prompt_logprobs: bool,
        shows_logprobs: bool,
        candidate_ids: Sequence[int] = (),
    ) -> None:
        self._body = body
        self._prompts = prompts
        self._num_returned = num_returned
        self._text = context.token_text
        self._write = token_writer(context.token_text, body.return_tokens_as_token_ids)
        self._head = {"id": reply_id, "object": "text_completion", "created": int(time.time()), "model": model}
        self.frame = EventFrame(self._head)
        self._asks_prompt_logprobs = asks_prompt_logprobs
        self._shows_logprobs = shows_logprobs
        self._candidate_ids = candidate_ids
        self._told: dict[int, CompletionLogprobs] = {}

    # -- whole replies ---------------------------------------------------------------------------------------------

    def reply(self, done: Sequence[Completion], routes: Sequence[Mapping[int, dict[str, Any]]] = ()) -> dict[str, Any]:
        """`routes`: of each completion, choice index -> what it says of its routed experts."""
        choices = []
        for index, completion in enumerate(done):
            for place, choice in enumerate(best(completion.choices, self._num_returned)):
                made = self._choice(index, place, choice, completion.prompt_logprobs)
                choices.append(made | routes[index][choice.index] if routes else made)
        reply = {**self._head, "choices": choices, "usage": self.usage(done)}
        reply["sampling_defaults"] = done[0].sampling_defaults
        return reply | self.metrics(done)

    def _choice(
        self, prompt_index: int, place: int, choice: Choice, prompted: Sequence[TokenLogprob | None] | None
    ) -> dict[str, Any]:
        delta = Delta(
            choice_index=place,
            text=choice.text,
            token_ids=choice.token_ids,
            logprobs=choice.logprobs,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )
        made = self.delta(prompt_index, delta, choice.seed, prompted)
        if made is None:
            raise TypeError("a finished choice always has something to show")
        return made

    # -- chunks ----------------------------------------------------------------------------------------------------

    def chunk(self, choices: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        return {**self._head, "choices": choices, **extra}

    def delta(
        self, prompt_index: int, delta: Delta, seed: int, prompted: Sequence[TokenLogprob | None] | None
    ) -> dict[str, Any] | None:
        """What a choice gained; its first piece brings seed and prompt along. None: nothing to tell yet."""
        body, prompt = self._body, self._prompts[prompt_index]
        index = prompt_index * self._num_returned + delta.choice_index
        first = index not in self._told
        if first:
            self._told[index] = CompletionLogprobs(self._write, self._text, self._candidate_ids)
        hidden = body.max_tokens == 0
        token_ids = () if hidden else delta.token_ids
        text = "" if hidden else delta.text
        shows_ids = body.return_token_ids and bool(token_ids)
        entries: list[TokenLogprob | None] = [] if hidden else list(delta.logprobs or ())
        if not (text or delta.finish_reason or shows_ids or (self._shows_logprobs and entries) or first):
            return None
        unpredicted: Sequence[int] = ()
        if first and body.echo:
            text = prompt.text + text
            entries = [*(prompted or ()), *entries]
            unpredicted = prompt.ids[:1]
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        if first:
            choice["seed"] = seed
        if self._shows_logprobs and entries:
            choice["logprobs"] = self._told[index].piece(entries, unpredicted)
        if delta.finish_reason is not None:
            reason, stop_reason = generation.finish(delta.finish_reason, delta.stop_reason)
            choice["finish_reason"], choice["stop_reason"] = ("length", None) if hidden else (reason, stop_reason)
        if body.return_token_ids:
            choice["token_ids"] = token_ids
            if first:
                choice["prompt_token_ids"] = prompt.ids
        if first and prompted is not None and self._asks_prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs(prompted, self._text, self._candidate_ids)
        return choice

    def metrics(self, done: Sequence[Completion]) -> dict[str, Any]:
        """Times where they were asked for; a list when there are several prompts."""
        if not self._body.return_metrics:
            return {}
        found = [timing_metrics(completion) for completion in done]
        return {"metrics": found if len(found) > 1 else found[0]}

    def usage(self, done: Sequence[Completion]) -> dict[str, Any]:
        """Of the whole call: tokens of choices that `best_of` drops were generated too."""
        return generation.usage(
            sum(completion.usage.prompt_tokens for completion in done),
            sum(completion.usage.output_tokens for completion in done) if self._body.max_tokens else 0,
            sum(completion.usage.cached_tokens for completion in done),
        )


def best(choices: Sequence[Choice], count: int) -> list[Choice]:
    """The likeliest by summed log-probability, best first; equal ones in order. All of them in their own order."""
    if count == len(choices):
        return list(choices)
    ranked = sorted(choices, key=lambda choice: -sum(entry.logprob for entry in choice.logprobs or ()))
    return ranked[:count]
