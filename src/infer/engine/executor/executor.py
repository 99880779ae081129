"""Contract of an executor: it carries plans to one worker, in order, and results back.

Called from the loop task; implementations: `thread` here, `FakeExecutor` in `infer.testing`, processes later.
"""

from __future__ import annotations

from typing import Protocol

from infer.engine.step import StepPlan, StepResult


class Worker(Protocol):
    """What an executor drives, on the executor's own thread or process."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. An exception fails the step, not the worker."""
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
