"""Makes the masks of guided rows ahead: on a thread of their own, while the model computes and results are delivered.

Called in the worker thread between steps' phases; owns that thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from infer.engine.sampling.guide import Grammars, Guide, is_guided, make_guide
from infer.engine.step import SamplingSpec
from infer.errors import GrammarError


class GuidedRows:
    """`make` at admission and `drawn` after a token note guides whose mask is to be made; `ahead` begins, `wait` ends it."""

    def __init__(self, grammars: Grammars | None) -> None:
        """`grammars` None: a worker without any; a guided request is refused."""
        self._grammars = grammars
        self._due: list[Guide] = []
        self._running: list[Future[None]] = []
        self._pool: ThreadPoolExecutor | None = None

    def make(self, spec: SamplingSpec, outputs: Sequence[int]) -> Guide | None:
        """The guide of an admitted request; None when it needs none. Raises `GrammarError`."""
        if not is_guided(spec):
            return None
        if self._grammars is None:
            raise GrammarError("this worker has no grammars")
        guide = make_guide(spec, outputs, self._grammars)
        self._due.append(guide)
        return guide

    def drawn(self, guide: Guide) -> None:
        """The guide has accepted a token."""
        self._due.append(guide)

    def ahead(self) -> None:
        """Begin to make the masks that are due."""
        if not self._due:
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="infer-masks")
        due, self._due = self._due, []
        self._running.append(self._pool.submit(_prepare, due))

    def wait(self) -> None:
        """Until no mask is being made. A guide must not be touched before."""
        running, self._running = self._running, []
        for future in running:
            future.result()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _prepare(guides: Sequence[Guide]) -> None:
    for guide in guides:
        try:
            guide.prepare()
        except BaseException as error:  # a backend's own fault, a panic of compiled code too, ends that row alone
            guide.fail(f"its grammar backend failed: {type(error).__name__}: {error}")
