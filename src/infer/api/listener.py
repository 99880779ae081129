"""The socket a server listens on: TCP, unix or inherited, bound before the model loads so that a taken port fails early.

Owns the socket until hypercorn takes it over.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
import stat
from pathlib import Path
from typing import Self

from infer.config.engine import ApiSection
from infer.errors import ConfigError

BACKLOG = 1024


class Listener:
    """A bound socket. `address` is what clients use. Close it, or leave its `with`, also after `hand_over`."""

    def __init__(self, bound: socket.socket, address: str, path: Path | None = None) -> None:
        self.address = address
        self._socket = bound
        self._path = path
        self._inode = path.stat().st_ino if path is not None else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def listen(self, write_timeout: float) -> None:
        """From now on clients can connect. The kernel drops one that leaves data unread for `write_timeout` seconds."""
        try:
            if self._socket.family != socket.AF_UNIX:
                _set_tcp_options(self._socket, write_timeout)
            self._socket.listen(BACKLOG)
        except OSError as error:
            raise _refused(self.address, error, ("api.port",)) from None

    def hand_over(self) -> int:
        """The descriptor; whoever takes it closes it."""
        return self._socket.detach()

    def close(self) -> None:
        """Close the socket if it is still ours, and remove the unix socket's file if it is still ours."""
        self._socket.close()
        try:
            if self._path is not None and self._path.stat().st_ino == self._inode:
                self._path.unlink()
        except FileNotFoundError:
            pass


def open_listener(settings: ApiSection) -> Listener:
    """Bind as the settings say. Raises `ConfigError` in one line."""
    scheme = _check_tls(settings)
    if settings.fd is not None:
        return _inherited(settings.fd, scheme)
    if settings.uds is not None:
        return _unix(settings.uds, "api.uds")
    return _tcp(settings.host, settings.port, scheme, ("api.host", "api.port"))


def open_admin_listener(settings: ApiSection) -> Listener | None:
    """Bind the place that is for admin routes alone, if there is one. Raises `ConfigError` in one line."""
    if settings.admin_uds is not None:
        return _unix(settings.admin_uds, "api.admin_uds")
    if settings.admin_port is None:
        return None
    host = "127.0.0.1" if settings.admin_host is None else settings.admin_host
    return _tcp(host, settings.admin_port, _check_tls(settings), ("api.admin_host", "api.admin_port"))


def _set_tcp_options(listening: socket.socket, write_timeout: float) -> None:
    """Accepted sockets inherit them. The write timeout is the kernel's too because hypercorn's writes on trio cannot be
    cancelled, and because a peer that lost its power never closes."""
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(write_timeout * 1000)))


def _tcp(host: str, port: int, scheme: str, fields: tuple[str, str]) -> Listener:
    where = _url_host(host) + f":{port}"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"{fields[0]}={host!r} is no address of this machine: {error}", fields=fields[:1]) from None
    family, kind, proto, _, address = found[0]
    bound = socket.socket(family, kind, proto)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and host in ("::", ""):
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _refused(where, error, fields) from None
    return Listener(bound, f"{scheme}://{_url_host(host)}:{bound.getsockname()[1]}")


def _unix(name: str, field: str) -> Listener:
    path = Path(name).absolute()
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        bound.bind(str(path))
    except OSError as error:
        bound.close()
        raise _refused(f"unix:{path}", error, (field,)) from None
    return Listener(bound, f"unix:{path}", path)


def _remove_stale(path: Path) -> None:
    """A socket file that nobody listens on was left by a server that was killed."""
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)


def _inherited(fd: int, scheme: str) -> Listener:
    try:
        bound = socket.socket(fileno=os.dup(fd))
    except OSError as error:
        raise ConfigError(f"api.fd={fd} is no socket: {error.strerror}", fields=("api.fd",)) from None
    if bound.type != socket.SOCK_STREAM:
        bound.close()
        raise ConfigError(f"api.fd={fd} is not a stream socket", fields=("api.fd",))
    name = bound.getsockname()
    if bound.family == socket.AF_UNIX:
        return Listener(bound, f"unix:{name}")
    return Listener(bound, f"{scheme}://{_url_host(name[0])}:{name[1]}")


def _check_tls(settings: ApiSection) -> str:
    """The scheme; a certificate that cannot be used is found before the model loads."""
    if settings.tls_cert is None or settings.tls_key is None:
        return "http"
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            settings.tls_cert, settings.tls_key, password=""
        )
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(
            f"api.tls_cert={settings.tls_cert!r} and api.tls_key={settings.tls_key!r} cannot be used: {error}",
            fields=("api.tls_cert", "api.tls_key"),
        ) from None
    return "https"


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host or "0.0.0.0"


def _refused(where: str, error: OSError, fields: tuple[str, ...]) -> ConfigError:
    hint = "; stop what listens there, or choose another place" if error.errno == errno.EADDRINUSE else ""
    return ConfigError(f"cannot listen on {where}: {error.strerror or error}{hint}", fields=fields)
