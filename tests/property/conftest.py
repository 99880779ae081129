"""The oracles for the properties of text (see `llama_cpp_sdist`), the native operations for those of kernels. Owns nothing."""

from llama_cpp_sdist import chat_templates, llama_cpp_sdist
from native_tables import tables

__all__ = ["chat_templates", "llama_cpp_sdist", "tables"]
