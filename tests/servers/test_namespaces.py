"""Hosts of their own: reached, cut off without a word, and reached again over the connections that they had."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest
from support.namespaces import Network, missing_for_namespaces
from support.waiting import WAIT

ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], 4000))
print("listening", flush=True)
peer, _ = server.accept()
while data := peer.recv(100):
    peer.sendall(data)
"""


@pytest.fixture
def network() -> Iterator[Network]:
    missing = missing_for_namespaces()
    if missing is not None:
        pytest.skip(f"no network namespaces here: {missing}")
    with closing(Network(2)) as network:
        yield network


def test_a_host_that_is_cut_off_says_nothing_and_goes_on_afterwards(network: Network) -> None:
    command = network.command(1, [sys.executable, "-c", ECHO, network.addresses[1]])
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"listening\n"
            with socket.create_connection((network.addresses[1], 4000), WAIT) as client:
                client.sendall(b"a")
                assert client.recv(1) == b"a"
                network.cut_off(1)
                client.sendall(b"b")
                client.settimeout(0.5)
                with pytest.raises(TimeoutError):
                    client.recv(1)
                network.reconnect(1)
                client.settimeout(WAIT)
                assert client.recv(1) == b"b"
        finally:
            server.kill()
