"""Names and addresses as requests carry them. Nothing heavy is imported here."""

from __future__ import annotations

import re
from ipaddress import ip_address

ANY = "*"
_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::\d{1,5})?", re.IGNORECASE)


def host_of(authority: str) -> str | None:
    """The name or address of ``host`` or ``host:port``, in small letters; None for other text."""
    found = _AUTHORITY.fullmatch(authority)
    return None if found is None else found[1].lower().strip("[]").removesuffix(".")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def is_address(host: str) -> bool:
    """Whether ``host`` is no name."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
