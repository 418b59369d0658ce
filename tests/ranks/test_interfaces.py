"""Where gloo is told to listen."""

from __future__ import annotations

import os
import socket

import pytest

from layline.comm import world
from layline.comm.interfaces import interface_towards


def own_address() -> str:
    """An address of this machine by which others could reach it; skips where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.9", 9))
        except OSError:
            pytest.skip("this machine has no network")
        found: str = probe.getsockname()[0]
    return found


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1"])
def test_loopback_is_reached_through_itself(host: str) -> None:
    assert interface_towards(host) in ("lo", "lo0")


def test_another_machine_is_reached_through_a_network_of_ours() -> None:
    names = {name for _, name in socket.if_nameindex()} - {"lo", "lo0"}
    found = interface_towards("203.0.113.9")
    assert found == interface_towards(own_address()), "and so is this one"
    assert found in names


@pytest.mark.parametrize("host", ["localhost", "node0", "", "10.0.0.7.1"])
def test_a_name_leads_nowhere(host: str) -> None:
    assert interface_towards(host) is None


def test_a_choice_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    with world._interface_of("127.0.0.1"):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"
