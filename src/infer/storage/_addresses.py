"""Which network addresses an upload may go to. Resolution is asynchronous, the judgement is pure. Owns nothing."""

from __future__ import annotations

import ipaddress
import socket

import anyio

Address = str
_IP = ipaddress.IPv4Address | ipaddress.IPv6Address
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


async def resolve(host: str, port: int) -> list[Address]:
    """The addresses of a name, without repetitions, in the resolver's order."""
    found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def refused_address(addresses: list[Address], *, loopback: bool) -> str:
    """Why this answer must not be contacted, or "". One address that is not allowed refuses them all."""
    for text in addresses:
        try:
            address = ipaddress.ip_address(text.partition("%")[0])
        except ValueError:
            return "the target's name resolves to something that is no address"
        if loopback:
            if not _plain(address).is_loopback:
                return "the insecure target does not resolve to the loopback"
        elif not is_public(address):
            return "the target's name resolves to an address that is not public"
    return ""


def is_public(address: _IP) -> bool:
    """Globally routable, also after unwrapping the IPv4 address that some IPv6 ranges carry."""
    plain = _plain(address)
    return plain.is_global and not (plain.is_multicast or plain.is_reserved or plain.is_unspecified)


def _plain(address: _IP) -> _IP:
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        return inner or address
    return address
