"""From what a caller gave (prompt, parameters) to sequences the scheduler can take, or a typed refusal.

Runs in the request's task. Part of the facade: knows text; the engine core behind it knows token ids only.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from infer.config.model import ModelConfig
from infer.config.resolve import ResolvedScheduler
from infer.engine.answers import AnswerFormat, AnswerReader
from infer.engine.feasibility import check_feasible
from infer.engine.processor_admission import ProcessorAdmission
from infer.engine.prompts import PromptEncoder, prompt_length
from infer.engine.repetition import RepetitionDetector
from infer.engine.request import Request
from infer.engine.step import SamplingSpec
from infer.engine.structured_admission import NO_GUIDANCE, Guidance, GuidedAdmission
from infer.errors import ContextLengthError, InvalidRequestError, QueueFullError, shown
from infer.options import BEAM_FIELDS
from infer.text.token_ids_only import NoTokenizer
from infer.types import Prompt, SamplingParams

if TYPE_CHECKING:
    from infer.artifacts.request import ArtifactRequest
    from infer.engine.aux.rows import RequestRows
    from infer.engine.outputs import Outbox
    from infer.engine.scheduler.scheduler import Scheduler
    from infer.plugins.tokenizer import Tokenizer
    from infer.text.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateOutputs:
    """What the engine computes for an artifact although the caller is not given it."""

    logprobs: int | None = None
    """Alternatives beside the chosen token, where the caller names no number; None: not wanted."""
    prompt_logprobs: bool = False
    kept_set: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A request that may run: everything decided, one sampling spec per choice."""

    prompt_ids: tuple[int, ...]
    specs: tuple[SamplingSpec, ...]
    max_tokens: int
    stop_ids: dict[int, int | None]
    """Token id -> stop reason (None for EOS)."""
    params: SamplingParams
    """As in force: defaults and seed filled in."""
    defaults: dict[str, Any]
    """Fields that generation_config.json gave."""
    guidance: Guidance = NO_GUIDANCE
    answers: AnswerReader | None = None
    """Of a chat: tells reasoning and calls from the answer."""


NOTHING_PRIVATE = PrivateOutputs()


