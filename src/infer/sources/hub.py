"""Model source: a repository on the Hugging Face Hub (or the server that HF_ENDPOINT names). Declares it; owns nothing."""

from __future__ import annotations

from infer.plugins.hookspecs import hookimpl
from infer.plugins.model_source import API_VERSION, ModelSourceSpec


@hookimpl
def infer_model_sources() -> list[ModelSourceSpec]:
    return [
        ModelSourceSpec(
            name="hub", api=API_VERSION, factory="infer.sources._hub_client:create", schemes=("hf", ""), example={}
        )
    ]
