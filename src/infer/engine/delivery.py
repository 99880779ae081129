"""What a request delivers beside its answer: an artifact from admission to receipt, and captured rows for the caller.

Runs in the request's task. Part of the facade: the one module of the engine that knows artifacts.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from infer.artifacts.admission import GenerationBounds
from infer.artifacts.pipeline import ArtifactPipeline
from infer.artifacts.receipt import ArtifactReceipt
from infer.artifacts.request import ArtifactRequest
from infer.artifacts.router_layout import RouterLayout
from infer.artifacts.ticket import Ticket
from infer.config.capture import MOE_ROUTES, ResolvedCapture
from infer.errors import InvalidRequestError, shown

if TYPE_CHECKING:
    from infer.config.artifacts import ArtifactsSection
    from infer.engine.admission import Admitted
    from infer.engine.metrics import EngineMetrics, Histogram
    from infer.engine.startup import EngineParts
    from infer.engine.step import PositionLogprobs
    from infer.types import Choice

SELECTED_LOGPROBS = "selected_logprobs"
LOGPROB_INTERVAL = 256
"""Tokens after which a request whose log-probabilities go to an artifact is read, even if nobody waits for its text: as
objects they take many times the bytes that were admitted for them."""


class Deliveries:
    """Admits what requests want delivered. One per engine, entered and left with it: leaving waits for what is on its way."""

    def __init__(self, settings: ArtifactsSection, parts: EngineParts) -> None:
        self.pipeline = ArtifactPipeline(settings, parts.registry)
        self.layout = router_layout(parts.resolved.capture)
        self._metrics = parts.scheduler.metrics

    async def __aenter__(self) -> Self:
        await self.pipeline.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.pipeline.__aexit__(kind, error, trace)

    async def admit(self, artifact: ArtifactRequest | None, admitted: Admitted, request_id: str) -> Delivery | None:
        """None when nothing is to be delivered. May wait for room. Raises `ArtifactRefusedError`.

        The caller releases what it got.
        """
        if artifact is None:
            return None
        params = admitted.params
        bounds = GenerationBounds(
            prompt_tokens=len(admitted.prompt_ids),
            max_tokens=admitted.max_tokens,
            num_choices=params.n,
            router_layout=self.layout,
            route_start=params.routed_experts_prompt_start,
            explicit_logprob_ids=bool(params.logprob_token_ids),
            logprobs_mode=params.logprobs_mode,
            expected_seconds=expected_seconds(self._metrics, admitted.max_tokens),
            request_id=request_id,
        )
        ticket = await self.pipeline.admit(artifact, bounds)
        for index in range(params.n):
            ticket.record(index, prompt_token_ids=admitted.prompt_ids)
        return Delivery(ticket)

    def limits(self) -> dict[str, int]:
        """What is in force, for whoever asks the server."""
        return self.pipeline.limits(GenerationBounds(prompt_tokens=1, max_tokens=1, router_layout=self.layout))


class Delivery:
    """What one request delivers. `record` while it runs, `finish` when every choice has ended, `release` in any case."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._with_logprobs = SELECTED_LOGPROBS in ticket.request.contents

    @property
    def interval(self) -> int | None:
        """Tokens after which the request is to be read at the latest."""
        return LOGPROB_INTERVAL if self._with_logprobs else None

    def record(self, choice_index: int, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs]) -> None:
        """What a choice gained, trimmed already."""
        values = [entry.logprob for entry in logprobs] if self._with_logprobs else None
        self._ticket.record(choice_index, token_ids=token_ids, logprobs=values)

    async def finish(self, choices: Sequence[Choice]) -> ArtifactReceipt:
        """Deliver, and say what became of it."""
        ticket = self._ticket
        if MOE_ROUTES in ticket.request.contents:
            for choice in choices:
                ticket.set_routes(choice.index, choice.captured[MOE_ROUTES])
        return await ticket.finish(aborted=any(choice.finish_reason == "abort" for choice in choices))

    @property
    def is_strict(self) -> bool:
        return self._ticket.request.strict

    def release(self, code: str = "artifact_cancelled") -> None:
        """What was not finished is counted as failed, for that reason. Waits for nothing; later calls change nothing."""
        self._ticket.abandon(code)


def router_layout(capture: ResolvedCapture | None) -> RouterLayout | None:
    """The routers whose rows are captured; None when routes are not."""
    profile = None if capture is None else capture.profile(MOE_ROUTES)
    if profile is None:
        return None
    return RouterLayout(profile.layer_ids, profile.num_experts, profile.row_shape[1])


def check_artifact(artifact: object) -> ArtifactRequest | None:
    """The argument `artifact`."""
    if artifact is None or isinstance(artifact, ArtifactRequest):
        return artifact
    raise InvalidRequestError(
        f"artifact={shown(artifact)} is not an infer.artifacts.ArtifactRequest", parameter="artifact", value=artifact
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
