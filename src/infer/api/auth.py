"""Who may call: API keys compared in constant time, and which web pages' origins are let in.

Pure, but for reading the key file at start. Keys are kept as digests and never logged.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from starlette.datastructures import Headers

from infer.api.errors import ApiError
from infer.config.engine import ApiSection
from infer.errors import ConfigError

KEY_HEADERS = ("authorization", "x-api-key")
PREFLIGHT_HEADERS = {
    "access-control-allow-methods": "GET, POST, DELETE, OPTIONS",
    "access-control-max-age": "600",
}


def key_digests(settings: ApiSection) -> tuple[bytes, ...]:
    """Digests of all accepted keys; empty: no key is asked for."""
    keys = [key.get_secret_value() for key in settings.api_keys]
    if settings.api_key_file is not None:
        path = Path(settings.api_key_file)
        try:
            keys += path.read_text("utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ConfigError(f"api.api_key_file={str(path)!r} cannot be read: {reason}") from None
        if not keys:
            raise ConfigError(f"api.api_key_file={str(path)!r} holds no key; write one per line")
    return tuple(dict.fromkeys(_digest(key) for key in keys))


def check_key(headers: Headers, digests: tuple[bytes, ...]) -> None:
    """Raises `ApiError` 401 unless one of the keys is shown. Every key is compared, whichever matches."""
    if not digests:
        return
    shown = _shown_key(headers)
    given = _digest(shown)
    if not sum(hmac.compare_digest(given, digest) for digest in digests):
        problem = "is wrong" if shown else "is missing"
        raise ApiError(
            f'the API key {problem}; send "Authorization: Bearer KEY"',
            status=401,
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )


def key_owner(headers: Headers, digests: tuple[bytes, ...]) -> str:
    """Tells the callers of different keys apart, without telling the key; "" where there are none."""
    return hashlib.sha256(b"owner" + _digest(_shown_key(headers))).hexdigest() if digests else ""


def _shown_key(headers: Headers) -> str:
    scheme, _, shown = headers.get("authorization", "").partition(" ")
    return (shown if scheme.lower() == "bearer" else headers.get("x-api-key", "")).strip()


def origin_headers(method: str, headers: Headers, allowed: tuple[str, ...]) -> dict[str, str]:
    """CORS headers for the reply. Raises `ApiError` 403 when a page of a foreign origin wants to act."""
    origin = headers.get("origin")
    if origin is None:
        return {}
    own = origin.partition("://")[2] == headers.get("host")
    if not own and "*" not in allowed and origin not in allowed:
        if method in ("GET", "HEAD"):
            return {"vary": "Origin"}  # the browser keeps the reply from the page
        raise ApiError(
            f"pages of origin {origin[:200]!r} may not call this server; add it to api.cors_origins",
            status=403,
            code="origin_not_allowed",
        )
    return {
        "access-control-allow-origin": "*" if "*" in allowed else origin,
        "access-control-expose-headers": "x-request-id, request-id, x-infer-notice, retry-after",
        "vary": "Origin",
    }


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
