"""A real WebDAV server for tests: wsgidav over a directory, in threads of this process, so that the kit's faults of the disk
are faults of the server's disk. Owns its threads and its port from `start` to `stop`."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from cheroot.wsgi import Server
from wsgidav.wsgidav_app import WsgiDAVApp  # type: ignore[import-untyped]

USER, PASSWORD = "writer", "a secret"


class WebDAVServer:
    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        config: dict[str, Any] = {
            "provider_mapping": {"/": str(directory)},
            "simple_dc": {"user_mapping": {"*": {USER: {"password": PASSWORD}}}},
            "http_authenticator": {"accept_basic": True, "accept_digest": False, "default_to_digest": False},
            "lock_storage": True,
            "logging": {"enable": False},
            "verbose": 0,
        }
        self._server = Server(("127.0.0.1", 0), WsgiDAVApp(config), numthreads=10)
        self._server.prepare()
        self.port: int = self._server.bind_addr[1]
        self._thread = threading.Thread(target=self._server.serve, daemon=True)
        self._thread.start()

    @property
    def uri(self) -> str:
        return f"dav://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self._server.stop()
        self._thread.join(30)
