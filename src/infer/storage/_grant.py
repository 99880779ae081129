"""Checks an upload grant: URL, expiry and headers, with fixed messages that repeat nothing a client sent. Pure."""

from __future__ import annotations

import datetime
import ipaddress
import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from infer.errors import StorageError
from infer.storage._addresses import is_public

MAX_URL_BYTES = 8192
MAX_ID_BYTES = 512
MAX_HEADERS = 16
MAX_NAME_BYTES = 256
MAX_VALUE_BYTES = 4096
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+")
_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_PRINTABLE = re.compile(r"[\x21-\x7e]+")
_HOST = re.compile(r"[A-Za-z0-9._-]+")
_RFC3339 = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d{1,12})?([Zz]|[+-]\d\d:\d\d)")
_DENIED = (
    *("authorization", "connection", "content-length", "cookie", "destination", "expect", "forwarded", "host"),
    *("keep-alive", "proxy-authorization", "proxy-connection", "set-cookie", "te", "trailer", "transfer-encoding"),
    *("upgrade", "x-forwarded-uri", "x-http-method-override", "x-method-override", "x-original-url", "x-rewrite-url"),
)
_DENIED_PREFIXES = ("proxy-", "sec-", "x-forwarded-", "x-amz-copy-source", "x-goog-copy-source", "x-ms-copy-source")
_DEFAULT_PORTS = {"https": 443, "http": 80}


@dataclass(frozen=True, slots=True)
class Grant:
    """A grant that passed every rule. Its repr shows neither URL nor header values."""

    host: str
    port: int
    insecure: bool
    authority: str = field(repr=False)
    request_target: str = field(repr=False)
    """Path and query, every byte as it was signed."""
    headers: tuple[tuple[str, str], ...] = field(repr=False)
    expires_at: float = field(repr=False)
    max_bytes: int
    object_id: str

    def head(self, length: int) -> bytes:
        """The head of the PUT: what was signed, and what HTTP itself needs."""
        lines = [f"PUT {self.request_target} HTTP/1.1", f"host: {self.authority}", f"content-length: {length}"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        return "\r\n".join([*lines, "", ""]).encode()


def parse_grant(url: str, options: Mapping[str, Any], now: float) -> Grant:
    """Raises `StorageError` (artifact_target_rejected)."""
    host, port, insecure, authority, request_target = _check_url(url, options)
    size = options.get("max_bytes")
    if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
        raise refuse("max_bytes must be a positive integer")
    return Grant(
        host=host,
        port=port,
        insecure=insecure,
        authority=authority,
        request_target=request_target,
        headers=_check_headers(options.get("required_headers", {})),
        expires_at=_check_expiry(options.get("expires_at"), now, options.get("max_ttl_seconds", 3600)),
        max_bytes=size,
        object_id=_check_id(options.get("object_id")),
    )


def refuse(message: str) -> StorageError:
    return StorageError(message, code="artifact_target_rejected")


def _check_url(url: object, options: Mapping[str, Any]) -> tuple[str, int, bool, str, str]:
    if not isinstance(url, str):
        raise refuse("the url must be text")
    url = url.strip(" ")
    if not url or len(url.encode("utf-8", "surrogatepass")) > MAX_URL_BYTES or not _PRINTABLE.fullmatch(url):
        raise refuse(f"the url must have 1 to {MAX_URL_BYTES} printable ASCII characters")
    scheme, separator, rest = url.partition("://")
    scheme = scheme.lower()
    if not separator or scheme not in _DEFAULT_PORTS:
        raise refuse("the url must be https")
    if "#" in url or _ESCAPE.search(url):
        raise refuse("the url has a fragment or a malformed percent escape")
    netloc = re.split(r"[/?]", rest, maxsplit=1)[0]
    try:
        split = urllib.parse.urlsplit(f"{scheme}://{netloc}")
        host, port = (split.hostname or "").lower(), split.port or _DEFAULT_PORTS[scheme]
    except ValueError:
        raise refuse("the url has no valid host and port") from None
    if not host or "@" in netloc or "\\" in netloc or netloc.endswith(":") or split.port == 0:
        raise refuse("the url has no valid host and port, or user information")
    literal = _literal(host)
    if literal is None and not _HOST.fullmatch(host):
        raise refuse("the url has no valid host and port")
    shown = f"[{host}]" if ":" in host else host
    authority = shown if port == _DEFAULT_PORTS[scheme] else f"{shown}:{port}"
    insecure = scheme == "http"
    if insecure:
        loopback = host == "localhost" or (literal is not None and literal.is_loopback)
        if not loopback or authority not in options.get("insecure_hosts", ()):
            raise refuse(
                "the url must be https: http goes to loopback hosts in artifacts.insecure_http_hosts alone, with "
                "artifacts.allow_insecure_http"
            )
    else:
        _check_host(host, literal)
        if authority not in options.get("hosts", ()):
            raise refuse("the url's host is not in artifacts.presigned_hosts")
    tail = rest[len(netloc) :]
    return host, port, insecure, authority, tail if tail.startswith("/") else f"/{tail}"


def _check_host(host: str, literal: ipaddress.IPv4Address | ipaddress.IPv6Address | None) -> None:
    bare = host.rstrip(".")
    if bare == "localhost" or bare.endswith((".localhost", ".local")):
        raise refuse("the url's host is local")
    if literal is not None and not is_public(literal):
        raise refuse("the url's address is not public")


def _literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _check_headers(headers: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(headers, Mapping) or len(headers) > MAX_HEADERS:
        raise refuse(f"required_headers must be an object of at most {MAX_HEADERS} entries")
    checked: dict[str, str] = {}
    for raw, value in headers.items():
        name = raw.strip().lower() if isinstance(raw, str) else ""
        if len(name) > MAX_NAME_BYTES or not _TOKEN.fullmatch(name):
            raise refuse("required_headers has a name that is not an HTTP token")
        if (
            not isinstance(value, str)
            or len(value.encode("utf-8", "replace")) > MAX_VALUE_BYTES
            or _CONTROL.search(value)
        ):
            raise refuse("required_headers has a value that is not plain text of at most 4096 bytes")
        if not value.isascii():
            raise refuse("required_headers has a value that is not ASCII")
        if name in _DENIED or name.startswith(_DENIED_PREFIXES):
            raise refuse("required_headers has a name that a grant may not set")
        if name in checked:
            raise refuse("required_headers names a header twice")
        checked[name] = value
    if checked.get("if-none-match") != "*":
        raise refuse("required_headers must hold if-none-match with the value *")
    return tuple(checked.items())


def _check_expiry(text: object, now: float, max_ttl: float) -> float:
    if not isinstance(text, str) or not _RFC3339.fullmatch(text.strip()):
        raise refuse("expires_at must be an RFC 3339 time with an offset")
    try:
        moment = datetime.datetime.fromisoformat(text.strip().upper()).timestamp()
    except (ValueError, OverflowError):
        raise refuse("expires_at must be an RFC 3339 time with an offset") from None
    if moment <= now:
        raise refuse("expires_at is in the past")
    if moment > now + max_ttl:
        raise refuse("expires_at is later than artifacts.max_presigned_ttl_seconds allows")
    return moment


def _check_id(text: object) -> str:
    if not isinstance(text, str):
        raise refuse("object_id must be text")
    name = text.strip()
    if not name or len(name.encode("utf-8", "replace")) > MAX_ID_BYTES or _CONTROL.search(name):
        raise refuse(f"object_id must have 1 to {MAX_ID_BYTES} bytes without control characters")
    return name
