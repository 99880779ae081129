"""The error tree. Every failure a caller can meet is one of these; messages say what, which value, what to do.

Used by every layer; owns nothing. HTTP status codes live in `api.errors`, not here.
"""

from __future__ import annotations


def shown(value: object) -> str:
    """A value as an error message shows it: short, whatever it is."""
    try:
        text = repr(value)
    except Exception as error:  # an integer of 5,000 digits, a broken __repr__
        text = f"<{type(value).__name__} that cannot be shown: {type(error).__name__}>"
    return text if len(text) <= 200 else f"{text[:200]}..."


class InferError(Exception):
    """Base of every error raised on purpose by `infer`."""


class ConfigError(InferError):
    """The operator's configuration is wrong or cannot be satisfied. `fields` names what to change."""

    def __init__(self, message: str, *, fields: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.fields = fields


class PluginError(InferError):
    """A plugin is at fault. `plugin` is the spec or distribution that the message names."""

    def __init__(self, message: str, *, plugin: str | None = None) -> None:
        super().__init__(message)
        self.plugin = plugin


class PluginLoadError(PluginError):
    """A plugin could not be imported or its factory raised."""


class PluginConflictError(PluginError):
    """Two distributions registered the same name of one kind."""


class PluginContractError(PluginError):
    """A plugin returned the wrong type, misses a method, or was built for another contract version."""


class UnknownPluginError(PluginError):
    """No plugin of that kind has that name; the message lists what exists and the nearest name."""


class ModelError(InferError):
    """The model cannot be found, read or run."""


class UnsupportedModelError(ModelError):
    """The checkpoint is well formed but asks for something `infer` does not do (architecture, pickle, remote code)."""


class WeightError(ModelError):
    """A weight file is damaged, or its tensors do not match the model. `tensor` names the first culprit."""

    def __init__(self, message: str, *, tensor: str | None = None) -> None:
        super().__init__(message)
        self.tensor = tensor


class RequestError(InferError):
    """The request itself is at fault; the engine goes on."""


class InvalidRequestError(RequestError):
    """A request parameter is wrong. `parameter` and `value` say which and what it was."""

    def __init__(self, message: str, *, parameter: str, value: object = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value


class GrammarError(InvalidRequestError):
    """The grammar or schema of a request cannot be used; the message names the feature. The other requests go on."""

    def __init__(self, message: str, *, parameter: str = "structured_output", value: object = None) -> None:
        super().__init__(message, parameter=parameter, value=value)


class ContextLengthError(InvalidRequestError):
    """Prompt plus requested output do not fit the context or the KV cache."""


class QueueFullError(RequestError):
    """The waiting queue is full. Retry after `retry_after` seconds."""

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineError(InferError):
    """The engine failed while serving a valid request."""


class StepError(EngineError):
    """The step that carried this request failed; the engine goes on. `__cause__` is the original exception."""


class SamplingError(StepError):
    """No token could be sampled for this request: of its logits nothing was left, or they were not finite. Its settings
    alone did not show it. The other requests of the step went on."""


class KVLoadError(EngineError):
    """KV blocks of this request could not be loaded from the external store, and `kv_connector.on_failure` is "fail"."""


class EngineClosedError(EngineError):
    """The engine was closed (or never entered) when it was used."""


class EngineDeadError(EngineError):
    """The worker is gone; nothing can be served any more. `__cause__` is the root cause."""


class StepLogError(EngineError):
    """A step log cannot be read, or contradicts itself."""


class ArtifactError(InferError):
    """Base of artifact failures. `code` is the word that refusals and receipts carry (see docs/artifacts.md)."""

    def __init__(
        self, message: str, *, code: str = "artifact_delivery_failed", retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after


class ArtifactCorruptError(ArtifactError):
    """Bytes are not a valid artifact."""


class ArtifactFieldMissingError(ArtifactError):
    """A requested field is absent."""


class CapturedBlockMissingError(ArtifactError):
    """Captured rows were returned as keys, and the object of one is not in the store any more. `key` is the first such."""

    def __init__(self, message: str, *, key: bytes) -> None:
        super().__init__(message)
        self.key = key


class ArtifactRefusedError(ArtifactError):
    """An artifact request was refused at admission."""


class StorageError(InferError):
    """A storage target failed. `retryable` says whether the same call may succeed later; `code` is what a receipt says."""

    def __init__(self, message: str, *, retryable: bool = False, code: str = "artifact_delivery_failed") -> None:
        super().__init__(message)
        self.retryable = retryable
        self.code = code


class StorageNotFoundError(StorageError):
    """The object does not exist."""


class StorageUnavailableError(StorageError):
    """The target cannot be reached now."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=True)
