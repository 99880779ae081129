"""Contract of an executor: it carries plans to one worker, in order, and results back.

Called from the loop task; implementations: `thread` here, `FakeExecutor` in `infer.testing`, processes later.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from infer.engine.step import StepPlan, StepResult


class Worker(Protocol):
    """What an executor drives, on the executor's own thread or process."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. An exception fails the step, not the worker."""
        ...

    def close(self) -> None: ...


class RunningStep(Protocol):
    """A step that a worker has begun."""

    def ready(self) -> bool:
        """Whether `finish` would not wait."""
        ...

    def finish(self) -> StepResult:
        """Wait for what is still missing. Called once, in the order in which steps were begun; raises what the step raised."""
        ...


@runtime_checkable
class OverlappingWorker(Protocol):
    """A worker whose device works on a step while the next one is begun."""

    def begin(self, plan: StepPlan) -> RunningStep:
        """Queue one step. An exception fails the step, not the worker."""
        ...

    def close(self) -> None: ...


class PendingStep(Protocol):
    """A submitted plan."""

    async def wait(self) -> StepResult:
        """The result; raises what the step raised, or `EngineDeadError` when the worker is gone.
        May be cancelled and called again."""
        ...


class Executor(Protocol):
    """Plans are executed one after the other in the order of submission."""

    def submit(self, plan: StepPlan) -> PendingStep:
        """Hand over a plan; never waits."""
        ...

    async def aclose(self) -> None:
        """Finish the running step, drop the rest, free the worker."""
        ...