class Admission:
    """Validates against one loaded model. `max_model_len` is what the KV cache can really hold."""

    def __init__(
        self,
        model: ModelConfig,
        scheduler: ResolvedScheduler,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        use_generation_config: bool,
        max_model_len: int,
        guided: GuidedAdmission,
        processors: ProcessorAdmission,
        answers: AnswerFormat,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._guided = guided
        self._processors = processors
        self._answers = answers
        self.prompts = PromptEncoder(tokenizer, template)
        self._use_generation_config = use_generation_config
        self._max_num_seqs = scheduler.max_num_seqs
        self.max_model_len = max_model_len

    async def admit(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        tools: Sequence[dict[str, Any]] | None,
        *,
        private: PrivateOutputs = NOTHING_PRIVATE,
    ) -> Admitted:
        """Raises `InvalidRequestError` or `ContextLengthError` naming the parameter and the value."""
        if params is not None and not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"params is {type(params).__name__}, not SamplingParams", parameter="params", value=params
            )
        params, defaults = self._with_defaults(params or SamplingParams())
        if isinstance(self._tokenizer, NoTokenizer):
            self._tokenizer.check(params)
        if isinstance(prompt, Sequence) and not isinstance(prompt, str):
            self._check_length(max(1, prompt_length(prompt)), params)  # before anybody looks at every item
        told, shown_tools = self._answers.told(prompt, tools)
        prompt_ids = await self.prompts.encode(told, tools=shown_tools)
        max_tokens = self._check_length(len(prompt_ids), params)
        self._check_ids(prompt_ids, params)
        _check_route_start(params, len(prompt_ids))
        stop_ids: dict[int, int | None] = {token_id: token_id for token_id in params.stop_token_ids}
        if not params.ignore_eos:
            for token_id in dict.fromkeys((*self._model.eos_token_ids, *self._tokenizer.eos_token_ids)):
                stop_ids.setdefault(token_id, None)
        guidance = await self._guided.guidance(params, stop_ids, prompt_ids)
        spec = self._spec(params, stop_ids, private, guidance)
        check_feasible(spec, prompt_ids, stop_ids, max_tokens, self._model.vocab_size)
        specs = [spec] + [_choice_spec(spec, index) for index in range(1, params.n)]
        return Admitted(
            prompt_ids=tuple(prompt_ids),
            specs=tuple(specs),
            max_tokens=max_tokens,
            stop_ids=stop_ids,
            params=params,
            defaults=defaults,
            guidance=guidance,
            answers=self._answers.reader(prompt, prompt_ids, tools),
        )

    def _with_defaults(self, params: SamplingParams) -> tuple[SamplingParams, dict[str, Any]]:
        """The caller's word first, then generation_config.json, then ours; the seed drawn if there is none."""
        given = params.model_fields_set
        defaults = self._model.generation.values if self._use_generation_config else {}
        used = {
            name: value
            for name, value in defaults.items()
            if name not in given and (params.beam is None or name in BEAM_FIELDS)
        }
        filled: dict[str, Any] = dict(used)
        if params.seed is None:
            filled["seed"] = secrets.randbits(52)  # JSON readers keep 53 bits, and choices count on from it
        if params.forced_token_ids is not None and params.max_tokens is None:
            filled["max_tokens"] = len(params.forced_token_ids)
        if not filled:
            return params, used
        values = {name: getattr(params, name) for name in given}
        return SamplingParams(**(values | filled)), used

    def _check_length(self, prompt_len: int, params: SamplingParams) -> int:
        limit = self.max_model_len
        if prompt_len == 0:
            raise InvalidRequestError("the prompt is empty: it has no token to predict from", parameter="prompt")
        if prompt_len >= limit:
            raise ContextLengthError(
                f"the prompt has {prompt_len} tokens and the context holds {limit} with at least one for the answer; "
                "shorten the prompt or raise model.max_model_len or the KV cache",
                parameter="prompt",
                value=prompt_len,
            )
        if params.max_tokens is None:
            if params.min_tokens > limit - prompt_len:
                raise ContextLengthError(
                    f"min_tokens={shown(params.min_tokens)} does not fit: behind the prompt ({prompt_len} tokens) the context "
                    f"of {limit} has room for {limit - prompt_len}",
                    parameter="min_tokens",
                    value=params.min_tokens,
                )
            return limit - prompt_len
        if prompt_len + params.max_tokens > limit:
            raise ContextLengthError(
                f"prompt ({prompt_len} tokens) and max_tokens={shown(params.max_tokens)} together exceed the context of {limit}; "
                f"max_tokens can be at most {limit - prompt_len}",
                parameter="max_tokens",
                value=params.max_tokens,
            )
        return params.max_tokens

    def _check_ids(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        vocab_size = self._model.vocab_size
        groups: tuple[tuple[str, Sequence[int]], ...] = (
            ("prompt", prompt_ids),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", tuple(params.logit_bias)),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("logprob_token_ids", params.logprob_token_ids or ()),
            ("forced_token_ids", params.forced_token_ids or ()),
        )
        for name, ids in groups:
            if ids and (max(ids) >= vocab_size or min(ids) < 0):
                wrong = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
                raise InvalidRequestError(
                    f"{name} holds token id {shown(wrong)}; the vocabulary has {vocab_size} ids (0 to {vocab_size - 1})",
                    parameter=name,
                    value=wrong,
                )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and count > vocab_size:
                raise InvalidRequestError(
                    f"{name}={shown(count)} is more than the vocabulary's {vocab_size} ids", parameter=name, value=count
                )
        if params.n > self._max_num_seqs:
            raise InvalidRequestError(
                f"n={params.n} is more than scheduler.max_num_seqs={self._max_num_seqs}", parameter="n", value=params.n
            )

    def _spec(
        self, params: SamplingParams, stop_ids: dict[int, int | None], private: PrivateOutputs, guidance: Guidance
    ) -> SamplingSpec:
        asked = params.logprobs or min(private.logprobs or 0, self._model.vocab_size)
        prompt_logprobs = params.prompt_logprobs
        if private.prompt_logprobs and prompt_logprobs is None:
            prompt_logprobs = 0
        return SamplingSpec(
            seed=params.seed or 0,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=min(params.top_k, self._model.vocab_size),
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            min_tokens=params.min_tokens,
            min_tokens_masked_ids=tuple(stop_ids) if params.min_tokens else (),
            logit_bias=tuple(sorted(params.logit_bias.items())),
            allowed_token_ids=params.allowed_token_ids,
            bad_words=self._bad_words(params.bad_words),
            logits_processors=self._processors.uses(params.logits_processors),
            logprobs=asked if params.wants_logprobs or private.logprobs is not None else None,
            prompt_logprobs=prompt_logprobs,
            logprobs_mode=params.logprobs_mode,
            logprob_token_ids=params.logprob_token_ids or (),
            return_kept_set=params.return_kept_set or private.kept_set,
            forced_token_ids=params.forced_token_ids or (),
            **guidance.fields,
        )

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as the tokenizer writes it at the start of a text and after a space."""
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word, " " + word.lstrip()):
                ids = tuple(self._tokenizer.encode(text, add_special_tokens=False))
                if ids and max(ids) < self._model.vocab_size:  # what the model cannot write needs no ban
                    sequences[ids] = None
        return tuple(sequences)


def _choice_spec(spec: SamplingSpec, index: int) -> SamplingSpec:
    """Choice `index`: its own seed; the prompt's logprobs are choice 0's business."""
    fields: dict[str, Any] = {name: getattr(spec, name) for name in spec.__struct_fields__}
    fields["seed"] = (spec.seed + index) % 2**63
    fields["prompt_logprobs"] = None
    return SamplingSpec(**fields)


def _check_route_start(params: SamplingParams, prompt_len: int) -> None:
    """Also where no routes are asked for: a wrong number means that the caller counts differently."""
    start = params.routed_experts_prompt_start
    if start > prompt_len:
        raise InvalidRequestError(
            f"routed_experts_prompt_start={shown(start)} must not exceed the prompt length ({prompt_len})",
            parameter="routed_experts_prompt_start",
            value=start,
        )


def make_requests(
    admitted: Admitted,
    name: str,
    outbox: Outbox,
    rows: Sequence[RequestRows],
    arrivals: Iterator[int],
    priority: int,
    cache_salt: str | None,
    deadline: float | None,
    arrived_at: float,
) -> list[Request]:
    """One sequence per choice; `rows` is empty or has one entry for each."""
    rule = admitted.params.repetition_detection
    return [
        Request(
            request_id=name,
            choice_index=index,
            prompt_ids=admitted.prompt_ids,
            sampling=spec,
            max_tokens=admitted.max_tokens,
            stop_ids=admitted.stop_ids,
            outbox=outbox,
            rows=rows[index] if rows else None,
            repetition=None if rule is None else RepetitionDetector(rule),
            priority=priority,
            arrival=next(arrivals),
            cache_salt=cache_salt,
            deadline=deadline,
            arrived_at=arrived_at,
        )
        for index, spec in enumerate(admitted.specs)
    ]


def check_scheduling(priority: object, cache_salt: object) -> None:
    """What the scheduler sorts by and the prefix cache hashes, refused here: there a wrong type would hurt everyone."""
    if type(priority) is not int:
        raise InvalidRequestError(f"priority={shown(priority)} is not an integer", parameter="priority", value=priority)
    if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt or not _is_unicode(cache_salt)):
        raise InvalidRequestError(
            f"cache_salt={shown(cache_salt)} is not a non-empty string of valid Unicode",
            parameter="cache_salt",
            value=cache_salt,
        )


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def check_room(scheduler: Scheduler, arrivals: Sequence[Request], count: int) -> None:
    """Refuse `count` sequences that would have to wait behind a full queue; those that can start at once do not wait."""
    limit = scheduler.config.max_num_waiting
    if limit is None:
        return
    waiting = len(scheduler.waiting) + sum(1 + len(request.siblings) for request in arrivals)
    startable = max(0, scheduler.config.max_num_active_seqs - len(scheduler.running))
    if waiting + count > limit + startable:
        raise QueueFullError(
            f"the queue holds {max(0, waiting - startable)} requests and scheduler.max_num_waiting={limit}; retry later",
            retry_after=1.0,
        )


def check_name(request_id: object, running: Container[str]) -> str:
    """The caller's name for a request, unless a running one has it."""
    if not isinstance(request_id, str) or not request_id:
        reason = "is not a non-empty string"
    elif request_id in running:
        reason = "is running already"
    else:
        return request_id
    raise InvalidRequestError(f"request_id={shown(request_id)} {reason}", parameter="request_id", value=request_id)


def check_many(
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams | None] | None,
    artifacts: Sequence[ArtifactRequest | None] | None,
    max_concurrent: int | None,
) -> tuple[list[SamplingParams | None], Sequence[ArtifactRequest | None]]:
    """The parameters and the artifact of each prompt of `generate_many`."""
    if not isinstance(prompts, Sequence) or isinstance(prompts, str | bytes | bytearray):
        raise InvalidRequestError(
            f"prompts is {type(prompts).__name__}; give a list of prompts", parameter="prompts", value=prompts
        )
    each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
    if len(each) != len(prompts):
        raise InvalidRequestError(f"{len(prompts)} prompts but {len(each)} params", parameter="params", value=len(each))
    wanted = [None] * len(prompts) if artifacts is None else artifacts
    if not isinstance(wanted, Sequence) or len(wanted) != len(prompts):  # one object cannot hold several requests
        raise InvalidRequestError(
            f"artifacts={shown(artifacts)}: give a list of {len(prompts)}, one for each prompt",
            parameter="artifacts",
            value=artifacts,
        )
    if max_concurrent is not None and (type(max_concurrent) is not int or max_concurrent < 1):
        raise InvalidRequestError(
            f"max_concurrent={shown(max_concurrent)} is not a positive integer",
            parameter="max_concurrent",
            value=max_concurrent,
        )
    return each, wanted


def refuse_unavailable(**arguments: object) -> None:
    """Arguments of the public contract whose feature does not exist yet."""
    for name, value in arguments.items():
        if value is not None:
            raise InvalidRequestError(f"{name} is not available in this version", parameter=name, value=value)


def deadline_at(seconds: float | None, called_at: float) -> float | None:
    """The moment a request is late, on the engine's clock."""
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= sys.float_info.max:
        raise InvalidRequestError(
            f"deadline={shown(seconds)} must be a positive number of seconds", parameter="deadline", value=seconds
        )
    return called_at + seconds
