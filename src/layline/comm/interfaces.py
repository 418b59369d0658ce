"""Which network interface leads to an address. gloo is told by name where it is to listen."""

from __future__ import annotations

import fcntl
import socket
import struct
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

_SIOCGIFADDR = 0x8915
_IFREQ = struct.Struct("256s")
_ADDRESS = slice(20, 24)
_DISCARD_PORT = 9


def interface_towards(host: str) -> str | None:
    """The interface through which this machine speaks with the address ``host``.

    None where that cannot be known, as for a name: it may mean another address here.
    """
    try:
        here = ip_address(_own_address(host))
        names = [name for _, name in socket.if_nameindex()]
        if here.is_loopback:
            return next((name for name in names if name in ("lo", "lo0")), None)
        return next((name for name in names if here in _addresses(name)), None)
    except (OSError, ValueError):
        return None


def _own_address(host: str) -> str:
    """The address that ``host`` would see us under; the routing table knows, nothing is sent."""
    family = socket.AF_INET if ip_address(host).version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _DISCARD_PORT))
        address: str = probe.getsockname()[0]
    return address.partition("%")[0]


def _addresses(name: str) -> list[IPv4Address | IPv6Address]:
    found: list[IPv4Address | IPv6Address] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            request = _IFREQ.pack(name.encode()[:15])
            found.append(ip_address(fcntl.ioctl(asking, _SIOCGIFADDR, request)[_ADDRESS]))
        except OSError:
            pass  # It has none of IPv4.
    try:
        table = Path("/proc/net/if_inet6").read_text(encoding="ascii")
    except OSError:
        return found
    rows = [line.split() for line in table.splitlines()]
    return found + [ip_address(bytes.fromhex(row[0])) for row in rows if row[-1] == name]
