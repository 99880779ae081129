"""Places where the server may listen that exclude each other. Pure; checked when a configuration is made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infer.errors import ConfigError

if TYPE_CHECKING:
    from infer.config.engine import ApiSection


def check_listeners(api: ApiSection) -> None:
    """Places to listen that exclude each other. Raises `ConfigError` naming both fields."""
    if (api.tls_cert is None) != (api.tls_key is None):
        raise ConfigError(
            "api.tls_cert and api.tls_key belong together; give both or neither", fields=("api.tls_cert", "api.tls_key")
        )
    if api.uds is not None and api.fd is not None:
        raise ConfigError(
            f"api.uds={api.uds!r} and api.fd={api.fd} are two places to listen; give one", fields=("api.uds", "api.fd")
        )
    if api.admin_port is not None and api.admin_uds is not None:
        raise ConfigError(
            f"api.admin_port={api.admin_port} and api.admin_uds={api.admin_uds!r} are two places to listen; give one",
            fields=("api.admin_port", "api.admin_uds"),
        )
    if api.admin_host is not None and api.admin_port is None:
        raise ConfigError(
            f"api.admin_host={api.admin_host!r} needs api.admin_port", fields=("api.admin_host", "api.admin_port")
        )
    name = "admin_port" if api.admin_port is not None else "admin_uds"
    place = getattr(api, name)
    if place is not None and not api.admin:
        raise ConfigError(
            f"api.{name}={place!r} is a listener for admin routes, and api.admin=False switches them off; set it",
            fields=(f"api.{name}", "api.admin"),
        )
    if api.admin_port and (api.admin_host or "127.0.0.1", api.admin_port) == (api.host, api.port) and api.uds is None:
        raise ConfigError(
            f"api.admin_port and api.port are both {api.port}; give two ports", fields=("api.admin_port", "api.port")
        )
    if api.admin_uds is not None and api.admin_uds == api.uds:
        raise ConfigError(
            f"api.admin_uds and api.uds are both {api.uds!r}; give two paths", fields=("api.admin_uds", "api.uds")
        )
