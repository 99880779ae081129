"""Published chat templates: see `llama_cpp_sdist`. Owns nothing."""

from llama_cpp_sdist import chat_templates, llama_cpp_sdist

__all__ = ["chat_templates", "llama_cpp_sdist"]
