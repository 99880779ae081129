"""How many prompts may be half computed at a time, and how long their pieces are.

Lives for one round over the waiting requests, in the loop task.
"""

from __future__ import annotations

from collections.abc import Iterable

from infer.config.resolve import ResolvedScheduler
from infer.engine.history import WaitReason
from infer.engine.request import Request


class PrefillLimits:
    def __init__(self, config: ResolvedScheduler, running: Iterable[Request], num_unfinished: int) -> None:
        self._config = config
        self._num_unfinished = num_unfinished
        limited = config.max_num_partial_prefills or config.max_long_partial_prefills
        partial = [r for r in running if r.num_computed < len(r.token_ids)] if limited else []
        self._num_partial = len(partial)
        self._num_long = sum(self._is_long(request) for request in partial)

    def chunk(self, remaining: int) -> int:
        """Longest piece of a prompt in one step: the threshold counts only while others want to run."""
        threshold = self._config.long_prefill_threshold
        return min(remaining, threshold) if threshold and self._num_unfinished > 1 else remaining

    def refuse(self, request: Request) -> WaitReason | None:
        """Why a prompt may not start with a part of it, if it may not."""
        config = self._config
        if not config.chunked_prefill:
            return "prompt longer than what is left of the step"
        if config.max_num_partial_prefills and self._num_partial >= config.max_num_partial_prefills:
            return "too many partial prefills"
        if config.max_long_partial_prefills and self._is_long(request):
            if self._num_long >= config.max_long_partial_prefills:
                return "too many long prefills"
            self._num_long += 1
        return None

    def started_partly(self) -> None:
        self._num_partial += 1

    def _is_long(self, request: Request) -> bool:
        threshold = self._config.long_prefill_threshold
        return bool(threshold) and len(request.token_ids) > threshold
