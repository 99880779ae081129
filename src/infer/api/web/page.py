"""The route `/`: the chat page, with a policy that lets its own script and style run and nothing else.

Runs in request tasks; the page is read once, when the routes are made.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

from starlette.responses import Response

from infer.api.context import ApiContext
from infer.api.routing import ApiRoute, Call


def routes(context: ApiContext) -> list[ApiRoute]:
    page = resources.files(__package__).joinpath("index.html").read_bytes()
    headers = {
        "content-security-policy": content_security_policy(page),
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }

    async def chat_page(call: Call) -> Response:
        return Response(page, media_type="text/html", headers=headers)

    # Public: the page itself asks for the key. It holds nothing that a stranger may not see.
    return [ApiRoute(method="GET", path="/", handler=chat_page, public=True, summary="The chat page")]


def content_security_policy(page: bytes) -> str:
    """Only the inline script and style of this very page may run; it may talk to this server only, and not be framed."""
    rules = {
        "default-src": "'none'",
        "script-src": _digests(page, b"script"),
        "style-src": _digests(page, b"style"),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _digests(page: bytes, tag: bytes) -> str:
    parts = re.findall(b"<%s>(.*?)</%s>" % (tag, tag), page, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(part).digest()).decode()}'" for part in parts)
