"""The public value types of a request: what the caller asks for and what comes back.

Plain frozen data, shared by every plane; imports no tensor library.
"""

from __future__ import annotations

import difflib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from infer.answer import ParsedAnswer, ToolCall
from infer.errors import InvalidRequestError, shown
from infer.options import (
    BEAM_FIELDS,
    MAX_PROCESSORS,
    PROCESSORS_SCHEMA,
    BeamSearch,
    LogitsFunction,
    NamedProcessor,
    RepetitionDetection,
    as_processors,
)
from infer.structured import StructuredOutput

if TYPE_CHECKING:
    from infer.artifacts.receipt import ArtifactReceipt

FinishReason = Literal["stop", "length", "repetition", "deadline", "abort", "error"]
LogprobsMode = Literal["raw", "processed", "raw_logits", "processed_logits"]
Prompt = str | Sequence[int] | Sequence[dict[str, Any]]
"""Raw text, token ids, or chat messages in the OpenAI shape."""

MAX_TOKEN_ID = 2**31 - 1
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_LISTED = 2**20
"""Ids or words in one list: more than any vocabulary, and an end to what never ends."""
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID, strict=True)]


def _one_or_many(value: object) -> object:
    return (value,) if isinstance(value, str) else value


class SamplingParams(BaseModel):
    """How one request is sampled. Keyword-only, frozen; a wrong value raises `InvalidRequestError`.

    Fields left unset take the checkpoint's `generation_config.json` default where it has one, then the value
    written here; `Completion.sampling` says what was used. Logits are processed in this order: structured_output and
    thinking_budget, allowed_token_ids, bad_words, logit_bias, min_tokens, logits_processors, repetition, frequency and
    presence penalties, temperature, top_k, top_p, min_p.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_tokens: Annotated[int, Field(ge=1, strict=True)] | None = None
    """At most this many output tokens; None means up to the context."""
    min_tokens: Annotated[int, Field(ge=0, strict=True)] = 0
    """Stop ids and EOS cannot be sampled, nor stop strings match, before this many output tokens."""
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 1.0
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, Field(ge=0, strict=True)] = 0
    """0 keeps all."""
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] = 1.0
    """Over prompt and output tokens (CTRL, arXiv:1909.05858)."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] = 0.0
    """Over output tokens, by count."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] = 0.0
    """Over output tokens, once each."""
    seed: Annotated[int, Field(ge=0, lt=2**63, strict=True)] | None = None
    """Drawn at admission when None (below 2**52), and returned in `Completion.seed`. Choice i uses seed + i."""
    stop: Annotated[
        tuple[str, ...], Field(max_length=MAX_STOP_STRINGS, fail_fast=True), BeforeValidator(_one_or_many)
    ] = ()
    stop_token_ids: Annotated[tuple[TokenId, ...], Field(max_length=MAX_LISTED, fail_fast=True)] = ()
    include_stop: bool = False
    """Keep the matched stop string in the text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text; ids and log-probabilities always have them."""
    ignore_eos: bool = False
    repetition_detection: RepetitionDetection | None = None
    """End an answer that loops, finish_reason "repetition": with its first token that completes `min_count` equal pieces in a
    row. Prompt tokens and the first `min_tokens` do not count as a reason; a stop on the same token goes first."""
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]] = Field(
        default_factory=dict
    )
    allowed_token_ids: Annotated[tuple[TokenId, ...], Field(max_length=MAX_LISTED, fail_fast=True)] | None = None
    bad_words: Annotated[tuple[str, ...], Field(max_length=MAX_LISTED, fail_fast=True)] = ()
    logits_processors: Annotated[
        tuple[NamedProcessor | LogitsFunction, ...],
        Field(max_length=MAX_PROCESSORS),
        BeforeValidator(as_processors),
        PROCESSORS_SCHEMA,
    ] = ()
    """Further edits of the logits, in this order: a plugin's by its name (`NamedProcessor`, or text), or a function of this
    program's, which every request waits for. One that raises fails its request."""
    logprobs: Annotated[int, Field(ge=0, strict=True)] | None = None
    """None: none. k: the chosen token's logprob and the k best alternatives."""
    prompt_logprobs: Annotated[int, Field(ge=0, strict=True)] | None = None
    logprobs_mode: LogprobsMode = "raw"
    """raw: log-softmax of the model's logits at temperature 1; processed: of the logits that are sampled from, after all
    processors (greedy: after the penalties; neither temperature nor truncation applies). raw_logits, processed_logits: the
    logits before and after."""
    logprob_token_ids: Annotated[tuple[TokenId, ...], Field(max_length=MAX_LISTED, fail_fast=True)] | None = None
    """Score these ids at every output position (and every prompt position, with prompt_logprobs): `TokenLogprob.candidates`."""
    return_kept_set: bool = False
    """What top_k, top_p and min_p kept at every output position: `TokenLogprob.kept_ids` and `kept_logmass`."""
    forced_token_ids: Annotated[tuple[TokenId, ...], Field(max_length=MAX_LISTED, fail_fast=True)] | None = None
    """Emit these ids instead of sampling and return what the model thinks of them. max_tokens is their number unless
    more is asked for: then sampling goes on behind them. Only the last of them can end the answer."""
    structured_output: StructuredOutput | None = None
    """The form that the answer must have. A model that reasons does so first. The answer ends with it: where nothing may
    follow, also without an end-of-sequence token and before min_tokens."""
    thinking_budget: Annotated[int, Field(ge=0, strict=True)] | None = None
    """Reasoning is closed after so many tokens of it."""
    return_routed_experts: bool = False
    """The experts that every token was routed to."""
    routed_experts_prompt_start: Annotated[int, Field(ge=0, strict=True)] = 0
    """First prompt position whose routes are returned."""
    captured_as: Literal["rows", "keys"] = "rows"
    """keys: of the captured rows that are returned, those of complete blocks are named by their keys in capture.store_dir, for
    `infer.artifacts.rebuild_rows` in any process."""
    beam: BeamSearch | None = None
    """Search the likeliest answers instead of sampling: choices come best first, at most `n`, with their `Choice.beam_score`, and
    their log-probabilities are those that the search summed. Of the other parameters only stop ids, ignore_eos, include_stop,
    max_tokens, logit_bias, allowed_token_ids, bad_words and repetition_penalty apply; it cannot be streamed."""
    n: Annotated[int, Field(ge=1, le=1024, strict=True)] = 1
    """Answers to one prompt, which is computed once. Greedy ones (temperature 0) are all equal."""

    if not TYPE_CHECKING:  # type checkers see the generated keyword-only signature

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise _invalid_parameter(error) from None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is larger than max_tokens={self.max_tokens}")
        if len(self.stop) > MAX_STOP_STRINGS or any(not s or len(s) > MAX_STOP_LENGTH for s in self.stop):
            raise ValueError(f"stop takes at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_LENGTH} characters")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids is empty: no token could be sampled")
        self._check_forced()
        self._check_beam()
        if any(not word for word in self.bad_words):
            raise ValueError("bad_words holds an empty string")
        for word in self.bad_words:
            try:
                word.encode()
            except UnicodeEncodeError as error:  # half a surrogate pair: no tokenizer takes it
                raise ValueError(f"bad_words holds {word!r}, which is not valid Unicode: {error.reason}") from None
        return self

    def _check_forced(self) -> None:
        if self.forced_token_ids is None:
            return
        count = len(self.forced_token_ids)
        if count == 0:
            raise ValueError("forced_token_ids is empty: name at least one id, or leave it out")
        if self.max_tokens is not None and self.max_tokens < count:
            raise ValueError(f"forced_token_ids holds {count} ids, more than max_tokens={self.max_tokens}")
        if self.n != 1:
            raise ValueError(f"forced_token_ids with n={self.n}: every choice would be the same, so n must be 1")

    def _check_beam(self) -> None:
        if self.beam is None:
            return
        for name in sorted(self.model_fields_set - BEAM_FIELDS):
            value = getattr(self, name)
            harmless = name == "temperature" and value == 0
            if not harmless and value != type(self).model_fields[name].default:
                raise ValueError(f"{name}={value!r} does not apply to beam search; leave it out")
        if self.n > self.beam.width:
            raise ValueError(f"n={self.n} is more than the width={self.beam.width} of the beam search")

    @property
    def wants_logprobs(self) -> bool:
        """Whether output positions get a `TokenLogprob`: `logprobs` was asked for, or what only comes with it."""
        return (
            self.logprobs is not None
            or bool(self.logprob_token_ids)
            or self.return_kept_set
            or self.forced_token_ids is not None
        )


