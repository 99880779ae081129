"""The HTTP server: OpenAI's API over an open engine. `serve` runs it; `build_app` makes the ASGI application."""

from infer.api.app import build_app, build_context
from infer.api.listener import open_admin_listener, open_listener
from infer.api.serve import serve

__all__ = ["build_app", "build_context", "open_admin_listener", "open_listener", "serve"]
