"""Servers on hosts of their own: network namespaces on a bridge, each of which can be cut off without a word.

A host that is cut off neither answers nor refuses: what is sent to it is lost, as behind a
switch that died. Connections stay open at both ends. Linux, and root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache

INTERFACE = "eth0"
_TIMEOUT = 20.0


@cache
def missing_for_namespaces() -> str | None:
    """What keeps this machine from having hosts of their own; None when nothing does."""
    if shutil.which("ip") is None:
        return "no ip command (iproute2)"
    try:
        Network(1).close()
    except CannotBuild as error:
        return str(error)
    return None


class CannotBuild(Exception):
    """The machine does not let us make namespaces: what it says."""


class Network:
    """``hosts`` namespaces on a bridge; ``address`` is that of this side of the bridge.

    Attributes:
        bridge: the interface of this side.
        addresses: of the hosts, in order.
    """

    def __init__(self, hosts: int) -> None:
        # The name of an interface has at most 15 characters.
        self.bridge = f"nsq{os.getpid()}"
        subnet = f"10.{200 + os.getpid() // 256 % 50}.{os.getpid() % 256}"
        self.address = f"{subnet}.1"
        self.addresses = [f"{subnet}.{number + 2}" for number in range(hosts)]
        self._hosts = [f"{self.bridge}h{number}" for number in range(hosts)]
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def command(self, host: int, command: list[str]) -> list[str]:
        """The command line that runs a command on a host; the process is the command's own."""
        return ["ip", "netns", "exec", self._hosts[host], *command]

    def cut_off(self, host: int) -> None:
        """Lose all that is sent to a host, and by it."""
        _ip("link", "set", self._port(host), "nomaster")

    def reconnect(self, host: int) -> None:
        """End ``cut_off``."""
        _ip("link", "set", self._port(host), "master", self.bridge)

    def close(self) -> None:
        """Remove all of it; processes on the hosts have to have ended."""
        for host in self._hosts:
            _ip("netns", "del", host, check=False)
        _ip("link", "del", self.bridge, check=False)

    def _build(self) -> None:
        _ip("link", "add", self.bridge, "type", "bridge")
        _ip("addr", "add", f"{self.address}/24", "dev", self.bridge)
        _ip("link", "set", self.bridge, "up")
        for number, host in enumerate(self._hosts):
            _ip("netns", "add", host)
            port = ("link", "add", self._port(number), "type", "veth", "peer", "name", INTERFACE)
            _ip(*port, "address", _mac(number), "netns", host)
            _ip("link", "set", self._port(number), "master", self.bridge, "up")
            for interface in ("lo", INTERFACE):
                _ip("-n", host, "link", "set", interface, "up")
            _ip("-n", host, "addr", "add", f"{self.addresses[number]}/24", "dev", INTERFACE)
        self._remember_addresses()

    def _remember_addresses(self) -> None:
        """Tell every side for good where the others are: a host that is cut off does not become "unreachable"."""
        for number, address in enumerate(self.addresses):
            neighbour = ("neigh", "replace", address, "lladdr", _mac(number), "nud", "permanent", "dev")
            _ip(*neighbour, self.bridge)
            for other, host in enumerate(self._hosts):
                if other != number:
                    _ip("-n", host, *neighbour, INTERFACE)

    def _port(self, host: int) -> str:
        return f"{self.bridge}p{host}"


def _mac(host: int) -> str:
    return f"02:6e:73:71:00:{host:02x}"


def _ip(*arguments: str, check: bool = True) -> None:
    done = subprocess.run(("ip", *arguments), capture_output=True, text=True, timeout=_TIMEOUT)
    if check and done.returncode:
        raise CannotBuild(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
