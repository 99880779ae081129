"""Rules P1 to P16 of an upload grant, each broken on purpose; no message repeats what the client sent."""

from __future__ import annotations

import time
from typing import Any

import pytest

from infer.errors import StorageError
from infer.storage._grant import Grant, parse_grant

URL = "https://bucket.example/k%2Fx?sig=SECRET&sig=SECRET"
Options = dict[str, Any]


def grant(options: Options, url: object = URL, **changes: Any) -> Grant:
    return parse_grant(url, options | changes, time.time())  # type: ignore[arg-type]


def refused(options: Options, url: object = URL, **changes: Any) -> str:
    with pytest.raises(StorageError) as caught:
        grant(options, url, **changes)
    assert caught.value.code == "artifact_target_rejected"
    assert caught.value.__cause__ is None and caught.value.__suppress_context__ | (caught.value.__context__ is None)
    message = str(caught.value)
    assert "SECRET" not in message and len(message) < 200
    return message


def with_header(options: Options, name: Any, value: Any = "x") -> Options:
    return options | {"required_headers": {"if-none-match": "*", name: value}}


def test_the_bytes_of_the_url_and_the_headers_stay(options: Options) -> None:
    head = grant(options, f"  {URL} ").head(5).decode()
    assert head.split("\r\n")[0] == "PUT /k%2Fx?sig=SECRET&sig=SECRET HTTP/1.1"
    assert sorted(head.split("\r\n")[1:-2]) == [
        "content-length: 5",
        "content-type: application/octet-stream",
        "host: bucket.example",
        "if-none-match: *",
    ]


@pytest.mark.parametrize("url", ["http://127.0.0.1:9000/SECRET", "http://bucket.example/SECRET"])
def test_plain_http_is_refused_with_the_setting_that_allows_it(options: Options, url: str) -> None:
    assert "artifacts.allow_insecure_http" in refused(options, url)
    assert "artifacts.insecure_http_hosts" in refused(options | {"insecure_hosts": ("127.0.0.1:9001",)}, url)


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("https://BUCKET.example", "/"),
        ("https://bucket.example:443?a=1", "/?a=1"),
        ("https://bucket.example:8443//a/../b?x=/y", "//a/../b?x=/y"),
        ("HTTPS://bucket.example/a+b;c=d|e", "/a+b;c=d|e"),
    ],
)
def test_the_request_target(options: Options, url: str, target: str) -> None:
    assert grant(options, url).request_target == target


def test_nothing_secret_in_a_repr(options: Options) -> None:
    """T22."""
    shown = repr(grant(with_header(options, "x-amz-meta", "SECRET")))
    assert "SECRET" not in shown and options["expires_at"] not in shown
    assert "opaque-1" in shown


@pytest.mark.parametrize(
    "url",
    [
        "",
        5,
        None,
        "https://bucket.example/" + "a" * 8192,
        "https://bucket.example/a\nb",
        "https://bucket.example/a\x7f",
        "https://bucket.example/a b",
        "https://bucket.example/ä",
        "https://bücket.example/",
        "http://bucket.example/SECRET",
        "ftp://bucket.example/SECRET",
        "//bucket.example/SECRET",
        "bucket.example/SECRET",
        "https:///SECRET",
        "https://",
        "https://user@bucket.example/SECRET",
        "https://user:SECRET@bucket.example/",
        "https://@bucket.example/",
        "https://bucket.example/#SECRET",
        "https://bucket.example/#",
        "https://bucket.example/%zzSECRET",
        "https://bucket.example/%2",
        "https://bucket.example/%",
        "https://bucket.example:0/",
        "https://bucket.example:/",
        "https://bucket.example:99999/",
        "https://bucket.example:port/",
        "https://bucket.example:8444/",
        "https://[::1/",
        "https://bucket.example\\@evil.example/",
        "https://evil.example\\.bucket.example/",
    ],
)
def test_urls_that_are_refused(options: Options, url: object) -> None:
    """P1, P2, P3; T26, T31, T32."""
    refused(options, url)


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "localhost.", "a.localhost", "a.local", "LOCALHOST", "127.0.0.1", "169.254.169.254", "10.0.0.1"),
        *("192.168.1.1", "0.0.0.0", "[::1]", "[::ffff:127.0.0.1]", "[64:ff9b::7f00:1]", "[fe80::1]", "[2002:7f00:1::]"),
        *("224.0.0.1", "100.64.0.1", "255.255.255.255"),
    ],
)
def test_hosts_that_are_local(options: Options, host: str) -> None:
    """P4, P5: also when they are on the list."""
    message = refused(options, f"https://{host}/", hosts=(host.lower(),))
    assert "local" in message or "public" in message


@pytest.mark.parametrize(
    "host", ["other.example", "a.bucket.example", "bucket.example.", "bucket.example.evil", "8.8.8.8"]
)
def test_the_list_of_hosts_is_exact(options: Options, host: str) -> None:
    """P6, T31."""
    refused(options, f"https://{host}/")
    refused(options, hosts=())


