"""Transfers with the external KV store, worker half: orders go to the connector, reports come back with the next result.

Runs on the worker thread; owns the connector's worker half. No fault of the connector becomes a fault of the step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec

from infer.engine.step import KVPlan, StepResult
from infer.plugins.kv_connector import KVReport, KVTransfer, WorkerConnector

logger = logging.getLogger("infer.engine.worker")


class KVTransfers:
    """In each step `begin` comes before the forward pass and `finish` when the result is made. A failed step loses no
    report: the next one carries it."""

    def __init__(
        self, connector: WorkerConnector, timeout: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`timeout`: seconds that a step waits for its loads."""
        self._connector = connector
        self._timeout = timeout
        self._clock = clock
        self._running: dict[int, KVTransfer] = {}
        self._reports: list[KVReport] = []
        self._late: list[int] = []
        self._broken = False

    def begin(self, plan: KVPlan | None) -> None:
        """Start the plan's transfers and wait for the loads that its rows need."""
        if plan is None or not plan.start:
            return
        self._running.update((transfer.job_id, transfer) for transfer in plan.start)
        try:
            self._connector.start(plan.start)
        except Exception as error:  # none of them was taken
            reason = f"{type(error).__name__}: {error}"
            for transfer in plan.start:
                self._take(KVReport(transfer.job_id, tuple(range(len(transfer.blocks))), reason))
        awaited = {transfer.job_id for transfer in plan.start if transfer.wait}
        deadline = self._clock() + self._timeout
        while waiting := awaited & self._running.keys():
            left = deadline - self._clock()
            if left <= 0 or not self._poll(left):
                self._late += sorted(waiting)
                break

    def finish(self, plan: KVPlan | None, result: StepResult) -> None:
        """Put into the result what is over by now."""
        if plan is not None and (self._running or plan.wait):
            self._poll(0.0 if self._reports or self._late else plan.wait)
        result.kv_reports, self._reports = self._reports, []
        result.kv_late, self._late = self._late, []

    def close(self) -> None:
        """Nothing touches the cache any more."""
        self._running.clear()
        try:
            self._connector.close()
        except Exception as error:
            logger.warning("the KV connector could not be closed: %s: %s", type(error).__name__, error)

    def _poll(self, timeout: float) -> bool:
        """False when the connector cannot be asked. What it does not report stays held for ever: somebody may write to it."""
        try:
            for report in self._connector.poll(timeout):
                self._take(report)
        except Exception as error:
            if not self._broken:
                logger.warning("the KV connector cannot be asked: %s: %s", type(error).__name__, error)
            self._broken = True
            return False
        self._broken = False
        return True

    def _take(self, report: KVReport) -> None:
        transfer = self._running.pop(report.job_id, None)
        if transfer is None:
            logger.warning("the KV connector reports transfer %r, which is not running", report.job_id)
            return
        if any(not 0 <= place < len(transfer.blocks) for place in report.failed):
            reason = f"the connector's report names blocks {report.failed} of {len(transfer.blocks)}"
            report = msgspec.structs.replace(report, failed=tuple(range(len(transfer.blocks))), reason=reason)
        self._reports.append(report)
