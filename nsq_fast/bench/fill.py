"""Fill a topic with messages before its clients start."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

from nsq_fast import _codec
from nsq_fast.errors import NsqError
from nsq_fast.names import Address
from nsq_fast.runtime import Producer

CHANNEL = "bench"
BATCH_BYTES = 1 << 20
_OK = struct.pack(">ii", 6, 0) + b"OK"
_TIMEOUT = 30.0


def create_channel(nsqd: Address, topic: str) -> None:
    """Make the channel by subscribing once, so that it gets what is published from now on."""
    with _connection(nsqd) as sock:
        _ask(sock, _codec.sub(topic, CHANNEL))


def fill(nsqds: Sequence[Address], topic: str, count: int, size: int) -> None:
    """Share ``count`` bodies of ``size`` bytes out over nsqds. Raises NsqError, or OSError."""
    for number, nsqd in enumerate(nsqds):
        create_channel(nsqd, topic)
        with _connection(nsqd) as sock:
            for many in _batches(count * (number + 1) // len(nsqds) - count * number // len(nsqds), size):
                _ask(sock, _codec.mpub(topic, [b"x" * size] * many))


def fill_partitions(lookupds: Sequence[str], topic: str, partitions: int, count: int, size: int) -> None:
    """Share ``count`` bodies out over the partitions of a topic. Raises NsqError."""
    with Producer(lookupd_http_addresses=lookupds) as producer:
        for partition in range(partitions):
            share = count * (partition + 1) // partitions - count * partition // partitions
            for many in _batches(share, size):
                producer.multipublish(topic, [b"x" * size] * many, partition=partition, timeout=_TIMEOUT)


def _batches(count: int, size: int) -> list[int]:
    most = max(1, min(1000, BATCH_BYTES // (size + 4)))
    return [most] * (count // most) + ([count % most] if count % most else [])


def _connection(nsqd: Address) -> socket.socket:
    sock = socket.create_connection(nsqd, _TIMEOUT)
    sock.sendall(_codec.MAGIC_V2)
    return sock


def _ask(sock: socket.socket, command: bytes) -> None:
    sock.sendall(command)
    reply = sock.recv(len(_OK), socket.MSG_WAITALL)
    if reply != _OK:
        raise NsqError(f"nsqd answered {reply!r}")
