"""One admitted artifact, from admission to release. Used by the request's own task; owns its captured data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from infer.artifacts.admission import Admitted, GenerationBounds
from infer.artifacts.capture import Capture
from infer.artifacts.destination import Destination
from infer.artifacts.receipt import ArtifactReceipt
from infer.artifacts.request import ArtifactRequest
from infer.artifacts.v2.capture import ChoiceEnd, OpenCapture, PositionEntry
from infer.artifacts.v2.limits import FORMAT as FORMAT_V2
from infer.errors import ArtifactError
from infer.types import CapturedRows

if TYPE_CHECKING:
    from infer.artifacts.generation import GenerationArtifact
    from infer.artifacts.pipeline import ArtifactPipeline

logger = logging.getLogger("infer.artifacts")


class Ticket:
    """An admitted artifact: `record` what is generated, `finish` once, `release` in any case."""

    def __init__(
        self,
        pipeline: ArtifactPipeline,
        request: ArtifactRequest,
        bounds: GenerationBounds,
        admitted: Admitted,
        destination: Destination,
    ) -> None:
        self.request = request
        self.bounds = bounds
        self.admitted = admitted
        self.destination = destination
        self.failure: ArtifactError | None = None
        """Why the artifact cannot be complete any more; the tokens flow on."""
        self._pipeline = pipeline
        self._capture: Capture | OpenCapture | None = None
        self._finished = False
        self.delivering = False
        """Set by the pipeline while it encodes and writes."""
        self._released = False

    @property
    def is_open(self) -> bool:
        """In the open format."""
        return self.request.format == FORMAT_V2

    @property
    def capture(self) -> Capture:
        """Of v1. Made at first use, so that a caller who brings a finished artifact holds nothing twice."""
        if self._capture is None:
            self._capture = Capture(self.request.contents, self.bounds)
        if not isinstance(self._capture, Capture):
            raise ArtifactError("this artifact is in the open format", code="artifact_capture_failed")
        return self._capture

    @property
    def open_capture(self) -> OpenCapture:
        """Of the open format."""
        if self._capture is None:
            self._capture = OpenCapture(self.request, self.bounds)
        if not isinstance(self._capture, OpenCapture):
            raise ArtifactError("this artifact is in format v1", code="artifact_capture_failed")
        return self._capture

    def record(self, choice_index: int, **captured: Any) -> None:
        """`record` of the capture, but a violation marks the artifact as failed and never disturbs the generation."""
        self._guard(lambda: (self.open_capture if self.is_open else self.capture).record(choice_index, **captured))

    def record_prompt_logprobs(self, entries: Sequence[PositionEntry]) -> None:
        """`OpenCapture.record_prompt_logprobs`, guarded in the same way."""
        self._guard(lambda: self.open_capture.record_prompt_logprobs(entries))

    def end_choice(self, choice_index: int, end: ChoiceEnd) -> None:
        """`OpenCapture.finish`, guarded in the same way."""
        self._guard(lambda: self.open_capture.finish(choice_index, end))

    def set_routes(self, choice_index: int, rows: CapturedRows) -> None:
        """`Capture.set_routes`, guarded in the same way."""
        self._guard(lambda: self.capture.set_routes(choice_index, rows))

    async def finish(self, artifact: GenerationArtifact | None = None, *, aborted: bool = False) -> ArtifactReceipt:
        """Encode, deliver, and say what became of it. Never raises for a failed artifact; the second call is an error.

        A caller cancelled before a slot was free has delivered nothing; later, the delivery runs on by itself.
        """
        if self._finished:
            raise ArtifactError("this artifact was finished already", code="artifact_capture_failed")
        self._finished = True
        if aborted and not self.request.deliver_on_abort:
            return self._pipeline.fail(self, "artifact_cancelled")
        if self.failure is None and artifact is None and self._capture is None:
            self.failure = ArtifactError("nothing was captured", code="artifact_capture_failed")
        if self.failure is not None:
            return self._pipeline.fail(self, self.failure.code)
        captured = self.open_capture if self.is_open else self.capture
        return await self._pipeline.deliver(self, captured if artifact is None else artifact)

    def give_up(self, code: str) -> ArtifactReceipt:
        """Instead of `finish`: nothing can be delivered, for that reason."""
        self._finished = True
        return self._pipeline.fail(self, code)

    def abandon(self, code: str = "artifact_cancelled") -> None:
        """The request ended without anybody to tell: counted, and released. Does nothing to a finished one."""
        if not self._finished:
            self.give_up(code)
        self.release()

    def release(self) -> None:
        """Forget the captured data and give the reservation back; a running delivery does so at its end. Idempotent."""
        self._finished = True
        if not self.delivering and not self._released:
            self._released = True
            if self._capture is not None:
                self._capture.release()
            self._pipeline.give_back(self.admitted.reserved_bytes)

    def _guard(self, step: Callable[[], None]) -> None:
        if self.failure is not None:
            return
        try:
            step()
        except ArtifactError as error:
            self.failure = error
        except Exception as error:  # whatever it is, the tokens must flow
            self.failure = ArtifactError(type(error).__name__, code="artifact_capture_failed")
        if self.failure is not None:
            logger.warning("artifact of request %s: capture failed", self.bounds.request_id)
            if self._capture is not None:
                self._capture.release()
