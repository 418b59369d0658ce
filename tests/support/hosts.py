"""Two network namespaces as two hosts with a cable between them."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import pytest

_CABLE = "cable"
_IP_S = 10.0


@dataclass(frozen=True)
class Host:
    """A network namespace with a loopback interface and one end of the cable."""

    name: str
    address: str

    def command(self, *program: str) -> list[str]:
        """What runs ``program`` on this host; its process is that program's."""
        return ["ip", "netns", "exec", self.name, *program]

    def processes(self) -> list[psutil.Process]:
        """What runs here."""
        found = []
        for pid in _ip("netns", "pids", self.name).split():
            try:
                found.append(psutil.Process(int(pid)))
            except psutil.NoSuchProcess:
                continue
        return found

    def rank(self, number: int) -> psutil.Process:
        """The process that torchrun started here as this rank."""
        (found,) = [each for each in self.processes() if each.environ().get("RANK") == str(number)]
        return found

    def end_all(self) -> None:
        """Kill what runs here, and wait until it is gone."""
        processes = self.processes()
        for process in processes:
            process.kill()
        psutil.wait_procs(processes, timeout=_IP_S)

    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """Nothing gets through the cable in here, as when the other host has lost its power."""
        _ip("-n", self.name, "link", "set", _CABLE, "down")
        try:
            yield
        finally:
            _ip("-n", self.name, "link", "set", _CABLE, "up")


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Hosts that reach each other and nothing else; nothing of them stays.

    Skips the test, with the reason, where they cannot be made.
    """
    if os.geteuid() != 0:
        pytest.skip("network namespaces are made by root")
    if shutil.which("ip") is None:
        pytest.skip("network namespaces are made by the program ip, which is not there")
    run = f"layline-{os.getpid()}-{secrets.token_hex(4)}"
    # The cable is made inside, so that names and addresses meet no others.
    first, second = hosts = (Host(f"{run}-0", "10.77.0.1"), Host(f"{run}-1", "10.77.0.2"))
    made = []
    try:
        try:
            for host in hosts:
                made.append(host)
                _ip("netns", "add", host.name)
            other_end = ("peer", "name", _CABLE, "netns", second.name)
            _ip("-n", first.name, "link", "add", _CABLE, "type", "veth", *other_end)
            for host in hosts:
                _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", _CABLE)
                _ip("-n", host.name, "link", "set", "lo", "up")
                _ip("-n", host.name, "link", "set", _CABLE, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        yield hosts
    finally:
        for host in made:
            _remove(host)


def _remove(host: Host) -> None:
    try:
        host.end_all()
    except subprocess.CalledProcessError:
        pass  # It was never made.
    finally:
        subprocess.run(
            ["ip", "netns", "delete", host.name], capture_output=True, check=False, timeout=_IP_S
        )


def _ip(*arguments: str) -> str:
    done = subprocess.run(
        ["ip", *arguments], capture_output=True, text=True, check=True, timeout=_IP_S
    )
    return done.stdout
