"""BR-06: which addresses an upload may go to, and that names are judged by what they resolve to."""

from __future__ import annotations

import ipaddress

import pytest

from infer.storage._addresses import is_public, refused_address, resolve

PUBLIC = ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8"]
PRIVATE = [
    *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1"),
    *("192.0.2.1", "198.18.0.1", "240.0.0.1", "255.255.255.255", "::", "::1", "fe80::1", "fc00::1", "ff02::1"),
    *("2001:db8::1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::", "2001:0:53aa:64c:0:0:f5ff:fffe"),
]


@pytest.mark.parametrize("text", PUBLIC)
def test_public(text: str) -> None:
    assert is_public(ipaddress.ip_address(text))
    assert refused_address([text], loopback=False) == ""


@pytest.mark.parametrize("text", PRIVATE)
def test_one_private_address_refuses_them_all(text: str) -> None:
    assert not is_public(ipaddress.ip_address(text))
    assert refused_address(["8.8.8.8", text], loopback=False)
    assert refused_address([text, "8.8.8.8"], loopback=False)


def test_the_loopback_is_only_for_the_insecure_escape() -> None:
    assert refused_address(["127.0.0.1", "::1"], loopback=True) == ""
    assert refused_address(["127.0.0.1", "8.8.8.8"], loopback=True)
    assert refused_address(["fe80::1%eth0"], loopback=False)
    assert refused_address(["no address"], loopback=False)


@pytest.mark.anyio
async def test_numeric_names_in_any_spelling_are_judged_as_addresses() -> None:
    for name in ("127.1", "0x7f.1", "2130706433"):
        found = await resolve(name, 443)
        assert refused_address(found, loopback=False), found
