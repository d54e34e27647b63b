"""Ports of this machine that nobody else takes while a test needs them free, or free again.

A port that was looked up and let go belongs to whoever asks next: on a busy machine
another process has it before the server that it was meant for. So a socket stays
bound to it that does not listen: connections are refused, the system gives the port
to nobody, and a server that asks for it by its number gets it (SO_REUSEADDR, which
Go and gevent set for what listens).
"""

from __future__ import annotations

import socket

from nsq_fast.names import Address

_held: list[socket.socket] = []


def free_address() -> Address:
    """An address where nothing listens, unless the test has something listen there. Held until the process ends."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    _held.append(sock)
    return Address(*sock.getsockname())


def is_free(address: Address) -> bool:
    """Whether the system would give the port to a program, for an outgoing connection or for a server."""
    with socket.socket() as sock:  # without SO_REUSEADDR, with which a port that is only bound may be taken
        try:
            sock.bind(address)
        except OSError:
            return False
    return True


def accepts(address: Address) -> bool:
    """Whether something listens there; False where connections are refused."""
    try:
        socket.create_connection(address).close()
    except ConnectionRefusedError:
        return False
    return True
