"""Publish the lines of standard input with a plain blocking socket: no event loop, no threads, no gevent.

python blocking_publisher.py 127.0.0.1:4150 orders < lines
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterable

from nsq_fast import protocol
from nsq_fast.protocol import ConnectionConfig, Session


class Publisher:
    """One connection to one nsqd. What fails raises, and the publisher is of no use any more.

    It reads only while it waits for a reply, so nsqd closes it when nothing is published for two heartbeat intervals.
    """

    def __init__(self, host: str, port: int, timeout: float = 10) -> None:
        self._socket = socket.create_connection((host, port), timeout)
        self._session = Session(ConnectionConfig(user_agent="blocking-example", heartbeat_interval=60))
        self._socket.sendall(self._session.connect())
        self._wait_for(protocol.Ready)

    def publish(self, topic: str, bodies: Iterable[bytes]) -> None:
        """Publish messages with one command, and wait for the reply."""
        self._socket.sendall(self._session.mpub(topic, bodies))
        self._wait_for(protocol.Reply)

    def close(self) -> None:
        self._socket.close()

    def _wait_for(self, kind: type[protocol.Event]) -> None:
        """Read until such an event comes. Heartbeats that gathered meanwhile are answered on the way."""
        while True:
            for event in self._session.receive(self._socket.recv(65536)):
                if event.send:
                    self._socket.sendall(event.send)
                if isinstance(event, kind):
                    return
                if isinstance(event, (protocol.CommandFailed, protocol.ServerFailed)):
                    raise event.error
                if isinstance(event, protocol.Disconnected):
                    raise ConnectionError("the server closed the connection")


if __name__ == "__main__":
    host, _, port = sys.argv[1].rpartition(":")
    publisher = Publisher(host, int(port))
    publisher.publish(sys.argv[2], sys.stdin.buffer.read().splitlines())
    publisher.close()
