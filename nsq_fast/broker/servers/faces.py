"""The addresses that a server listens on, by the name of what is served there: ``tcp``, ``http``, ``https``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nsq_fast.broker.http.router import HttpFace
from nsq_fast.broker.net.listener import Listener
from nsq_fast.errors import NotRunning
from nsq_fast.names import Address


class Faces:
    """What listens for one server. A port that was free once is taken again after a restart.

    Args:
        server: what the server is called in an error.
        addresses: where each face is to listen, as ``host:port``; an empty one leaves it out.
    """

    def __init__(self, server: str, addresses: Mapping[str, str]) -> None:
        self._server = server
        self._addresses: dict[str, str | Address] = dict(addresses)
        self._open: list[Listener | HttpFace] = []

    def is_wanted(self, name: str) -> bool:
        """Whether there is such a face at all."""
        return bool(self._addresses[name])

    def known(self, name: str) -> Address:
        """Where a face listens, or has listened; raises NotRunning before its first start."""
        address = self.optional(name)
        if address is None:
            raise NotRunning(f"the {self._server} has no {name} address before it is started")
        return address

    def optional(self, name: str) -> Address | None:
        """Where a face listens, or has listened; None before its first start, or if there is none."""
        address = self._addresses[name]
        return address if isinstance(address, Address) else None

    def open(self, name: str, make: Callable[[str | Address], Listener | HttpFace]) -> None:
        """Bind a face, if it is wanted. Raises OSError when the port is in use."""
        if self.is_wanted(name):
            face = make(self._addresses[name])
            self._addresses[name] = face.address
            self._open.append(face)

    def start(self) -> None:
        """Begin to accept on all of them."""
        for face in self._open:
            face.start()

    def stop(self) -> None:
        """Close all of them, and their connections."""
        for face in self._open:
            face.stop()
        self._open = []
