"""What a request delivers beside its answer: an artifact from admission to receipt, and captured rows for the caller.

Runs in the request's task. Part of the facade: the one module of the engine that knows artifacts.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import anyio.to_thread
import msgspec

from infer.artifacts.admission import GenerationBounds
from infer.artifacts.pipeline import ArtifactPipeline
from infer.artifacts.provenance import engine_provenance, text_digest, tokenizer_digest, with_sampling
from infer.artifacts.receipt import ArtifactReceipt
from infer.artifacts.request import ArtifactRequest, Target
from infer.artifacts.router_layout import RouterLayout
from infer.artifacts.ticket import Ticket
from infer.artifacts.v2.admission import NUM_TOP, first_row, most_kept
from infer.artifacts.v2.capture import ChoiceEnd
from infer.artifacts.v2.limits import FORMAT as FORMAT_V2
from infer.artifacts.weights_digest import weights_digest
from infer.config.capture import MOE_ROUTES, CaptureProfile, ResolvedCapture, artifact_name
from infer.engine.admission import PrivateOutputs
from infer.engine.aux.rows import RequestRows
from infer.engine.feasibility import what_may_exclude_forced
from infer.engine.keyed_rows import check_captured_as, with_keys
from infer.errors import EngineClosedError, EngineError, InvalidRequestError

if TYPE_CHECKING:
    from infer.artifacts.record import Provenance
    from infer.config.artifacts import ArtifactsSection
    from infer.config.engine import ModelSection
    from infer.engine.admission import Admitted
    from infer.engine.kv_cache.manager import KVCacheManager
    from infer.engine.metrics import EngineMetrics, Histogram
    from infer.engine.request import Request
    from infer.engine.startup import EngineParts
    from infer.engine.step import PositionLogprobs
    from infer.types import CapturedRows, Choice

SELECTED_LOGPROBS = "selected_logprobs"
PROMPT_LOGPROBS = "prompt_logprobs"
KEPT = ("kept_set", "kept_logmass")
PER_TOKEN = (SELECTED_LOGPROBS, "topk_logprobs", *KEPT)
"""Contents for which every output token brings something beside its id."""
LOGPROB_INTERVAL = 256
"""Tokens after which a request whose log-probabilities go to an artifact is read, even if nobody waits for its text: as
objects they take many times the bytes that were admitted for them."""

KEPT_SET_BYTES = 2**22
"""The same of kept sets, which may list the whole vocabulary for a token."""


class Deliveries:
    """Admits what requests want delivered. One per engine, entered and left with it: leaving waits for what is on its way."""

    def __init__(self, settings: ArtifactsSection, parts: EngineParts, model: ModelSection) -> None:
        self.pipeline = ArtifactPipeline(settings, parts.registry)
        self._parts = parts
        self._model = model
        self._provenance: Provenance | None = None
        self._provenance_lock = anyio.Lock()
        self._reading = threading.Lock()
        self._closed = threading.Event()
        profiles = () if parts.resolved.capture is None else parts.resolved.capture.profiles
        self._captured = {
            artifact_name(one.name, parts.registry.origin("artifact_field", one.name).distribution): one
            for one in profiles
        }
        specs = {name: parts.registry.get("artifact_field", one.name) for name, one in self._captured.items()}
        self._predicted = frozenset(name for name, spec in specs.items() if spec.coordinate == "predicted_token")
        routes = self._captured.get(MOE_ROUTES)
        self.layout = (
            None if routes is None else RouterLayout(routes.layer_ids, routes.num_experts, routes.row_shape[1])
        )
        self._metrics = parts.scheduler.metrics

    async def __aenter__(self) -> Self:
        await self.pipeline.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        await self.pipeline.__aexit__(kind, error, trace)

    async def admit(self, artifact: ArtifactRequest | None, admitted: Admitted, request_id: str) -> Delivery | None:
        """None when nothing is to be delivered. May wait for room. Raises `ArtifactRefusedError` or
        `InvalidRequestError`; the caller releases what it got."""
        params = admitted.params
        inline = params.return_routed_experts
        check_captured_as(params, self._parts.resolved.capture)
        if artifact is None and not inline:
            return None
        if inline and self.layout is None:
            raise InvalidRequestError(
                "return_routed_experts needs capture.routed_experts=True and a model with mixture-of-experts layers",
                parameter="return_routed_experts",
                value=True,
            )
        is_open = artifact is not None and artifact.format == FORMAT_V2
        bounds = GenerationBounds(
            prompt_tokens=len(admitted.prompt_ids),
            max_tokens=admitted.max_tokens,
            num_choices=params.n,
            router_layout=self.layout,
            route_start=params.routed_experts_prompt_start,
            explicit_logprob_ids=bool(params.logprob_token_ids),
            logprobs_mode=params.logprobs_mode,
            excludes_forced=what_may_exclude_forced(params),
            expected_seconds=expected_seconds(self._metrics, admitted.max_tokens),
            request_id=request_id,
        )
        if artifact is not None and is_open:
            bounds = await self._open_bounds(artifact, bounds, admitted)
        ticket = None if artifact is None else await self.pipeline.admit(artifact, bounds)
        in_artifact = artifact is not None and MOE_ROUTES in artifact.contents
        contents = () if artifact is None else artifact.contents
        wanted = {name: one for name, one in self._captured.items() if name in contents}
        if inline:
            wanted[MOE_ROUTES] = self._captured[MOE_ROUTES]
        delivery = Delivery(self.pipeline, bounds, ticket, wanted)
        if params.captured_as == "keys" and self._parts.resolved.capture is not None:
            delivery.keyed_by = (self._parts.resolved.capture, self._parts.scheduler.kv)
        if inline and not in_artifact:  # the rows of an artifact were admitted with it
            try:
                await delivery.reserve_rows()
            except BaseException:
                delivery.release()
                raise
        if ticket is not None:
            for index in range(params.n):
                ticket.record(index, prompt_token_ids=admitted.prompt_ids)
        return delivery

    async def _open_bounds(
        self, artifact: ArtifactRequest, bounds: GenerationBounds, admitted: Admitted
    ) -> GenerationBounds:
        """What matters to the open format beside it."""
        params, vocab_size = admitted.params, self._parts.model.vocab_size
        bounds = replace(bounds, captured=self._captured, predicted=self._predicted)
        start = bounds.route_start
        if isinstance(artifact.contents, tuple | list) and not params.return_routed_experts:
            start = first_row(artifact, bounds, start)
        return replace(
            bounds,
            route_start=start,
            num_top=params.logprobs or min(NUM_TOP, vocab_size),
            prompt_logprobs=params.prompt_logprobs or 0,
            num_kept=most_kept(params, vocab_size),
            num_forced=len(params.forced_token_ids or ()),
            longest_stop=max((len(text.encode()) for text in params.stop), default=0),
            weight_version=self._parts.scheduler.weight_version,
            provenance=with_sampling(await self._known_provenance(), params, admitted.max_tokens),
        )

    async def _known_provenance(self) -> Provenance:
        """Files are read once, by the first who asks; should that request be cancelled, its thread goes on for the others."""
        async with self._provenance_lock:
            if self._provenance is None:
                await anyio.to_thread.run_sync(self._read_provenance, abandon_on_cancel=True)
        if self._provenance is None:
            raise EngineClosedError("the engine was closed while the request was admitted")
        return self._provenance

    def _read_provenance(self) -> None:
        with self._reading:
            if self._provenance is not None or self._closed.is_set():
                return
            parts, model = self._parts, self._model
            path = Path(model.tokenizer) if model.tokenizer else parts.model.path
            template = text_digest(model.chat_template or parts.tokenizer.chat_template)
            known = engine_provenance(parts.model, parts.resolved, template)
            known = msgspec.structs.replace(
                known,
                tokenizer_digest="" if model.skip_tokenizer else tokenizer_digest(path),
                weights_digest=weights_digest(parts.model, self._closed.is_set),
            )
            if not self._closed.is_set():
                self._provenance = known

    def limits(self) -> dict[str, int]:
        """What is in force, for whoever asks the server."""
        return self.pipeline.limits(GenerationBounds(prompt_tokens=1, max_tokens=1, router_layout=self.layout))


class Delivery:
    """What one request delivers. `record` while it runs, `finish` when every choice has ended, `release` in any case."""

    def __init__(
        self,
        pipeline: ArtifactPipeline,
        bounds: GenerationBounds,
        ticket: Ticket | None,
        captured: Mapping[str, CaptureProfile],
    ) -> None:
        """`captured`: fields whose rows are wanted, as artifacts call them."""
        self._pipeline = pipeline
        self._bounds = bounds
        self._ticket = ticket
        self._captured = captured
        self._profiles = tuple(captured.values())
        self._contents = () if ticket is None else ticket.request.contents
        self._reserved = 0
        self.keyed_by: tuple[ResolvedCapture, KVCacheManager] | None = None
        """Whose keys the caller is given instead of rows; None: rows."""

    @property
    def has_artifact(self) -> bool:
        return self._ticket is not None

    @property
    def interval(self) -> int | None:
        """Tokens after which the request is to be read at the latest."""
        if not any(name in self._contents for name in PER_TOKEN):
            return None
        num_kept = self._bounds.num_kept if any(name in self._contents for name in KEPT) else 1
        return max(1, min(LOGPROB_INTERVAL, KEPT_SET_BYTES // (4 * num_kept)))

    async def reserve_rows(self) -> None:
        """Room for rows that go to the caller. Raises `ArtifactRefusedError`."""
        amount = sum(rows.nbytes for rows in self.make_rows())
        await self._pipeline.reserve(amount)
        self._reserved = amount

    def make_rows(self) -> list[RequestRows]:
        """Where the captured rows of each choice go; empty when none are wanted. Takes no memory until rows come."""
        if not self._profiles:
            return []
        bounds = self._bounds
        first = RequestRows(
            self._profiles,
            prompt_len=bounds.prompt_tokens,
            max_tokens=bounds.max_tokens,
            start=bounds.route_start,
        )
        return [first, *(first.sibling() for _ in range(1, bounds.num_choices))]

    async def returned_rows(self, request: Request, captured: Mapping[str, CapturedRows]) -> Mapping[str, CapturedRows]:
        """As the caller asked for them."""
        if self.keyed_by is None or not captured:
            return captured
        return await with_keys(*self.keyed_by, request, captured)

    def record(self, choice_index: int, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs]) -> None:
        """What a choice gained, trimmed already."""
        if self._ticket is not None and self._ticket.is_open:
            self._ticket.record(choice_index, token_ids=token_ids, entries=logprobs)
        elif self._ticket is not None:
            values = [entry.logprob for entry in logprobs] if SELECTED_LOGPROBS in self._contents else None
            self._ticket.record(choice_index, token_ids=token_ids, logprobs=values)

    def record_prompt_logprobs(self, entries: Sequence[PositionLogprobs]) -> None:
        """Of the next positions of the prompt."""
        if PROMPT_LOGPROBS in self._contents and self._ticket is not None:
            self._ticket.record_prompt_logprobs(entries)

    async def finish(self, choices: Sequence[Choice], rows: Sequence[Mapping[str, CapturedRows]]) -> ArtifactReceipt:
        """Deliver, and say what became of it. `rows` are those of each choice."""
        ticket = self._ticket
        if ticket is None:
            raise EngineError("this request asked for no artifact")
        aborted = any(choice.finish_reason == "abort" for choice in choices)
        if ticket.is_open:
            if aborted and self._needs_a_token and any(not choice.token_ids for choice in choices):
                return ticket.give_up("artifact_cancelled")
            self._end_choices(ticket, choices, rows)
        elif MOE_ROUTES in self._contents:
            routes = [held[MOE_ROUTES] for held in rows]
            if aborted and any(held.error for held in routes):  # it never came to a first token
                return ticket.give_up("artifact_cancelled")
            for choice, held in zip(choices, routes, strict=True):
                ticket.set_routes(choice.index, held)
        return await ticket.finish(aborted=aborted)

    @property
    def _needs_a_token(self) -> bool:
        """Something was asked for that is complete, or known, only once the prompt was computed."""
        return any(name in self._contents for name in (PROMPT_LOGPROBS, "weight_spans", *self._captured))

    def _end_choices(
        self, ticket: Ticket, choices: Sequence[Choice], rows: Sequence[Mapping[str, CapturedRows]]
    ) -> None:
        for choice, held in zip(choices, rows, strict=True):
            end = ChoiceEnd(
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
                seed=choice.seed,
                weight_versions=choice.weight_versions,
                rows={name: held[one.name] for name, one in self._captured.items()},
            )
            ticket.end_choice(choice.index, end)

    @property
    def is_strict(self) -> bool:
        return self._ticket is not None and self._ticket.request.strict

    def release(self, code: str = "artifact_cancelled") -> None:
        """What was not finished is counted as failed, for that reason. Waits for nothing; later calls change nothing."""
        if self._ticket is not None:
            self._ticket.abandon(code)
        if self._reserved:
            self._pipeline.give_back(self._reserved)
            self._reserved = 0


def taken_rows(request: Request, num_output: int) -> dict[str, CapturedRows]:
    """The captured rows of a choice, cut with its tokens."""
    if request.rows is None:
        return {}
    request.rows.trim(request.prompt_len + num_output)
    return request.rows.export()


def check_artifact(artifact: object) -> ArtifactRequest | None:
    """The argument `artifact`."""
    if artifact is None:
        return None
    if isinstance(artifact, ArtifactRequest):
        if isinstance(artifact.target, Target):
            return artifact
        raise InvalidRequestError(
            f"artifact.target is {type(artifact.target).__name__}; give a PresignedTarget, ManagedTarget or SinkTarget",
            parameter="artifact",
            value=None,  # it may be a grant in another form
        )
    raise InvalidRequestError(
        f"artifact is {type(artifact).__name__}; give an infer.artifacts.ArtifactRequest",
        parameter="artifact",
        value=None,
    )


def private_outputs(artifact: ArtifactRequest | None) -> PrivateOutputs:
    """What must be computed for the artifact. Asked before anything was checked."""
    contents: object = () if artifact is None else artifact.contents
    if not isinstance(contents, tuple | list):
        return PrivateOutputs()
    return PrivateOutputs(
        logprobs=NUM_TOP if "topk_logprobs" in contents else 0 if any(name in contents for name in PER_TOKEN) else None,
        prompt_logprobs=PROMPT_LOGPROBS in contents,
        kept_set=any(name in contents for name in KEPT),
    )


def expected_seconds(metrics: EngineMetrics, max_tokens: int) -> float:
    """How long a request takes from arrival to its end, going by those before it. 0 while there were none.

    Its length is taken to be twice the average, at most what it may have: few requests use all they are allowed.
    """
    tokens = min(float(max_tokens), 2 * _mean(metrics.output_length)) if metrics.output_length.total else max_tokens
    return _mean(metrics.queued) + _mean(metrics.prefill) + tokens * _mean(metrics.inter_token)


def _mean(histogram: Histogram) -> float:
    count = sum(histogram.counts)
    return histogram.total / count if count else 0.0
