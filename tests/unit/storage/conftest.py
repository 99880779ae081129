"""Upload grants for the tests of storage."""

from __future__ import annotations

import datetime
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

EXPIRES_IN = 600


def expiry(seconds: float = EXPIRES_IN) -> str:
    moment = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)
    return moment.isoformat()


@pytest.fixture
def options() -> dict[str, Any]:
    """A grant that is accepted for https://bucket.example."""
    return {
        "expires_at": expiry(),
        "max_bytes": 10_000_000,
        "object_id": "opaque-1",
        "required_headers": {"content-type": "application/octet-stream", "If-None-Match": "*"},
        "hosts": ("bucket.example", "bucket.example:8443", "127.0.0.1", "localhost", "[::1]", "169.254.169.254"),
        "max_ttl_seconds": 3600,
    }


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for bucket.example and its key, in one file, made for this run."""
    directory = tmp_path_factory.mktemp("tls")
    key, chain, both = directory / "key.pem", directory / "chain.pem", directory / "both.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=bucket.example"
    )
    names = ["-addext", "subjectAltName=DNS:bucket.example", "-keyout", str(key), "-out", str(chain)]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    both.write_bytes(key.read_bytes() + chain.read_bytes())
    return both


@pytest.fixture
def server_tls(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


@pytest.fixture
def client_tls(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate))
