"""A logits processor: none of an answer's last `last` tokens comes again, {"last": n}.

`check` runs in the request's task, `apply` on the worker thread; one object serves all requests and keeps nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from infer import InvalidRequestError
from infer.plugins import LogitsProcessorSpec, LogitsRow, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

MOST = 1000


class NotAgain:
    def __init__(self, vocab_size: int) -> None:
        self._most = min(MOST, vocab_size - 1)  # one token must be left

    def check(self, params: Mapping[str, Any]) -> None:
        last = params.get("last")
        if set(params) != {"last"} or type(last) is not int or not 1 <= last <= self._most:
            raise InvalidRequestError(
                f"my-name takes {{'last': n}} with n from 1 to {self._most}, not {dict(params)!r:.80}",
                parameter="logits_processors",
                value=last,
            )

    def apply(self, logits: Tensor, rows: Sequence[LogitsRow]) -> None:
        for i, row in enumerate(rows):
            recent = row.output_ids[-row.params["last"] :]
            if recent:
                logits[i, list(recent)] = float("-inf")


@hookimpl
def infer_logits_processors() -> list[LogitsProcessorSpec]:
    return [
        LogitsProcessorSpec(
            name="my-name",
            api=1,
            factory=f"{__name__}:NotAgain",
            example={"params": {"last": 2}, "refused": {"last": 0}},
        )
    ]
