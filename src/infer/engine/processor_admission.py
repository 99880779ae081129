"""Which logits processors a request may use, and whether they can do what it asks: refused here, never ignored later.

Runs in the request's task. Part of the facade.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from infer.engine.step import ProcessorUse
from infer.errors import InvalidRequestError, PluginError, UnknownPluginError
from infer.options import LogitsFunction, NamedProcessor, processor_label
from infer.plugins.registry import Registry

if TYPE_CHECKING:
    from infer.plugins.logits_processor import LogitsProcessor


class ProcessorAdmission:
    """Makes each named processor once, to check parameters with; the worker has its own."""

    def __init__(self, registry: Registry, vocab_size: int) -> None:
        self._registry = registry
        self._vocab_size = vocab_size
        self._made: dict[str, LogitsProcessor] = {}

    def uses(self, processors: Sequence[NamedProcessor | LogitsFunction]) -> tuple[ProcessorUse, ...]:
        """As the worker is told. Raises `InvalidRequestError` for an unknown name or refused parameters, `PluginError` when
        the plugin cannot be loaded."""
        return tuple(self._use(processor) for processor in processors)

    def _use(self, processor: NamedProcessor | LogitsFunction) -> ProcessorUse:
        label = processor_label(processor)
        if not isinstance(processor, NamedProcessor):
            return ProcessorUse(name=label, function=processor)
        name, params = processor.name, processor.params
        try:
            self._get(name).check(params)
        except UnknownPluginError as error:
            raise InvalidRequestError(str(error), parameter="logits_processors", value=name) from None
        except (InvalidRequestError, PluginError):
            raise
        except Exception as error:
            raise InvalidRequestError(
                f"the logits processor {label} refuses these parameters: {error or type(error).__name__}",
                parameter="logits_processors",
                value=params,
            ) from error
        return ProcessorUse(name=name, params=params)

    def _get(self, name: str) -> LogitsProcessor:
        if name not in self._made:
            self._made[name] = self._registry.create("logits_processor", name, self._vocab_size)
        return self._made[name]
