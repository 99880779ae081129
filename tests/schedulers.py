"""A user's scheduler, named by import path in `scheduler.scheduler_class`. For tests; owns nothing."""

from typing import Any

from infer.engine.request import Request
from infer.engine.scheduler.scheduler import Scheduler


class LastComeFirstServed(Scheduler):
    """Turns the queue around."""

    def add(self, request: Request) -> None:
        request.arrival = -request.arrival
        super().add(request)


class KeepsMore(Scheduler):
    """Has state that a step log cannot write."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.more = object()