def _invalid_parameter(error: ValidationError) -> InvalidRequestError:
    first = error.errors(include_url=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    value = first.get("input")
    if first["type"] == "extra_forbidden":
        close = difflib.get_close_matches(path, SamplingParams.model_fields, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return InvalidRequestError(
            f"unknown sampling parameter {path!r}{hint}", parameter=path.split(".")[0], value=value
        )
    message = first["msg"].removeprefix("Value error, ")
    if not path:  # a rule over several fields: its message names them
        return InvalidRequestError(message, parameter=message.split("=")[0].split(" ")[0], value=None)
    return InvalidRequestError(f"{path}={shown(value)}: {message}", parameter=path.split(".")[0], value=value)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One position's log-probabilities (natural log), or logits when the mode says so."""

    token_id: int
    logprob: float
    rank: int
    """1 is the best token of the vocabulary."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), best first, as many as asked for."""
    candidates: tuple[float, ...] = ()
    """Of `SamplingParams.logprob_token_ids`, in their order; -inf where a processor excluded one."""
    kept_ids: array[int] | None = None
    """With `return_kept_set`: the ids that could be drawn here, ascending, as int32 (greedy: the best one alone). None with
    a `kept_logmass` means the whole vocabulary."""
    kept_logmass: float | None = None
    """Log of the probability that the kept ids had together before top_k, top_p and min_p. A processed logprob is the one
    before these filters minus this."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a whole request; output tokens are summed over choices."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one choice gained since the last delta."""

    choice_index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedRows:
    """Rows of one captured field of one choice. Row i describes the token at position `start + i`, which was fed to the
    model; the last token of a sequence was never fed and has no row."""

    field: str
    start: int
    """Effective first position."""
    count: int
    data: bytes | memoryview
    """Rows in C order: `count` x `row_shape` of `dtype`, little-endian."""
    dtype: str
    row_shape: tuple[int, ...]
    layer_ids: tuple[int, ...] = ()
    """0-based decoder layers of the row's first axis."""
    num_experts: int = 0
    status: bytes = b""
    """One byte per row: 0 captured, 1 cached (read because its KV block was reused), 2 recomputed (after preemption)."""
    versions: tuple[tuple[int, int], ...] = ()
    """(rows, weight version under which they were computed), together `count`."""
    error: str | None = None
    """Why the rows are not complete; then there are none."""
    model_identity: str = ""
    """With `keys`: content identity of the model."""
    keys: tuple[bytes, ...] = ()
    """Asked for with captured_as="keys": of the objects with the first rows, in order, from the one that has row `start`.
    `data` has the rows behind them."""
    block_size: int = 0
    """With `keys`: rows of an object; each begins at a multiple of it."""
    digest: bytes = b""
    """With `keys`: SHA-256 of all `count` rows."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished answer. `text` is all of it."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    seed: int = 0
    beam_score: float | None = None
    """Of a beam search: the log-probability of its tokens / length ** length_penalty."""
    captured: Mapping[str, CapturedRows] = field(default_factory=dict)
    """Artifact field -> its rows, for the fields that the request asked to have returned."""
    weight_versions: tuple[tuple[int, int, int], ...] = ()
    """(first output token, end, weight version): spans that cover every output token once."""
    parsed: ParsedAnswer | None = None
    """Of an answer to chat messages."""

    @property
    def content(self) -> str:
        """The text without reasoning and calls; all of it where the prompt was no chat."""
        return self.text if self.parsed is None else self.parsed.content

    @property
    def reasoning(self) -> str:
        return "" if self.parsed is None else self.parsed.reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Of a request that had `tools`, in order."""
        return () if self.parsed is None else self.parsed.tool_calls

    @property
    def routed_experts(self) -> CapturedRows | None:
        """The experts that each token used; None when not asked for."""
        return self.captured.get("moe_routes")


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Where the seconds of a request went, on the engine's monotonic clock, from its arrival."""

    queued: float
    """Until first scheduled."""
    first_token: float | None
    """Until the first token was there; None if there never was one."""
    total: float
    """Until the last choice ended: queued + prefill + decode."""
    prefill: float = 0.0
    """From first scheduled to first token."""
    decode: float = 0.0
    """From first token to the end."""
    num_preemptions: int = 0
    """Over all choices."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What `Engine.generate` returns. `text`, `token_ids` and friends are those of choice 0."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    usage: Usage
    sampling: SamplingParams
    """The parameters in force, generation_config defaults and the drawn seed filled in."""
    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    """The fields that came from the checkpoint's generation_config.json, with their values."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """One entry per prompt token; the first is None (nothing predicts it)."""
    timings: RequestTimings | None = None
    artifact: ArtifactReceipt | None = None
    """Where the generation artifact is, or why there is none; None when not asked for."""

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def content(self) -> str:
        """The text without reasoning and calls, of an answer to chat messages."""
        return self.choices[0].content

    @property
    def reasoning(self) -> str:
        return self.choices[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.choices[0].tool_calls

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self.choices[0].stop_reason

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        return self.choices[0].logprobs

    @property
    def seed(self) -> int:
        return self.choices[0].seed