def test_a_port_must_be_listed(options: Options) -> None:
    """P6, T37."""
    assert grant(options, "https://bucket.example:8443/").port == 8443
    refused(options, "https://bucket.example:8443/", hosts=("bucket.example",))
    assert grant(options, "https://8.8.8.8:443/", hosts=("8.8.8.8",)).host == "8.8.8.8"


@pytest.mark.parametrize(
    "text",
    [
        *(None, 5, "", "soon", "2099-01-01", "2099-01-01T00:00:00", "20990101T000000Z", "2099-01-01 00:00:00Z"),
        *("2099-13-01T00:00:00Z", "2000-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "2099-01-01T00:00:00+0000"),
    ],
)
def test_times_that_are_refused(options: Options, text: object) -> None:
    """P7, T32, T37."""
    refused(options, expires_at=text)


def test_a_grant_may_not_live_too_long(options: Options) -> None:
    """P7, T37."""
    now = 1_800_000_000.0  # 2027-01-15T08:00:00Z
    later = options | {"expires_at": "2027-01-15T09:00:00Z"}
    assert parse_grant(URL, later, now).expires_at == now + 3600
    shifted = later | {"expires_at": "2027-01-15t10:59:59.5+02:00"}
    assert parse_grant(URL, shifted, now).expires_at == now + 3599.5
    for changes in ({"expires_at": "2027-01-15T09:00:01Z"}, {"max_ttl_seconds": 3599}, {"max_ttl_seconds": 0}):
        with pytest.raises(StorageError):
            parse_grant(URL, later | changes, now)


def test_the_insecure_escape_needs_everything(options: Options) -> None:
    """P8, T30."""
    allowed = options | {"insecure_hosts": ("127.0.0.1:9000", "localhost", "[::1]:81", "bucket.example", "8.8.8.8")}
    assert grant(allowed, "http://127.0.0.1:9000/x").insecure
    assert grant(allowed, "http://localhost:80/x").authority == "localhost"
    assert grant(allowed, "http://[::1]:81/x").host == "::1"
    for url in ("http://127.0.0.1:9001/x", "http://127.0.0.1/x", "http://bucket.example/x", "http://8.8.8.8/x"):
        refused(allowed, url)
    refused(options, "http://127.0.0.1:9000/x")
    refused(allowed, "https://127.0.0.1:9000/x")


@pytest.mark.parametrize("size", [0, -1, True, "5", 1.5, None])
def test_sizes_that_are_refused(options: Options, size: object) -> None:
    """P9, P16, T32, T33."""
    refused(options, max_bytes=size)


@pytest.mark.parametrize("name", [None, 5, "", "  ", "a\nb", "x" * 513])
def test_ids_that_are_refused(options: Options, name: object) -> None:
    """P10, P16."""
    refused(options, object_id=name)
    assert grant(options, object_id=" a b ").object_id == "a b"


@pytest.mark.parametrize("headers", [None, [], "if-none-match: *", {}, {"if-none-match": "x"}, {"if-none-match": 1}])
def test_headers_that_are_not_create_only(options: Options, headers: object) -> None:
    """P11, P12, BR-16."""
    refused(options, required_headers=headers)


def test_header_limits(options: Options) -> None:
    """P11, T29."""
    many = {f"x-{number}": "v" for number in range(15)}
    assert len(grant(options, required_headers={**many, "if-none-match": "*"}).headers) == 16
    refused(options, required_headers={**many, "x-more": "v", "if-none-match": "*"})
    assert len(refused(with_header(options, "x" * 65_536))) < 200
    for name in ("x" * 257, "a b", "a:b", "", "ä", "a\r\nb", 5):
        refused(with_header(options, name))
    for value in ("a\r\nSECRET: b", "a\nb", "\x00", "v" * 4097, 5, None, "ä"):
        refused(with_header(options, "x-a", value))
    refused(options, required_headers={"if-none-match": "*", "If-None-Match": "*"})


DENIED = (
    "authorization connection content-length cookie destination expect forwarded host keep-alive proxy-authorization "
    "proxy-connection set-cookie te trailer transfer-encoding upgrade x-forwarded-uri x-http-method-override "
    "x-method-override x-original-url x-rewrite-url proxy-x sec-fetch-site x-forwarded-for x-amz-copy-source "
    "x-goog-copy-source-generation x-ms-copy-source Authorization X-Amz-Copy-Source-Range"
)


@pytest.mark.parametrize("name", DENIED.split())
def test_headers_that_a_grant_may_not_set(options: Options, name: str) -> None:
    """P13, P14; T26, T28."""
    refused(with_header(options, name))
    refused(with_header(options, f" {name} "))


@pytest.mark.parametrize(
    "name",
    [
        "x-ms-blob-type",
        "x-ms-version",
        "x-goog-content-sha256",
        "x-amz-checksum-sha256",
        "x-amz-server-side-encryption",
    ],
)
def test_headers_of_the_providers(options: Options, name: str) -> None:
    """P15, T27."""
    assert (name, "x") in grant(with_header(options, name)).headers
