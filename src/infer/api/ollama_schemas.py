"""What Ollama's `/api/chat` and `/api/generate` accept: every documented field and what becomes of it.

Plain data; the checks are `api.fields`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from infer.api.fields import Body, BodyModel, Unsupported


class OllamaBody(BodyModel):
    model: Annotated[str, Field(min_length=1)]
    """One of the served names; ":latest" at its end is passed over."""
    stream: bool = True
    """Send lines of JSON as the answer grows."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Sampling and num_predict."""
    logprobs: bool = False
    """Log-probabilities of the output tokens."""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Alternatives per token; needs logprobs."""
    format: str | dict[str, Any] | None = None
    """"json", or a JSON schema that the answer has to fit."""


class ChatBody(OllamaBody):
    messages: list[dict[str, Any]] = Field(default_factory=list)
    """The conversation; none: only say that the model is there."""
    tools: list[dict[str, Any]] | None = None
    """Functions that the model may call."""
    think: bool | None = None
    """Handed to the chat template as `enable_thinking`. Reasoning is in `message.thinking`, or left out with false."""


class GenerateBody(OllamaBody):
    prompt: str = ""
    """The prompt; empty: only say that the model is there."""
    system: str | None = None
    """A system message before it."""
    raw: bool = False
    """Send the prompt as it is, without the chat template."""


class ModelBody(BodyModel):
    model: str | None = None
    """One of the served names."""
    name: str | None = None
    """Older name of the field."""


_LATER = "not there yet"
_TEXT_ONLY = "infer takes text only"
_ONE_MODEL = "the model is loaded when the server starts, and stays"


def _any(value: Any) -> bool:
    return True


_BOTH = {
    "keep_alive": Unsupported(note=_ONE_MODEL, refused=False, harmless=lambda value: value in (-1, "-1", "5m", 300)),
    "template": Unsupported(note="the operator chooses the template (model.chat_template)"),
    "width": Unsupported(note=_TEXT_ONLY),
    "height": Unsupported(note=_TEXT_ONLY),
    "steps": Unsupported(note=_TEXT_ONLY),
}
CHAT = Body(
    name="/api/chat",
    model=ChatBody,
    unsupported=_BOTH,
)
GENERATE = Body(
    name="/api/generate",
    model=GenerateBody,
    unsupported={
        **_BOTH,
        "think": Unsupported(note="reasoning is told apart from the answer in /api/chat"),
        "suffix": Unsupported(note="no served model fills in the middle yet"),
        "images": Unsupported(note=_TEXT_ONLY),
        "context": Unsupported(note="send the conversation to /api/chat; the prefix cache finds what is known"),
    },
)
SHOW = Body(
    name="/api/show",
    model=ModelBody,
    unsupported={
        "verbose": Unsupported(note="all there is is shown", harmless=_any),
        "system": Unsupported(note=_LATER),
        "template": Unsupported(note=_LATER),
        "options": Unsupported(note=_LATER),
    },
)

_LOADING = Unsupported(note=_ONE_MODEL, refused=False)
_SAMPLER = Unsupported(note="this sampler is not there", harmless=lambda value: value in (0, 0.0, 1, 1.0))

OPTIONS = Body(
    name="options",
    model=BodyModel,
    sampling={
        "num_predict": "max_tokens",
        "temperature": "temperature",
        "top_p": "top_p",
        "top_k": "top_k",
        "min_p": "min_p",
        "seed": "seed",
        "stop": "stop",
        "repeat_penalty": "repetition_penalty",
        "presence_penalty": "presence_penalty",
        "frequency_penalty": "frequency_penalty",
    },
    unsupported={
        "repeat_last_n": Unsupported(note="repeat_penalty counts all tokens", refused=False),
        "num_keep": Unsupported(note="nothing is cut off a prompt", refused=False),
        "penalize_newline": Unsupported(note="has no effect here", harmless=_any),
        "mirostat": _SAMPLER,
        "mirostat_tau": Unsupported(note="mirostat is not there", harmless=_any),
        "mirostat_eta": Unsupported(note="mirostat is not there", harmless=_any),
        "tfs_z": _SAMPLER,
        "typical_p": _SAMPLER,
        **dict.fromkeys(
            (
                *("numa", "num_ctx", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv"),
                *("logits_all", "vocab_only", "use_mmap", "use_mlock", "embedding_only", "num_thread"),
            ),
            _LOADING,
        ),
    },
)
"""num_predict -1 and -2: up to the context."""
